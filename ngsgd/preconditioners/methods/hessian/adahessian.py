"""AdaHessian (Yao et al. 2021): the diagonal of the Hessian by random signs (Hutchinson), averaged as Adam averages squares.

    D = mean over taps of z * (H z),  z random signs       equations 5 and 8
    v = mean of D^2 over steps,  P g = g / (v^(k/2) + d)   equations 7 and 10; momentum is the optimiser's business

"Taps": the positions of a convolution's kernel share one number, which makes the estimate less noisy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ngsgd.preconditioners.methods.hessian.second_derivatives import SecondOrderMethod
from ngsgd.preconditioners.options import Options
from ngsgd.preconditioners.states import State


@dataclass(frozen=True)
class AdaHessianOptions(Options):
    """Of AdaHessian."""

    hessian_power: float = 1.0   # k, above 0 to 1; 0.5 is gentler

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0.0 < self.hessian_power <= 1.0:
            found.append(f"hessian_power is {self.hessian_power}; it must be above 0 and at most 1.")
        return found


class AdaHessian(SecondOrderMethod):
    """AdaHessian; one product with the Hessian for each look at the curvature."""

    Options = AdaHessianOptions

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, **options)
        self._bias_of = {}   # nothing to join: a diagonal

    def update_curvature(self, seen: Any) -> None:
        z = self.drawn(seen, signs=True)
        for name, Hz in self.product("hessian", z, is_last=True).items():
            self._average(name, {"square": _over_taps(z[name] * Hz).square()})

    def invert(self, name: str, known: State) -> State:
        root = known["square"].pow(self.options.hessian_power / 2.0)
        return {"factor": 1.0 / (root + self.option(name, "damping"))}

    def direction(self, name: str, inverse: State, g: Tensor) -> Tensor:
        return g * inverse["factor"]


def _over_taps(D: Tensor) -> Tensor:
    """The mean over the dimensions behind outputs and inputs."""
    return D if D.ndim < 3 else D.mean(dim=tuple(range(2, D.ndim)), keepdim=True).expand_as(D)
