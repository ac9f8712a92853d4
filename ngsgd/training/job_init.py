"""Initial parameters of each job, for every averaging method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np

from ngsgd.config import OuterConfig
from ngsgd.ops.compression import Codec
from ngsgd.training.dispatcher import OuterIterationState
from ngsgd.training.job import Fisher, JobInit, VectorRef
from ngsgd.training.planning import Plan
from ngsgd.training.storage.job_states import JobStates
from ngsgd.training.worker_pool import VectorRefcount


@dataclass(frozen=True)
class _Left:
    """Result of a job that the next job of its slot starts from."""

    outer_iter: int
    own: VectorRef


class JobInitializer:
    """Computes the initial state of jobs.

    Jobs start from the broadcast model. Overlap and streaming also need the previous result of the
    job slot.

    Overlap adds the last parameter delta of the slot to a model that does not contain it yet.
    Streaming continues from the last parameters of the slot. Compression adds the last encoding
    error of the slot to its next delta.
    """

    def __init__(self, config: OuterConfig, refcount: VectorRefcount, *, codec: Codec | None = None,
                 mean_fisher: Callable[[Sequence[Fisher]], Fisher] | None = None) -> None:
        self.config = config
        # combines the estimates of all jobs to one for every job; None: each slot keeps its
        # estimates
        self.mean_fisher = mean_fisher
        # job -> Fisher estimates that its last run ended with
        self.fisher: dict[int, Fisher] = {}
        self.need_own = config.jobs_keep_state or codec is not None
        self.codec = codec
        self.delay = config.fragment_delay if config.kind == "streaming" else int(config.overlap)
        self.returns: Literal["parameters", "move"] = "move" if config.overlap else "parameters"
        self._refcount = refcount
        self._own: dict[int, _Left] = {}  # by job

    @property
    def are_ahead(self) -> bool:
        """Whether jobs may start before the outer iteration of their predecessors is averaged."""
        return self.delay > 0

    def fragment(self, outer_iter: int) -> tuple[int, int]:
        """(index, count) of the fragment that is averaged in an outer iteration."""
        count = self.config.num_fragments if self.config.kind == "streaming" else 1
        return outer_iter % count, count

    def of(self, plan: Plan, job: int, model: VectorRef) -> JobInit:
        """Return the initial state of a job: without a previous result, the broadcast model."""
        fisher = self.fisher.get(job)
        if self.mean_fisher is not None and self.fisher:
            fisher = self.mean_fisher([left for _, left in sorted(self.fisher.items())])
        return replace(self._of(plan, job, model), fisher=fisher, codec=self.codec)

    def _of(self, plan: Plan, job: int, model: VectorRef) -> JobInit:
        left = self._own.get(job)
        if left is None or left.outer_iter != plan.outer_iter - 1:
            return JobInit(model)
        if self.config.overlap or self.codec is not None:
            return JobInit(model, left.own, own_is_move=self.config.overlap)
        averaged = plan.outer_iter - 1 - self.delay
        return JobInit(model, left.own, mix=self.config.fragment_mixing, take=self.fragment(averaged) if averaged >= 0 else None)

    def remember(self, job: int, state: OuterIterationState) -> None:
        """Keep the result of a job of `state`; it replaces the result of its predecessor."""
        old = self._own.get(job)
        if old and old.outer_iter == state.plan.outer_iter:
            # the next job of the slot has started from it
            return
        result = state.results.get(job)
        if result is not None and result.fisher is not None and job not in state.rejection_reasons:
            self.fisher[job] = result.fisher
        else:
            self.fisher.pop(job, None)
        if not self.need_own:
            return
        self._own.pop(job, None)
        if result is not None and result.own is not None and job not in state.rejection_reasons:
            self._own[job] = left = _Left(state.plan.outer_iter, result.own)
            self._refcount.acquire(left.own)
        self._drop(old)

    def states(self, outer_iter: int, ahead: OuterIterationState | None) -> JobStates | None:
        """Return the state for a checkpoint of an outer iteration; None if jobs keep none.

        Args:
            outer_iter: the outer iteration, whose results the next jobs start from.
            ahead: the next outer iteration if its jobs have started already.
        """
        if not self.need_own:
            return None
        own = {job: left.own.read() for job, left in sorted(self._own.items()) if left.outer_iter == outer_iter}
        if ahead is None:
            return JobStates(own)
        return JobStates(own, ahead.model.read(), ahead.plan.layer_rates, ahead.plan.excluded)

    def restore(self, outer_iter: int, states: JobStates) -> None:
        """Continue from the state of a checkpoint of an outer iteration."""
        for job, vector in states.own.items():
            ref = self._refcount.pool.publish(partial(np.copyto, src=vector))
            self._refcount.acquire(ref)
            self._own[job] = _Left(outer_iter, ref)

    def forget(self) -> None:
        """Drop the state of all jobs, so that they start from the model again."""
        for left in self._own.values():
            self._drop(left)
        self._own.clear()
        self.fisher.clear()

    def _drop(self, left: _Left | None) -> None:
        if left:
            self._refcount.release(left.own)
