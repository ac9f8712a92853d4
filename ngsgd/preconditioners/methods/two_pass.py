"""What quasi-Newton methods share: a minibatch is looked at again after the optimiser's step.

The second look is taken when the next minibatch is evaluated, or before the state is asked for, with the random numbers and buffers
(running statistics) of the first.  It leaves `.grad` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature.layers import upcast
from ngsgd.errors import ConfigError
from ngsgd.preconditioners.base import Preconditioner

_Closure = Callable[[], Tensor]


@dataclass
class _Pending:
    """The passes of the last minibatch that was looked at."""

    step: int
    # and the states of the random numbers before
    passes: list[tuple[_Closure, list[Tensor]]] = field(default_factory=list)
    # that the losses of the passes are a mean over, where the user says so
    num_rows: int | None = None
    # of the parameters, when the step was made
    norms: list[float] = field(default_factory=list)


class TwoPassMethod(Preconditioner):
    """Methods that compare two looks at a minibatch: `second_evaluation` takes the second one.

    Needs `evaluate(closure)`; the closure is called twice.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._pending: _Pending | None = None

    def __getstate__(self) -> dict[str, Any]:
        # as for `state_dict`
        self.run_second_pass()
        return {**super().__getstate__(), "_pending": None}

    def evaluate(self, closure: _Closure, *, num_rows: int | None = None) -> Tensor:
        """The loss that `closure()` returns for a minibatch; its gradient is added to `.grad`."""
        self.run_second_pass()
        if self._pending is not None and self._pending.step != self.num_steps:
            # the optimiser left the step out
            self._pending = None
        if self.is_due("curvature"):
            self._pending = self._pending or _Pending(self.num_steps)
            self._pending.passes.append((closure, _random_states(self.generator.device)))
            if num_rows is not None:
                self._pending.num_rows = (self._pending.num_rows or 0) + num_rows
        return super().evaluate(closure, num_rows=num_rows)

    def step(self, lr: float | None = None) -> None:
        """Replaces `.grad` of every parameter by the preconditioned one; `lr` is needed for kl_clip alone."""
        if self._pending is None and self.is_due("curvature"):
            raise ConfigError(f"{type(self).__name__} looks at a minibatch twice and has no closure for that; compute the loss by "
                              "preconditioner.evaluate(closure).")
        super().step(lr)
        if self._pending is not None:
            self._pending.norms = self._norms()

    def run_second_pass(self) -> None:
        """Takes the second look, if one is due: when the optimiser has moved the parameters."""
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
        """Takes in the same minibatch with the parameters after the step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """All that the next steps depend on; takes the second look first, so call it after the optimiser's step."""
        self.run_second_pass()
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Continues where the state was taken, bit for bit; CheckpointError if it belongs to another model."""
        self._pending = None
        super().load_state_dict(state)

    def gradients(self, passes: list[_Closure], names: Collection[str] | None = None) -> dict[str, Tensor]:
        """The sum of the passes' gradients by parameter name, of those named or all; `.grad` stays as it is."""
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
        # tells whether the optimiser has made its step; fused optimisers do not raise the tensors'
        # version counters
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
