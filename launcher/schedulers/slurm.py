"""The batch script of a run on Slurm: one Ray node per task, forwarded signals, requeue and resume.

The name of the run holds the job number, because Slurm keeps only that for a requeued job.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ngsgd.errors import ConfigError
from ngsgd.launcher.arguments import Parser, out_of_range
from ngsgd.launcher.ray.jobs import IN_JOB

WARN_S = 120  # seconds before the time limit at which Slurm sends the warning
# minutes, minutes:seconds, hours:minutes:seconds; days-hours, with minutes and seconds or without
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")

# with @NAME@ for a value. `ray symmetric-run` would run `ray stop`, which ends all Rays of a host
_SCRIPT = Path(__file__).with_name("slurm.sh")

_TRAIN = """\
# a requeued job keeps its number
{words} --continue name={name}-"$SLURM_JOB_ID" {in_job} &
run=$!
"""

_RESUME = """\
{words} &
run=$!
"""


def add_arguments(parser: Parser) -> None:
    """Add the flags of Slurm and Kubernetes, and those of Slurm alone."""
    parser.declare({
        "--nodes N": (2, "number of machines (default: %(default)s); one worker per GPU, or per "
                         "machine without GPUs, unless cluster.num_workers is given"),
        "--cpus-per-node N": (4, "cores of a machine"), "--gpus-per-node N": (0, "GPUs of a machine")}, "Slurm and Kubernetes")
    group = parser.declare({
        "--time TIME": ("1-0", "time limit in the notation of sbatch (default: one day)"),
        "--partition PARTITION": ("", "partition (default: that of the cluster)"),
        "--account ACCOUNT": ("", "account (default: that of the user)")}, "Slurm")
    group.add_argument("--setup", action="append", default=[], metavar="LINE",
                       help="line of shell before Ray starts, such as --setup='module load python'; repeatable")
    group.add_argument("--sbatch", action="append", default=[], metavar="OPTION",
                       help="another option of sbatch, such as --sbatch=--mem=32G; repeatable")


def without_name(words: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the name of the run in a train command, or a default, and the other words."""
    run = next((word.partition("=")[2] for word in words if word.startswith("name=")), default)
    return run, [word for word in words if not word.startswith("name=")]


def script(options: argparse.Namespace, name: str, words: Sequence[str]) -> str:
    """Return the script for sbatch; raise one ConfigError with all mistakes.

    `words` are the train or resume command, without cluster address.
    """
    problems = out_of_range(options, {"nodes": 1, "cpus_per_node": 1, "gpus_per_node": 0})
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
        problems.append(f"--job-name is {name!r}; use letters, digits, '-', '_' and '.'.")
    if not _TIME.fullmatch(options.time):
        problems.append(f"--time is {options.time!r}; give minutes, hours:minutes:seconds or days-hours, such as 8:00:00.")
    problems += [f"--sbatch is {one!r}; give one option of sbatch, such as --sbatch=--mem=32G."
                 for one in options.sbatch if not one.startswith("-") or len(one.split()) != 1]
    if problems:
        raise ConfigError(problems)
    given = {"partition": options.partition, "account": options.account, "gpus-per-node": options.gpus_per_node}
    more = [f"--{option}={value}" for option, value in given.items() if value]
    # Ray is started by name, and comes from the same environment
    folder = PurePosixPath(words[0]).parent
    path = [f"export PATH={shlex.quote(str(folder))}:$PATH"] if folder.is_absolute() else []
    if "train" in words[:2]:
        # the first start of the run; a requeued job resumes it
        run, others = without_name(words, name)
        start = _TRAIN.format(name=shlex.quote(run), words=shlex.join(others), in_job=shlex.join(IN_JOB))
    else:
        start = _RESUME.format(words=shlex.join(words))
    values = {"name": name, "num_nodes": options.nodes, "cpus_per_node": options.cpus_per_node,
              "time_limit": options.time, "warn_s": WARN_S, "start_s": 300, "start": start,
              "more": "".join(f"#SBATCH {option}\n" for option in (*more, *options.sbatch)),
              "setup": "".join(f"{line}\n" for line in (*options.setup, *path))}
    return re.sub(r"@(\w+)@", lambda found: str(values[found[1]]), _SCRIPT.read_text(encoding="utf-8"))
