"""Updates of Fisher estimates: at once on the host, gathered on a GPU so that it waits for the host once for all of them."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.ops.natural_gradient import Moments

Number = Tensor | float


class Estimate(Protocol):
    """Something whose update needs numbers on the host."""

    def move(self, J_RD: Tensor, moments: Moments) -> None:
        """Takes the step, given the products of the minibatch."""


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

    def add(self, estimate: Estimate, J_RD: Tensor, KL_2RR: Tensor, numbers: tuple[Number, Number, Number]) -> None:
        """`numbers`: tr X X^T, the number of rows and the scale that they carry."""
        if J_RD.is_cpu if self.deferred is None else not self.deferred:
            estimate.move(J_RD, _moments(KL_2RR.cpu().numpy(), [float(number) for number in numbers]))
            return
        rest = KL_2RR.new_empty(3)
        for index, number in enumerate(numbers):
            rest[index] = number
        self._waiting.append((estimate, J_RD, torch.cat([KL_2RR.view(-1), rest])))
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
        all_packed = numbers.numpy()
        start = 0
        for estimate, J_RD, packed in waiting:
            end = start + len(packed)
            estimate.move(J_RD, _moments(all_packed[start:end - 3].reshape(2, len(J_RD), len(J_RD)),
                                         all_packed[end - 3:end].tolist()))
            start = end


def _moments(KL_2RR: npt.NDArray[Any], numbers: list[float]) -> Moments:
    K_RR, L_RR = KL_2RR.astype(np.float64)
    return Moments(K_RR, L_RR, *numbers)


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
