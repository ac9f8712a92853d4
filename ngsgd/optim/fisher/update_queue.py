"""Deferred updates of Fisher estimates.

A single estimate updates immediately; those of an optimizer update together. Updates of Kaldi's
form need numbers on the host; those of the polar form need none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ngsgd.ops import natural_gradient as ops
from ngsgd.optim.fisher.stack import Estimate, FisherStack, Number, Shares, Stacked


class _PendingUpdate(NamedTuple):
    estimate: Estimate
    J_RD: Tensor
    KL_2RR: Tensor                          # K and L
    # tr X X^T, the number of rows, and the scale of the rows
    numbers: tuple[Number, Number, Number]

    def moments(self) -> ops.Moments:
        """Return the moments; on a device the host waits for them."""
        K_RR, L_RR = self.KL_2RR.cpu().numpy().astype(np.float64)
        return ops.Moments(K_RR, L_RR, *map(float, self.numbers))


class _Products(NamedTuple):
    """Products of an estimate that is not in the stack yet."""

    J_RD: Tensor
    sum_sq: Number
    shares: Shares


class UpdateQueue:
    """Updates of Fisher estimates that have not been applied yet.

    The estimates of one optimizer share a queue. Updates wait in it until the step is done or an
    estimate is needed again. On a CPU this keeps code and data of the R x R algebra in the cache.
    On a GPU the polar updates of a step run when the next step begins, on a second stream during
    its forward pass; the backward pass waits for them, and the host never does. Results are bitwise
    identical to immediate updates.
    """

    def __init__(self, *, deferred: bool = False) -> None:
        self.deferred = deferred
        # steps of the optimizer
        self.num_commits = 0
        # One warning of flat estimates for all that share the queue.
        self.has_warned = False
        self._waiting: list[_PendingUpdate] = []
        # ids of the estimates with waiting updates
        self._ids = set[int]()
        # polar form: estimates with an update in `stack`, by id
        self._shares: dict[int, Shares] = {}
        self._new: dict[Estimate, _Products] = {}
        self.stack: FisherStack | None = None
        # of updates that run during the forward pass, and the same while one runs
        self._side: Any = None
        self._stream: Any = None
        self._is_held = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy must not contain rows of a minibatch, and makes its own stack.
        self.wait()
        return {**self.__dict__, "stack": None, "_side": None}

    def add(self, estimate: Estimate, J_RD: Tensor, KL_2RR: Tensor, numbers: tuple[Number, Number, Number]) -> None:
        """Queue an update in Kaldi's form, or apply it immediately if updates are not deferred."""
        self._waiting.append(_PendingUpdate(estimate, J_RD, KL_2RR, numbers))
        self._ids.add(id(estimate))
        if not self.deferred:
            self.wait()

    def record(self, estimate: Estimate, J_RD: Tensor, sum_sq: Number, shares: Shares) -> None:
        """Queue an update in polar form, or apply it immediately if updates are not deferred."""
        if self.stack is not None and self.stack.holds([estimate]):
            self.stack.record(estimate, J_RD, sum_sq, shares)
            self._shares[id(estimate)] = shares
        else:
            self._new[estimate] = _Products(J_RD, sum_sq, shares)
        self._ids.add(id(estimate))
        if not self.deferred:
            self.wait()

    def places_of(self, estimates: Sequence[Estimate], dtype: torch.dtype) -> tuple[tuple[int, ...], Stacked]:
        """Return the places of estimates of one dtype in the stack, to which new ones are added."""
        if self.stack is None or not self.stack.holds(estimates):
            self._include(estimates)
        assert self.stack is not None
        return self.stack.places_of(estimates, dtype)

    def record_all(self, shares: Mapping[Any, Shares]) -> None:
        """Queue updates of members of the stack, whose products come to its memory."""
        assert self.stack is not None
        self.stack.record_shares(shares)
        self._shares.update((id(estimate), share) for estimate, share in shares.items())
        self._ids.update(map(id, shares))

    def sum_sq_of(self, part: Stacked) -> Tensor:
        """Return tr X X^T of the next updates of a part of the stack, to be set."""
        assert self.stack is not None
        return self.stack.sum_sq_L[part.rows]

    def drop(self, estimate: Estimate) -> None:
        """Remove the waiting updates of an estimate."""
        self._waiting = [update for update in self._waiting if update.estimate is not estimate]
        self._shares.pop(id(estimate), None)
        self._new.pop(estimate, None)
        self._ids.discard(id(estimate))

    @contextlib.contextmanager
    def held(self) -> Iterator[dict[int, Shares]]:
        """Ignore `flush`, and yield the updates that are left at the end; for a CUDA graph."""
        left: dict[int, Shares] = {}
        self._is_held = True
        try:
            yield left
        finally:
            self._is_held = False
            left.update(self._shares)

    def put(self, shares: dict[int, Shares]) -> None:
        """Queue the updates that a replay of a CUDA graph has left, instead of those before."""
        self._shares = dict(shares)
        self._ids = set(shares)

    def graph_key(self) -> Hashable | None:
        """Return what the next step depends on; None if a CUDA graph cannot contain it."""
        if self._waiting or self._new:
            return None
        shares = tuple((number, *("on the device" if isinstance(share, Tensor) else share for share in shares))
                       for number, shares in self._shares.items())
        return id(self.stack), shares

    def flush(self) -> None:
        """End a step: apply waiting updates on a CPU, and those that need the host."""
        if self._is_held:
            return
        self.num_commits += 1
        if self._waiting or any(products.J_RD.is_cpu for products in self._new.values()) \
                or (self._shares and self.stack is not None and self.stack.rho_L.is_cpu):
            self.wait()

    def fork(self) -> None:
        """Begin a step: start polar updates on a second stream of a GPU."""
        if self._shares and not self._new and self.stack is not None and self.stack.rho_L.is_cuda:
            # Each stream has its own cached memory.
            if self._side is None or self._side.device != self.stack.rho_L.device:
                self._side = torch.cuda.Stream(self.stack.rho_L.device)
            self._stream = self._side
            self._stream.wait_stream(torch.cuda.current_stream(self.stack.rho_L.device))
            with torch.cuda.stream(self._stream):
                self._update_stack()

    def wait(self, needed: Estimate | None = None) -> None:
        """Apply the waiting updates in order; with `needed`, only if it has one."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._stream = None
        if not self._ids or (needed is not None and id(needed) not in self._ids):
            return
        waiting, self._waiting = self._waiting, []
        if self._shares or self._new:
            self._update_stack()
        self._ids = set()
        # In Kaldi's form, estimates of one rank together; products that are not finite are skipped.
        for turn in _in_turns([_Update(update.estimate, update.J_RD, update.moments()) for update in waiting]):
            problems = [estimate.problem(J_RD, moments) for estimate, J_RD, moments in turn]
            for (estimate, J_RD, _), problem, found in zip(turn, problems, ops.compute_updates(problems), strict=True):
                # K may have overflowed.
                (step,) = [found] if found is not None else ops.compute_updates(
                    [problem._replace(moments=ops.wide_moments(J_RD, problem.moments))])
                if step is not None:
                    estimate.updated(problem, ops.apply_update(problem.state, J_RD, step, estimate.smoothing))

    def _update_stack(self) -> None:
        if self._new:
            new, self._new = self._new, {}
            self._include(list(new))
            assert self.stack is not None
            for estimate, products in new.items():
                self.stack.record(estimate, *products)
                self._shares[id(estimate)] = products.shares
        shares, self._shares = self._shares, {}
        self._ids = {id(update.estimate) for update in self._waiting}
        if shares and self.stack is not None:
            self.stack.update(shares)

    def _include(self, estimates: Sequence[Estimate]) -> None:
        """Make a stack of the members that are still views of the present one, and of others."""
        before = self.stack
        kept = [] if before is None else [one for one in before.members if before.holds([one])]
        self.stack = FisherStack([*kept, *(estimate for estimate in estimates if estimate not in kept)])
        for one in kept:
            if before is not None and id(one) in self._shares:
                self.stack.record(one, *before.recorded(one), self._shares[id(one)])


class _Update(NamedTuple):
    estimate: Estimate
    J_RD: Tensor
    moments: ops.Moments


def _in_turns(updates: Sequence[_Update]) -> Iterator[list[_Update]]:
    """Yield updates of one rank, each estimate once per list; skip those of masked rows."""
    rest = [update for update in updates if update.moments.num_rows > 0.0]
    while rest:
        turns: dict[int, list[_Update]] = {}
        seen, later = set[int](), []
        for update in rest:
            if id(update.estimate) in seen:
                later.append(update)
            else:
                seen.add(id(update.estimate))
                turns.setdefault(len(update.J_RD), []).append(update)
        yield from turns.values()
        rest = later
