"""Scores of models on held-out frames for the final combination.

Dropout is off, and batch-norm statistics are those of these frames. Letters: N rows (frames), D
inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ngsgd.data.reader import Minibatch
from ngsgd.errors import DataError
from ngsgd.tasks.frame_scores import score_subset
from ngsgd.training.parameter_vector import FlatLayout, Vector


class HeldOut:
    """Scores parameter vectors on one fixed set of frames.

    It uses `model` as workspace, which is left in evaluation mode with the parameters of the last
    call.
    """

    def __init__(self, model: nn.Module, minibatch: Minibatch) -> None:
        if not len(minibatch.pdf_N):
            raise DataError("there are no held-out frames to choose the final combination; check "
                            "data.valid_minutes.")
        device = next(model.parameters()).device
        self.model = model.eval()
        self.layout = FlatLayout.of(model)
        weight_N = None if minibatch.weight_N is None else minibatch.weight_N.to(device)
        self.minibatch = Minibatch(minibatch.x_ND.to(device), minibatch.pdf_N.to(device), weight_N)
        self.total_weight = float(len(minibatch.pdf_N) if weight_N is None else weight_N.sum())

    def parts(self, num_frames: int) -> Iterator[Minibatch]:
        """Yield the frames in order, in parts of `num_frames`."""
        for begin in range(0, len(self.minibatch.pdf_N), num_frames):
            part = slice(begin, begin + num_frames)
            weight_N = None if self.minibatch.weight_N is None else self.minibatch.weight_N[part]
            yield Minibatch(self.minibatch.x_ND[part], self.minibatch.pdf_N[part], weight_N)

    def __call__(self, parameters: Vector) -> tuple[float, Vector]:
        """Return (objf per frame or -Inf, the parameters with recomputed batch-norm statistics)."""
        self.layout.load(self.model, parameters)
        if recompute_batchnorm(self.model, self.minibatch.x_ND):
            parameters = self.layout.flatten(self.model.state_dict())
        objf = score_subset(self.model, self.minibatch).objf
        return (objf if math.isfinite(objf) else -math.inf), parameters


@torch.no_grad()
def recompute_batchnorm(model: nn.Module, x_ND: Tensor) -> int:
    """Recompute the batch-norm statistics on these frames; return the number of layers.

    The statistics of averaged models differ from the average of their statistics, so Kaldi
    recomputes them too (RecomputeStats in nnet3/nnet-diagnostics.cc). Dropout is off meanwhile. All
    frames are processed at once: the input of a layer depends on the statistics of the layers below
    it, so parts would not give the pooled mean and (unbiased) variance. This needs the memory of
    the inputs and outputs of the widest layer for all frames, without gradients.
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return 0
    if len(x_ND) == 1:
        raise DataError("batch-norm statistics cannot be recomputed on a single frame; raise "
                        "egs.num_diagnostic_frames.")
    modes = [(module, module.training) for module in model.modules()]
    momenta = [layer.momentum for layer in layers]
    model.eval()
    for layer in layers:
        layer.train()
        layer.reset_running_stats()
        # a cumulative average, here of one minibatch
        layer.momentum = None
    try:
        model(x_ND)
    finally:
        for module, training in modes:
            module.training = training
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
    return len(layers)
