"""Gradient noise and curvature of the loss per layer, as figures for a chart.

    signal_to_noise/LAYER    |g|^2 / S, of a single frame: multiply by the minibatch size
    noise_scale/model        S / |g|^2: minibatch size beyond which averaging stops to help
                             (McCandlish et al. 2018)
    curvature_trace/LAYER    trace of the generalized Gauss-Newton matrix per frame,
                             one Monte Carlo sample per frame

S is the trace of the covariance of the gradient of one frame, |g|^2 the squared norm of the true
gradient. Estimates of the latter may be negative; figures that are not finite are omitted.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import nn

from ngsgd.curvature import collect
from ngsgd.curvature.collection import Collection
from ngsgd.curvature.second_order.noise import GradientNoise, gradient_noise
from ngsgd.data.reader import Minibatch


def check_layers(model: nn.Module) -> None:
    """Raise ConfigError for a model with layers that do not support per-sample gradients."""
    _collection(model)


def gradient_figures(model: nn.Module, subset: Minibatch, num_frames: int) -> dict[str, float]:
    """Compute figures from the first frames of a subset; the model has no gradients afterwards.

    This takes about as long as two training steps on so many frames. It does not use the default
    generator of torch.

    Args:
        model: the model.
        subset: labeled frames.
        num_frames: number of frames, at least 2.
    """
    part = Minibatch(subset.x_ND[:num_frames], subset.pdf_N[:num_frames],
                     None if subset.weight_N is None else subset.weight_N[:num_frames])
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    with torch.enable_grad(), _collection(model, loss_fn) as q:
        loss_N = loss_fn(model(part.x_ND), part.pdf_N)
        (loss_N if part.weight_N is None else loss_N * part.weight_N).mean().backward()
    model.zero_grad(set_to_none=True)
    noise = gradient_noise(q, len(part.x_ND))
    figures = {"noise_scale/model": noise[""].noise_scale, "signal_to_noise/model": noise[""].signal_to_noise}
    for layer, names in _layers(q).items():
        whole = GradientNoise(sum(noise[name].trace for name in names), sum(noise[name].squared_norm for name in names))
        figures[f"signal_to_noise/{layer}"] = whole.signal_to_noise
        figures[f"curvature_trace/{layer}"] = sum(float(q[name].diag_ggn_mc.sum(dtype=torch.float64)) for name in names)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _collection(model: nn.Module, loss_fn: nn.Module | None = None) -> Collection:
    # a separate generator: training uses that of torch in another thread
    return collect(model, "variance", "second_moment", "diag_ggn_mc", loss_fn=loss_fn or nn.CrossEntropyLoss(), reduction="mean",
                   generator=torch.Generator().manual_seed(0))


def _layers(q: Collection) -> dict[str, list[str]]:
    """Names of parameters by layer; a direct parameter of the model is a layer."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in q:
        names[name.rpartition(".")[0] or name].append(name)
    return names
