"""Kaldi's two natural gradients (arXiv 1410.7455) in the place of a preconditioner: rows are preconditioned, then multiplied.

    P g = gamma sum_x ehat_x ahat_x^T    of input rows a and derivative rows e, each side by itself, with the norm that it had

    simple   each row by the inverse Fisher matrix of the other rows of the minibatch (Appendix A); nothing is kept
    online   by a low-rank estimate that goes on from minibatch to minibatch (section 3)

`ngsgd.NGSGD` does the same inside of the backward pass, quicker, with Kaldi's treatment of every kind of layer; these stand
beside the other methods, for comparisons and loops of other optimisers.

Letters: X rows (samples, positions), O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops.simple_natural_gradient import precondition_simple
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.fisher_recorder import Rows
from ngsgd.preconditioners.online import OnlineNaturalGradient
from ngsgd.preconditioners.options import EveryStepOptions, FisherOptions
from ngsgd.preconditioners.states import State

_SIDES = ("input", "output")


@dataclass(frozen=True)
class SimpleOptions(EveryStepOptions, FisherOptions):
    """Of the simple method."""

    ema_decay: float = 0.0
    # smoothing towards the identity, in units of the mean eigenvalue; Kaldi uses 4
    alpha: float = 4.0

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.alpha > 0.0:
            found.append(f"alpha is {self.alpha}; it must be above 0.")
        if self.fisher != "empirical":
            found.append(f"fisher is {self.fisher!r}; it must be \"empirical\": the loss's own derivatives make the gradient.")
        if self.ema_decay or self.layer_options:
            found.append("ema_decay and layer_options have no meaning here; leave them out.")
        return found


class SimpleNG(Preconditioner):
    """The simple method; damping has no meaning for affine layers, alpha has.  Other layers get the diagonal of one minibatch."""

    Options = SimpleOptions
    has_mean = False

    def measure(self, name: str, rows: Rows) -> State:
        """The direction, for a gradient of norm 1: it belongs to this minibatch alone."""
        a_XI, e_XO = rows.a_NTI.flatten(0, 1), rows.e_VNTO.flatten(0, 2)
        plain = (e_XO.T @ a_XI).norm()
        made = self.preconditioned(name, "output", e_XO).T @ self.preconditioned(name, "input", a_XI)
        return {"direction": made / plain.clamp(min=torch.finfo(plain.dtype).tiny)}

    def preconditioned(self, name: str, side: str, rows_XD: Tensor) -> Tensor:
        """The rows of one side of a layer, with the norm that they had."""
        if not bool(rows_XD.isfinite().all()):
            # the statistics that follow are not finite, and counted
            return rows_XD
        return precondition_simple(rows_XD, self.options.alpha)

    def invert(self, name: str, known: State) -> State:
        return known

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        direction_OI: Tensor = inverse["direction"] * g_OI.norm()
        return direction_OI


@dataclass(frozen=True)
class OnlineOptions(SimpleOptions):
    """Of the online method; see `ngsgd.NGSGD`."""

    # of the estimate for input rows
    rank_in: int = 20
    rank_out: int = 80                   # for derivative rows
    # minibatches between updates of the estimates
    update_period: int = 4
    # rows after which the past counts 1/e
    num_samples_history: float = 2000.0


class OnlineNG(SimpleNG):
    """The online method."""

    Options = OnlineOptions

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # by weight and side
        self._estimates: dict[tuple[str, str], OnlineNaturalGradient] = {}

    def preconditioned(self, name: str, side: str, rows_XD: Tensor) -> Tensor:
        """The rows of one side of a layer, with the norm that they had."""
        if not bool(rows_XD.isfinite().all()):
            return rows_XD
        if (name, side) not in self._estimates:
            self._estimates[name, side] = self._estimate(side)
        hat_XD, scale = self._estimates[name, side].precondition(rows_XD)
        scaled_XD: Tensor = hat_XD * scale
        return scaled_XD

    def _estimate(self, side: str) -> OnlineNaturalGradient:
        own = self.options
        return OnlineNaturalGradient(own.rank_in if side == "input" else own.rank_out, own.update_period, own.num_samples_history,
                                     alpha=own.alpha, relative_floor=True)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """All that the next steps depend on, by parameter; "" holds the counters."""
        state = super().state_dict()
        for (name, side), estimate in self._estimates.items():
            state.setdefault(name, {}).update({f"{side}.{key}": value for key, value in estimate.state_dict().items()})
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues where the state was taken, bit for bit; CheckpointError if it belongs to another model."""
        sides = [f"{side}." for side in _SIDES]
        super().load_state_dict({name: {key: value for key, value in entry.items() if not key.startswith(tuple(sides))}
                                 for name, entry in state.items()})
        self._estimates = {}
        for name, entry in state.items():
            for side in _SIDES:
                own = {key.partition(".")[2]: value for key, value in entry.items() if key.startswith(f"{side}.")}
                if own:
                    self._estimates[name, side] = self._estimate(side)
                    self._estimates[name, side].load_state_dict(own)
