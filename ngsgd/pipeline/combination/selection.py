"""Which models of a run enter the final combination.  Numbers only."""

from __future__ import annotations

from ngsgd.schedules import Schedule


def candidates(schedule: Schedule, max_models: int = 20) -> tuple[int, ...]:
    """The outer iterations whose models are to be kept until the end of the run, newest first, 0-based.

    As Kaldi has it (get_model_combine_iters of steps/libs/nnet3/train/common.py): the last `max_models`, or all of the last
    half epoch if that is more, subsampled to at least `max_models` and fewer than twice as many, and the last; never from the
    first half of the run.  Kaldi numbers models from 1, and of a run of one outer iteration it takes none; here it is taken.

    >>> candidates(Schedule(num_archives=6, frames_per_eg=4, num_epochs=3, lr_initial=0.01, lr_final=0.001,
    ...                     num_jobs_initial=6, num_jobs_final=6), max_models=5)
    (11, 10, 9, 8, 7)
    """
    num_iters = schedule.num_outer_iters
    passes_per_epoch = schedule.num_archives * schedule.frames_per_eg
    half_epoch = passes_per_epoch // (2 * schedule.num_jobs_final) + 1
    span = max(1, min(num_iters // 2, max(half_epoch, max_models)))
    kept = {*range(num_iters - span, num_iters, max(1, span // max_models)), num_iters - 1}
    return tuple(sorted(kept, reverse=True))
