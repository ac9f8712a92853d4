"""Two coordinators on one run: one continues, the other is refused.

The first that writes a checkpoint waits there until the other has ended or waits too, so the
outcome does not depend on which is faster.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

from tests.fuzz import judge, server
from tests.fuzz.interposer import Arming, Mode
from tests.fuzz.judge import Expected
from tests.fuzz.report import Report
from tests.fuzz.server import Child
from tests.fuzz.stage import Stage
from tests.tiers import HANGS_S


def campaign(stage: Stage, num_tries: int) -> Report:
    """Starts `ngsgd resume` twice at once on a stopped run."""
    stage.finish()
    expected = Expected.of(stage.run)
    report = Report("two resumes", lambda case: "python -m tests.fuzz two-resumes --tries 1")
    for number in range(num_tries):
        stage.stop()
        report.add(f"try-{number:02d}", _try(stage, expected))
    return report


class _Held:
    """A `resume` that waits before its first checkpoint."""

    def __init__(self, stage: Stage) -> None:
        self.waits, notify = os.pipe()
        self._released, self._release = os.pipe()
        arming = Arming(stage.out, Mode.HOLD, hold=("/checkpoints/.iter-", notify, self._released))
        self.child: Child = server.start(["resume", str(stage.run)], stage.scratch, arming)
        # when the child ends, reading from `waits` gives the end of the file
        os.close(notify)

    def release(self) -> None:
        os.write(self._release, b"g")

    def close(self) -> None:
        os.close(self.waits)
        os.close(self._release)
        os.close(self._released)


def _try(stage: Stage, expected: Expected) -> Iterator[str]:
    both = [_Held(stage), _Held(stage)]
    pending = [one.waits for one in both]
    while pending:
        ready, _, _ = select.select(pending, [], [], HANGS_S)
        if not ready:
            break
        pending = [waits for waits in pending if waits not in ready]
    is_held = [bool(os.read(one.waits, 1)) if one.waits not in pending else False for one in both]
    for one in both:
        one.release()
    outcomes = [one.child.wait(HANGS_S) for one in both]
    for one in both:
        one.close()
    if sum(is_held) != 1:
        yield f"{sum(is_held)} of 2 came to write a checkpoint"
    codes = sorted(outcome.code for outcome in outcomes)
    if codes[0] != 0 or codes[1] not in judge.SENTENCE_CODES:
        yield f"they ended with {' and '.join(outcome.ending for outcome in outcomes)}"
    for outcome in outcomes:
        yield from judge.well_told(outcome)
        if outcome.code != 0 and len(outcome.sentences) != 1:
            yield f"the refused one printed {len(outcome.sentences)} sentences"
    yield from judge.finished_run(stage.run, expected)
