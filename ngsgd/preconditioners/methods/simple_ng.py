"""Kaldi's simple natural gradient (arXiv 1410.7455, Appendix A) as a preconditioner.

    P g = gamma sum_x ehat_x ahat_x^T    of input rows a and derivative rows e

Each row is multiplied by the inverse Fisher matrix of the other rows of its side, and each side
keeps its norm. The online method is `ngsgd.NGSGD`.

Letters: X rows (samples, positions), O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ngsgd.config.traits import TRAITS
from ngsgd.ops.simple_natural_gradient import precondition_simple
from ngsgd.preconditioners.fisher_method import FisherMethod
from ngsgd.preconditioners.fisher_recorder import Rows
from ngsgd.preconditioners.states import Layout, State


class SimpleNG(FisherMethod):
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

    ema_decay: float = 0.0
    alpha: float = 4.0

    traits = TRAITS["simple"]

    def problems(self) -> list[str]:
        found = [] if self.alpha > 0.0 else [f"alpha is {self.alpha}; it must be above 0."]
        if self.ema_decay or self.layer_options:
            found.append("ema_decay and layer_options have no effect here; remove them.")
        return [*super().problems(), *found]

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return dict.fromkeys(("statistics.direction", "inverse.direction"), self.blocks.sides(name)[:2])

    def measure(self, name: str, rows: Rows) -> State:
        """Return the direction, for a gradient of norm 1; it is valid for this minibatch only."""
        a_XI, e_XO = rows.a_NTI.flatten(0, 1), rows.e_VNTO.flatten(0, 2)
        plain = (e_XO.T @ a_XI).norm()
        made = self._preconditioned(e_XO).T @ self._preconditioned(a_XI)
        return {"direction": made / plain.clamp(min=torch.finfo(plain.dtype).tiny)}

    def _preconditioned(self, rows_XD: Tensor) -> Tensor:
        """Precondition the rows of one side of a layer and restore their norm."""
        if not bool(rows_XD.isfinite().all()):
            # The statistics are then not finite, and the update is counted as skipped.
            return rows_XD
        return precondition_simple(rows_XD, self.alpha)

    def invert(self, name: str, known: State) -> State:
        return known

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        direction_OI: Tensor = inverse["direction"] * g_OI.norm()
        return direction_OI
