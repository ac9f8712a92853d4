"""Small networks, one for each kind of layer, with minibatches; all in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.models import Window, build_model
from ngsgd.models.growing import SumSubclasses
from ngsgd.models.layers import PNorm, Renormalize
from tests.wired import Wired

N = 4


class Problem(NamedTuple):
    """A network and its input."""

    model: nn.Module
    x: Tensor
    num_classes: int


def _functional() -> nn.Module:
    """Activations as functions, an in-place one, a residual sum, and a layer that is used twice."""
    def run(model: Any, x: Tensor) -> Any:
        y = nn.functional.relu_(model.first(x))
        y = y + torch.tanh(model.shared(y))
        y = y + nn.functional.gelu(model.shared(y))
        return model.out(y)
    return Wired(run, first=nn.Linear(5, 6), shared=nn.Linear(6, 6), out=nn.Linear(6, 3))


def _residual() -> nn.Module:
    """Curved activations on both sides of a residual sum."""
    def run(model: Any, x: Tensor) -> Any:
        y = torch.tanh(model.first(x))
        y = y + nn.functional.softplus(model.second(y))
        return model.out(nn.functional.silu(y) * 0.5)
    return Wired(run, first=nn.Linear(5, 6), second=nn.Linear(6, 6), out=nn.Linear(6, 3))


def _recurrent(layer: nn.RNNBase, width: int) -> nn.Module:
    """The mean over time of a recurrent layer's outputs."""
    def run(model: Any, x_NTD: Tensor) -> Any:
        y, _ = model.layer(x_NTD if layer.batch_first else x_NTD.transpose(0, 1))
        return model.out((y if layer.batch_first else y.transpose(0, 1)).mean(dim=1))
    return Wired(run, layer=layer, out=nn.Linear(width, 3))


def _attention(norm: nn.Module, *, cross: bool) -> nn.Module:
    """A residual block of attention with a normalization."""
    def run(model: Any, x_NTD: Tensor) -> Any:
        key = x_NTD.flip(1) * 2.0 if cross else x_NTD
        y, _ = model.attention(x_NTD, key, key)
        return model.out(model.norm(x_NTD + y).mean(dim=1))
    return Wired(run, attention=nn.MultiheadAttention(6, 2, batch_first=True), norm=norm,
                 out=nn.Linear(6, 3))


def _tied() -> nn.Module:
    """An embedding whose table is the output layer's weight too."""
    model = Wired(lambda m, x_NT: m.out(torch.tanh(m.hidden(m.embedding(x_NT))).mean(dim=1)),
                  embedding=nn.Embedding(5, 4, padding_idx=1), hidden=nn.Linear(4, 4),
                  out=nn.Linear(4, 5))
    model.out.weight = model.embedding.weight
    return model


def _tdnn(kind: Any, normalize: Any) -> nn.Module:
    """A time-delay network of this project in test mode, for windows of 8 frames of 3 numbers."""
    offsets = {"tdnn": "-1,0,1 -2,1", "tdnnf": "-1,0,1 -2,0,1"}[kind]
    config = ModelConfig(kind=kind, num_layers=2, hidden_dim=5, bottleneck_dim=2, normalize=normalize, tdnn_offsets=offsets)
    model = build_model(config, 24, 3, 1, window=Window(4, 3, 3))
    # it starts from zero, which has no curvature before it
    nn.init.normal_(model.get_parameter("output.weight"))
    model.train()(torch.randn(50, 24))
    return model.eval()


def _images() -> Tensor:
    return torch.randn(N, 2, 6, 6)


def _frames(channels: int = 4, length: int = 9) -> Tensor:
    return torch.randn(N, channels, length)


def _built() -> dict[str, Callable[[], Problem]]:
    def of(model: Callable[[], nn.Module], x: Callable[[], Tensor], num_classes: int = 3) -> Callable[[], Problem]:
        return lambda: Problem(model(), x(), num_classes)

    def eval_norm(norm: Any) -> nn.Module:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        norm.weight.data.normal_()
        module: nn.Module = norm.eval()
        return module
    rows = lambda: torch.randn(N, 5)  # noqa: E731
    times = lambda: torch.randn(N, 4, 6)  # noqa: E731
    return {
        "linear": of(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)), rows),
        "linear without bias": of(lambda: nn.Sequential(nn.Linear(5, 6, bias=False), nn.Sigmoid(), nn.Linear(6, 3)), rows),
        "linear over frames": of(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Flatten(), nn.Linear(20, 3)), times),
        "conv1d": of(lambda: nn.Sequential(nn.Conv1d(4, 5, 3, stride=2, dilation=2), nn.ReLU(), nn.Flatten(),
                                           nn.Linear(15, 3)), _frames),
        "conv1d same": of(lambda: nn.Sequential(nn.Conv1d(4, 6, 4, padding="same", groups=2), nn.ELU(), nn.AvgPool1d(9),
                                                nn.Flatten(),
                                                nn.Linear(6, 3)), _frames),
        "conv1d dilated same": of(lambda: nn.Sequential(nn.Conv1d(4, 5, 3, padding="same", dilation=2), nn.Sigmoid(),
                                                        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(10, 3)), _frames),
        "conv2d": of(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2),
                                           nn.Flatten(), nn.Linear(4, 3)), _images),
        "conv2d circular": of(lambda: nn.Sequential(nn.Conv2d(2, 3, (3, 2), padding=(1, 0), padding_mode="circular"),
                                                    nn.LeakyReLU(),
                                                    nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 3)), _images),
        "conv3d": of(lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.ReLU(), nn.Flatten(), nn.Linear(54, 3)),
                     lambda: torch.randn(N, 1, 4, 4, 4)),
        "p-norm": of(lambda: nn.Sequential(nn.Linear(5, 8), PNorm(2), Renormalize(), nn.Linear(4, 3)), rows),
        "sub-classes": of(lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5), SumSubclasses([2, 1, 2])), rows),
        "tdnn": of(lambda: _tdnn("tdnn", "renormalize"), lambda: torch.randn(N, 24)),
        "tdnnf": of(lambda: _tdnn("tdnnf", "renormalize"), lambda: torch.randn(N, 24)),
        "tdnnf with batch norm": of(lambda: _tdnn("tdnnf", "batchnorm"), lambda: torch.randn(N, 24)),
        "functional": of(_functional, rows),
        "residual": of(_residual, rows),
        "layer norm": of(lambda: nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3)), rows),
        "rms norm over frames": of(lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6), nn.ReLU(), nn.Flatten(),
                                                         nn.Linear(24, 3)), times),
        "group norm": of(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(),
                                               nn.Linear(64, 3)), _images),
        "batch norm": of(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), eval_norm(nn.BatchNorm2d(4)), nn.ReLU(), nn.Flatten(),
                                               nn.Linear(64, 3)), _images),
        "batch norm of rows": of(lambda: nn.Sequential(nn.Linear(5, 4), eval_norm(nn.BatchNorm1d(4)), nn.Linear(4, 3)), rows),
        "activations": of(lambda: nn.Sequential(*(part for kind in (nn.Sigmoid, nn.Tanh, nn.ELU, nn.Softplus, nn.GELU, nn.SiLU)
                                                  for part in (nn.Linear(5, 5), kind())), nn.Linear(5, 3)), rows),
        "pieces": of(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Hardtanh(-0.5, 0.5), nn.ZeroPad2d(1), nn.MaxPool2d(3, 2),
                                           nn.AvgPool2d(2, 1, padding=1), nn.Unflatten(1, (2, 2)), nn.Flatten(),
                                           nn.Linear(36, 3)), _images),
        "dropout": of(lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.ReLU(), nn.Linear(6, 3)).eval(), rows),
        "lstm": of(lambda: _recurrent(nn.LSTM(6, 4, num_layers=2, bidirectional=True,
                                              batch_first=True), 8), times),
        "lstm with projection": of(lambda: _recurrent(nn.LSTM(6, 4, proj_size=3), 3), times),
        "gru": of(lambda: _recurrent(nn.GRU(6, 4), 4), times),
        "rnn": of(lambda: _recurrent(nn.RNN(6, 4, nonlinearity="relu", bias=False,
                                            batch_first=True), 4), times),
        "attention": of(lambda: _attention(nn.LayerNorm(6), cross=False), times),
        "cross-attention": of(lambda: _attention(nn.RMSNorm(6), cross=True), times),
        "embedding": of(_tied, lambda: torch.randint(5, (N, 6)), 5)}


PROBLEMS = _built()


def problem(name: str) -> Problem:
    """The problem of that name, always with the same numbers."""
    torch.manual_seed(0)
    model, x, num_classes = PROBLEMS[name]()
    return Problem(model.double(), x.double() if x.is_floating_point() else x, num_classes)
