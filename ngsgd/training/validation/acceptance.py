"""Which results enter the average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ngsgd.errors import ClusterError, DivergenceError, NgsgdError
from ngsgd.training.job import JobResult
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.planning import Plan
from ngsgd.training.validation.plausibility import compare, impossible

NOT_THE_BEST = "only the best job of an early outer iteration is kept (schedule.early_rules)"

# each result with the reason why it is rejected, empty when it is accepted
Verdicts = list[tuple[JobResult, str]]


class Judged(NamedTuple):
    """What the results and what is known of them say."""

    verdicts: Verdicts
    # parameter deltas disagree without a majority: held-out data must decide
    is_contested: bool


def judge(results: Sequence[JobResult], troubles: Mapping[int, str], max_objf_gap: float,
          chance_objf: float, layout: FlatLayout) -> Judged:
    """Rejects what is broken, what training cannot have made, and what is far behind.

    `troubles` says, by job, what is wrong with a result's parameters.  A result whose objf per
    frame is not finite or more than `max_objf_gap` below the best (Kaldi: 1.0), or more than twice
    `chance_objf`, is rejected too: if all jobs diverge, none is accepted.  Plain SGD's first steps
    may well end below guessing, which is no divergence yet.
    """
    reasons = [troubles.get(result.job.job)
               or ("" if math.isfinite(result.objf) else f"its objf is {result.objf}")
               or impossible(result, layout) for result in results]
    whole = [result for result, reason in zip(results, reasons, strict=True) if not reason]
    compared = compare(whole, layout)
    reasons = [reason or compared.outliers.get(result.job.job, "")
               for result, reason in zip(results, reasons, strict=True)]
    sound = [result.objf for result, reason in zip(results, reasons, strict=True) if not reason]
    best = max(sound, default=-math.inf)
    verdicts = [(result, reason or _too_low(result.objf, best, chance_objf, max_objf_gap))
                for result, reason in zip(results, reasons, strict=True)]
    return Judged(verdicts, bool(compared.contested))


def best_alone(verdicts: Verdicts) -> Verdicts:
    """The same with only the accepted result of highest objf, the first of equals; Kaldi's early
    outer iterations.
    """
    best = max((result.objf for result, reason in verdicts if not reason), default=-math.inf)
    kept = next((result.job.job for result, reason in verdicts if not reason
                 and result.objf == best), None)
    return [(result, reason or ("" if result.job.job == kept else NOT_THE_BEST))
            for result, reason in verdicts]


def too_few(accepted: Sequence[JobResult], verdicts: Verdicts, plan: Plan,
            min_accepted_fraction: float) -> NgsgdError | None:
    """The error of an outer iteration that would average too little; None when there is enough."""
    if accepted and len(accepted) >= min_accepted_fraction * plan.num_jobs:
        return None
    reasons = "; ".join(f"job {result.job.job}: {reason}" for result, reason in verdicts if reason)
    counted = f"only {len(accepted)} of {plan.num_jobs} jobs of outer iteration {plan.outer_iter + 1} could be averaged"
    if reasons:
        return DivergenceError(f"{counted} ({reasons}); lower schedule.lr_initial and resume, or "
                               "start again.")
    return ClusterError(f"{counted}, because workers kept dying or data is quarantined; look at "
                        "the log above and resume.")


def _too_low(objf: float, best: float, guessing: float, tolerance: float) -> str:
    if best - objf > tolerance:
        return f"its objf {objf:.3f} is more than {tolerance:g} below the best, {best:.3f}"
    return f"its objf {objf:.3f} is more than twice that of guessing, {guessing:.3f}" if objf < 2.0 * guessing else ""
