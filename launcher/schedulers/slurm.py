"""The batch script of a run on Slurm: one Ray node per task, forwarded signals, requeue and resume.

The name of the run holds the job number, because Slurm keeps only that for a requeued job.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from ngsgd.errors import ConfigError
from ngsgd.launcher.arguments import Parser, out_of_range
from ngsgd.launcher.ray.jobs import IN_JOB

WARN_S = 120  # seconds before the time limit at which Slurm sends the warning
# minutes, minutes:seconds, hours:minutes:seconds; days-hours, with minutes and seconds or without
_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}")

# Double braces belong to the shell. `ray symmetric-run` would run `ray stop`, which ends every Ray
# of a host.
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={cpus_per_node}
#SBATCH --time={time_limit}
#SBATCH --output=ngsgd-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:TERM@{warn_s}
{more}set -eo pipefail
{setup}set -u

# a token for this job, because Ray listens on all interfaces
RAY_AUTH_TOKEN=$(od -An -tx1 -N32 /dev/urandom | tr -d ' \\n')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0 OMP_WAIT_POLICY=${{OMP_WAIT_POLICY:-PASSIVE}}
# since Slurm 22.05 the steps do not inherit --cpus-per-task, and could be bound to one core
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# uncomment and adapt to your network
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_DISABLE=0 NCCL_DEBUG=WARN

# Slurm warns before it removes the nodes: finish the outer iteration, save, and requeue
warned=0 run=""
trap 'warned=1; [ -z "$run" ] || kill -TERM "$run" 2>/dev/null || true' TERM USR1

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")   # a pipe into `head` ends it by SIGPIPE
head=${{hosts[0]}}
# Debian maps the host name to a loopback address, which other machines cannot reach
ip=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" bash -c 'hostname --ip-address; hostname --all-ip-addresses' |
    awk '{{for (i = 1; i <= NF; i++) if (!ip && $i !~ /^127[.]|:/) ip = $i}} END {{print ip ? ip : "127.0.0.1"}}')
port=$((20000 + SLURM_JOB_ID % 10000))
export RAY_ADDRESS="$ip:$port"
scratch=/tmp/ngsgd-$SLURM_JOB_ID   # short, because socket paths have a maximum length
node=(--block --num-cpus="$SLURM_CPUS_PER_TASK" --temp-dir="$scratch" --disable-usage-stats)

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \\
    ray start --head --node-ip-address="$ip" --port="$port" --include-dashboard=false "${{node[@]}}" &
steps=$!
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    # other nodes cannot join before the head is up
    until ray status --address "$RAY_ADDRESS" >/dev/null 2>&1; do kill -0 "$steps"; sleep 1; done
    others=$((SLURM_JOB_NUM_NODES - 1))
    srun --overlap --nodes=$others --ntasks=$others --exclude="$head" ray start --address="$RAY_ADDRESS" "${{node[@]:0:2}}" \\
        --disable-usage-stats &
fi
for ((tries = 0; tries < {start_s}; tries++)); do
    kill -0 "$steps"   # Ray has ended, and so does the job; the log holds the reason
    up=$(ray status --address "$RAY_ADDRESS" 2>/dev/null | grep -c ' node_' || true)
    [ "$up" -ge "$SLURM_JOB_NUM_NODES" ] && break
    sleep 1
done

{start}
[ "$warned" = 0 ] || kill -TERM "$run" 2>/dev/null || true   # warned during the start of Ray
code=0
wait "$run" || code=$?
while kill -0 "$run" 2>/dev/null; do code=0; wait "$run" || code=$?; done
about=$(scontrol show job "$SLURM_JOB_ID" || true)
again=0
case $warned-$code in 1-130 | 1-143) again=1 ;; esac
# a preemption that signals only the steps ends Ray before the run
[ "$code" = 0 ] || [[ $about != *PreemptTime=2* ]] || again=1
# SIGTERM of scancel looks like a warning, but the job is no longer running and must not be requeued
if [ "$again" = 1 ] && [[ $about == *JobState=RUNNING* ]]; then
    scontrol requeue "$SLURM_JOB_ID"   # before the end of Ray, which may take longer than Slurm waits
    code=0
fi
kill "$steps" 2>/dev/null || true
exit "$code"
"""

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
    return _SCRIPT.format(
        name=name, num_nodes=options.nodes, cpus_per_node=options.cpus_per_node,
        time_limit=options.time, warn_s=WARN_S, start_s=300, start=start,
        more="".join(f"#SBATCH {option}\n" for option in (*more, *options.sbatch)),
        setup="".join(f"{line}\n" for line in (*options.setup, *path)))
