"""Deferred updates of Fisher estimates.

A single estimate updates immediately; those of an optimizer update together, so a GPU is
synchronized with the host at most once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ngsgd.ops import natural_gradient as ops

Number = Tensor | float


class Estimate(Protocol):
    """An estimate whose update needs numbers on the host."""

    smoothing: ops.Smoothing

    def problem(self, J_RD: Tensor, moments: ops.Moments) -> ops.UpdateProblem:
        """Return the update of the current estimate by a minibatch."""

    def updated(self, problem: ops.UpdateProblem, state: ops.FisherState) -> None:
        """Replace the estimate by the result of an update."""


class _PendingUpdate(NamedTuple):
    estimate: Estimate
    J_RD: Tensor
    KL_2RR: Tensor                          # K and L
    # tr X X^T, the number of rows, and the scale of the rows
    numbers: tuple[Number, Number, Number]

    def on_device(self) -> list[Tensor]:
        """Return the device numbers that the host needs, flat."""
        sent = [number.view(1).to(self.KL_2RR.dtype) for number in self.numbers
                if isinstance(number, Tensor)]
        return [self.KL_2RR.view(-1), *sent]

    @property
    def num_sent(self) -> int:
        return self.KL_2RR.numel() + sum(isinstance(number, Tensor) for number in self.numbers)

    def moments(self, received: Tensor) -> ops.Moments:
        """Return the moments from the transferred numbers."""
        size = self.KL_2RR.numel()
        rest = iter(received[size:].tolist())
        return _moments(received[:size].view_as(self.KL_2RR),
                        [next(rest) if isinstance(number, Tensor) else number
                         for number in self.numbers])


class UpdateQueue:
    """Updates whose numbers have not reached the host yet.

    The estimates of one optimizer share a queue. Updates wait in it until the step is done or an
    estimate is needed again. On a CPU this keeps code and data of the R x R algebra in the cache.
    On a GPU `flush` sends all numbers to the host on a separate stream, concurrently with the
    parameter step and the next forward pass. `wait`, in the next backward pass, waits for that one
    transfer. Results are bitwise identical to immediate updates.
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
        self._transfer: tuple[Tensor, Any] | None = None
        self._is_held = False

    def __getstate__(self) -> dict[str, Any]:
        # A copy must not contain events or rows of a minibatch.
        self.wait()
        return self.__dict__

    def add(self, estimate: Estimate, J_RD: Tensor, KL_2RR: Tensor, numbers: tuple[Number, Number, Number]) -> None:
        """Queue an update, or apply it immediately if updates are not deferred."""
        self._waiting.append(_PendingUpdate(estimate, J_RD, KL_2RR, numbers))
        self._ids.add(id(estimate))
        self._transfer = None
        if not self.deferred:
            self.wait()

    def drop(self, estimate: Estimate) -> None:
        """Remove the waiting updates of an estimate."""
        kept = [update for update in self._waiting if update.estimate is not estimate]
        if len(kept) < len(self._waiting):
            self._waiting, self._transfer = kept, None
            self._ids.remove(id(estimate))

    @contextlib.contextmanager
    def held(self) -> Iterator[list[Any]]:
        """Keep the updates that are added inside for `put`, and ignore `flush`.

        For a CUDA graph, whose replays compute their tensors again.
        """
        held: list[Any] = []
        self._is_held = True
        try:
            yield held
        finally:
            held += self._waiting
            self._waiting, self._ids, self._is_held = [], set(), False

    def put(self, updates: Sequence[Any]) -> None:
        """Queue held updates again."""
        self._waiting += updates
        self._ids.update(id(update.estimate) for update in updates)

    def flush(self) -> None:
        """End a step: apply waiting updates on a CPU, else start the transfer and return."""
        if self._is_held:
            return
        self.num_commits += 1
        if self._waiting and self._transfer is None:
            if self._waiting[0].J_RD.is_cpu:
                self.wait()
            else:
                self._transfer = _sent(self._waiting)

    def wait(self, needed: Estimate | None = None) -> None:
        """Apply the waiting updates in order; with `needed`, only if it has one."""
        if not self._waiting or (needed is not None and id(needed) not in self._ids):
            return
        waiting, self._waiting, self._ids = self._waiting, [], set()
        if waiting[0].J_RD.is_cpu:
            moments = [_moments(update.KL_2RR, update.numbers) for update in waiting]
        else:
            moments = self._received(waiting)
        _update_together([_Update(update.estimate, update.J_RD, one) for update, one in zip(waiting, moments, strict=True)])

    def _received(self, waiting: Sequence[_PendingUpdate]) -> list[ops.Moments]:
        """Return the moments from the device after the transfer."""
        numbers, done = self._transfer or _sent(waiting)
        self._transfer = None
        if done is not None:
            done.synchronize()
        parts = [update.num_sent for update in waiting]
        return [update.moments(part)
                for update, part in zip(waiting, numbers.split(parts), strict=True)]


def _moments(KL_2RR: Tensor, numbers: Any) -> ops.Moments:
    K_RR, L_RR = KL_2RR.numpy().astype(np.float64)
    return ops.Moments(K_RR, L_RR, *map(float, numbers))


def _sent(updates: Sequence[_PendingUpdate]) -> tuple[Tensor, Any]:
    """Start the transfer of the numbers that the host needs; see `_to_host`."""
    return _to_host(torch.cat([part for update in updates for part in update.on_device()]))


def _to_host(numbers: Tensor) -> tuple[Tensor, Any]:
    """Return (host tensor, event that signals its completion; None if complete)."""
    if not numbers.is_cuda:
        return numbers.cpu(), None
    side = torch.cuda.Stream(numbers.device)
    side.wait_stream(torch.cuda.current_stream(numbers.device))
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    with torch.cuda.stream(side):
        host.copy_(numbers, non_blocking=True)
        numbers.record_stream(side)
        done = torch.cuda.Event()
        done.record(side)
    return host, done


class _Update(NamedTuple):
    estimate: Estimate
    J_RD: Tensor
    moments: ops.Moments


def _update_together(updates: Sequence[_Update]) -> None:
    """Update estimates; a minibatch whose products are not finite has no effect.

    Estimates of one rank share the R x R algebra.
    """
    for turn in _in_turns(updates):
        problems = [estimate.problem(J_RD, moments) for estimate, J_RD, moments in turn]
        moving = []
        for (estimate, J_RD, _), problem, found in zip(turn, problems, ops.compute_updates(problems), strict=True):
            # K may have overflowed.
            (step,) = [found] if found is not None else ops.compute_updates(
                [problem._replace(moments=ops.wide_moments(J_RD, problem.moments))])
            if step is not None:
                moving.append((estimate, J_RD, problem, step))
        if turn[0].J_RD.is_cpu:
            for estimate, J_RD, problem, step in moving:
                estimate.updated(problem, ops.apply_update(problem.state, J_RD, step, estimate.smoothing))
            continue
        # Those of one dimension together, because each device operation has overhead.
        for dim in dict.fromkeys(problem.dim for *_, problem, _ in moving):
            alike = [move for move in moving if move[2].dim == dim]
            states = ops.apply_updates_together([problem.state for *_, problem, _ in alike], [J_RD for _, J_RD, *_ in alike],
                                                [step for *_, step in alike], [one.smoothing for one, *_ in alike])
            for (estimate, _, problem, _), state in zip(alike, states, strict=True):
                estimate.updated(problem, state)


def _in_turns(updates: Sequence[_Update]) -> Iterator[list[_Update]]:
    """Yield lists of updates of one rank, with each estimate at most once per list and in order.

    Skips updates of minibatches whose rows were all masked.
    """
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
