"""Base class of quasi-Newton methods, which evaluate a minibatch again after the optimizer step.

The second pass runs when the next minibatch is evaluated, or before the state is read. It uses the
random numbers and buffers (running statistics) of the first pass, and does not change `.grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.layers import upcast
from ngsgd.errors import ConfigError
from ngsgd.preconditioners.fisher_method import FisherMethod

_Closure = Callable[[], Tensor]


@dataclass
class _Pending:
    """The passes of the last minibatch with a curvature update."""

    step: int
    # closures, and the random states before them
    passes: list[tuple[_Closure, list[Tensor]]] = field(default_factory=list)
    # number of rows that the losses are a mean over, if given
    num_rows: int | None = None
    # parameter norms at the step
    norms: list[float] = field(default_factory=list)


class TwoPassMethod(FisherMethod):
    """Methods that compare two passes of a minibatch.

    `second_evaluation` processes the second one.

    Needs `evaluate(closure)`; the closure is called twice.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._pending: _Pending | None = None

    def __getstate__(self) -> dict[str, Any]:
        # as for `state_dict`
        self.run_second_pass()
        return {**super().__getstate__(), "_pending": None}

    def evaluate(self, closure: _Closure, *, num_rows: int | None = None) -> Tensor:
        """Run the forward and backward pass of a minibatch; gradients are added to `.grad`.

        Returns:
            The loss.
        """
        self.run_second_pass()
        if self._pending is not None and self._pending.step != self.num_steps:
            # The optimizer skipped the step.
            self._pending = None
        if self.is_due("curvature"):
            self._pending = self._pending or _Pending(self.num_steps)
            self._pending.passes.append((closure, _random_states(self.generator.device)))
            if num_rows is not None:
                self._pending.num_rows = (self._pending.num_rows or 0) + num_rows
        return super().evaluate(closure, num_rows=num_rows)

    def step(self, lr: float | None = None) -> None:
        """Replace `.grad` of every parameter by the preconditioned gradient.

        Args:
            lr: learning rate of the optimizer; only kl_clip needs it.
        """
        if self._pending is None and self.is_due("curvature"):
            raise ConfigError(f"{type(self).__name__} evaluates a minibatch twice and needs a "
                              "closure; compute the loss with preconditioner.evaluate(closure).")
        super().step(lr)
        if self._pending is not None:
            self._pending.norms = self._norms()

    def run_second_pass(self) -> None:
        """Run the second pass if one is due: after the optimizer has changed the parameters."""
        before = self.seen_parameters
        if self.follow(dict(self.model.named_parameters())):
            self.renew()
        if self.seen_parameters is not before:
            # The closure of the first pass is of the model as it was.
            self._pending = None
        pending = self._pending
        if pending is None or pending.step == self.num_steps or self._norms() == pending.norms:
            return
        self._pending = None
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            with torch.random.fork_rng(devices=[self.generator.device] if self.generator.device.type == "cuda" else []):
                passes = [_replayed(closure, states, self.generator.device)
                          for closure, states in pending.passes]
                self.second_evaluation(passes, pending.num_rows)
        finally:
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])

    def second_evaluation(self, passes: list[_Closure], num_rows: int | None) -> None:
        """Update with the same minibatch and the parameters after the step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the complete state; runs the second pass, so call it after the optimizer step."""
        self.run_second_pass()
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load a state; training continues bitwise identically.

        Raises:
            OptimizerStateError: the state is of another method or model, or incomplete.
        """
        super().load_state_dict(state)
        self._pending = None

    def forget(self, name: str) -> None:
        super().forget(name)
        # The model has changed since the first pass.
        self._pending = None

    def gradients(self, passes: list[_Closure], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return the sum of the gradients of the passes by parameter name.

        `.grad` does not change.
        """
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad and (names is None or name in names)}
        total = {name: torch.zeros_like(upcast(p)) for name, p in parameters.items()}
        for closure in passes:
            with torch.enable_grad():
                found = torch.autograd.grad(closure(), list(parameters.values()), allow_unused=True)
            for name, g in zip(parameters, found, strict=True):
                if g is not None:
                    total[name] += g
        return total

    def _norms(self) -> list[float]:
        # Compare values to detect the step, because fused optimizers do not raise version counters.
        parameters = [p.detach() for p in self.model.parameters()]
        found: list[float] = torch.stack(torch._foreach_norm(parameters, 2, torch.float64)).tolist()
        return found


def _random_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _replayed(closure: _Closure, states: list[Tensor], device: torch.device) -> _Closure:
    def replay() -> Tensor:
        torch.set_rng_state(states[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states[1], device)
        return closure()

    return replay
