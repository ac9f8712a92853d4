"""Kaldi's two natural gradients (arXiv 1410.7455) as preconditioners.

    P g = gamma sum_x ehat_x ahat_x^T    of input rows a and derivative rows e

    simple   each row times the inverse Fisher matrix of the other rows (Appendix A); stateless
    online   a low-rank estimate that is updated over minibatches (section 3)

Each side is preconditioned separately and keeps its norm. `ngsgd.NGSGD` computes the same inside
the backward pass, which is faster, with Kaldi's treatment of every kind of layer. The classes here
serve comparisons and loops with other optimizers.

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
from ngsgd.preconditioners.states import OWN, Layout, State, entries_text, packed_text, require_counters

_SIDES = ("input", "output")


@dataclass(frozen=True)
class SimpleOptions(EveryStepOptions, FisherOptions):
    """Options of the simple method."""

    ema_decay: float = 0.0
    # Smoothing towards the identity, in units of the mean eigenvalue; Kaldi uses 4.
    alpha: float = 4.0

    def problems(self) -> list[str]:
        found = super().problems()
        if not self.alpha > 0.0:
            found.append(f"alpha is {self.alpha}; it must be above 0.")
        if self.fisher != "empirical":
            found.append(f"fisher is {self.fisher!r}; it must be \"empirical\", because "
                         "derivatives of the loss itself form the gradient.")
        if self.ema_decay or self.layer_options:
            found.append("ema_decay and layer_options have no effect here; remove them.")
        return found


class SimpleNG(Preconditioner):
    """Simple natural gradient of Kaldi; stateless.

    Affine layers use alpha instead of damping. Other layers use the diagonal of one minibatch.

    Args:
        model: the module to precondition.
        alpha: smoothing towards the identity, in units of the mean eigenvalue. Default 4, as in
            Kaldi.
        options: see `Preconditioner`.

    Source: arXiv 1410.7455, Appendix A.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = SimpleNG(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    Options = SimpleOptions
    has_mean = False

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return dict.fromkeys(("statistics.direction", "inverse.direction"), self._sides(name)[:2])

    def measure(self, name: str, rows: Rows) -> State:
        """Return the direction, for a gradient of norm 1; it is valid for this minibatch only."""
        a_XI, e_XO = rows.a_NTI.flatten(0, 1), rows.e_VNTO.flatten(0, 2)
        plain = (e_XO.T @ a_XI).norm()
        made = self.preconditioned(name, "output", e_XO).T @ self.preconditioned(name, "input", a_XI)
        return {"direction": made / plain.clamp(min=torch.finfo(plain.dtype).tiny)}

    def preconditioned(self, name: str, side: str, rows_XD: Tensor) -> Tensor:
        """Precondition the rows of one side of a layer and restore their norm."""
        if not bool(rows_XD.isfinite().all()):
            # The statistics are then not finite, and the update is counted as skipped.
            return rows_XD
        return precondition_simple(rows_XD, self.options.alpha)

    def invert(self, name: str, known: State) -> State:
        return known

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        direction_OI: Tensor = inverse["direction"] * g_OI.norm()
        return direction_OI


@dataclass(frozen=True)
class OnlineOptions(SimpleOptions):
    """Options of the online method; see `ngsgd.NGSGD`."""

    # rank of the estimate for input rows
    rank_in: int = 20
    rank_out: int = 80                   # rank for derivative rows
    # minibatches between updates of the estimates
    update_period: int = 4
    # time constant of the estimates in rows
    num_samples_history: float = 2000.0


class OnlineNG(SimpleNG):
    """Online natural gradient of Kaldi, with a low-rank Fisher estimate for each side of a layer.

    Args:
        model: the module to precondition.
        rank_in, rank_out: ranks of the estimates for input and derivative rows. Default 20 and 80.
        update_period: minibatches between updates of the estimates. Default 4.
        num_samples_history: time constant of the estimates in rows. Default 2000.
        options: see `SimpleNG`.

    Source: arXiv 1410.7455, section 3.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 3)
        >>> preconditioner = OnlineNG(model)
        >>> x, y = torch.randn(8, 4), torch.randint(3, (8,))
        >>> loss = preconditioner.evaluate(lambda: torch.nn.functional.cross_entropy(model(x), y))
        >>> preconditioner.step()
    """

    Options = OnlineOptions
    other_keys = tuple(f"{side}." for side in _SIDES)

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        # by weight and side
        self._estimates: dict[tuple[str, str], OnlineNaturalGradient] = {}

    def preconditioned(self, name: str, side: str, rows_XD: Tensor) -> Tensor:
        """Precondition the rows of one side of a layer and restore their norm."""
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
        """Return the complete state by parameter; "" holds the counters."""
        state = super().state_dict()
        for (name, side), estimate in self._estimates.items():
            state.setdefault(name, {}).update({f"{side}.{key}": value for key, value in estimate.state_dict().items()})
        state[OWN]["entries"] = packed_text(entries_text(state))
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a state; training continues bitwise identically.

        Raises:
            OptimizerStateError: the state is of another method or model, or incomplete.
        """
        require_counters(state, self.counters(), type(self).__name__, dict(self.model.named_parameters()))
        estimates: dict[tuple[str, str], OnlineNaturalGradient] = {}
        for name, entry in state.items():
            for side, dim in zip(_SIDES, self._sides(name)[1::-1] if name else (), strict=False):
                own = {key.partition(".")[2]: value for key, value in dict(entry).items() if key.startswith(f"{side}.")}
                if own:
                    estimates[name, side] = self._estimate(side)
                    estimates[name, side].dim = dim
                    estimates[name, side].load_state_dict(own)
        super().load_state_dict(state)
        self._estimates = estimates

    def forget(self, name: str) -> None:
        super().forget(name)
        for side in _SIDES:
            self._estimates.pop((name, side), None)
