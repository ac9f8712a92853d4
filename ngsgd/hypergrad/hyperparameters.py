"""The hyperparameters of a run as tensors, and the derivative of the validation loss by each of them.

Letters: T steps of a job over the whole run, O outer iterations, N jobs, G layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class HyperparameterPlan:
    """A run of N jobs that are averaged every T/O steps.  All tensors float64, on the CPU.

    One step of a layer: v = momentum v - (1 - momentum) (g + l2 w), w += s lr v, where s shortens the change to `max_change` and
    then, over all layers, to `max_param_change` (L2 norms; 0 = none).  Each job starts with velocity 0.
    """

    # of a job, on the task's loss; at least 0
    lr_TG: Tensor
    # at least 0; with 0 anywhere there is no cheap way back
    momentum_TG: Tensor
    # adds l2 / 2 |w|^2 to the task's loss
    l2_G: Tensor
    # multiplies the task's starting parameters
    init_scale_G: Tensor
    max_change_G: Tensor
    max_param_change: Tensor      # 0-d
    # weights of the jobs in each average; normalised to sum to one
    averaging_ON: Tensor
    # handed to the task's loss
    data_weights: Tensor | None = None

    def __post_init__(self) -> None:
        (num_steps, num_layers), num_iters = self.lr_TG.shape, len(self.averaging_ON)
        if self.momentum_TG.shape != self.lr_TG.shape or num_steps % num_iters:
            raise ValueError(f"Invalid plan: momentum is {tuple(self.momentum_TG.shape)} and lr {tuple(self.lr_TG.shape)}; both "
                             f"must be steps x layers, the steps a multiple of the {num_iters} outer iterations")
        if any(len(part) != num_layers for part in (self.l2_G, self.init_scale_G, self.max_change_G)):
            raise ValueError(f"Invalid plan: l2, init_scale and max_change need a number for each of the {num_layers} layers")
        if wrong := [name for name, part in self.tensors().items() if not bool(part.isfinite().all())]:
            raise ValueError(f"Invalid plan: {', '.join(wrong)} must be finite")
        signed = ("init_scale_G", "data_weights")
        if wrong := [name for name, part in self.tensors().items() if name not in signed and bool((part < 0).any())]:
            raise ValueError(f"Invalid plan: {', '.join(wrong)} must be at least 0")
        if not bool((self.averaging_ON.sum(dim=1) > 0).all()):
            raise ValueError("Invalid plan: in every average some job must have a weight above 0")

    @classmethod
    def constant(cls, num_steps: int, num_layers: int, *, lr: float, momentum: float = 0.9, l2: float = 0.0,
                 max_change: float = 0.0, max_param_change: float = 0.0, num_jobs: int = 1,
                 num_outer_iters: int = 1) -> HyperparameterPlan:
        """The same numbers in every step and layer."""
        def full(value: float, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.float64)
        return cls(full(lr, num_steps, num_layers), full(momentum, num_steps, num_layers), full(l2, num_layers),
                   full(1.0, num_layers), full(max_change, num_layers), full(max_param_change),
                   full(1.0, num_outer_iters, num_jobs))

    @property
    def num_steps(self) -> int:
        return len(self.lr_TG)

    @property
    def num_layers(self) -> int:
        return self.lr_TG.shape[1]

    @property
    def num_outer_iters(self) -> int:
        return len(self.averaging_ON)

    @property
    def num_jobs(self) -> int:
        return self.averaging_ON.shape[1]

    @property
    def steps_per_iter(self) -> int:
        return self.num_steps // self.num_outer_iters

    def tensors(self) -> dict[str, Tensor]:
        """The hyperparameters that are there, by name."""
        return {spec.name: value for spec in fields(self) if (value := getattr(self, spec.name)) is not None}

    def detached(self) -> HyperparameterPlan:
        return replace(self, **{name: value.detach() for name, value in self.tensors().items()})


@dataclass(frozen=True)
class HypergradientReport:
    """How a hypergradient was come by, and whether to believe it."""

    # store, checkpoint or reversible
    engine: str
    why: str                 # this engine
    # none; exact; constant: what it owes to the weights is left out, so the gradient is approximate
    preconditioner: str
    # the derivative of what was computed, up to rounding
    exact: bool
    # every step was undone to the bits of the forward pass; true too where nothing had to be undone
    digest_ok: bool
    # |d loss / d log lr| over the first tenth of the steps to that over the last tenth
    adjoint_growth: float
    spill_bytes: int
    # all that was kept for the way back, spills included
    state_bytes: int
    seconds_forward: float
    seconds_reverse: float

    @property
    def trusted(self) -> bool:
        """False where the run amplifies any change so much (chaos) that its slope says nothing about the next point."""
        return self.adjoint_growth <= 100.0


@dataclass(frozen=True)
class HyperGrad:
    """The validation loss at the end of a run, and its derivatives, shaped like the plan's fields."""

    value: float
    lr_TG: Tensor
    momentum_TG: Tensor
    l2_G: Tensor
    init_scale_G: Tensor
    max_change_G: Tensor
    max_param_change: Tensor
    averaging_ON: Tensor
    data_weights: Tensor | None
    # by the task's starting parameters
    start: dict[str, Tensor]
    report: HypergradientReport

    def by(self, plan: HyperparameterPlan, inputs: Tensor) -> Tensor:
        """The derivative by `inputs`, of which `plan` was made by differentiable operations."""
        outputs = {name: value for name, value in plan.tensors().items() if value.requires_grad}
        gradients = [getattr(self, name) for name in outputs]
        return torch.autograd.grad(list(outputs.values()), inputs, grad_outputs=gradients)[0]
