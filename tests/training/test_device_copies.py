"""The way of minibatches to a GPU, with stand-ins for the streams and events of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ngsgd.training import devices
from ngsgd.training.devices import on_device
from ngsgd.training.task import Batch, map_tensors

CUDA = torch.device("cuda", 0)


class Rows(NamedTuple):
    x_ND: Tensor
    weight_N: Tensor | None
    lengths: tuple[int, ...]


def batches(count: int) -> Iterator[tuple[Batch | None, str]]:
    for number in range(count):
        rows = Rows(torch.full((2, 3), float(number)), torch.ones(2), (1, 1))
        yield Batch({"rows": rows, "name": "text"}, 2), f"left {number}"
    yield None, ""


@dataclass(eq=False)
class Stream:
    """Operations in the order in which they were queued."""

    queued: list[Any] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        self.queued.append(event)


class Event:
    """Has no `synchronize`: the host may not wait."""

    def record(self, stream: Stream) -> None:
        self.before = (stream, len(stream.queued))

    def follows(self, operation: object) -> bool:
        stream, count = self.before
        return any(one is operation for one in stream.queued[:count])


def _method(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that becomes a method of the tensor, which a bound method does not."""
    return lambda tensor: function(tensor)  # noqa: PLW0108


class Cuda:
    """The functions of torch.cuda that `devices` uses, and a record of the calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute = self.current = Stream()
        # pinned tensors, copies by tensor, and streams that were reported to the allocator
        self.pinned: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.used_on: dict[int, list[Stream]] = {}
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", self.stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(Tensor, "pin_memory", _method(self.pin))
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: any(tensor is one for one in self.pinned))
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.used_on[id(tensor)].append(stream))
        monkeypatch.setattr(devices, "data_to_device", lambda data, device: map_tensors(data, self.copy))

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def pin(self, tensor: Tensor) -> Tensor:
        self.pinned.append(tensor.clone())
        return self.pinned[-1]

    def copy(self, tensor: Tensor) -> Tensor:
        assert tensor.is_pinned(), "from other memory the host would wait"
        made = tensor.clone()
        self.current.queued.append(made)
        self.copies.append(made)
        self.used_on[id(made)] = []
        return made


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_step_waits_on_the_gpu_for_its_own_copy_and_for_no_other(cuda: Cuda) -> None:
    for number, (batch, left) in enumerate(on_device(batches(3), CUDA)):
        if batch is None:
            continue
        assert left == f"left {number}" and batch.num_examples == 2 and batch.data["name"] == "text"
        rows = batch.data["rows"]
        assert torch.equal(rows.x_ND, torch.full((2, 3), float(number))) and rows.lengths == (1, 1)
        # the host is here: what the step queues now comes behind the queued work
        waited_for = [one for one in cuda.compute.queued if isinstance(one, Event)]
        assert len(waited_for) == number + 1
        for tensor in (rows.x_ND, rows.weight_N):
            assert waited_for[-1].follows(tensor)
            # copied by another stream, so that it can run next to the step before
            assert not any(one is tensor for one in cuda.compute.queued)
            # and kept from that stream's next copies until this step is done
            assert cuda.used_on[id(tensor)] == [cuda.compute]
        cuda.compute.queued.append(f"step {number}")
    # one stream for all of them, and each tensor once
    assert len(cuda.copies) == len(cuda.pinned) == 6


def test_rows_that_are_pinned_already_are_not_copied_on_the_host(cuda: Cuda) -> None:
    x_ND = torch.ones(2, 3).pin_memory()
    list(on_device([(Batch(x_ND, 2), ())], CUDA))
    assert len(cuda.pinned) == len(cuda.copies) == 1


def test_on_a_cpu_the_tensors_are_the_same() -> None:
    for (found, left), (given, _) in zip(on_device(items := list(batches(2)), torch.device("cpu")), items, strict=True):
        assert (found is None) == (given is None)
        if found is not None and given is not None:
            assert found.data["rows"].x_ND is given.data["rows"].x_ND and left
