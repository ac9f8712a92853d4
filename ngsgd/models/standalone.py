"""Model as one function of consecutive frames, including splicing and priors, for export.

Letters: N sequences, T frames with context, F output frames, W frames of a window, D feature
dimension, S values beyond the features, P pdfs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.models.growing import StagedModel
from ngsgd.models.layers import Window
from ngsgd.models.tdnn import TimeDelayNetwork, TimeLayer


class _Slices(NamedTuple):
    """Splicing of consecutive frames as slices of any length; `Splice` has fixed indices."""

    # start of each spliced frame in the input
    starts: tuple[int, ...]
    num_frames: int | torch.SymInt

    def __call__(self, x_NTD: Tensor) -> Tensor:
        """Return N x frames x (K D)."""
        return torch.cat([x_NTD.narrow(1, start, self.num_frames) for start in self.starts], dim=2)


class _LayerPlan(NamedTuple):
    """Splices of a time layer.

    Their starts, and the number of frames beyond those of the output.
    """

    starts: tuple[tuple[int, ...], ...]
    num_extra: tuple[int, ...]

    def of(self, num_frames: int | torch.SymInt) -> tuple[_Slices, ...]:
        return tuple(_Slices(start, num_frames + extra)
                     for start, extra in zip(self.starts, self.num_extra, strict=True))


class StandaloneNetwork(nn.Module):
    """Log likelihoods (log posterior minus log prior) of consecutive frames, for decoders.

    Args:
        model: a trained model in evaluation mode.
        window: how its input rows are made of frames.
        prior_P: class priors.

    Example:
        >>> net = StandaloneNetwork(nn.Linear(9, 2), Window(1, 1, 3), np.array([0.5, 0.5]))
        >>> net(torch.zeros(1, 12, 3)).shape
        torch.Size([1, 10, 2])
    """

    log_prior_P: Tensor

    def __init__(self, model: nn.Module, window: Window, prior_P: npt.NDArray[np.float64]) -> None:
        super().__init__()
        self.network = model.at(model.stage) if isinstance(model, StagedModel) else model
        self.window = window
        self.register_buffer("log_prior_P", torch.from_numpy(np.log(prior_P)).float())
        self._first, self._plans = _plans(self.network, window) \
            if isinstance(self.network, TimeDelayNetwork) else (0, [])

    def forward(self, frames_NTD: Tensor, beside_NS: Tensor | None = None) -> Tensor:
        """Compute log likelihoods, N x F x P, F = T - left context - right context.

        Args:
            frames_NTD: normalized features with their context on both sides.
            beside_NS: i-vectors, one for all frames of a sequence; only if the window has any.
        """
        num_frames = frames_NTD.shape[1] - self.window.left_context - self.window.right_context
        rows = (self._in_time if self._plans else self._spliced)(frames_NTD, beside_NS, num_frames)
        loglik = rows.log_softmax(dim=1) - self.log_prior_P
        return loglik.reshape(frames_NTD.shape[0], num_frames, loglik.shape[1])

    def _spliced(self, frames_NTD: Tensor, beside_NS: Tensor | None, num_frames: int) -> Tensor:
        """Return rows of logits of a model with windows as input."""
        width = self.window.left_context + 1 + self.window.right_context
        x_NFI = _Slices(tuple(range(width)), num_frames)(frames_NTD)
        if beside_NS is not None:
            # `expand` would limit an exported program to more than one frame.
            beside_NFS = beside_NS[:, None] * beside_NS.new_ones(1, num_frames, 1)
            x_NFI = torch.cat([x_NFI, beside_NFS], dim=2)
        logits: Tensor = self.network(x_NFI.flatten(0, 1))
        return logits

    def _in_time(self, frames_NTD: Tensor, beside_NS: Tensor | None, num_frames: int) -> Tensor:
        """Return rows of logits of a TDNN, which computes each frame of its hidden layers once."""
        children = list(self.network.children())
        layers = [child for child in children if isinstance(child, TimeLayer)]
        num_inputs = self._plans[0].num_extra[-1] + num_frames
        y = frames_NTD.narrow(1, self._first, num_inputs)
        for number, (layer, plan) in enumerate(zip(layers, self._plans[1:], strict=True)):
            beside = (beside_NS,) if number == 0 and beside_NS is not None else ()
            y = layer(y, plan.of(num_frames), *beside)
        y = y.flatten(0, 1)
        for child in children:
            y = y if isinstance(child, TimeLayer) else child(y)
        return y


def _plans(network: TimeDelayNetwork, window: Window) -> tuple[int, list[_LayerPlan]]:
    """Return (first required input frame, plans of the input and of each time layer)."""
    # With this number of output frames, the required frames have no gaps.
    num_frames = window.left_context + 1 + window.right_context
    times, plans = np.arange(num_frames), []
    for layer in reversed([child for child in network.children() if isinstance(child, TimeLayer)]):
        times, splices = layer.plan(times)
        plans.append(_LayerPlan(tuple(tuple(splice.index_TK[0].tolist()) for splice in splices),
                                tuple(len(splice.index_TK) - num_frames for splice in splices)))
    assert len(times) == times[-1] - times[0] + 1
    of_input = _LayerPlan(((0,),), (len(times) - num_frames,))
    return int(times[0]) + window.left_context, [of_input, *reversed(plans)]
