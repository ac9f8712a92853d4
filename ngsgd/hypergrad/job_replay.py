"""Forward and reverse pass of one job of one outer iteration.

Algorithm 2 of arXiv 1502.03492 with update-norm limits. Letters: P parameters, G layers, t step.
dw, dv: gradients of the validation loss with respect to position and velocity, float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.errors import ReversalError
from ngsgd.hypergrad.adjoint import Adjoint, MoveAdjoint, Shortened, Velocity, shorten, with_decay
from ngsgd.hypergrad.exact_momentum import ExactMomentum
from ngsgd.hypergrad.hyperparameters import HyperparameterPlan, full
from ngsgd.hypergrad.training_task import Flat, MinibatchIndex, TrainingTask
from ngsgd.ops.tensors import twice_differentiable

ENGINES = ("reversible", "store")


class Numbers(NamedTuple):
    """Hyperparameters of one job of one outer iteration as floats: equal in both directions."""

    lr_TG: list[list[float]]
    momentum_TG: list[list[float]]
    l2_G: list[float]
    max_change_G: list[float]
    max_param_change: float
    data_weights: Tensor | None

    @classmethod
    def of(cls, plan: HyperparameterPlan, outer_iter: int) -> Numbers:
        """Return those of an outer iteration."""
        steps = slice(outer_iter * plan.steps_per_iter, (outer_iter + 1) * plan.steps_per_iter)
        weights = plan.data_weights
        return cls(plan.lr_TG[steps].tolist(), plan.momentum_TG[steps].tolist(), plan.l2_G.tolist(), plan.max_change_G.tolist(),
                   float(plan.max_param_change), None if weights is None else weights.detach())


@dataclass
class SegmentGrad:
    """Contributions of one job to the gradients, by its steps."""

    lr_TG: Tensor
    momentum_TG: Tensor
    l2_G: Tensor
    max_change_G: Tensor
    max_param_change: Tensor
    data_weights: Tensor | None

    @classmethod
    def zero(cls, num_steps: int, num_layers: int, weights: Tensor | None) -> SegmentGrad:
        """Create zeros."""
        return cls(full(0.0, num_steps, num_layers), full(0.0, num_steps, num_layers), full(0.0, num_layers),
                   full(0.0, num_layers), full(0.0), None if weights is None else full(0.0, *weights.shape))

    def add(self, t: int, move: MoveAdjoint, by_momentum_G: Sequence[float], by_l2_G: Sequence[float],
            by_weights: Tensor | None) -> None:
        """Add the contribution of step t."""
        def vector(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64)
        self.lr_TG[t], self.momentum_TG[t] = vector(move.lr_G), vector(by_momentum_G)
        self.max_change_G += vector(move.max_change_G)
        self.max_param_change += move.max_param_change
        self.l2_G += vector(by_l2_G)
        if self.data_weights is not None and by_weights is not None:
            self.data_weights -= by_weights


@dataclass
class Linearized:
    """A direction d(w, data weights), and vector-Jacobian products."""

    direction_P: Tensor
    # of the gradient of each parameter
    graphs: list[Tensor]
    leaves: list[Tensor]
    flat: Flat

    def products(self, z_P: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (z dd/dw, z dd/d data weights)."""
        num = len(self.flat.names)
        found = torch.autograd.grad(self.graphs, self.leaves, grad_outputs=self.flat.unflatten(z_P), allow_unused=True)
        whole = [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, self.leaves, strict=True)]
        return self.flat.flatten(whole[:num]), whole[num].double() if len(whole) > num else None


class PlainGradients:
    """The plain gradient as direction."""

    def __init__(self, task: TrainingTask, flat: Flat) -> None:
        # A gradient with a graph may use other kernels than one without (LSTM). In that case the
        # reverse pass computes the direction in a separate pass.
        self.task, self.flat, self.recomputes = task, flat, False

    def probe(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> None:
        """Let the reverse pass recompute directions if it does not reproduce them bitwise."""
        self.recomputes = not torch.equal(self.forward(w_P, place, data_weights),
                                          self.reverse(w_P, place, data_weights).direction_P)

    def forward(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        leaves = [part.detach().requires_grad_() for part in self.flat.unflatten(w_P)]
        found = torch.autograd.grad(self._loss(leaves, place, data_weights), leaves, allow_unused=True)
        return self.flat.flatten([torch.zeros_like(p) if one is None else one for one, p in zip(found, leaves, strict=True)])

    def reverse(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> Linearized:
        leaves = [part.detach().requires_grad_() for part in self.flat.unflatten(w_P)]
        weights = None if data_weights is None else data_weights.detach().requires_grad_()
        found = torch.autograd.grad(self._loss(leaves, place, weights), leaves, create_graph=True, allow_unused=True)
        # A parameter without effect on the gradients would have no graph; adding 0 w keeps it.
        graphs = [p * 0.0 if one is None else one for one, p in zip(found, leaves, strict=True)]
        direction_P = (self.forward(w_P, place, data_weights) if self.recomputes
                       else self.flat.flatten([graph.detach() for graph in graphs]))
        return Linearized(direction_P, graphs, leaves if weights is None else [*leaves, weights], self.flat)

    def _loss(self, leaves: Sequence[Tensor], place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        seed = place.seed(self.task.seed)
        # torch.manual_seed would also store a traceback for unused GPUs.
        torch.default_generator.manual_seed(seed)
        if leaves[0].is_cuda:
            torch.cuda.manual_seed(seed)
        # In both directions, because their gradients must be bitwise identical.
        with twice_differentiable():
            return self.task.loss(dict(zip(self.flat.names, leaves, strict=True)), place, data_weights)


class _Reversible:
    """Data of a reversed step: the final state and the dropped bits only."""

    bytes = 0

    def before(self, state: ExactMomentum) -> None:
        """Store data before a step."""

    def after(self, state: ExactMomentum) -> None:
        """Store data after a step."""

    def begin(self, segment: JobSegment) -> None:
        segment.state.verify()

    def new_velocity(self, segment: JobSegment) -> Velocity:
        return Velocity(segment.state.u_P, segment.state.scale_G)

    def old_weights(self, segment: JobSegment, t: int) -> Tensor:
        segment.state.undo_x(segment.rates(t))
        return segment.state.weights()

    def old_velocity(self, segment: JobSegment, direction_P: Tensor) -> Velocity:
        segment.state.undo_v(direction_P)
        return Velocity(segment.state.u_P, segment.state.scale_G)


class _Store(_Reversible):
    """Weights before each step and velocity after it."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._velocities: list[Tensor] = []

    def before(self, state: ExactMomentum) -> None:
        self._weights.append(state.weights().clone())
        if not self._velocities:
            self._velocities.append(state.velocity().to(state.dtype))
        self.bytes += 2 * self._weights[-1].numel() * self._weights[-1].element_size()

    def after(self, state: ExactMomentum) -> None:
        self._velocities.append(state.velocity().to(state.dtype))

    def begin(self, segment: JobSegment) -> None:
        """Do nothing; nothing is reversed."""

    def new_velocity(self, segment: JobSegment) -> Velocity:
        return Velocity(self._velocities.pop(), segment.ones_G)

    def old_weights(self, segment: JobSegment, t: int) -> Tensor:
        return self._weights.pop()

    def old_velocity(self, segment: JobSegment, direction_P: Tensor) -> Velocity:
        return Velocity(self._velocities[-1], segment.ones_G)


class JobSegment:
    """Run the steps of a job and reverse them: in integers ("reversible"), from stored weights and
    velocities ("store"), or not ("none").
    """

    def __init__(self, gradients: PlainGradients, flat: Flat, numbers: Numbers, place: MinibatchIndex,
                 engine: str, kernels: str = "auto") -> None:
        self.gradients, self.flat, self.numbers, self.place, self.engine = gradients, flat, numbers, place, engine
        self._kernels = kernels
        self.done: list[Shortened] = []
        self.ones_G = (1.0,) * len(flat.groups)

    @property
    def num_steps(self) -> int:
        r"""Number of steps of the job."""
        return len(self.numbers.lr_TG)

    def rates(self, t: int) -> list[float]:
        """Return the factor of the velocity in step t after limits, G."""
        return self.done[t].rates(self.numbers.lr_TG[t])

    def forward(self, start_P: Tensor, dtype: torch.dtype) -> Tensor:
        """Run from the given weights (float64) to the final weights."""
        self.state = ExactMomentum(start_P.to(torch.float64), self.flat.groups, dtype=dtype, names=self.flat.layer_names,
                                   keeps=self.engine == "reversible", engine=self._kernels)
        self._tape = _Store() if self.engine == "store" else _Reversible()
        self._num_threads = torch.get_num_threads()
        for t in range(self.num_steps):
            self._tape.before(self.state)
            self.done.append(self.step(self.state, t))
            self._tape.after(self.state)
        return self.state.position()

    def step(self, state: ExactMomentum, t: int) -> Shortened:
        """Take a step forward; bitwise reproducible from the same state."""
        numbers, w_P = self.numbers, state.weights()
        direction_P = self.gradients.forward(w_P, self.place._replace(step=t), numbers.data_weights)
        state.step_v(with_decay(direction_P, w_P, numbers.l2_G, self.flat.groups), numbers.momentum_TG[t])
        limited = numbers.max_param_change > 0.0 or any(limit > 0.0 for limit in numbers.max_change_G)
        norms_G = state.velocity_norms() if limited else [0.0] * len(numbers.l2_G)
        shortened = shorten(norms_G, numbers.lr_TG[t], numbers.max_change_G, numbers.max_param_change)
        state.step_x(shortened.rates(numbers.lr_TG[t]))
        return shortened

    def reverse(self, dw_P: Tensor) -> tuple[Tensor, SegmentGrad]:
        """Backpropagate from the final to the initial weights; also return the contributions."""
        grad = SegmentGrad.zero(self.num_steps, len(self.flat.groups), self.numbers.data_weights)
        adjoint = Adjoint(dw_P, self.flat.groups, self.state.dtype)
        numbers, tape = self.numbers, self._tape
        try:
            tape.begin(self)
            for t in reversed(range(self.num_steps)):
                move = adjoint.over_move(tape.new_velocity(self), numbers.lr_TG[t], self.done[t])
                w_P = tape.old_weights(self, t)
                linearized = self.gradients.reverse(w_P, self.place._replace(step=t), numbers.data_weights)
                direction_P = with_decay(linearized.direction_P, w_P, numbers.l2_G, self.flat.groups)
                by_momentum_G = adjoint.over_decay(tape.old_velocity(self, direction_P), direction_P, numbers.momentum_TG[t])
                by_w_P, by_weights = linearized.products(adjoint.z_P)
                by_l2_G = adjoint.over_gradient(by_w_P, w_P, numbers.l2_G)
                grad.add(t, move, by_momentum_G, by_l2_G, by_weights)
        except ReversalError as error:
            # Also name the place, and known causes.
            now = torch.get_num_threads()
            threads = f" (threads then: {self._num_threads}, now: {now})" if now != self._num_threads else ""
            where = f"job {self.place.job} of outer iteration {self.place.outer_iter}"
            raise ReversalError(error.step, f"in {where} {error.why}{threads}") from error
        return adjoint.dw_P, grad

    @property
    def state_bytes(self) -> int:
        """Size of the data for the reverse pass in bytes."""
        return self._tape.bytes + (16 * self.flat.size + self.state.spill_bytes if self.engine == "reversible" else 0)
