"""What the steps of an optimizer do to the layers that AdamW does not train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from ngsgd.ops.max_change import Limits

Group = dict[str, Any]
# (groups with gradients, a tensor of the device and dtype of the result) -> factors of updates
Factors = Callable[[Sequence[Group], Tensor], Tensor]


@dataclass(slots=True)
class Minibatch:
    """The minibatch of a step."""

    # multiplies the update and the limits; backstitch
    scale: float
    # samples summed in the loss, for weight decay
    num_samples: float | None
    # number of samples if the loss is their mean
    gradient_scale: float = 1.0
    # whether the updates of other layers are finite, as a 0-d bool; None without any
    others_finite: Tensor | None = None


class Step(NamedTuple):
    """A step that was taken."""

    # indices of the param groups
    indices: list[int]
    # 1 if the minibatch was skipped, 0-d float32
    is_skipped: Tensor


class StepRecord(NamedTuple):
    """Calls of Fisher estimates and their updates, which a replay of a step does not repeat."""

    calls: list[Any]
    updates: dict[int, Any]


class Stepped(Protocol):
    """What a rule uses of its optimizer."""

    model: nn.Module
    param_groups: list[Group]
    # by parameter
    state: Any
    max_param_change: float
    step_count: int

    def count(self, limits: Limits | Tensor, indices: list[int]) -> None: ...

    def warn_once(self, subject: str, message: str) -> None: ...


class Rule:
    """Steps of the groups without AdamW; `Optimizer` calls `begin`, `step` and `end`."""

    # rules that a group may have; the first is the default
    names: tuple[str, ...] = ("sgd", "adamw")
    # further settings of a group, with their defaults
    settings: Mapping[str, Any] = {}

    def begin(self, optimizer: Stepped, minibatch: Minibatch) -> None:
        """Prepare a step, and complete the numbers of samples of the minibatch."""

    def step(self, optimizer: Stepped, minibatch: Minibatch, factors: Factors | None = None) -> Step | None:
        """Update the layers of this rule, by factors before limits; None without gradients."""
        raise NotImplementedError

    def end(self, optimizer: Stepped) -> None:
        """Complete a step."""

    def attach(self, optimizer: Stepped) -> None:
        """Follow new groups, at first all of them."""

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if a layer is no longer the one that was attached."""

    def adamw_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups that AdamW trains."""
        return [group for group in groups if group["rule"] == "adamw"]

    def has_velocity(self, group: Group, p: Tensor) -> bool:
        """Return whether a parameter has a velocity."""
        return bool(group["momentum"]) and group["rule"] != "adamw"

    def graph_key(self, optimizer: Stepped) -> Hashable | None:
        """Return what the next step depends on besides groups and data; None if it must wait."""
        return ()

    @contextlib.contextmanager
    def recording(self) -> Iterator[StepRecord]:
        """Keep what a replay of the step inside does not repeat."""
        yield StepRecord([], {})

    def replayed(self, optimizer: Stepped, record: StepRecord) -> None:
        """Count a step that a CUDA graph takes."""

    def send_updates(self, record: StepRecord) -> None:
        """Complete a step that a CUDA graph has taken."""
