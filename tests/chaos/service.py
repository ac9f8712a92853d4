"""Faults of the coordinator through the command that users call, `ngsgd train cluster=local`.

    python -m tests.chaos.service WHEN HOW MARK train cluster=local ...     the command, broken at a point
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from tests import judge
from tests.chaos.cases import Case, Seen
from tests.chaos.faults import Fault
from tests.chaos.invariants import TAG, Surroundings
from tests.chaos.recorded import note_answer
from tests.integration.service import TINY, Service, events
from tests.tiers import HANGS_S

_INTERRUPTED = 130


def try_service(case: Case, folder: Path) -> Seen:
    """Starts a run, lets it break, resumes it, and compares it with one that nobody disturbed."""
    service = _whole_run()[0]
    folder.mkdir(parents=True, exist_ok=True)
    fault = Fault(case.when, case.how, str(folder / "struck"))
    tag, name = uuid.uuid4().hex, case.when.replace(" ", "_")
    around = Surroundings(tag=tag)
    words = [sys.executable, "-m", "tests.chaos.service", case.when, case.how, fault.mark, "train", "cluster=local",
             f"name={name}", "failure.grace_period_s=30", f"output_dir={service.output_dir}", *TINY]
    broken = subprocess.run(words, capture_output=True, text=True, timeout=HANGS_S, check=False, cwd=folder,
                            env={**os.environ, TAG: tag, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert fault.strikes(), f"the fault never struck: {broken.stderr}"
    assert broken.returncode == (-signal.SIGKILL if case.how == "SIGKILL" else _INTERRUPTED), broken.stderr
    assert "Traceback" not in broken.stderr
    left = around.problems(folder)
    assert not left, "\n".join(left)
    began = time.monotonic()
    (run,) = service.runs(name)
    note_answer(run, folder)
    done = service.call(str(run), command="resume")
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert judge.finished_run(run, models=judge.committed_models(_whole_run()[1])) == []
    # progress is printed by time: a slow machine has more of these lines
    num_lines = sum(not line.endswith(" ...") and not line.startswith("waiting for workers")
                    for line in (broken.stdout + broken.stderr + done.stdout + done.stderr).splitlines())
    budget = len(events(run, "outer_iteration")) + len(events(run, "incident")) + 2 * _LINES_AROUND
    assert num_lines <= budget, f"{num_lines} lines were printed, the budget is {budget}"
    return Seen("resumed with `ngsgd resume`", True, took_s)


_LINES_AROUND = 20    # that a command prints before the first outer iteration and after the last


@functools.cache
def _whole_run() -> tuple[Service, Path, object]:
    """An undisturbed run, and the folder that holds it while this program runs."""
    keeper = tempfile.TemporaryDirectory(prefix="chaos-service-")
    service = Service(Path(keeper.name))
    done = service.call("cluster=in_process", "name=whole")
    assert done.returncode == 0, done.stderr
    return service, service.runs("whole")[0], keeper


def _main() -> None:
    when, how, mark = sys.argv[1:4]
    from ngsgd.launcher import cli
    from ngsgd.pipeline import run as pipeline_run
    from tests.chaos.coordinator import break_coordinator, strike_at
    fault = Fault(when, how, mark)
    break_coordinator(fault)
    if when == "final combine":
        strike_at(pipeline_run, "save_final", lambda *_: True, fault)
    sys.argv = ["ngsgd", *sys.argv[4:]]
    sys.exit(cli.main())


if __name__ == "__main__":
    _main()
