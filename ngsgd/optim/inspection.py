"""How healthy the Fisher estimates of an optimiser are, and which ranks would suit them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ngsgd.ops.natural_gradient import spectrum
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.preconditioners.online import OnlineNaturalGradient

# of the smallest e_i: below, directions are kept that matter little; above, some are missing
_HEALTHY = (0.05, 0.2)
_RANK_OF = {"input": "rank_in", "output": "rank_out"}


@dataclass(frozen=True)
class EstimateHealth:
    """One Fisher estimate; letters as in `ngsgd.ops.natural_gradient`."""

    dim: int                      # D
    rank: int                     # R
    # e_i (43), descending: 0 leaves a direction as it is, 1 takes it out
    e: tuple[float, ...]
    # (sum of eigenvalues)^2 / sum of their squares, 1 to D: how many directions carry the Fisher
    effective_rank: float
    # share of the trace in the R directions kept, 0 to 1
    captured: float

    @property
    def suggested_rank(self) -> int:
        """A rank whose last e_i would lie between 0.05 and 0.2; twice the present one where that cannot be seen yet."""
        low, high = _HEALTHY
        if self.e[-1] > high:
            return min(2 * self.rank, max(self.dim // 2, self.rank))
        return max(1, sum(e >= low for e in self.e))


@dataclass(frozen=True)
class LayerHealth:
    """One preconditioned layer."""

    # "input", "output" of a Linear
    estimates: dict[str, EstimateHealth]
    # share of steps that max_change shortened since `reset_activity`, 0 to 1; NaN: the layer has
    # only parameters that another one counts for
    limited: float
    # between the preconditioned and the plain gradient when last measured; NaN: never
    cosine: float


def inspect(optimizer: NGSGD) -> dict[str, LayerHealth]:
    """The state of every preconditioned layer that has seen data, by name; waits for the device once.

    Costs a few microseconds per layer.  The cosine is only there if the optimiser was made with `cosine_period`.

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
        estimates = {side: health for side, estimate in layer.sides.items() if (health := _health(estimate)) is not None}
        if estimates:
            cosine = float("nan") if layer.cosine is None else float(layer.cosine)
            found[name] = LayerHealth(estimates, shares.get(name, float("nan")), cosine)
    return found


def suggest_ranks(optimizer: NGSGD) -> dict[str, dict[str, int]]:
    """Ranks for `layer_options`, as {"affine1": {"rank_in": 20, "rank_out": 40}}, from the spectra of the estimates so far.

    Ask after some hundred minibatches.  A rank is right when the last e_i lies between 0.05 and 0.2.
    """
    ranks = {name: {_RANK_OF[side]: estimate.suggested_rank for side, estimate in layer.estimates.items() if side in _RANK_OF}
             for name, layer in inspect(optimizer).items()}
    return {name: of_layer for name, of_layer in ranks.items() if of_layer}


def figures(optimizer: NGSGD) -> dict[str, float]:
    """The same as flat numbers for a log: "affine1/input_last_e", "affine1/input_effective_rank", "affine1/limited" .."""
    numbers: dict[str, float] = {}
    for name, layer in inspect(optimizer).items():
        numbers[f"{name}/limited"] = layer.limited
        if layer.cosine == layer.cosine:
            numbers[f"{name}/cosine"] = layer.cosine
        for side, estimate in layer.estimates.items():
            numbers[f"{name}/{side}_last_e"] = estimate.e[-1]
            numbers[f"{name}/{side}_effective_rank"] = estimate.effective_rank
    return numbers


def _health(estimate: OnlineNaturalGradient) -> EstimateHealth | None:
    state = estimate.state
    if state is None:
        return None
    R, D = state.W_RD.shape
    d_R, rho = state.d_R, state.rho
    eigenvalues = np.append(d_R + rho, np.full(D - R, rho))
    trace = float(eigenvalues.sum())
    return EstimateHealth(D, R, tuple(np.sort(spectrum(state, estimate.smoothing))[::-1].tolist()),
                          trace**2 / float((eigenvalues**2).sum()), float((d_R + rho).sum()) / trace)
