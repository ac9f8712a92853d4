"""The warning that max_change sets the length of the steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ngsgd.training.diagnostics.clipped_updates import ClippedUpdates
from tests.launcher.records import outer_iteration


@pytest.mark.parametrize(("shares", "num_warnings"), [
    ((1.0, 0.6, 1.0, 0.3), 0), ((0.6, 0.65, 0.5), 0), ((0.5, 1.0, 0.95), 1), ((1.0, 1.0, 1.0, 0.2, 1.0, 1.0), 1)])
def test_two_outer_iterations_of_shortened_updates_warn_once(shares: tuple[float, ...], num_warnings: int) -> None:
    found: list[str] = []
    tracker = ClippedUpdates(found.append)
    for number, share in enumerate(shares):
        record = outer_iteration(number)
        tracker.outer_iteration(replace(record, jobs=tuple(replace(job, max_change_share=share) for job in record.jobs)))
    assert len(found) == num_warnings
