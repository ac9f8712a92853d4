"""Time-delay networks (TDNN; Peddinti et al. 2015) and factored ones (TDNN-F; Povey et al. 2018).

A layer reads the frames at its offsets around each of its output frames, by splicing and an affine
layer; only frames that the output depends on are computed. Side values of a frame, such as an
i-vector, are an input of the first layer, equal at all frames that an output depends on.
Letters: N rows (examples or utterances), T frames, K offsets, D dimension, S side values.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.models.layers import FixedAffine, Window, normalization

BYPASS_SCALE = 0.66  # Kaldi's bypass-scale of tdnnf-layer

Times = npt.NDArray[np.int64]   # ascending


class Splice(NamedTuple):
    """Indices of the input frames of each output frame of a splicing layer."""

    index_TK: Tensor

    def __call__(self, x_NTD: Tensor) -> Tensor:
        """Return N x T x (K D)."""
        spliced: Tensor = x_NTD.index_select(1, self.index_TK.flatten()).unflatten(1, self.index_TK.shape).flatten(2)
        return spliced


class _FramePlan(NamedTuple):
    """Plan of a network for certain output frames, on one device."""

    needed: Tensor  # required frames of a window, or of an utterance
    splices: list[tuple[Splice, ...]]  # of each time layer


class TimeLayer(nn.Module):
    """A layer that computes output frames from input frames at other times."""

    offsets: tuple[int, ...]  # of the input frames of an output frame

    def plan(self, times: Times) -> tuple[Times, tuple[Splice, ...]]:
        """Return (input frames that the outputs at `times` need, their indices)."""
        needed, splice = _spliced(times, self.offsets)
        return needed, (splice,)


class SplicedTransform(TimeLayer):
    """Fixed transform of the spliced input of the first layer."""

    def __init__(self, transform: Tensor, offsets: Sequence[int]) -> None:
        super().__init__()
        self.offsets = tuple(offsets)
        self.fixed = FixedAffine(transform)

    def forward(self, x_NTD: Tensor, splices: Sequence[Splice], side_NS: Tensor | None = None) -> Tensor:
        y: Tensor = self.fixed(_beside(splices[0](x_NTD), side_NS))
        return y


class Tdnn(TimeLayer):
    """Affine layer over spliced frames, ReLU, normalization."""

    def __init__(self, config: ModelConfig, num_inputs: int, offsets: Sequence[int], side_dim: int = 0) -> None:
        super().__init__()
        self.offsets = tuple(offsets)
        self.affine = nn.Linear(len(self.offsets) * num_inputs + side_dim, config.hidden_dim)
        self.rest = _rest(config)

    def forward(self, x_NTD: Tensor, splices: Sequence[Splice], side_NS: Tensor | None = None) -> Tensor:
        y: Tensor = self.rest(self.affine(_beside(splices[0](x_NTD), side_NS)))
        return y

    def extra_repr(self) -> str:
        return f"offsets={self.offsets}"


class FactoredTdnn(TimeLayer):
    """Factored TDNN layer: semi-orthogonal factor of the past offsets, affine layer of the future
    ones (0: both), ReLU, normalization, and BYPASS_SCALE * x, as Kaldi's tdnnf-layer.
    """

    def __init__(self, config: ModelConfig, num_inputs: int, offsets: Sequence[int]) -> None:
        super().__init__()
        self.past = tuple(offset for offset in offsets if offset <= 0) or (0,)
        self.future = tuple(offset for offset in offsets if offset >= 0) or (0,)
        self.bypass_scale = BYPASS_SCALE if num_inputs == config.hidden_dim else 0.0
        self.factor = nn.Linear(len(self.past) * num_inputs, config.bottleneck_dim, bias=False)
        self.affine = nn.Linear(len(self.future) * config.bottleneck_dim, config.hidden_dim)
        self.rest = _rest(config)

    @property
    def layer_options(self) -> dict[str, dict[str, Any]]:
        """Rows of the factor are orthogonal with a free scale (Kaldi's constraint -1)."""
        return {"factor": {"orthonormal_constraint": -1.0}}

    def plan(self, times: Times) -> tuple[Times, tuple[Splice, ...]]:
        middle, second = _spliced(times, self.future)
        needed = np.union1d(_needed(middle, self.past), times)
        return needed, (_splice(needed, middle, self.past), second, _splice(needed, times, (0,)))

    def forward(self, x_NTD: Tensor, splices: Sequence[Splice]) -> Tensor:
        first, second, same = splices
        y: Tensor = self.rest(self.affine(second(self.factor(first(x_NTD)))))
        return torch.add(y, same(x_NTD), alpha=self.bypass_scale) if self.bypass_scale else y

    def extra_repr(self) -> str:
        return f"past={self.past}, future={self.future}, bypass_scale={self.bypass_scale}"


class TimeDelayNetwork(nn.Sequential):
    """Time layers, then frame-by-frame layers; its input is rows of spliced frames. `forward`
    returns the middle frame of each row, `utterance` the same for consecutive frames, each computed
    once.
    """

    def __init__(self, children: OrderedDict[str, nn.Module], window: Window) -> None:
        super().__init__(children)
        self.window = window
        self._plan_of_one: _FramePlan | None = None

    def forward(self, x_NI: Tensor) -> Tensor:
        """Return N x outputs for the middle frames."""
        x_NWD, side_NS = self._parts(x_NI)
        plan = self._plan_of_one
        if plan is None or plan.needed.device != x_NI.device:
            plan = self._plan_of_one = self._plan(np.zeros(1, np.int64), x_NI.device)
        return self._run(x_NWD, plan, side_NS).squeeze(1)

    def utterance(self, x_TI: Tensor) -> Tensor:
        """Return T x outputs from the spliced frames of one utterance, in order and without gaps;
        each sequence of equal side values is computed separately.
        """
        side_TS = self._parts(x_TI)[1]
        if side_TS is None:
            return self._alike(x_TI)
        ends = torch.nonzero((side_TS[1:] != side_TS[:-1]).any(dim=1)).flatten() + 1
        return torch.cat([self._alike(run) for run in x_TI.tensor_split(ends.cpu())])

    def _alike(self, x_TI: Tensor) -> Tensor:
        x_TWD, side_TS = self._parts(x_TI)
        frames = torch.cat([x_TWD[0], x_TWD[1:, -1]])[None]  # each frame once
        plan = self._plan(np.arange(len(x_TI)), x_TI.device)
        return self._run(frames, plan, None if side_TS is None else side_TS[:1]).squeeze(0)

    def _parts(self, x_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (frames of the window, side values)."""
        if not self.window.side_dim:
            return x_NI.unflatten(1, (-1, self.window.feature_dim)), None
        spliced_NI, side_NS = x_NI.split([x_NI.shape[1] - self.window.side_dim, self.window.side_dim], dim=1)
        return spliced_NI.unflatten(1, (-1, self.window.feature_dim)), side_NS

    def _time_layers(self) -> list[TimeLayer]:
        return [layer for layer in self.children() if isinstance(layer, TimeLayer)]

    def _plan(self, times: Times, device: torch.device) -> _FramePlan:
        splices = []
        for layer in reversed(self._time_layers()):
            times, of_layer = layer.plan(times)
            splices.append(tuple(Splice(splice.index_TK.to(device)) for splice in of_layer))
        return _FramePlan(torch.from_numpy(times + self.window.left_context).to(device), splices[::-1])

    def _run(self, x_NTD: Tensor, plan: _FramePlan, side_NS: Tensor | None) -> Tensor:
        y = x_NTD.index_select(1, plan.needed)
        for number, (layer, of_layer) in enumerate(zip(self._time_layers(), plan.splices, strict=True)):
            y = layer(y, of_layer, side_NS) if number == 0 and side_NS is not None else layer(y, of_layer)
        rows = y.flatten(0, 1)
        for module in self.children():
            if not isinstance(module, TimeLayer):
                rows = module(rows)
        logits: Tensor = rows.unflatten(0, y.shape[:2])
        return logits


def _rest(config: ModelConfig) -> nn.Sequential:
    modules: OrderedDict[str, nn.Module] = OrderedDict(nonlinearity=nn.ReLU(), normalize=normalization(config, config.hidden_dim))
    if config.dropout_schedule:
        # Each job sets the proportion from the schedule.
        modules["dropout"] = nn.Dropout(0.0)
    return nn.Sequential(modules)


def _beside(x_NTD: Tensor, side_NS: Tensor | None) -> Tensor:
    """Concatenate the features of every frame with the side values of its row."""
    return x_NTD if side_NS is None else torch.cat([x_NTD, side_NS[:, None].expand(-1, x_NTD.shape[1], -1)], dim=2)


def _needed(times: Times, offsets: Sequence[int]) -> Times:
    return np.unique(times[:, None] + np.asarray(offsets))


def _splice(have: Times, times: Times, offsets: Sequence[int]) -> Splice:
    return Splice(torch.from_numpy(np.searchsorted(have, times[:, None] + np.asarray(offsets))))


def _spliced(times: Times, offsets: Sequence[int]) -> tuple[Times, Splice]:
    needed = _needed(times, offsets)
    return needed, _splice(needed, times, offsets)
