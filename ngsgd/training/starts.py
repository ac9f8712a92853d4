"""What each job starts from, under each way of averaging."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ngsgd.config import OuterConfig
from ngsgd.training.dispatch import Round
from ngsgd.training.job import Fisher, Start, VectorRef
from ngsgd.training.leases import Leases
from ngsgd.training.planning import Plan


class Starts:
    """Most rules start every job from the broadcast model; three also need what the job of that number did last.

    Overlapped averaging adds its own last move to a model that does not hold it yet; elastic averaging and streaming go on
    from its own parameters.
    """

    def __init__(self, config: OuterConfig, leases: Leases, *, keep_fisher: bool = False) -> None:
        self.config = config
        self.keep_fisher = keep_fisher
        self.fisher: dict[int, Fisher] = {}   # by job: the Fisher estimates that its last run ended with
        self.need_own = config.overlap or config.kind in ("easgd", "streaming")
        self.delay = config.delay if config.kind == "streaming" else int(config.overlap)
        self.returns: Literal["parameters", "move"] = "move" if config.overlap else "parameters"
        self._leases = leases
        self._own: dict[int, tuple[int, VectorRef]] = {}  # by job: the outer iteration it is from, and what it left

    @property
    def are_ahead(self) -> bool:
        """Jobs may start before the outer iteration of their predecessors has been averaged."""
        return self.delay > 0

    def fragment(self, outer_iter: int) -> tuple[int, int]:
        """(which, of how many) fragment is averaged in an outer iteration."""
        count = self.config.num_fragments if self.config.kind == "streaming" else 1
        return outer_iter % count, count

    def of(self, plan: Plan, job: int, model: VectorRef) -> Start:
        """A job whose predecessor left nothing, or that has none, starts from the model."""
        return replace(self._of(plan, job, model), fisher=self.fisher.get(job))

    def _of(self, plan: Plan, job: int, model: VectorRef) -> Start:
        outer_iter, own = self._own.get(job, (-1, None))
        if own is None or outer_iter != plan.outer_iter - 1:
            return Start(model)
        if self.config.overlap:
            return Start(model, own, own_is_move=True)
        if self.config.kind == "easgd":
            return Start(model, own, mix=1.0 - self.config.easgd_beta / plan.num_jobs)
        averaged = plan.outer_iter - 1 - self.delay
        return Start(model, own, mix=self.config.mixing, take=self.fragment(averaged) if averaged >= 0 else None)

    def remember(self, job: int, round_: Round) -> None:
        """Keeps what a job of `round_` left, in place of what its predecessor did."""
        result = round_.results.get(job)
        if result is not None and result.fisher is not None and job not in round_.troubles:
            self.fisher[job] = result.fisher
        else:
            self.fisher.pop(job, None)
        if not self.need_own or self._own.get(job, (-1, None))[0] == round_.plan.outer_iter:
            return
        _, old = self._own.pop(job, (-1, None))
        if result is not None and result.own is not None and job not in round_.troubles:
            self._leases.take(result.own)
            self._own[job] = (round_.plan.outer_iter, result.own)
        self._leases.drop(old)

    def forget(self) -> None:
        """All jobs start from the model again."""
        for _, own in self._own.values():
            self._leases.drop(own)
        self._own.clear()
        self.fisher.clear()
