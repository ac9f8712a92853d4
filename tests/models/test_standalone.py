"""A model as a function of consecutive frames gives the log likelihoods of the model's windows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.exports.source import StandaloneNetwork
from ngsgd.models import DataStatistics, Window, build_model

DIM, LEFT, RIGHT, SIDE, CLASSES = 3, 5, 4, 2, 6
PRIOR_P = np.array([0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
KINDS: dict[str, dict[str, Any]] = {
    "relu": {"kind": "relu"}, "pnorm": {"kind": "pnorm", "pnorm_group": 4, "normalize": "batchnorm"},
    "tdnn": {"kind": "tdnn", "tdnn_offsets": "-1,0,1 -2,2 0", "normalize": "batchnorm"},
    # the first output frame needs frames that lie apart, and not itself
    "tdnn-ahead": {"kind": "tdnn", "tdnn_offsets": "1,2 -4,0 -1"},
    "tdnnf": {"kind": "tdnnf", "tdnn_offsets": "-1,0,1 -2,1 -1,2"},
    "subclasses": {"kind": "relu", "num_subclasses": 14, "prior_scale_power": -0.25},
    "lda": {"kind": "tdnn", "tdnn_offsets": "-1,0,1 -2,2 0", "input_transform": "lda"},
}


def model_of(settings: dict[str, Any], window: Window) -> nn.Module:
    config = ModelConfig(num_layers=3, hidden_dim=8, bottleneck_dim=4, **settings)
    generator = torch.Generator().manual_seed(1)
    num_seen = 3 * DIM + window.side_dim
    transform = torch.randn(num_seen, num_seen + 1, generator=generator) if "input_transform" in settings else None
    model = build_model(config, window.num_inputs, CLASSES, 0, window=window,
                        statistics=DataStatistics((900.0, 800.0, 700.0, 600.0, 500.0, 400.0), transform))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "output" in name:
                parameter.normal_(generator=generator)
    model.train()(torch.randn(60, window.num_inputs, generator=generator))
    return model.eval()


def of_windows(model: nn.Module, frames_NTD: Tensor, beside_NS: Tensor | None) -> Tensor:
    """Each output frame from its own window."""
    width, outputs = LEFT + 1 + RIGHT, []
    for first in range(frames_NTD.shape[1] - width + 1):
        x_NI = frames_NTD[:, first:first + width].flatten(1)
        outputs.append(model(x_NI if beside_NS is None else torch.cat([x_NI, beside_NS], dim=1)))
    return torch.stack(outputs, dim=1).log_softmax(dim=2) - torch.from_numpy(np.log(PRIOR_P)).float()


@pytest.mark.parametrize("num_frames", [1, 2, 13])
@pytest.mark.parametrize("side_dim", [0, SIDE])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_consecutive_frames_have_the_log_likelihoods_of_their_windows(name: str, side_dim: int, num_frames: int) -> None:
    window = Window(LEFT, RIGHT, DIM, side_dim)
    model = model_of(KINDS[name], window)
    generator = torch.Generator().manual_seed(2)
    frames_NTD = torch.randn(2, LEFT + num_frames + RIGHT, DIM, generator=generator)
    beside = (torch.randn(2, side_dim, generator=generator),) if side_dim else ()
    found = StandaloneNetwork(model, window, PRIOR_P)(frames_NTD, *beside)
    expected = of_windows(model, frames_NTD, beside[0] if beside else None)
    # float32, three layers
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


@torch.no_grad()
def test_frames_before_and_after_make_no_difference() -> None:
    """Chunks of a stream give the outputs of the complete utterance."""
    window = Window(LEFT, RIGHT, DIM)
    network = StandaloneNetwork(model_of(KINDS["tdnnf"], window), window, PRIOR_P)
    frames_NTD = torch.randn(1, LEFT + 20 + RIGHT, DIM)
    chunks = [network(frames_NTD[:, first:first + LEFT + 4 + RIGHT]) for first in range(0, 20, 4)]
    torch.testing.assert_close(torch.cat(chunks, dim=1), network(frames_NTD), rtol=2e-5, atol=2e-5)
