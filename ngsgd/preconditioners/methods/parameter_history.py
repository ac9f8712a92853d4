"""Methods that use the parameters of earlier steps, and gradients only.

    L-BFGS    s = theta+ - theta, y = g+ - g + d s of the last `rank` steps; P g by two loops
              (Liu and Nocedal 1989); y compares different minibatches, so its noise is large
    Neumann   d_t = g + (a r^2 - b / r^2) (theta - v) / r,  r = max(|theta - v|, damping)
              n_t = mu n_(t-1) - d_t,  P g = d_t - mu n_t,  mu = 1 - 1/(1 + t) in [.5, .9]
              v is the moving average of theta; n and the regularizer are 0 at resets, the distance
              of which doubles. P g is the update at learning rate 1 (Krishnan et al. 2018, alg. 2)

Letters: M pairs, D parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ngsgd.preconditioners.base import DirectMethod, Preconditioner
from ngsgd.preconditioners.blocks import flat, unflat
from ngsgd.preconditioners.states import Layout, State

# Fraction of |s| |y| below which a pair has no curvature.
_MIN_CURVATURE = 1e-10


class LBFGS(Preconditioner, kind="lbfgs"):
    """L-BFGS without line search; the gradient itself before the first pair.

    Args:
        rank: number of pairs. Default 10.
        options: see `Preconditioner`; ema_decay must be 0 (default).
    """

    ema_decay: float = 0.0
    rank: int = 10

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        pairs = ("statistics.s?", "statistics.y?", "inverse.s?", "inverse.y?")
        return {**dict.fromkeys(pairs, ("m", "d")), "statistics.last": (2, "d")}

    def update_curvature(self, seen: Any) -> None:
        theta = {name: self.value_of(name) for name in seen}
        self.cover(sorted(seen))
        now_2D, known = torch.stack([flat(theta), flat(seen)]), self.statistics.get(min(seen), {})
        if not bool(now_2D.sum().isfinite()):
            self.note_skipped()
            return
        found: State = {**known, "last": now_2D}
        if known:
            s_D, y_D = now_2D - known["last"]
            y_D = y_D + self.damping * s_D
            if bool(s_D @ y_D > _MIN_CURVATURE * s_D.norm() * y_D.norm()):
                for key, x_D in (("s", s_D), ("y", y_D)):
                    found[key] = torch.cat([known[key], x_D[None]])[-self.rank:] if key in known else x_D[None]
        self.statistics.put(min(seen), found)

    def invert(self, name: str, known: State) -> State:
        return {key: known[key].clone() for key in ("s", "y") if key in known}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        inverse = next(iter(self.inverses.values()), {})
        if not inverse:
            return dict(grads)
        self.require_covered(grads)
        q_D, weights = flat(grads), []
        pairs = [(s_D, y_D, s_D @ y_D) for s_D, y_D in zip(inverse["s"], inverse["y"], strict=True)]
        for s_D, y_D, sy in reversed(pairs):
            weights.append(s_D @ q_D / sy)
            q_D = q_D - weights[-1] * y_D
        q_D = q_D * (pairs[-1][2] / pairs[-1][1].square().sum())
        for (s_D, y_D, sy), weight in zip(pairs, reversed(weights), strict=True):
            q_D = q_D + s_D * (weight - y_D @ q_D / sy)
        return unflat(q_D, grads)


class Neumann(DirectMethod, kind="neumann"):
    """Neumann optimizer; use an optimizer without momentum, because n is one.

    Args:
        first_reset: steps before the first reset; then twice, four times, .. as many. Default 1000.
        attraction: a, of the cubic regularizer. Default 1e-7.
        repulsion: b divided by the number of parameters. Default 1e-5.
        damping: least distance of theta and v in the regularizer. Default 0.01.
        ema_decay: decay of v. Default 0.99.
        options: see `Preconditioner`; layer_options is not supported.
    """

    ema_decay: float = 0.99
    first_reset: int = 1000
    attraction: float = 1e-7
    repulsion: float = 1e-5
    unused = (("layer_options", "all layers have one regularizer"),)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return {f"statistics.{key}": self.blocks.shape(name) for key in ("n", "v")}

    def apply(self, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not grads or not bool(torch.stack([g.sum().isfinite() for g in grads.values()]).all()):
            self.note_skipped()
            return dict(grads)
        theta = {name: self.value_of(name) for name in grads}
        turn, since = divmod(self.num_steps, self.first_reset)
        # after 1, 3, 7, .. times first_reset steps
        is_reset = since == 0 and (turn + 1) & turn == 0
        mu = min(max(1.0 - 1.0 / (1.0 + self.num_steps), 0.5), 0.9)
        v = {name: torch.lerp(x, self.statistics[name]["v"], self.ema_decay) if name in self.statistics else x.clone()
             for name, x in theta.items()}
        r = max(float(torch.stack([(x - v[name]).norm() for name, x in theta.items()]).norm()), self.damping)
        scale = 0.0 if is_reset else (self.attraction * r**2 - self.repulsion * sum(map(Tensor.numel, grads.values())) / r**2) / r
        found = {}
        for name, g in grads.items():
            d = g + scale * (theta[name] - v[name])
            n = -d if is_reset or name not in self.statistics else mu * self.statistics[name]["n"] - d
            self.statistics.put(name, {"n": n, "v": v[name]})
            found[name] = d - mu * n
        return found
