"""Hyperparameters of a run as tensors, and the gradient of the validation loss with respect to
them.

Letters: T steps of a job over the complete run, O outer iterations, N jobs, G layers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ngsgd.arguments import checks_arguments
from ngsgd.errors import ArgumentError


def full(value: float, *shape: int) -> Tensor:
    """Return a float64 tensor with equal values."""
    return torch.full(shape, value, dtype=torch.float64)


@dataclass(frozen=True)
class HyperparameterPlan:
    """Hyperparameters of a run of N jobs that are averaged every T/O steps.

    One step of a layer: v = momentum v - (1 - momentum) (g + l2 w), w += s lr v. The factor s
    limits the update to `max_change` per layer and then to `max_param_change` over all layers (L2
    norms; 0 = none). Each job starts with velocity 0. All tensors are float64 on the CPU.

    Raises:
        ArgumentError: shapes do not match, or a number is negative or not finite.

    Example:
        >>> plan = HyperparameterPlan.constant(num_steps=5, num_layers=2, lr=0.1)
        >>> plan.lr_TG.shape
        torch.Size([5, 2])
    """

    # learning rate of a job, for the loss of the task; at least 0
    lr_TG: Tensor
    # at least 0; a zero anywhere excludes efficient reversal
    momentum_TG: Tensor
    # adds l2 / 2 |w|^2 to the loss of the task
    l2_G: Tensor
    # multiplies the initial parameters of the task
    init_scale_G: Tensor
    max_change_G: Tensor
    max_param_change: Tensor      # 0-d
    # weights of the jobs in each average; normalized to sum to one
    averaging_ON: Tensor
    # passed to the loss of the task
    data_weights: Tensor | None = None

    def __post_init__(self) -> None:
        (num_steps, num_layers), num_iters = self.lr_TG.shape, len(self.averaging_ON)
        if self.momentum_TG.shape != self.lr_TG.shape or num_steps % num_iters:
            raise ArgumentError(f"Invalid plan: momentum is {tuple(self.momentum_TG.shape)} and lr {tuple(self.lr_TG.shape)}; both "
                             f"must be steps x layers, the steps a multiple of the {num_iters} outer iterations")
        if any(len(part) != num_layers for part in (self.l2_G, self.init_scale_G, self.max_change_G)):
            raise ArgumentError(f"Invalid plan: l2, init_scale and max_change need a number for each of the {num_layers} layers")
        if wrong := [name for name, part in self.tensors().items() if not bool(part.isfinite().all())]:
            raise ArgumentError(f"Invalid plan: {', '.join(wrong)} must be finite")
        signed = ("init_scale_G", "data_weights")
        if wrong := [name for name, part in self.tensors().items() if name not in signed and bool((part < 0).any())]:
            raise ArgumentError(f"Invalid plan: {', '.join(wrong)} must be at least 0")
        if not bool((self.averaging_ON.sum(dim=1) > 0).all()):
            raise ArgumentError("Invalid plan: every average needs a job with a weight above 0")

    @classmethod
    @checks_arguments()
    def constant(cls, num_steps: int, num_layers: int, *, lr: float, momentum: float = 0.9, l2: float = 0.0,
                 max_change: float = 0.0, max_param_change: float = 0.0, num_jobs: int = 1,
                 num_outer_iters: int = 1) -> HyperparameterPlan:
        """Create a plan with equal values in every step and layer."""
        return cls(full(lr, num_steps, num_layers), full(momentum, num_steps, num_layers), full(l2, num_layers),
                   full(1.0, num_layers), full(max_change, num_layers), full(max_param_change),
                   full(1.0, num_outer_iters, num_jobs))

    @property
    def num_steps(self) -> int:
        r"""T"""
        return len(self.lr_TG)

    @property
    def num_layers(self) -> int:
        r"""G"""
        return self.lr_TG.shape[1]

    @property
    def num_outer_iters(self) -> int:
        r"""O"""
        return len(self.averaging_ON)

    @property
    def num_jobs(self) -> int:
        r"""N"""
        return self.averaging_ON.shape[1]

    @property
    def steps_per_iter(self) -> int:
        r"""T / O"""
        return self.num_steps // self.num_outer_iters

    def tensors(self) -> dict[str, Tensor]:
        """Return the hyperparameters that are not None, by name."""
        return {spec.name: value for spec in fields(self) if (value := getattr(self, spec.name)) is not None}

    def detached(self) -> HyperparameterPlan:
        r"""Return a copy without autograd graph."""
        return replace(self, **{name: value.detach() for name, value in self.tensors().items()})


@dataclass(frozen=True)
class HypergradientReport:
    """Engine and reliability of a hypergradient."""

    # store or reversible
    engine: str
    why: str                 # reason for this engine
    # |d loss / d log lr| over the first tenth of the steps relative to the last tenth
    adjoint_growth: float
    spill_bytes: int
    # size of the stored state, in bytes, with stored bits
    state_bytes: int
    seconds_forward: float
    seconds_reverse: float

    @property
    def trusted(self) -> bool:
        """False if the run is chaotic, so that its gradient does not predict nearby runs."""
        return self.adjoint_growth <= 100.0


@dataclass(frozen=True)
class HyperGrad:
    """Final validation loss of a run, and its gradients in the shapes of the plan."""

    value: float
    lr_TG: Tensor
    momentum_TG: Tensor
    l2_G: Tensor
    init_scale_G: Tensor
    max_change_G: Tensor
    max_param_change: Tensor
    averaging_ON: Tensor
    data_weights: Tensor | None
    # gradient with respect to the initial parameters of the task
    start: dict[str, Tensor]
    report: HypergradientReport

    def by(self, plan: HyperparameterPlan, inputs: Tensor) -> Tensor:
        """Return the gradient with respect to inputs of which `plan` is a function."""
        outputs = {name: value for name, value in plan.tensors().items() if value.requires_grad}
        gradients = [getattr(self, name) for name in outputs]
        return torch.autograd.grad(list(outputs.values()), inputs, grad_outputs=gradients)[0]
