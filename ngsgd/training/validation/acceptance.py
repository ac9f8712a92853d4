"""Selection of the results that enter the average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ngsgd.errors import ClusterError, DivergenceError, NgsgdError
from ngsgd.training.job import JobResult
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.planning import Plan
from ngsgd.training.records import NOT_THE_BEST
from ngsgd.training.validation.plausibility import compare, impossible

# each result with the reason of its rejection, empty if it is accepted
Verdicts = list[tuple[JobResult, str]]


class Judged(NamedTuple):
    """Verdicts on all results."""

    verdicts: Verdicts
    # parameter deltas disagree without a majority: held-out data must decide
    is_contested: bool


def judge(results: Sequence[JobResult], troubles: Mapping[int, str], max_objf_gap: float,
          chance_objf: float, layout: FlatLayout) -> Judged:
    """Reject damaged, implausible and far inferior results.

    A result is also rejected if its objf per frame is not finite, more than `max_objf_gap` below
    the best (Kaldi: 1.0), or more than twice `chance_objf`. If all jobs diverge, none is accepted.
    The first steps of plain SGD may end below chance, which is not yet a divergence.

    Args:
        results: results of the outer iteration.
        troubles: job -> known problem of its parameters.
        max_objf_gap: tolerance to the best objf, nats per frame.
        chance_objf: objf of a model that always predicts the class frequencies.
        layout: entries of the parameter vector.
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

    def too_low(objf: float) -> str:
        if best - objf > max_objf_gap:
            return f"its objf {objf:.3f} is more than {max_objf_gap:g} below the best, {best:.3f}"
        is_worse = objf < 2.0 * chance_objf
        return f"its objf {objf:.3f} is more than twice that of guessing, {chance_objf:.3f}" if is_worse else ""
    verdicts = [(result, reason or too_low(result.objf)) for result, reason in zip(results, reasons, strict=True)]
    return Judged(verdicts, bool(compared.contested))


def best_alone(verdicts: Verdicts) -> Verdicts:
    """Keep only the accepted result of highest objf (early outer iterations in Kaldi)."""
    best = max((result.objf for result, reason in verdicts if not reason), default=-math.inf)
    kept = next((result.job.job for result, reason in verdicts if not reason
                 and result.objf == best), None)
    return [(result, reason or ("" if result.job.job == kept else NOT_THE_BEST))
            for result, reason in verdicts]


def too_few(accepted: Sequence[JobResult], verdicts: Verdicts, plan: Plan,
            min_accepted_fraction: float, num_skipped: int = 0) -> NgsgdError | None:
    """Return the error of an outer iteration with too few accepted results, else None.

    Skipped jobs do not count: their data were in quarantine before.
    """
    if accepted and len(accepted) >= min_accepted_fraction * (plan.num_jobs - num_skipped):
        return None
    reasons = "; ".join(f"job {result.job.job}: {reason}" for result, reason in verdicts if reason)
    counted = (
        f"only {len(accepted)} of {plan.num_jobs} jobs of outer iteration {plan.outer_iter + 1} "
        "could be averaged"
    )
    if reasons:
        return DivergenceError(f"{counted} ({reasons}); lower schedule.lr_initial and resume, or "
                               "restart.")
    return ClusterError(f"{counted}, because workers died repeatedly or data are quarantined; fix "
                        "the problems in the log above and resume.")
