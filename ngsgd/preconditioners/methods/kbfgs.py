"""K-BFGS: BFGS updates of the two inverses of K-FAC, without matrix inversions or roots.

    P g = H_g G H_a                                  lambda = sqrt(damping), for either factor
    H_a  of A + lambda I, A = mean of a a^T:         s = H_a mean(a),  y = A s + lambda s
    H_g  of the Hessian with respect to outputs z:   s = mean(z+) - mean(z),  y = mean(e+) - mean(e)

H_a starts at the inverse of the first minibatch, H_g at I. The plus sign marks the same minibatch
after the optimizer step, of which a second pass runs when the next one is evaluated; its pair is
doubly damped (y <- y + lambda s). Source: Goldfarb, Ren and Bahamou 2020.

a: input rows, z: output rows, e: derivatives of the loss of a row with respect to z. Letters: O
outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.fisher_rows import FisherRecorder, FisherSample, Rows
from ngsgd.curvature.forms.kronecker import add_gram
from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import bfgs_inverse, damped_inverse, doubly_damped
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.states import Layout, State

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


class KBFGS(FisherMethod, kind="kbfgs"):
    """K-BFGS; a curvature update costs another forward and backward pass and O^2 + I^2 operations
    per layer.

    Args:
        min_curvature: mu_1, in (0, 1): s^T y is raised to at least this fraction of y^T H y.
            Default 0.2.
        options: see `Preconditioner`; `evaluate` must be used, and its closure is called twice.
    """

    min_curvature: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        # by weight: mean z and mean e of the first pass
        self._first: dict[str, tuple[Tensor, Tensor]] = {}
        self._pending: _Pending | None = None

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        O, I, _ = self.blocks.sides(name)  # noqa: E741
        return {"statistics.A": (I, I), "statistics.H_a": (I, I), "statistics.H_g": (O, O), "inverse.H_a": (I, I),
                "inverse.H_g": (O, O)}

    def __getstate__(self) -> dict[str, Any]:
        # as for `state_dict`
        self.run_second_pass()
        return {**super().__getstate__(), "_first": {}, "_pending": None}

    def evaluate(self, closure: _Closure, *, num_rows: int | None = None) -> Tensor:
        self.run_second_pass()
        if self._pending is not None and self._pending.step != self.num_steps:
            # The optimizer skipped the step.
            self._pending = None
        if self.is_due("curvature"):
            device = self.generator.device
            states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
            self._pending = self._pending or _Pending(self.num_steps)
            self._pending.passes.append((closure, states))
            if num_rows is not None:
                self._pending.num_rows = (self._pending.num_rows or 0) + num_rows
        return super().evaluate(closure, num_rows=num_rows)

    def step(self, lr: float | None = None) -> None:
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
        # Without it the first pass was not finite, so there is nothing to compare with.
        if not self._first:
            return
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        try:
            with torch.random.fork_rng(devices=[self.generator.device] if self.generator.device.type == "cuda" else []):
                self._evaluate_again(pending)
        finally:
            with torch.no_grad():
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(buffers[name])

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the complete state; runs the second pass, so call it after the optimizer step."""
        self.run_second_pass()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        super().load_state_dict(state)
        self._pending = None

    def forget(self, name: str) -> None:
        super().forget(name)
        # The model has changed since the first pass.
        self._pending = None

    def _norms(self) -> list[float]:
        # Compare values to detect the step, because fused optimizers do not raise version counters.
        parameters = [p.detach() for p in self.model.parameters()]
        found: list[float] = torch.stack(torch._foreach_norm(parameters, 2, torch.float64)).tolist()
        return found

    def update_curvature(self, seen: FisherSample) -> None:
        super().update_curvature(FisherSample({}, seen.squares))
        self._first = {}
        for name, rows in seen.rows.items():
            self.blocks.bias_of[name] = rows.bias
            # This bounds all products.
            if not all(bool(x.square().sum().isfinite()) for x in (rows.a_NTI, rows.e_VNTO)):
                self.note_skipped()
                continue
            if not self.is_due("inverse"):
                # The inverses to apply share matrices with the statistics, which change now.
                known = self.statistics.get(name, {})
                self.inverses[name] = {key: value.clone() if value is known.get(key) else value
                                       for key, value in self.inverses.get(name, {}).items()}
            self.statistics.put(name, self._with_inputs(name, rows))
            self._first[name] = self._means(name, rows)

    def _with_inputs(self, name: str, rows: Rows) -> State:
        """Update A and H_a of the layer with this minibatch, in place."""
        root = self.option(name, "damping") ** 0.5
        a_XI, known = rows.a_NTI.flatten(0, 1), self.statistics.get(name)
        if known is None:
            num_inputs, num_outputs = a_XI.shape[1], rows.e_VNTO.shape[3]
            A_II, H_g = a_XI.new_empty(num_inputs, num_inputs), a_XI.new_zeros(num_outputs, num_outputs)
            H_g.diagonal().fill_(1.0)
            add_gram(a_XI, A_II, keep=0.0, scale=1.0 / len(a_XI))
            return {"A": A_II, "H_a": damped_inverse(A_II, root), "H_g": H_g}
        decay = self.option(name, "ema_decay")
        add_gram(a_XI, known["A"], keep=decay, scale=(1.0 - decay) / len(a_XI))
        s_I = known["H_a"] @ a_XI.mean(dim=0)
        if bool(s_I.any()):
            bfgs_inverse(known["H_a"], s_I, known["A"] @ s_I + root * s_I)
        return known

    def _means(self, name: str, rows: Rows) -> tuple[Tensor, Tensor]:
        parameters = dict(self.model.named_parameters())
        W_OI = self.blocks.oriented(name, parameters[name].detach()).flatten(1).to(rows.a_NTI)
        mean_a_I = rows.a_NTI.mean(dim=(0, 1))
        mean_z_O = W_OI @ mean_a_I[:W_OI.shape[1]]
        if rows.bias is not None:
            mean_z_O = mean_z_O + parameters[rows.bias].detach().to(mean_z_O)
        return mean_z_O, rows.e_VNTO.sum(dim=(0, 1, 2)) / rows.num_rows

    def _evaluate_again(self, pending: _Pending) -> None:
        """Run the passes with the parameters after the step, and update H_g."""
        recorder = FisherRecorder(self.model, fisher="empirical", num_draws=1, generator=None, skipped=self.skipped)
        recorder.give_rows(pending.num_rows)
        # Differentiating with respect to biases yields output derivatives without weight gradients.
        names = {self.blocks.bias_of[name] or name for name in self._first}
        parameters = [p for name, p in self.parameters.items() if p.requires_grad and name in names]
        with recorder:
            for closure, states in pending.passes:
                torch.set_rng_state(states[0])
                for state in states[1:]:
                    torch.cuda.set_rng_state(state, self.generator.device)
                with torch.enable_grad():
                    torch.autograd.grad(closure(), parameters, allow_unused=True)
        with torch.no_grad():
            for name, rows in recorder.signal().rows.items():
                if name not in self._first:
                    continue
                (z_O, e_O), (z_after_O, e_after_O) = self._first[name], self._means(name, rows)
                H_g, change_O = self.statistics[name]["H_g"], e_after_O - e_O
                s_O, y_O = doubly_damped(z_after_O - z_O, change_O, H_g @ change_O, least=self.min_curvature,
                                         damping=self.option(name, "damping") ** 0.5)
                # Without a path to the loss there is no pair of this step.
                if not bfgs_inverse(H_g, s_O, y_O) and bool(change_O.any()):
                    self.note_skipped()
            self.refresh()
        recorder.forget()
        self._first = {}

    def invert(self, name: str, known: State) -> State:
        return {"H_a": known["H_a"], "H_g": known["H_g"]}

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        return (inverse["H_g"], inverse["H_a"]) if "H_g" in inverse else None
