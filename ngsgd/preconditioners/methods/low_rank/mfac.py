"""M-FAC (Frantar et al. 2021): the Fisher matrix of the last m gradients, F = 1/m sum_i g_i g_i^T, of the whole model.

    (F + d I)^-1 g = (1/d) [g - U^T (m d I + U U^T)^-1 U g]     U: m past gradients as rows

Letters: M gradients kept, P elements of a parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import damped_solve
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.options import Options, history_problems
from ngsgd.preconditioners.states import State


@dataclass(frozen=True)
class MFACOptions(Options):
    """Of M-FAC."""

    num_gradients: int = 32    # m; memory is that many models
    ema_decay: float = 0.0     # the last m gradients count alike

    def problems(self) -> list[str]:
        return [*super().problems(), *history_problems(self, "num_gradients", "gradients of the whole model count alike")]


class MFAC(Preconditioner):
    """M-FAC by the Gram matrix of the gradients kept, the present one among them."""

    Options = MFACOptions
    has_mean = False
    agrees_over_ranks = True
    joins_bias = False   # the whole model is one block

    def update_curvature(self, seen: Any) -> None:
        if not isinstance(seen, Mapping):
            raise ConfigError("MFAC looks at gradients, not at rows; give update_curvature the gradients by name.")
        if not all(bool(g.isfinite().all()) for g in seen.values()):
            self.num_skipped += 1
            return
        for name, g in seen.items():
            old = self.statistics.get(name, {}).get("gradients")
            rows = g.flatten()[None].clone() if old is None else torch.cat([old, g.flatten()[None]])
            self.statistics[name] = {"gradients": rows[-self.options.num_gradients:]}
            self.weights[name] = 1.0

    def refresh(self) -> None:
        if not self.statistics:
            return
        # in the order of names: that of a dict is not the same after a restart
        ordered = [known["gradients"] for _, known in sorted(self.statistics.items())]
        total_MM = torch.stack([U_MP @ U_MP.T for U_MP in ordered]).sum(dim=0)
        for name, known in self.statistics.items():
            self.inverses[name] = {"gradients": known["gradients"]}
        self.inverses[min(self.statistics)]["gram"] = total_MM

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        known = {name: inverse["gradients"] for name, inverse in sorted(self.inverses.items()) if name in grads}
        if not known:
            return dict(grads)
        gram_MM = next(inverse["gram"] for inverse in self.inverses.values() if "gram" in inverse)
        damping = self.options.damping
        Ug_M = torch.stack([U_MP @ grads[name].flatten() for name, U_MP in known.items()]).sum(dim=0)
        b_M = damped_solve(gram_MM, damping * len(gram_MM), Ug_M[:, None])[:, 0]
        return {**grads, **{name: ((grads[name].flatten() - U_MP.T @ b_M) / damping).view_as(grads[name])
                            for name, U_MP in known.items()}}

    def invert(self, name: str, known: State) -> State:
        return known
