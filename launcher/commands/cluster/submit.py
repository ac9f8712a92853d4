"""`ngsgd submit`: hands a run to a cluster, and shows the command or the file that does the same without us."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ClusterError, ConfigError
from ngsgd.launcher.arguments import TRUST, Parser
from ngsgd.launcher.ray import jobs
from ngsgd.launcher.ray.jobs import told
from ngsgd.launcher.schedulers import kubernetes, slurm

# Ray's own 3 s are too few for an outer iteration to end in; it is ended after this long
_STOP_WAIT_S = 60
_PLACES = ("ray", "slurm", "kubernetes")
_EXCLUDES = [".git", ".venv", "runs", "mlartifacts", "mlflow.db", "__pycache__", ".mypy_cache", ".pytest_cache"]


def command(arguments: Sequence[str]) -> int:
    """`ngsgd submit`."""
    options = _parser().parse_intermixed_args(list(arguments))
    words, to = train_words(options)
    if to == "slurm":
        return _to_slurm(options, words)
    if to == "kubernetes":
        return _to_kubernetes(options, words)
    return _to_ray(options, words)


def _parser() -> Parser:
    parser = Parser("submit", epilog="Settings (KEY=VALUE) are those of ngsgd train. docs/cluster.md has examples.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for ngsgd train")
    parser.add_argument("--to", choices=_PLACES,
                        help="a running Ray cluster; sbatch; a RayJob for KubeRay (default: what cluster= says, else ray)")
    parser.add_argument("--resume", metavar="RUN", help="go on with this run folder, as the cluster sees it; takes no settings")
    parser.add_argument("--workers", type=int, metavar="N", help="with --resume: as many as there are now")
    parser.add_argument("--trust", action="store_true", help=f"passed on: {TRUST}")
    parser.add_argument("--name", help="of the job (default: ngsgd- and the time)")
    parser.add_argument("--dry-run", action="store_true", help="print the command or the file, and submit nothing")
    parser.add_argument("--follow", "-f", action="store_true", help="ray: print the job's log until it ends")
    parser.add_argument("--json", action="store_true", help="print JSON: the job's id and the equivalent command")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own YAML files, as the cluster sees it")
    jobs.add_arguments(parser)
    parser.add_argument("--working-dir", metavar="DIR", help="ray: upload this folder, for a module of your own")
    parser.add_argument("--program", default="ngsgd", help="the command on the cluster's machines (default: %(default)s)")
    slurm.add_arguments(parser)
    kubernetes.add_arguments(parser)
    return parser


def train_words(options: argparse.Namespace) -> tuple[list[str], str]:
    """The command that the cluster runs, but for the cluster's own address, and where; raises all mistakes at once."""
    if options.resume:
        if options.overrides:
            raise ConfigError(f"--resume takes no settings, since a run keeps its own; leave out {' '.join(options.overrides)}.")
        more = [*(["--workers", str(options.workers)] if options.workers else []), *(["--trust"] if options.trust else [])]
        return ["resume", os.path.abspath(options.resume), *more], options.to or "ray"
    from ngsgd.launcher.config import compose

    config = compose.compose(options.overrides, config_dir=Path(options.config_dir) if options.config_dir else None)
    kind = config.cluster.kind
    if config.cluster.address or kind not in _PLACES:
        raise ConfigError("a run is submitted to cluster=ray, slurm or kubernetes, and --address tells where Ray is; "
                          f"leave out cluster.address and cluster={kind}.")
    if options.to and kind not in ("ray", options.to):
        raise ConfigError(f"--to is {options.to}, but cluster is {kind}; give one of them.")
    extra = ["--config-dir", os.path.abspath(options.config_dir)] if options.config_dir else []
    extra += ["--trust"] if options.trust else []
    # in the job it is a Ray cluster in any case
    given = [word for word in options.overrides if not word.startswith(("output_dir=", "cluster=", "cluster.kind="))]
    # the job starts in another folder, and often on another machine
    return ["train", *extra, f"output_dir={os.path.abspath(config.output_dir)}", *given], options.to or kind


def _name(options: argparse.Namespace) -> str:
    return options.name or f"ngsgd-{time.strftime('%Y%m%d-%H%M%S')}"


# Ray ----------------------------------------------------------------------------------------------


def _to_ray(options: argparse.Namespace, words: list[str]) -> int:
    name, server = _name(options), jobs.job_server_of(options)
    joined = words if options.resume else [*words, "cluster.address=auto"]
    # a resumed run has the address of its first cluster in its own settings: auto, unless it was
    # started by hand
    entrypoint = shlex.join([options.program, *joined])
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S)}}
    runtime = {**environment, **({"working_dir": options.working_dir, "excludes": _EXCLUDES} if options.working_dir else {})}
    same = shlex.join(["ray", "job", "submit", "--address", server.address, "--submission-id", name, "--no-wait",
                       "--runtime-env-json", json.dumps(runtime), "--", *shlex.split(entrypoint)])
    if options.dry_run:
        print(same)
        return EXIT_OK
    client = jobs.connect(server)
    with told(server):
        job = jobs.submit(client, entrypoint=entrypoint, submission_id=name, runtime_env=runtime)
    if options.json:
        print(json.dumps({"job": job, "address": server.address, "command": same}, indent=1))
    else:
        print(f"the same as: {same}\njob {job}\nfollow it with: ngsgd logs --follow --address {server.address} {job}")
    if not options.follow:
        return EXIT_OK
    from ngsgd.launcher.commands.cluster.jobs import exit_code

    with told(server, job):
        return exit_code(jobs.follow(client, job))


# Slurm and Kubernetes -----------------------------------------------------------------------------


def _to_slurm(options: argparse.Namespace, words: list[str]) -> int:
    text = slurm.script(slurm.SlurmJob.of(options, _name(options)), [options.program, *words])
    if options.dry_run:
        print(text, end="")
        return EXIT_OK
    said = _run(["sbatch", "--parsable"], text, "sbatch is not there; submit on a login node of the Slurm cluster, or write the "
                                                "script with --dry-run.")
    job = said.strip().partition(";")[0]
    print(json.dumps({"job": job}) if options.json else f"Slurm job {job}\nfollow it with: tail -F ngsgd-{job}.log")
    return EXIT_OK


def _to_kubernetes(options: argparse.Namespace, words: list[str]) -> int:
    text = kubernetes.manifest(kubernetes.KubernetesJob.of(options, _name(options)), [options.program, *words])
    if options.dry_run:
        print(text, end="")
        return EXIT_OK
    said = _run(["kubectl", "apply", "-f", "-"], text, "kubectl is not there; write the manifest with --dry-run.")
    print(said, end="")
    return EXIT_OK


def _run(words: list[str], text: str, missing: str) -> str:
    try:
        done = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(missing) from None
    if done.returncode:
        raise ClusterError(f"{words[0]} refused: {(done.stderr or done.stdout).strip()}")
    sys.stderr.write(done.stderr)
    return done.stdout
