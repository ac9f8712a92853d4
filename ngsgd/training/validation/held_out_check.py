"""Check of the averaged model on held-out data, before it is committed."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import nn

from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.task import Task, seeded_model

_UNKNOWN = object()
# fraction of the tolerance: after such a drop each result is scored, which is cheap
_LOOK_CLOSER = 0.25


def max_objf_gap(task: Task, factor: float, seed: int) -> float:
    """Tolerance of objf: `factor` nats, or that multiple of a larger loss of the initial model.

    The loss of a custom task has any scale, and its score may jump, as with batch normalization. If
    the chance objf is known, it is in nats per frame.
    """
    if math.isfinite(task.chance_objf):
        return factor
    with torch.no_grad():
        objf = task.held_out_objf(seeded_model(task, seed).eval())
    return factor * max(1.0, abs(objf)) if math.isfinite(objf) else factor


class HeldOutCheck:
    """Scores parameters in a given model, and keeps the score of the last committed parameters.

    If the task optimizes another objective than the held-out objf, results are still compared by it
    after a drop beyond the tolerance, but a drop of the average is not divergence.
    """

    def __init__(self, task: Task, model: nn.Module, layout: FlatLayout, tolerance: float) -> None:
        # in the unit of the objf
        self.tolerance = tolerance
        self._task, self._model, self._layout = task, model, layout
        self._stage: Hashable = _UNKNOWN
        self._before: float | None = None

    def begin(self, committed: Vector, stage: Hashable) -> None:
        """Score the initial model of an outer iteration, unless its score is known."""
        if self._before is None or stage != self._stage:
            self._stage = stage
            self._before = self.score(committed)

    def commit(self, objf: float) -> None:
        """Set the score that later models are compared with."""
        self._before = objf

    def score(self, parameters: Vector) -> float:
        """Held-out objf; -Inf if it is not finite."""
        self._task.growth.select(self._model, self._stage)
        self._layout.load(self._model.eval(), parameters)
        with torch.no_grad():
            objf = self._task.held_out_objf(self._model)
        return objf if math.isfinite(objf) else -math.inf

    def is_suspect(self, objf: float, *, is_expensive: bool) -> bool:
        """Whether to score each result alone; this is expensive if results are in workers."""
        assert self._before is not None
        share = _LOOK_CLOSER if self._task.optimizes_held_out_objf and not is_expensive else 1.0
        return self._before - objf > self.tolerance * share

    def failure(self, objf: float) -> str:
        """Return why a model of this score is not committed; empty if it may be.

        A model that is better than chance by more than the tolerance may not lose more than the
        tolerance in one outer iteration. Earlier, the first steps may end below chance, but not
        twice as bad (as for the objf of jobs).
        """
        assert self._before is not None
        if objf == -math.inf:
            return "its held-out objf is not finite"
        if not self._task.optimizes_held_out_objf or self._before - objf <= self.tolerance:
            return ""
        fell = (f"its held-out objf fell from {self._before:.3f} to {objf:.3f}, more than "
                f"{self.tolerance:g}")
        if self._before > self._task.chance_objf + self.tolerance:
            return fell
        is_worse = objf < 2.0 * self._task.chance_objf
        return f"{fell}, and is more than twice that of guessing, {self._task.chance_objf:.3f}" if is_worse else ""

    def judge(self, scores: dict[int, float]) -> dict[int, str]:
        """Return reasons to reject, by job: divergence, or a score far below the best."""
        best = max(scores.values())
        low = {job: f"its held-out objf {objf:.3f} is more than {self.tolerance:g} below that of the "
                    f"best result, {best:.3f}" for job, objf in scores.items() if best - objf > self.tolerance}
        # if most are low, the best result is the exception
        if len(low) * 2 > len(scores):
            low = {}
        return low | {job: reason for job, objf in scores.items() if (reason := self.failure(objf))}
