"""TONGA (Le Roux, Manzagol and Bengio 2007): the leading eigenvectors of each layer's moving second moment of gradients.

    C <- decay C + (1 - decay) g g^T,  cut to its `rank` largest eigenvalues after every `num_fresh` gradients
    P g = (C / w + d I)^-1 g,  w the sum of the weights (bias correction)

C = X^T X is never written down: X holds the eigenvectors times the roots of their eigenvalues, and below them the gradients since.

Letters: M rows, D parameters of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ngsgd.ops.linalg import damped_cholesky, eigh
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.options import Options
from ngsgd.preconditioners.states import State


@dataclass(frozen=True)
class TONGAOptions(Options):
    """Of TONGA."""

    rank: int = 10         # k: eigenvectors kept
    num_fresh: int = 10    # b: gradients between two decompositions; memory is k + b models

    def problems(self) -> list[str]:
        found = super().problems()
        return found + [f"{name} is {value}; it must be at least 1." for name, value
                        in (("rank", self.rank), ("num_fresh", self.num_fresh)) if value < 1]


class TONGA(Preconditioner):
    """TONGA in blocks of layers, of minibatches' mean gradients."""

    Options = TONGAOptions
    has_mean = False
    agrees_over_ranks = True

    def measure_gradient(self, name: str, g: Tensor) -> State:
        return {"X": g.flatten()[None]}

    def _average(self, name: str, new: State) -> None:
        if not bool(new["X"].isfinite().all()):
            self.num_skipped += 1
            return
        decay = self.option(name, "ema_decay")
        fresh_XD = new["X"] * (1.0 - decay) ** 0.5
        known = self.statistics.get(name)
        if known is None:
            self.statistics[name], self.weights[name] = {"X": fresh_XD.clone()}, 1.0 - decay
            return
        X_MD = torch.cat([known["X"] * decay**0.5, fresh_XD])
        if len(X_MD) >= self.options.rank + self.options.num_fresh:
            _, U_MM = eigh(X_MD @ X_MD.T)   # in rising order
            X_MD = U_MM[:, -self.options.rank:].T @ X_MD
        self.statistics[name] = {"X": X_MD}
        self.weights[name] = decay * self.weights[name] + 1.0 - decay

    def curvature(self, name: str) -> State:
        """X of the average: C / w = X^T X."""
        return {"X": self.statistics[name]["X"] / self.weights[name] ** 0.5}

    def invert(self, name: str, known: State) -> State:
        X_MD = known["X"]
        return {"X": X_MD, "root": damped_cholesky(X_MD @ X_MD.T, self.option(name, "damping"))}

    def direction(self, name: str, inverse: State, g: Tensor) -> Tensor:
        X_MD, root_MM = inverse["X"], inverse["root"]
        g_D = g.flatten()
        b_M1 = torch.cholesky_solve((X_MD @ g_D).to(root_MM.dtype)[:, None], root_MM).to(g_D.dtype)
        return ((g_D - (X_MD.T @ b_M1)[:, 0]) / self.option(name, "damping")).view_as(g)
