"""Data that each engine stores in the forward pass and uses in the reverse pass.

Letters: P parameters, t step.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

from torch import Tensor

from ngsgd.hypergrad.adjoint import Velocity
from ngsgd.hypergrad.exact_momentum import ExactMomentum
from ngsgd.hypergrad.step_limits import Shortened


class Carrier(Protocol):
    """State that is carried between steps; see `ngsgd.hypergrad.job_replay.Gradients`."""

    def snapshot(self) -> Any: ...

    def restore(self, snapshot: Any) -> None: ...


class ReplayableSegment(Protocol):
    """Interface of the job whose steps are stored; see `ngsgd.hypergrad.job_replay.JobSegment`."""

    state: ExactMomentum
    ones_G: tuple[float, ...]

    @property
    def carrier(self) -> Carrier: ...

    def rates(self, t: int) -> list[float]: ...

    def step(self, state: ExactMomentum, t: int) -> Shortened: ...


class _Tape(Protocol):
    """Data of a reversed step, by engine.

    Read in this order: new_velocity, old_weights, old_velocity.
    """

    bytes: int

    def __init__(self, num_steps: int) -> None: ...

    def before(self, segment: ReplayableSegment, state: ExactMomentum, t: int) -> None: ...

    def after(self, state: ExactMomentum) -> None: ...

    def begin(self, segment: ReplayableSegment) -> None: ...

    def new_velocity(self, segment: ReplayableSegment, t: int) -> Velocity: ...

    def old_weights(self, segment: ReplayableSegment, t: int) -> Tensor: ...

    def old_velocity(self, segment: ReplayableSegment, t: int, direction_P: Tensor) -> Velocity: ...


class _Reversible:
    """Stores the final state and the dropped bits only."""

    def __init__(self, num_steps: int) -> None:
        self.bytes = 0

    def before(self, segment: ReplayableSegment, state: ExactMomentum, t: int) -> None:
        pass

    def after(self, state: ExactMomentum) -> None:
        pass

    def begin(self, segment: ReplayableSegment) -> None:
        segment.state.verify()

    def new_velocity(self, segment: ReplayableSegment, t: int) -> Velocity:
        return Velocity(segment.state.u_P, segment.state.scale_G)

    def old_weights(self, segment: ReplayableSegment, t: int) -> Tensor:
        segment.state.undo_x(segment.rates(t))
        return segment.state.weights()

    def old_velocity(self, segment: ReplayableSegment, t: int, direction_P: Tensor) -> Velocity:
        segment.state.undo_v(direction_P)
        return Velocity(segment.state.u_P, segment.state.scale_G)


class _Store:
    """Weights before each step and velocity after it."""

    def __init__(self, num_steps: int) -> None:
        self._weights: list[Tensor] = []
        self._velocities: list[Tensor] = []
        self._carried: list[Any] = []
        self.bytes = 0

    def before(self, segment: ReplayableSegment, state: ExactMomentum, t: int) -> None:
        self._weights.append(state.weights().clone())
        self._carried.append(segment.carrier.snapshot())
        if not self._velocities:
            self._velocities.append(state.velocity().to(state.dtype))
        self.bytes += 2 * self._weights[-1].numel() * self._weights[-1].element_size()

    def after(self, state: ExactMomentum) -> None:
        self._velocities.append(state.velocity().to(state.dtype))

    def begin(self, segment: ReplayableSegment) -> None:
        pass

    def new_velocity(self, segment: ReplayableSegment, t: int) -> Velocity:
        return Velocity(self._velocities.pop(), segment.ones_G)

    def old_weights(self, segment: ReplayableSegment, t: int) -> Tensor:
        segment.carrier.restore(self._carried.pop())
        return self._weights.pop()

    def old_velocity(self, segment: ReplayableSegment, t: int, direction_P: Tensor) -> Velocity:
        return Velocity(self._velocities[-1], segment.ones_G)


class _Checkpoint:
    """The state at regular intervals.

    The steps between are repeated and stored during the reverse pass.
    """

    def __init__(self, num_steps: int) -> None:
        self._period = max(1, math.isqrt(num_steps))
        self._num_steps = num_steps
        self._states: list[tuple[int, ExactMomentum, Any]] = []
        self._block = _Store(0)
        self.bytes = 0

    def before(self, segment: ReplayableSegment, state: ExactMomentum, t: int) -> None:
        if t % self._period == 0:
            self._states.append((t, state.copy(), segment.carrier.snapshot()))
            self.bytes += 16 * len(state.x_P)

    def after(self, state: ExactMomentum) -> None:
        pass

    def begin(self, segment: ReplayableSegment) -> None:
        self._replay(segment, self._num_steps)

    def _replay(self, segment: ReplayableSegment, stop: int) -> None:
        first, state, carried = self._states.pop()
        segment.carrier.restore(carried)
        self._block = _Store(0)
        for t in range(first, stop):
            self._block.before(segment, state, t)
            segment.step(state, t)
            self._block.after(state)

    def new_velocity(self, segment: ReplayableSegment, t: int) -> Velocity:
        if not self._block._weights:
            self._replay(segment, t + 1)
        return self._block.new_velocity(segment, t)

    def old_weights(self, segment: ReplayableSegment, t: int) -> Tensor:
        return self._block.old_weights(segment, t)

    def old_velocity(self, segment: ReplayableSegment, t: int, direction_P: Tensor) -> Velocity:
        return self._block.old_velocity(segment, t, direction_P)


class _Nothing(_Reversible):
    """For a forward pass only."""


TAPES: dict[str, type[_Tape]] = {"reversible": _Reversible, "store": _Store, "checkpoint": _Checkpoint, "none": _Nothing}
