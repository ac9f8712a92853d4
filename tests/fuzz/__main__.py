"""Fault injection into run folders.

    python -m tests.fuzz all                           everything; about half an hour on one core
    python -m tests.fuzz crash --how kill --cases 160  the process dies before operation N
    python -m tests.fuzz damage --cases 600            files of a run and of its data are damaged
    python -m tests.fuzz power                         what was not synced is lost
    python -m tests.fuzz two-resumes --tries 20        two coordinators at once
    python -m tests.fuzz audio --cases 1000            damaged recordings for ngsgd transcribe
    python -m tests.fuzz bundles --cases 1000          damaged and edited bundles for it
    python -m tests.fuzz crash --only 'kill-0037'      one case again
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests.fuzz import interposer
from tests.tiers import HANGS_S

if TYPE_CHECKING:
    from tests.fuzz.report import Report
    from tests.fuzz.stage import Stage

_SCRATCH = "NGSGD_FUZZ_SCRATCH"   # environment variable with the folder for runs
_CAMPAIGNS = ("crash", "damage", "power", "two-resumes", "audio", "bundles")
# without a run, and without the library that injects faults
_OF_RECOGNITION = ("audio", "bundles")


def main() -> int:
    """Starts itself again with the library loaded, then runs the campaigns."""
    options = _options()
    if interposer.LIBRARY in os.environ:
        return _run(options)
    if options.campaign in _OF_RECOGNITION:
        return _recognition(options)
    if not interposer.compiler():
        print("no C compiler was found, which the fault injection needs; install cc", file=sys.stderr)
        return 2
    memory = Path("/dev/shm")
    parent = options.scratch or (memory if os.access(memory, os.W_OK) else None)
    # whatever ends this process, both folders are removed, and the other process ends with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (tempfile.TemporaryDirectory(prefix="ngsgd-fuzz-") as folder,
          tempfile.TemporaryDirectory(prefix="ngsgd-fuzz-", dir=parent) as scratch):
        library = interposer.build(Path(folder))
        environment = {**os.environ, interposer.LIBRARY: str(library), "LD_PRELOAD": str(library),
                       _SCRATCH: scratch, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
                       "DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true",
                       "RAY_USAGE_STATS_ENABLED": "0"}
        command = [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]]
        return subprocess.run(command, env=environment, check=False).returncode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("campaign", choices=[*_CAMPAIGNS, "all", "slice"])
    parser.add_argument("--cases", type=int, help="number of cases (default: all; damage: 600; audio, bundles: 1000)")
    parser.add_argument("--only", metavar="PATTERN", help="only cases whose name matches")
    parser.add_argument("--how", default="kill", help="crash: kill, full, eio or half")
    parser.add_argument("--seed", type=int, default=0, help="of the damages")
    parser.add_argument("--tries", type=int, default=20, help="two-resumes: number of tries")
    parser.add_argument("--hang-s", type=float, default=HANGS_S, help="limit of one command, in seconds")
    parser.add_argument("--scratch", type=Path, help="parent of the scratch folder")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args()


def _run(options: argparse.Namespace) -> int:
    from tests.fuzz import server
    from tests.fuzz.stage import Stage

    server.preload()
    stage, reports = Stage(Path(os.environ[_SCRATCH]).resolve()), []
    for report in _reports(options, stage):
        reports.append(report)
        if options.json:
            report.write(options.json)
    print("\n".join(line for report in reports for line in report.summary()))
    return int(any(report.problems for report in reports))


def _recognition(options: argparse.Namespace) -> int:
    from tests.fuzz import recognition, server

    server.preload()
    campaign = {"audio": recognition.audio_campaign, "bundles": recognition.bundle_campaign}[options.campaign]
    with tempfile.TemporaryDirectory(prefix="ngsgd-fuzz-", dir=options.scratch) as folder:
        report = campaign(Path(folder), options.cases or 1000, options.only, options.seed, options.hang_s)
    if options.json:
        report.write(options.json)
    print("\n".join(report.summary()))
    return int(bool(report.problems))


def _reports(options: argparse.Namespace, stage: Stage) -> Iterator[Report]:
    from tests.fuzz import crash, damage, power, two_resumes

    name, is_slice = options.campaign, options.campaign == "slice"
    if name in ("crash", "all", "slice"):
        for how in (options.how,) if name == "crash" else ("kill",) if is_slice else crash.HOW:
            yield crash.campaign(stage, how, 8 if is_slice else options.cases, options.only)
    if name in ("damage", "all", "slice"):
        cases = 20 if is_slice else options.cases or 600
        yield damage.campaign(stage, cases, options.only, options.seed, options.hang_s)
    if name in ("power", "all", "slice"):
        yield power.campaign(stage, 4 if is_slice else options.cases, options.only)
    if name in ("two-resumes", "all", "slice"):
        yield two_resumes.campaign(stage, 2 if is_slice else options.tries)


if __name__ == "__main__":
    sys.exit(main())
