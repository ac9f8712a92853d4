"""Initial parameters of each job, for every averaging method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np

from ngsgd.config import OuterConfig
from ngsgd.ops.compression import Codec
from ngsgd.training.dispatcher import OuterIterationState
from ngsgd.training.job import Fisher, JobInit, VectorRef
from ngsgd.training.planning import Plan
from ngsgd.training.storage.checkpoint import JobStates
from ngsgd.training.worker_pool import VectorRefcount

# weight of a job's own fragment when it receives an average that is one outer iteration old
# (Streaming DiLoCo, arXiv 2501.18512)
_MIXING = 0.5


class JobInitializer:
    """Computes the initial state of jobs, which is the broadcast model by default.

    Overlap adds the last parameter delta of the job slot to a model that does not contain it yet.
    Streaming continues from the last parameters of the slot. Compression adds the last encoding
    error of the slot to its next delta.
    """

    def __init__(self, config: OuterConfig, refcount: VectorRefcount, *, codec: Codec | None = None,
                 mean_fisher: Callable[[Sequence[Fisher]], Fisher] | None = None) -> None:
        self.config = config
        # combines the estimates of all jobs to one for every job; None: each slot keeps its own
        self.mean_fisher = mean_fisher
        # job -> Fisher estimates that its last run ended with
        self.fisher: dict[int, Fisher] = {}
        self.need_own = config.jobs_keep_state or codec is not None
        self.codec = codec
        # whether jobs may start before the outer iteration of their predecessors is averaged
        self.are_ahead = config.overlap
        is_streaming = config.kind == "streaming"
        self.returns: Literal["parameters", "move"] = "move" if config.overlap and not is_streaming else "parameters"
        self._refcount = refcount
        # job -> (outer iteration, result that the next job of the slot starts from)
        self._own: dict[int, tuple[int, VectorRef]] = {}

    def fragment(self, outer_iter: int) -> tuple[int, int]:
        """(index, count) of the fragment that is averaged in an outer iteration."""
        count = self.config.num_fragments if self.config.kind == "streaming" else 1
        return outer_iter % count, count

    def of(self, plan: Plan, job: int, model: VectorRef) -> JobInit:
        """Return the initial state of a job: without a previous result, the broadcast model."""
        fisher = self.fisher.get(job)
        if self.mean_fisher is not None and self.fisher:
            fisher = self.mean_fisher([left for _, left in sorted(self.fisher.items())])
        start = JobInit(model, fisher=fisher, codec=self.codec)
        outer_iter, own = self._own.get(job, (-2, None))
        if outer_iter != plan.outer_iter - 1:
            return start
        if self.returns == "move" or self.codec is not None:
            return replace(start, own=own, own_is_move=self.returns == "move")
        averaged = outer_iter - self.config.overlap
        return replace(start, own=own, mix=_MIXING if self.config.overlap else 0.0,
                       take=self.fragment(averaged) if averaged >= 0 else None)

    def remember(self, job: int, state: OuterIterationState) -> None:
        """Keep the result of a job of `state`; it replaces the result of its predecessor."""
        outer_iter, old = self._own.get(job, (-2, None))
        if outer_iter == state.plan.outer_iter:
            # the next job of the slot has started from it
            return
        result = None if job in state.rejection_reasons else state.results.get(job)
        if result is not None and result.fisher is not None:
            self.fisher[job] = result.fisher
        else:
            self.fisher.pop(job, None)
        if not self.need_own:
            return
        self._own.pop(job, None)
        if result is not None and result.own is not None:
            self._own[job] = state.plan.outer_iter, result.own
            self._refcount.acquire(result.own)
        self._refcount.release(old)

    def states(self, outer_iter: int, ahead: OuterIterationState | None) -> JobStates | None:
        """State for a checkpoint; None if jobs keep none. `ahead` has started already, if given."""
        if not self.need_own:
            return None
        own = {job: ref.read() for job, (there, ref) in sorted(self._own.items()) if there == outer_iter}
        if ahead is None:
            return JobStates(own)
        return JobStates(own, ahead.model.read(), ahead.plan.excluded)

    def restore(self, outer_iter: int, states: JobStates) -> None:
        """Continue from the state of a checkpoint of an outer iteration."""
        for job, vector in states.own.items():
            ref = self._refcount.pool.publish(partial(np.copyto, src=vector))
            self._refcount.acquire(ref)
            self._own[job] = outer_iter, ref

    def forget(self) -> None:
        """Drop the state of all jobs, so that they start from the model again."""
        for _, ref in self._own.values():
            self._refcount.release(ref)
        self._own.clear()
        self.fisher.clear()
