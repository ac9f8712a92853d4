"""Diagnostics of the Fisher estimates of an optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ngsgd.ops.natural_gradient import spectrum
from ngsgd.optim.ngsgd import NGSGD


@dataclass(frozen=True)
class EstimateHealth:
    """Diagnostics of one Fisher estimate; letters as in `ngsgd.ops.natural_gradient`."""

    dim: int                      # D
    rank: int                     # R
    # e_i (43), descending; 0 keeps a direction unchanged, 1 removes it.
    e: tuple[float, ...]
    # (sum of eigenvalues)^2 / sum of squared eigenvalues, 1 to D: number of dominant directions.
    effective_rank: float
    # Fraction of the trace in the R directions of the estimate, 0 to 1.
    captured: float


@dataclass(frozen=True)
class LayerHealth:
    """Diagnostics of one preconditioned layer."""

    # By side; "input" and "output" for a Linear.
    estimates: dict[str, EstimateHealth]
    # Fraction of steps that max_change shortened since `reset_activity`, 0 to 1. NaN if all
    # parameters of the layer are counted with another layer.
    limited: float
    # Cosine of the preconditioned and the plain gradient at the last measurement; NaN: never
    # measured.
    cosine: float


def inspect(optimizer: NGSGD) -> dict[str, LayerHealth]:
    """Return diagnostics of every preconditioned layer that has processed data.

    Costs a few microseconds per layer and one synchronization with the device.

    Args:
        optimizer: the optimizer; it measures cosines only if it was created with `cosine_period`.

    Returns:
        By layer name: its Fisher estimates, the fraction of clipped steps, and the cosine.

    Example:
        >>> import torch, ngsgd
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8))
        >>> optimizer = ngsgd.NGSGD(model, lr=1e-3)
        >>> model(torch.randn(16, 4)).square().sum().backward()
        >>> optimizer.step()
        >>> inspect(optimizer)["0"].estimates["input"].rank
        2
    """
    shares = optimizer.activity().layer_share
    found = {}
    for name, layer in optimizer.layer_preconditioners().items():
        estimates = {}
        for side, estimate in layer.sides.items():
            if (state := estimate.state) is not None:
                R, D = state.W_RD.shape
                tops = state.d_R + state.rho
                eigenvalues = np.append(tops, np.full(D - R, state.rho))
                trace = float(eigenvalues.sum())
                e_R = np.sort(spectrum(state, estimate.smoothing))[::-1]
                estimates[side] = EstimateHealth(D, R, tuple(e_R.tolist()),
                                                 trace**2 / float((eigenvalues**2).sum()),
                                                 float(tops.sum()) / trace)
        if estimates:
            cosine = float("nan") if layer.cosine is None else float(layer.cosine)
            found[name] = LayerHealth(estimates, shares.get(name, float("nan")), cosine)
    return found


def figures(optimizer: NGSGD) -> dict[str, float]:
    """Return the same diagnostics as flat numbers for a log.

    Keys are "affine1/limited", "affine1/cosine", "affine1/input_last_e" and
    "affine1/input_effective_rank", for example.
    """
    numbers: dict[str, float] = {}
    for name, layer in inspect(optimizer).items():
        numbers[f"{name}/limited"] = layer.limited
        if layer.cosine == layer.cosine:
            numbers[f"{name}/cosine"] = layer.cosine
        for side, estimate in layer.estimates.items():
            numbers[f"{name}/{side}_last_e"] = estimate.e[-1]
            numbers[f"{name}/{side}_effective_rank"] = estimate.effective_rank
    return numbers
