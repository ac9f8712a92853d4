"""Parts of an `OnlineNaturalGradient`: products of the estimate, moments of rows, saved state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.arguments import require_state
from ngsgd.errors import OptimizerStateError
from ngsgd.ops import natural_gradient as ops
from ngsgd.preconditioners.states import finite_tensor, number_of

STATE_TENSORS = ("W", "d", "rho")


class RowMoments(NamedTuple):
    """What an update and gamma need of the rows of a minibatch."""

    J_RD: Tensor
    KL_2RR: Tensor
    # tr X X^T
    sum_sq: float
    num_rows: Tensor | float
    loss_scale: Tensor | float


class Derived:
    """What follows from an estimate, computed on demand."""

    def __init__(self, state: ops.FisherState, smoothing: ops.Smoothing) -> None:
        self.state, self._smoothing = state, smoothing

    @functools.cached_property
    def gram_RR(self) -> Tensor:  # noqa: N802
        """W W^T."""
        return self.state.W_RD @ self.state.W_RD.T

    @functools.cached_property
    def scale(self) -> float:
        """The expected gamma."""
        return ops.expected_rescaling(self.state, self._smoothing)


def checked_state(state: Any, name: str, dim: int | None = None) -> tuple[ops.FisherState | None, int]:
    """Return (estimate, calls) of a state of `OnlineNaturalGradient` with rows of `dim`."""
    require_state(state, ("t",) if isinstance(state, Mapping) and {*state} == {"t"} else ("t", *STATE_TENSORS), name,
                  OptimizerStateError)
    if extra := sorted({*state} - {"t", *STATE_TENSORS}):
        raise OptimizerStateError(f"the state of {name} has {extra[0]!r}, which estimates do not have.")
    num_calls = number_of(state, "t", name)
    if "W" not in state:
        return None, num_calls
    W_RD, d_R, rho = (finite_tensor(state[key], f"{key} of the state of {name}") for key in STATE_TENSORS)
    if W_RD.ndim != 2 or d_R.shape != W_RD.shape[:1] or rho.numel() != 1 or not W_RD.is_floating_point():
        raise OptimizerStateError(f"Invalid state of {name}: W {tuple(W_RD.shape)} of {W_RD.dtype}, d {tuple(d_R.shape)}, "
                                  f"rho {tuple(rho.shape)}; load a complete state.")
    if dim is not None and W_RD.shape[1] != dim:
        raise OptimizerStateError(f"the state of {name} has rows of dimension {W_RD.shape[1]}, and this estimate {dim}; "
                                  "load the state of the same model.")
    if not 0 < len(W_RD) < W_RD.shape[1]:
        raise OptimizerStateError(f"the state of {name} has rank {len(W_RD)} for rows of dimension {W_RD.shape[1]}; it "
                                  "must be at least 1 and below the dimension.")
    W_RD = W_RD.to(torch.promote_types(W_RD.dtype, torch.float32), copy=True)
    return ops.FisherState(W_RD, d_R.cpu().double().numpy().copy(), float(rho)), num_calls
