"""K-BFGS (Goldfarb, Ren and Bahamou 2020): K-FAC's two inverses by BFGS updates, without an inversion or a root.

    P g = H_g G H_a                                          lambda = sqrt(damping), for either factor
    H_a  of A + lambda I, A = mean of a a^T:  s = H_a mean(a),  y = A s + lambda s;   starts at the first minibatch's inverse
    H_g  of the Hessian with respect to outputs z:  s = mean(z+) - mean(z),  y = mean(e+) - mean(e) of the same minibatch before
         and after the optimiser's step, doubly damped (y <- y + lambda s);           starts at I

a: input rows, z: output rows, e: derivatives of a row's loss with respect to z; means are over rows.

Letters: O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import products
from ngsgd.ops.linalg import bfgs_inverse, damped_inverse, doubly_damped
from ngsgd.preconditioners.methods.secant import Secant
from ngsgd.preconditioners.options import FisherOptions
from ngsgd.preconditioners.signals import Rows, Signal, Watch
from ngsgd.preconditioners.states import State


@dataclass(frozen=True)
class KBFGSOptions(FisherOptions):
    """Of K-BFGS."""

    min_curvature: float = 0.2   # mu_1: s^T y is brought to at least this share of y^T H y; above 0, below 1

    def problems(self) -> list[str]:
        found = super().problems()
        if self.fisher != "empirical":
            found.append(f"fisher is {self.fisher!r}; it must be \"empirical\": the loss's own derivatives are compared.")
        if not 0.0 < self.min_curvature < 1.0:
            found.append(f"min_curvature is {self.min_curvature}; it must be above 0 and below 1.")
        return found


class KBFGS(Secant):
    """K-BFGS; a look costs one more forward and backward pass, and updates of O^2 + I^2 operations a layer."""

    Options = KBFGSOptions
    looks_at_held = True

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._first: dict[str, tuple[Tensor, Tensor]] = {}   # by weight: mean z and mean e at the first look

    def update_curvature(self, seen: Signal | Mapping[str, Tensor]) -> None:
        assert isinstance(seen, Signal)
        super().update_curvature(Signal({}, seen.squares))
        self._first = {}
        for name, rows in seen.rows.items():
            self._bias_of[name] = rows.bias
            known = self._with_inputs(name, rows)
            if not all(bool(value.isfinite().all()) for value in known.values()):
                self.num_skipped += 1
                continue
            self.statistics[name], self.weights[name] = known, 1.0
            self._first[name] = self._means(name, rows)

    def _with_inputs(self, name: str, rows: Rows) -> State:
        """The layer's statistics with A and H_a of this minibatch, too."""
        root = self.option(name, "damping") ** 0.5
        a_XI = rows.a_NTI.flatten(0, 1)
        A_II, known = products.mm(a_XI.T, a_XI) / len(a_XI), self.statistics.get(name)
        if known is None:
            H_g = torch.eye(rows.e_VNTO.shape[3]).to(a_XI)
            return {"A": A_II, "H_a": damped_inverse(A_II, root), "H_g": H_g}
        decay = self.option(name, "ema_decay")
        A_II = decay * known["A"] + (1.0 - decay) * A_II
        s_I = known["H_a"] @ a_XI.mean(dim=0)
        H_a = bfgs_inverse(known["H_a"], s_I, A_II @ s_I + root * s_I) if bool(s_I.any()) else known["H_a"]
        return {"A": A_II, "H_a": H_a, "H_g": known["H_g"]}

    def _means(self, name: str, rows: Rows) -> tuple[Tensor, Tensor]:
        parameters = dict(self.model.named_parameters())
        W_OI = parameters[name].detach().flatten(1).to(rows.a_NTI)
        mean_a_I = rows.a_NTI.mean(dim=(0, 1))
        mean_z_O = W_OI @ mean_a_I[:W_OI.shape[1]]
        if rows.bias is not None:
            mean_z_O = mean_z_O + parameters[rows.bias].detach().to(mean_z_O)
        return mean_z_O, rows.e_VNTO.sum(dim=(0, 1, 2)) / rows.num_rows

    def look_again(self, passes: list[Callable[[], Tensor]]) -> None:
        with Watch(self.model, fisher="empirical", num_draws=1, generator=None, layers=self._layers()) as watch:
            self.gradients(passes)
        with torch.no_grad():
            for name, rows in watch.signal().rows.items():
                if name in self._first:
                    self._update_outputs(name, self._first[name], self._means(name, rows))
            self.refresh()
        self._first = {}

    def _update_outputs(self, name: str, before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> None:
        (z_O, e_O), (z_after_O, e_after_O) = before, after
        H_g = self.statistics[name]["H_g"]
        s_O, y_O = z_after_O - z_O, e_after_O - e_O
        s_O, y_O = doubly_damped(s_O, y_O, H_g @ y_O, least=self.options.min_curvature, damping=self.option(name, "damping") ** 0.5)
        updated = bfgs_inverse(H_g, s_O, y_O)
        if bool(s_O @ y_O > 0.0) and bool(updated.isfinite().all()):
            self.statistics[name]["H_g"] = updated
        else:
            self.num_skipped += 1

    def invert(self, name: str, known: State) -> State:
        return {"H_a": known["H_a"], "H_g": known["H_g"]}

    def factors(self, inverse: State) -> tuple[Tensor, Tensor] | None:
        return (inverse["H_g"], inverse["H_a"]) if "H_g" in inverse else None
