"""A warning if max_change and not the learning rate sets the length of the steps."""

from __future__ import annotations

from collections.abc import Callable

from ngsgd.training.records import OuterIterationRecord, Tracker

# the report's red limit; good recipes begin with shares up to 0.65
_TOO_MANY = 0.9
_IN_A_ROW = 2


class ClippedUpdates(Tracker):
    """A tracker that warns once after two outer iterations with nearly all updates shortened."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._num_in_a_row = 0
        self._has_warned = False

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        share = max(record.max_change_share, record.max_param_change_share)
        self._num_in_a_row = self._num_in_a_row + 1 if share > _TOO_MANY else 0
        if self._num_in_a_row == _IN_A_ROW and not self._has_warned:
            self._has_warned = True
            self._warn(f"optimizer.max_change shortened {share:.0%} of the updates of outer iteration {record.outer_iter + 1}, so "
                       "the learning rate has no effect; lower lr (schedule.lr_initial and lr_final), or raise "
                       "optimizer.max_change (0: no limit)")
