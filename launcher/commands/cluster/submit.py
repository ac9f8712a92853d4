"""`ngsgd submit`: submit a run to a Ray, Slurm or Kubernetes cluster."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_OK, ClusterError, ConfigError
from ngsgd.launcher.arguments import CONFIG, JSON, OTHER_BITS, TRUST, Parser
from ngsgd.launcher.ray import jobs
from ngsgd.launcher.ray.jobs import told
from ngsgd.launcher.schedulers import kubernetes, slurm
from ngsgd.launcher.screen import loading
from ngsgd.object_storage.urls import is_url

if TYPE_CHECKING:
    from ngsgd.config import ClusterConfig

# to save and to requeue, of the time between Slurm's warning and the limit
_SAVE_S = 30
# time to finish an outer iteration after a stop; Ray's default of 3 s is too short
_STOP_WAIT_S = 60
_PLACES = ("ray", "slurm", "kubernetes")
# flags that have an effect for some types of clusters only
_FLAGS = {
    ("ray",): ("--follow", "-f", "--working-dir", "--dashboard-url", "--token-file"),
    ("slurm", "kubernetes"): ("--nodes", "--cpus-per-node", "--gpus-per-node"),
    ("slurm",): ("--time", "--partition", "--account", "--sbatch", "--setup"),
    ("kubernetes",): ("--image", "--namespace", "--claim", "--mount", "--retries", "--memory")}
_EXCLUDES = [".git", ".venv", "runs", "mlartifacts", "mlflow.db", "__pycache__", ".mypy_cache", ".pytest_cache"]


def command(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    words, to = train_words(options)
    flags = [word.partition("=")[0] for word in arguments]
    if problems := [f"{flag} is for {' and '.join(kinds)}, and this run goes to {to}; remove it, or "
                    f"add cluster={kinds[0]}." for kinds, known in _FLAGS.items() if to not in kinds
                    for flag in flags if flag in known]:
        raise ConfigError(problems)
    options.job_name = options.job_name or f"ngsgd-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        program = shlex.split(options.program)
    except ValueError as error:
        raise ConfigError(f"--program is {options.program!r}, which is not a command line "
                          f"({error}); quote a path with spaces.") from error
    if to == "ray":
        return _to_ray(options, [*program, *words])
    return _to_scheduler(options, [*program, *words], to)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("submit", epilog="docs/cluster.md has examples.")
    parser.add_argument("--to", choices=_PLACES, help="type of cluster (default: that of cluster=, else ray)")
    parser.declare({
        "--resume RUN": "run folder to continue, as a path on the cluster; excludes settings",
        "--workers N": (int, "with --resume: number of workers (default: that of the run)"),
        "--trust": TRUST, "--allow-other-bits": OTHER_BITS,
        "--job-name NAME": "name of the job (default: ngsgd- and the time)",
        "--dry-run": "print the command or the file without submitting it", "--json": JSON,
        **CONFIG, "--program PROGRAM": ("ngsgd", 'command on the machines of the cluster, such as "python -m ngsgd"')})
    parser.declare({"--follow -f": "print the log of the job until it ends",
                    "--working-dir DIR": "folder to upload, with a custom module"}, "Ray")
    jobs.add_arguments(parser)
    slurm.add_arguments(parser)
    kubernetes.add_arguments(parser)
    return parser.parse_with_settings(arguments)


def train_words(options: argparse.Namespace) -> tuple[list[str], str]:
    """Return the command for the cluster, without its address, and the type of cluster."""
    shared = [f"--{name}" for name in ("trust", "allow-other-bits") if getattr(options, name.replace("-", "_"))]
    if options.resume:
        flags = [f"--{name}" for name in ("config-dir", "config-path", "config-name") if getattr(options, name.replace("-", "_"))]
        if options.overrides or flags:
            kinds = [word.partition("=")[2] for word in options.overrides if word.startswith(("cluster=", "cluster.kind="))]
            meant = f" The type of cluster is --to {kinds[-1]}." if {*kinds[-1:]} & {*_PLACES} else ""
            raise ConfigError("--resume keeps the settings of the run; remove "
                              f"{' '.join(options.overrides or flags)}.{meant}")
        more = ["--workers", str(options.workers)] if options.workers else []
        # the run may have begun on another cluster, or on one machine
        return ["resume", _absolute(options.resume), "--address", "auto", *more, *shared], (options.to or "ray")
    if options.workers:
        raise ConfigError(f"--workers is for --resume; set cluster.num_workers={options.workers}.")
    from ngsgd.launcher.config import compose
    from ngsgd.launcher.config.sources import Sources
    given = compose.given_by(options.overrides)
    is_address_given, is_kind_given = "cluster.address" in given.settings, "cluster" in given.groups
    # the job joins the cluster that runs it, which makes Ray the default
    joined = [] if is_address_given or is_kind_given else ["cluster.address=auto"]
    config = compose.compose([*options.overrides, *joined], Sources.of(options))
    kind = config.cluster.kind
    if is_address_given or kind not in _PLACES:
        raise ConfigError("ngsgd submit supports cluster=ray, slurm and kubernetes, and "
                          f"--dashboard-url is the Ray cluster; remove cluster.address and cluster={kind}.")
    if options.to and kind not in ("ray", options.to):
        raise ConfigError(f"--to is {options.to}, but cluster is {kind}; give one of them.")
    sources = {"--config-dir": options.config_dir and os.path.abspath(options.config_dir), "--config-name": options.config_name,
               "--config-path": options.config_path and os.path.abspath(options.config_path)}
    extra = [word for flag, value in sources.items() if value for word in (flag, value)]
    # within the job, the cluster is always Ray
    words = [word for word in options.overrides if not word.startswith(("output_dir=", "cluster=", "cluster.kind="))]
    to = options.to or kind
    words += [] if to == "ray" else _sizes(options, config.cluster)
    if to == "slurm" and "failure.grace_period_s" not in given.settings:
        words.append(f"failure.grace_period_s={slurm.WARN_S - _SAVE_S}")
    return ["train", *extra, *shared, f"output_dir={_absolute(config.output_dir)}", *words], to


def _absolute(path: str) -> str:
    """A path for a job, which starts in another folder."""
    return path if is_url(path) else os.path.abspath(path)


def _sizes(options: argparse.Namespace, cluster: ClusterConfig) -> list[str]:
    """Settings for one worker per GPU, or per machine without GPUs, that uses all cores."""
    from ngsgd.config import ClusterConfig
    words, num_workers, num_nodes = list[str](), cluster.num_workers, max(1, options.nodes)
    given = {word.lstrip("+").partition("=")[0] for word in options.overrides}
    if "cluster.num_workers" not in given and num_workers == ClusterConfig().num_workers:
        num_workers = num_nodes * max(1, options.gpus_per_node // cluster.ranks_per_worker)
        words.append(f"cluster.num_workers={num_workers}")
    if options.gpus_per_node and cluster.device == "auto" and "cluster.device" not in given:
        # an environment without CUDA would train on the CPUs in silence
        words.append("cluster.device=cuda")
    num_threads = cluster.threads_per_worker
    if not num_threads:
        # by itself, the run would count the cores of one machine, which may have more than the job
        num_processes = math.ceil(num_workers / num_nodes) * cluster.ranks_per_worker
        num_threads = max(1, options.cpus_per_node // num_processes)
        words.append(f"cluster.threads_per_worker={num_threads}")
    num_cpus = num_threads * cluster.ranks_per_worker
    room = num_nodes * (options.cpus_per_node // num_cpus)
    if num_workers > room:
        raise ConfigError(f"{options.nodes} machines of {options.cpus_per_node} CPUs have room for "
                          f"{room} workers of {num_cpus} CPUs, and cluster.num_workers is "
                          f"{num_workers}; raise --nodes or --cpus-per-node, or lower "
                          "cluster.num_workers or cluster.threads_per_worker.")
    return words


def _environment(options: argparse.Namespace) -> dict[str, str]:
    """Variables of a job, which whoever sees the cluster can read: a login is not among them."""
    from ngsgd.launcher.mlflow.store import VARIABLES, without_login
    # Slurm passes those of the shell to a job by itself
    found = {} if options.resume else {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    name = "MLFLOW_TRACKING_URI"
    if (uri := found.get(name, "")) != without_login(uri):
        found[name] = without_login(uri)
        sys.stderr.write(f"{name} is passed without its login; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD on "
                         "the cluster.\n")
    return {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S), **found}


def _to_ray(options: argparse.Namespace, words: list[str]) -> int:
    name, server = options.job_name, jobs.job_server_of(options)
    joined = words if options.resume else [*words, *jobs.IN_JOB]
    runtime: dict[str, Any] = {"env_vars": _environment(options)}
    if options.working_dir:
        runtime |= {"working_dir": options.working_dir, "excludes": _EXCLUDES}
    same = shlex.join(["ray", "job", "submit", "--address", server.address, "--submission-id", name,
                       "--no-wait", "--runtime-env-json", json.dumps(runtime), "--", *joined])
    if options.dry_run:
        print(same)
        return EXIT_OK
    with loading(f"asking {server.address}"), told(server, name):
        client = jobs.connect(server)
        job = jobs.submit(client, entrypoint=shlex.join(joined), submission_id=name, runtime_env=runtime)
    if options.json:
        print(json.dumps({"job": job, "address": server.address, "command": same}, indent=1))
    else:
        print(f"equivalent: {same}\njob {job}\nfollow it with: ngsgd logs --follow --dashboard-url {server.address} {job}")
    if not options.follow:
        return EXIT_OK
    from ngsgd.launcher.commands.cluster.jobs import exit_code
    with told(server, job):
        return exit_code(jobs.follow(client, job))


def _to_scheduler(options: argparse.Namespace, words: list[str], to: str) -> int:
    name = options.job_name
    if to == "slurm":
        text, program = slurm.script(options, name, words), ["sbatch", "--parsable"]
        missing = ("sbatch is not installed; submit on a login node of the Slurm cluster, or write "
                   "the script with --dry-run.")
    else:
        where = [word for word in words if word.startswith("output_dir=")]
        where = where or [words[words.index("resume") + 1]]
        text = kubernetes.manifest(options, name, where[0].removeprefix("output_dir="), words, _environment(options))
        program = ["kubectl", "apply", "-f", "-"]
        missing = "kubectl is not installed; write the manifest with --dry-run."
    if options.dry_run:
        print(text, end="")
        return EXIT_OK
    try:
        done = subprocess.run(program, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(missing) from None
    if done.returncode:
        raise ClusterError(f"{program[0]} failed: {(done.stderr or done.stdout).strip()}")
    sys.stderr.write(done.stderr)
    if to == "kubernetes":
        output = done.stdout
        print(json.dumps({"job": name, "output": output.strip()}) if options.json else output.rstrip())
        return EXIT_OK
    number = done.stdout.strip().partition(";")[0]
    print(json.dumps({"job": number}) if options.json else f"Slurm job {number}\nfollow it with: tail -F ngsgd-{number}.log")
    return EXIT_OK
