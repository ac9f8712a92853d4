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
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.errors import EXIT_OK, ClusterError, ConfigError
from ngsgd.launcher.arguments import JSON, OTHER_BITS, TRUST, Parser
from ngsgd.launcher.ray import jobs
from ngsgd.launcher.ray.jobs import told
from ngsgd.launcher.schedulers import kubernetes, slurm
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
    """`ngsgd submit`."""
    options = _parser().parse_with_settings(arguments)
    words, to = train_words(options)
    flags = [word.partition("=")[0] for word in arguments]
    if problems := [f"{flag} is for {' and '.join(kinds)}, and this run goes to {to}; remove it, or add cluster={kinds[0]}."
                    for kinds, known in _FLAGS.items() if to not in kinds for flag in flags if flag in known]:
        raise ConfigError(problems)
    if to == "slurm":
        return _to_slurm(options, words)
    if to == "kubernetes":
        return _to_kubernetes(options, words)
    return _to_ray(options, words)


def _parser() -> Parser:
    parser = Parser("submit", epilog="docs/cluster.md has examples.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of ngsgd train")
    parser.add_argument("--to", choices=_PLACES,
                        help="type of cluster (default: that of cluster=, else ray)")
    parser.add_argument("--resume", metavar="RUN",
                        help="run folder to continue, as a path on the cluster; excludes settings")
    parser.add_argument("--workers", type=int, metavar="N",
                        help="with --resume: number of workers (default: that of the run)")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--allow-other-bits", action="store_true", help=OTHER_BITS)
    parser.add_argument("--job-name", metavar="NAME",
                        help="name of the job (default: ngsgd- and the time)")
    parser.add_argument("--dry-run", action="store_true",
                        help="print the command or the file without submitting it")
    parser.add_argument("--json", action="store_true", help=JSON)
    parser.add_argument("--config-dir", "-cd", metavar="DIR",
                        help="folder of custom YAML files, as a path on the cluster")
    parser.add_argument("--program", default="ngsgd",
                        help="command on the cluster's machines, such as \"python -m ngsgd.launcher\" (default: %(default)s)")
    ray = parser.add_argument_group("Ray")
    ray.add_argument("--follow", "-f", action="store_true",
                     help="print the log of the job until it ends")
    ray.add_argument("--working-dir", metavar="DIR", help="folder to upload, with a custom module")
    jobs.add_arguments(parser)
    slurm.add_arguments(parser)
    kubernetes.add_arguments(parser)
    return parser


def train_words(options: argparse.Namespace) -> tuple[list[str], str]:
    """Return the command for the cluster, without the cluster's address, and the type of cluster.

    Raises:
        ConfigError: all mistakes.
    """
    if options.resume:
        if options.overrides or options.config_dir:
            kinds = [word.partition("=")[2] for word in options.overrides if word.startswith(("cluster=", "cluster.kind="))]
            meant = f" The type of cluster is --to {kinds[-1]}." if kinds and kinds[-1] in _PLACES else ""
            raise ConfigError("--resume keeps the settings of the run; remove "
                              f"{' '.join(options.overrides) or '--config-dir'}.{meant}")
        more = [*(["--workers", str(options.workers)] if options.workers else []), *_shared_flags(options)]
        # the run may have begun on another cluster, or on one machine
        return ["resume", _absolute(options.resume), "--address", "auto", *more], options.to or "ray"
    if options.workers:
        raise ConfigError(f"--workers is for --resume; set cluster.num_workers={options.workers}.")
    from ngsgd.launcher.config import compose

    config = compose.compose(options.overrides, config_dir=Path(options.config_dir) if options.config_dir else None)
    kind = config.cluster.kind
    if config.cluster.address or kind not in _PLACES:
        raise ConfigError("ngsgd submit supports cluster=ray, slurm and kubernetes, and "
                          "--dashboard-url is the Ray cluster; remove cluster.address and "
                          f"cluster={kind}.")
    if options.to and kind not in ("ray", options.to):
        raise ConfigError(f"--to is {options.to}, but cluster is {kind}; give one of them.")
    extra = ["--config-dir", os.path.abspath(options.config_dir)] if options.config_dir else []
    extra += _shared_flags(options)
    # within the job, the cluster is always Ray
    given = [word for word in options.overrides if not word.startswith(("output_dir=", "cluster=", "cluster.kind="))]
    to = options.to or kind
    given += [] if to == "ray" else _sizes(options, config.cluster)
    if to == "slurm" and not any("grace_period_s=" in word for word in given):
        given.append(f"failure.grace_period_s={slurm.WARN_S - _SAVE_S}")
    return ["train", *extra, f"output_dir={_absolute(config.output_dir)}", *given], to


def _absolute(path: str) -> str:
    """A path for a job, which starts in another folder."""
    return path if is_url(path) else os.path.abspath(path)


def _shared_flags(options: argparse.Namespace) -> list[str]:
    """Flags that train and resume have, too."""
    return [*(["--trust"] if options.trust else []), *(["--allow-other-bits"] if options.allow_other_bits else [])]


def _program(options: argparse.Namespace) -> list[str]:
    try:
        return shlex.split(options.program)
    except ValueError as error:
        raise ConfigError(f"--program is {options.program!r}, which is not a command line ({error}); "
                          "quote a path with spaces.") from error


def _sizes(options: argparse.Namespace, cluster: ClusterConfig) -> list[str]:
    """Settings for one worker per GPU, or per machine without GPUs, that uses all cores."""
    from ngsgd.config import ClusterConfig

    words, num_threads, num_workers, num_nodes = [], 1, cluster.num_workers, max(1, options.nodes)
    is_given = any(word.lstrip("+").startswith("cluster.num_workers=") for word in options.overrides)
    if not is_given and num_workers == ClusterConfig().num_workers:
        num_workers = num_nodes * max(1, options.gpus_per_node // cluster.ranks_per_worker)
        words.append(f"cluster.num_workers={num_workers}")
    if options.gpus_per_node and cluster.device == "auto" and not any("cluster.device=" in word for word in options.overrides):
        # an environment without CUDA would train on the CPUs in silence
        words.append("cluster.device=cuda")
    if not cluster.threads_per_worker:
        # by itself, the run would count the cores of one machine, which may have more than the job
        num_processes = math.ceil(num_workers / num_nodes) * cluster.ranks_per_worker
        num_threads = max(1, options.cpus_per_node // num_processes)
        words.append(f"cluster.threads_per_worker={num_threads}")
    _require_room(num_workers, (cluster.threads_per_worker or num_threads) * cluster.ranks_per_worker, options)
    return words


def _require_room(num_workers: int, num_cpus: int, options: argparse.Namespace) -> None:
    """Raise ConfigError unless all workers, of so many CPUs each, fit on the machines."""
    room = max(1, options.nodes) * (options.cpus_per_node // num_cpus)
    if num_workers > room:
        raise ConfigError(f"{options.nodes} machines of {options.cpus_per_node} CPUs have room for {room} workers of {num_cpus} "
                          f"CPUs, and cluster.num_workers is {num_workers}; raise --nodes or --cpus-per-node, or lower "
                          "cluster.num_workers or cluster.threads_per_worker.")


def _name(options: argparse.Namespace) -> str:
    return options.job_name or f"ngsgd-{time.strftime('%Y%m%d-%H%M%S')}"


# Ray ----------------------------------------------------------------------------------------------


def _to_ray(options: argparse.Namespace, words: list[str]) -> int:
    name, server = _name(options), jobs.job_server_of(options)
    joined = words if options.resume else [*words, "cluster.address=auto"]
    entrypoint = shlex.join([*_program(options), *joined])
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S)}}
    runtime = {**environment, **({"working_dir": options.working_dir, "excludes": _EXCLUDES} if options.working_dir else {})}
    same = shlex.join(["ray", "job", "submit", "--address", server.address, "--submission-id", name, "--no-wait",
                       "--runtime-env-json", json.dumps(runtime), "--", *shlex.split(entrypoint)])
    if options.dry_run:
        print(same)
        return EXIT_OK
    client = jobs.connect(server)
    with told(server, name):
        job = jobs.submit(client, entrypoint=entrypoint, submission_id=name, runtime_env=runtime)
    if options.json:
        print(json.dumps({"job": job, "address": server.address, "command": same}, indent=1))
    else:
        print(f"equivalent: {same}\njob {job}\nfollow it with: ngsgd logs --follow "
              f"--dashboard-url {server.address} {job}")
    if not options.follow:
        return EXIT_OK
    from ngsgd.launcher.commands.cluster.jobs import exit_code

    with told(server, job):
        return exit_code(jobs.follow(client, job))


# Slurm and Kubernetes -----------------------------------------------------------------------------


def _to_slurm(options: argparse.Namespace, words: list[str]) -> int:
    text = slurm.script(slurm.SlurmJob.of(options, _name(options)), [*_program(options), *words])
    if options.dry_run:
        print(text, end="")
        return EXIT_OK
    output = _run(["sbatch", "--parsable"], text, "sbatch is not installed; submit on a login "
                                                  "node of the Slurm cluster, or write "
                                                "the script with --dry-run.")
    job = output.strip().partition(";")[0]
    print(json.dumps({"job": job}) if options.json else f"Slurm job {job}\nfollow it with: tail "
                                                        f"-F ngsgd-{job}.log")
    return EXIT_OK


def _to_kubernetes(options: argparse.Namespace, words: list[str]) -> int:
    where = next((word for word in words if word.startswith("output_dir=")), words[1]).removeprefix("output_dir=")
    text = kubernetes.manifest(kubernetes.KubernetesJob.of(options, _name(options), where), [*_program(options), *words])
    if options.dry_run:
        print(text, end="")
        return EXIT_OK
    output = _run(["kubectl", "apply", "-f", "-"], text, "kubectl is not installed; write the "
                                                         "manifest with --dry-run.")
    print(json.dumps({"job": _name(options), "output": output.strip()}) if options.json else output.rstrip())
    return EXIT_OK


def _run(words: list[str], text: str, missing: str) -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(missing) from None
    if done.returncode:
        raise ClusterError(f"{words[0]} failed: {(done.stderr or done.stdout).strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout
