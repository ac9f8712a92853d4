"""Which results enter the average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ngsgd.errors import ClusterError, DivergenceError, NgsgdError
from ngsgd.training.job import JobResult
from ngsgd.training.planning import Plan

NOT_THE_BEST = "only the best job of an early outer iteration is kept (schedule.early_rules)"

Verdicts = list[tuple[JobResult, str]]  # each result with the reason why it is rejected, empty when it is accepted


def judge(results: Sequence[JobResult], troubles: Mapping[int, str], objf_tolerance: float, num_classes: int) -> Verdicts:
    """Rejects what is broken, and what is far behind.

    `troubles` says, by job, what is wrong with a result's parameters.  A result whose objf per frame is not finite or
    more than `objf_tolerance` below the best (Kaldi: 1.0), or more than twice that of guessing, is rejected too: if all
    jobs diverge, none is accepted.  Plain SGD's first steps may well end below guessing, which is no divergence yet.
    """
    reasons = [troubles.get(result.job.job) or ("" if math.isfinite(result.objf) else f"its objf is {result.objf}")
               for result in results]
    sound = [result.objf for result, reason in zip(results, reasons, strict=True) if not reason]
    best = max(sound, default=-math.inf)
    guessing = -math.log(num_classes)
    return [(result, reason or _too_low(result.objf, best, guessing, objf_tolerance))
            for result, reason in zip(results, reasons, strict=True)]


def best_alone(verdicts: Verdicts) -> Verdicts:
    """The same with only the accepted result of highest objf, the first of equals; Kaldi's early outer iterations."""
    best = max((result.objf for result, reason in verdicts if not reason), default=-math.inf)
    kept = next((result.job.job for result, reason in verdicts if not reason and result.objf == best), None)
    return [(result, reason or ("" if result.job.job == kept else NOT_THE_BEST)) for result, reason in verdicts]


def too_few(accepted: Sequence[JobResult], verdicts: Verdicts, plan: Plan, min_accepted: float) -> NgsgdError | None:
    """The error of an outer iteration that would average too little; None when there is enough."""
    if accepted and len(accepted) >= min_accepted * plan.num_jobs:
        return None
    reasons = "; ".join(f"job {result.job.job}: {reason}" for result, reason in verdicts if reason)
    counted = f"only {len(accepted)} of {plan.num_jobs} jobs of outer iteration {plan.outer_iter + 1} could be averaged"
    if reasons:
        return DivergenceError(f"{counted} ({reasons}); lower schedule.lr_initial and resume, or start again.")
    return ClusterError(f"{counted}, because workers kept dying or data is quarantined; look at the log above and resume.")


def _too_low(objf: float, best: float, guessing: float, tolerance: float) -> str:
    if best - objf > tolerance:
        return f"its objf {objf:.3f} is more than {tolerance:g} below the best, {best:.3f}"
    return f"its objf {objf:.3f} is more than twice that of guessing, {guessing:.3f}" if objf < 2.0 * guessing else ""
