"""Stochastic L-BFGS: the inverse Hessian of the whole model from the last pairs (s, y) of steps and changes of the gradient.

    s = theta+ - theta,   y = g(theta+) - g(theta) of the same minibatch (Schraudolph, Yu and Guenter 2007)
    (s, y) are damped as K-BFGS damps them, then P g by the two loops of Nocedal (1980)

Letters: M pairs, D parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.layers import upcast
from ngsgd.curvature.second_order.full_model import LossWeight
from ngsgd.ops.linalg import doubly_damped, lbfgs_product
from ngsgd.preconditioners.methods.hessian.two_pass import TwoPassMethod
from ngsgd.preconditioners.options import Options, history_problems
from ngsgd.preconditioners.states import State

_LEAST = 0.2    # of y^T H y that s^T y is brought to


@dataclass(frozen=True)
class LBFGSOptions(Options):
    """Of L-BFGS."""

    num_pairs: int = 10        # M; memory is twice that many models
    ema_decay: float = 0.0     # the last M pairs make the matrix

    def problems(self) -> list[str]:
        found = [*super().problems(), *history_problems(self, "num_pairs", "pairs of the whole model make one matrix")]
        if self.inverse_interval != 1:
            found.append("inverse_interval has no meaning here: the pairs are applied as they are; leave it out.")
        return found


class LBFGS(TwoPassMethod):
    """L-BFGS; before the first pair the direction is the gradient.  A look costs one more forward and backward pass."""

    Options = LBFGSOptions
    has_mean = False
    joins_bias = False   # the whole model is one block

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self._weight = LossWeight()   # of the minibatch at hand
        self._gradients: dict[str, Tensor] = {}   # of its mean loss, before anybody unscales or clips what is in .grad
        self._before: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None   # parameters and gradients of the first look

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weight": LossWeight(), "_gradients": {}, "_before": None}

    def evaluate(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss that `closure()` returns for a minibatch; its gradient is added to `.grad`."""
        self.run_second_pass()   # not among this minibatch's losses
        with self._weight:
            loss = super().evaluate(closure)
        if self.is_due("curvature"):
            self._gradients = {name: upcast(p.grad) / self._weight.total for name,
                               p in self.model.named_parameters()
                               if p.grad is not None}
        return loss

    def update_curvature(self, seen: Any) -> None:
        theta = {name: upcast(p.detach()).clone() for name,
                 p in self.model.named_parameters() if name in seen}
        self._before = theta, {name: self._gradients[name] for name in seen}

    def step(self, lr: float | None = None) -> None:
        """Replaces `.grad` of every parameter by the preconditioned one; `lr` is needed for kl_clip alone."""
        super().step(lr)
        self._weight, self._gradients = LossWeight(), {}

    def second_evaluation(self, passes: list[Callable[[], Tensor]]) -> None:
        if self._before is None:
            return
        (theta, g), self._before = self._before, None
        with LossWeight() as weight:
            g_after = self.gradients(passes)
        after = dict(self.model.named_parameters())
        s_D = torch.cat([(upcast(after[name].detach()) - theta[name]).flatten() for name in sorted(g)])
        y_D = torch.cat([(g_after[name] / weight.total - g[name]).flatten() for name in sorted(g)])
        self._take(min(g), s_D, y_D)

    def _take(self, name: str, s_D: Tensor, y_D: Tensor) -> None:
        known = self.statistics.get(name)
        if known is not None:
            Hy_D = lbfgs_product(known["s"], known["y"], y_D)
            s_D, y_D = doubly_damped(s_D, y_D, Hy_D, least=_LEAST, damping=self.options.damping)
        else:   # no matrix yet to damp by
            y_D = y_D + self.options.damping * s_D
        if not bool(torch.isfinite(s_D @ y_D)) or not bool(s_D @ y_D > 0.0):
            self.num_skipped += 1
            return
        pairs = {"s": s_D[None], "y": y_D[None]}
        if known is not None:
            pairs = {key: torch.cat([known[key], value])[-self.options.num_pairs:] for key, value in pairs.items()}
        self.statistics[name], self.weights[name] = pairs, 1.0
        self.refresh()

    def invert(self, name: str, known: State) -> State:
        return known

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inverse = self.inverses.get(min(grads, default=""))
        if inverse is None:
            return dict(grads)
        ordered = sorted(grads.items())
        Hg_D = lbfgs_product(inverse["s"], inverse["y"], torch.cat([g.flatten() for _, g in ordered]))
        parts = Hg_D.split([g.numel() for _, g in ordered])
        return {name: part.view_as(g) for (name, g), part in zip(ordered, parts, strict=True)}
