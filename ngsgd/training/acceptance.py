"""Which results enter the average."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ngsgd.errors import ClusterError, DivergenceError
from ngsgd.schedules import OuterIteration
from ngsgd.training.job import JobResult


def judge(results: Sequence[JobResult], objf_tolerance: float, num_classes: int) -> list[tuple[JobResult, str]]:
    """Each result with the reason why it is rejected, empty when it is accepted.

    Rejected: a result whose parameters or objf are not finite, and one whose objf per frame is more than
    `objf_tolerance` below the best (Kaldi: 1.0) or below that of guessing: if all jobs diverge, none is accepted.
    """
    reasons = [_not_finite(result) for result in results]
    finite = [result.objf for result, reason in zip(results, reasons, strict=True) if not reason]
    guessing = -math.log(num_classes)
    best = max([guessing, *finite])
    name = "the best" if best > guessing else "guessing"
    return [(result, reason or _too_far_below(best, name, result.objf, objf_tolerance))
            for result, reason in zip(results, reasons, strict=True)]


def require_enough(accepted: Sequence[JobResult], verdicts: Sequence[tuple[JobResult, str]], plan: OuterIteration,
                   min_accepted: float) -> None:
    """Stops a run that would average too little."""
    if accepted and len(accepted) >= min_accepted * plan.num_jobs:
        return
    reasons = "; ".join(f"job {result.job.job}: {reason}" for result, reason in verdicts if reason)
    counted = f"only {len(accepted)} of {plan.num_jobs} jobs of outer iteration {plan.outer_iter + 1} could be averaged"
    if reasons:
        raise DivergenceError(f"{counted} ({reasons}); lower schedule.lr_initial and resume, or start again.")
    raise ClusterError(f"{counted}, because their workers kept dying; look at the log above and resume.")


def _not_finite(result: JobResult) -> str:
    if not math.isfinite(result.objf):
        return f"its objf is {result.objf}"
    num_bad = int(np.count_nonzero(~np.isfinite(result.parameters)))
    return f"{num_bad} of its parameters are not finite" if num_bad else ""


def _too_far_below(best: float, name: str, objf: float, tolerance: float) -> str:
    if best - objf <= tolerance:
        return ""
    return f"its objf {objf:.3f} is more than {tolerance:g} below {name}, {best:.3f}"
