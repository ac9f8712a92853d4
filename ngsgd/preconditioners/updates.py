"""Updates of Fisher estimates: at once on the host, gathered on a GPU so that it waits for the host once for all of them."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Estimate(Protocol):
    """Something whose update needs numbers on the host."""

    def move(self, J_RD: Tensor, packed: Any) -> None:
        """Takes the step, given the products of the minibatch and its moments as a NumPy array."""


class UpdateQueue:
    """Updates that wait for their numbers to reach the host.

    The estimates of one optimiser share a queue.  On a GPU an update stays in it until some estimate is needed again, which
    is in the next backward pass: `start_transfer` sends all numbers to the host on a stream of their own, beside the
    parameter step and the next forward pass, and `settle` waits for that one transfer.  The numbers are those of an
    immediate update.
    """

    def __init__(self, *, deferred: bool | None = None) -> None:
        self.deferred = deferred  # None: deferred on anything but a CPU
        self._waiting: list[tuple[Estimate, Tensor, Tensor]] = []
        self._transfer: tuple[Tensor, Any] | None = None

    def add(self, estimate: Estimate, J_RD: Tensor, packed: Tensor) -> None:
        if J_RD.is_cpu if self.deferred is None else not self.deferred:
            estimate.move(J_RD, packed.numpy().astype("float64"))
            return
        self._waiting.append((estimate, J_RD, packed))
        self._transfer = None

    def start_transfer(self) -> None:
        """Sends what the waiting updates need to the host; returns at once."""
        if self._waiting and self._transfer is None:
            self._transfer = _to_host(torch.cat([packed for _, _, packed in self._waiting]))

    def settle(self) -> None:
        """Carries the waiting updates out, in the order in which they came."""
        if not self._waiting:
            return
        self.start_transfer()
        assert self._transfer is not None
        numbers, done = self._transfer
        if done is not None:
            done.synchronize()
        waiting, self._waiting, self._transfer = self._waiting, [], None
        all_packed = numbers.numpy().astype("float64")
        start = 0
        for estimate, J_RD, packed in waiting:
            estimate.move(J_RD, all_packed[start:start + len(packed)])
            start += len(packed)


def _to_host(numbers: Tensor) -> tuple[Tensor, Any]:
    """(a tensor on the host, the event after which it is filled; None if it is already)."""
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
