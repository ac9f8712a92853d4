"""Outer iterations whose data are in quarantine.

A job whose data were in quarantine before it could run is skipped. It is no evidence
about the workers or the model, so it does not count among the jobs of which
`failure.min_accepted_fraction` must be accepted. An outer iteration without data is committed with
an unchanged model, because a repetition would have no data either. If no other data are left, the
run ends.

If several jobs put their data in quarantine at once and no other result is there, a shared cause is
more likely: a lost mount, too little memory. Nothing is committed then, so that the data are tried
again once the cause is removed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ngsgd.errors import QuarantineError
from ngsgd.schedules import Schedule, Shard
from ngsgd.training.dispatcher import OuterIterationState
from ngsgd.training.planning import Progress

# shards that a message names
_MAX_NAMED = 16


def has_no_data(state: OuterIterationState, before: Progress) -> bool:
    """Whether the data of all jobs are in quarantine, those of at most one job since this outer
    iteration.

    If no result has been counted yet, the workers may be at fault.
    """
    num_tried = state.plan.num_jobs - len(state.skipped)
    if len(state.without_data) < state.plan.num_jobs:
        return False
    return not num_tried or (num_tried == 1 and before.frames_processed > 0)


def message(state: OuterIterationState, schedule: Schedule) -> str:
    """Describe an outer iteration without data.

    Raises:
        QuarantineError: all shards of the data are in quarantine.
    """
    data = {Shard(archive, frame) for archive in range(schedule.num_archives) for frame in range(schedule.frames_per_eg)}
    in_quarantine = (state.avoided | {piece.shard for piece in state.quarantined}
                     | {shard for shard in data if shard.archive in state.damaged})
    if data <= in_quarantine:
        raise QuarantineError(
            f"all {len(data)} shards of the data are in quarantine ({_names(data)}), and no data are left to train on; "
            "ngsgd why names the faults that led to it. Restore damaged archives and resume, or start a new run.")
    planned = {piece.shard for pieces in state.plan.work for piece in pieces}
    return (f"the data of outer iteration {state.plan.outer_iter + 1} are in quarantine "
            f"({_names(planned & in_quarantine)}): it has no results, and the model is unchanged.")


def _names(shards: Iterable[Shard]) -> str:
    ordered = sorted(shards, key=lambda shard: (shard.archive, shard.frame))
    named = [f"archive {shard.archive}, frame {shard.frame}" for shard in ordered[:_MAX_NAMED]]
    more = len(ordered) - len(named)
    return "; ".join([*named, *([f"and {more} more"] if more else [])])
