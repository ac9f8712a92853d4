"""Selection of the results that enter the average, and the check of the average on held-out data.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import nn

from ngsgd.errors import ClusterError, DivergenceError, NgsgdError
from ngsgd.training.job import JobResult
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.planning import Plan
from ngsgd.training.task import Task, seeded_model
from ngsgd.training.validation.plausibility import compare, impossible

# of the jobs of an outer iteration; with fewer nothing is committed
MIN_ACCEPTED_FRACTION = 0.5
_UNKNOWN = object()
# fraction of the tolerance: after such a drop each result is scored, which is cheap
_LOOK_CLOSER = 0.25
# each result with the reason of its rejection, empty if it is accepted
Verdicts = list[tuple[JobResult, str]]


def judge(results: Sequence[JobResult], troubles: Mapping[int, str], max_objf_gap: float,
          chance_objf: float, layout: FlatLayout) -> tuple[Verdicts, bool]:
    """Reject damaged, implausible and far inferior results.

    A result is also rejected if its objf per frame is not finite, more than `max_objf_gap` below
    the best (Kaldi: 1.0), or more than twice `chance_objf`, that of predicting the class
    frequencies. If all jobs diverge, none is accepted. The first steps of plain SGD may end below
    chance, which is not yet a divergence. `troubles` are known problems of the parameters, by job.

    Returns (verdicts, whether held-out data must decide, since deltas disagree without a majority).
    """
    reasons = [troubles.get(result.job.job) or ("" if math.isfinite(result.objf) else f"its objf is {result.objf}")
               or impossible(result, layout) for result in results]
    whole = [result for result, reason in zip(results, reasons, strict=True) if not reason]
    compared = compare(whole, layout)
    reasons = [reason or compared.outliers.get(result.job.job, "") for result, reason in zip(results, reasons, strict=True)]
    sound = [result.objf for result, reason in zip(results, reasons, strict=True) if not reason]
    best = max(sound, default=-math.inf)

    def too_low(objf: float) -> str:
        if best - objf > max_objf_gap:
            return f"its objf {objf:.3f} is more than {max_objf_gap:g} below the best, {best:.3f}"
        is_worse = objf < 2.0 * chance_objf
        return f"its objf {objf:.3f} is more than twice that of guessing, {chance_objf:.3f}" if is_worse else ""
    verdicts = [(result, reason or too_low(result.objf)) for result, reason in zip(results, reasons, strict=True)]
    return verdicts, bool(compared.contested)


def fewest_results(num_jobs: int, num_skipped: int) -> float:
    """Return how many results an outer iteration needs; skipped jobs do not count."""
    return MIN_ACCEPTED_FRACTION * (num_jobs - num_skipped)


def too_few(accepted: Sequence[JobResult], verdicts: Verdicts, plan: Plan, num_skipped: int = 0) -> NgsgdError | None:
    """Return the error of too few accepted results, else None; skipped jobs do not count."""
    if accepted and len(accepted) >= fewest_results(plan.num_jobs, num_skipped):
        return None
    reasons = "; ".join(f"job {result.job.job}: {reason}" for result, reason in verdicts if reason)
    counted = (f"only {len(accepted)} of {plan.num_jobs} jobs of outer iteration {plan.outer_iter + 1} could be averaged")
    if reasons:
        return DivergenceError(f"{counted} ({reasons}); lower schedule.lr_initial and resume, or restart.")
    return ClusterError(f"{counted}, because workers died repeatedly or data are quarantined; fix "
                        "the problems in the log above and resume.")


def max_objf_gap(task: Task, factor: float, seed: int) -> float:
    """Tolerance of objf: `factor` nats, or that multiple of a larger loss of the initial model.

    The loss of a custom task has any scale, and its score may jump, as with batch normalization.
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
        fell = (f"its held-out objf fell from {self._before:.3f} to {objf:.3f}, more than {self.tolerance:g}")
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
