"""One training step of everything that computes, on the pretended device.

A case makes its inputs and returns the function of one step; `NAMES` of all cases together are
the public names, and the test compares the two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ngsgd
from ngsgd.config import ModelConfig, ObjectiveConfig
from ngsgd.curvature import QUANTITIES, collect
from ngsgd.hypergrad import ReversibleSGD
from ngsgd.models import DataStatistics, Window, build_model
from ngsgd.ops.averaging import average_parameters
from ngsgd.optim import SGD
from ngsgd.preconditioners import METHODS, Method
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.objectives import Denominator, SequenceObjective
from ngsgd.training.parameter_vector import FlatLayout
from tests.device.pretended import device, moved

Step = Callable[[], Any]
# methods that look at every minibatch
EVERY_MINIBATCH = tuple(kind for kind, method in METHODS.items() if method.traits.every_step)
# torch's engine cannot go back from a gradient edge to a tensor that Python wraps
NOT_RUN = ("kfra",)
N, D, CLASSES = 24, 20, 10
WINDOW = Window(4, 4, D, 0)


class Case(NamedTuple):
    """What a case is of, and how it is made."""

    names: tuple[str, ...]  # names that users write: of a class, a function or a kind
    make: Callable[[], Step]


def _data(shape: tuple[int, ...] = (N, D)) -> tuple[Tensor, Tensor]:
    return _on_device(torch.randn(shape)), _on_device(torch.arange(shape[0]) % CLASSES)


def _on_device(values: Tensor) -> Tensor:
    return values.to(device())


def mlp(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                         nn.Linear(width, CLASSES))


def _norms() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 32), nn.LayerNorm(32), nn.RMSNorm(32), nn.GroupNorm(4, 32),
                         nn.BatchNorm1d(32), nn.Linear(32, CLASSES))


def _convolutions() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 10)), nn.Conv1d(2, 8, 3), nn.Unflatten(1, (2, 4)),
                         nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(48, CLASSES))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.output = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return self.output(found).mean(dim=1)  # type: ignore[no-any-return]


class _Words(nn.Module):
    """Layers without natural gradient, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, D)
        self.twice, self.output = nn.Linear(D, D), nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.table(x)
        return self.output(self.twice(torch.tanh(self.twice(y))).mean(dim=1))  # type: ignore[no-any-return]


def network(config: ModelConfig) -> nn.Module:
    """An acoustic model with all that its options need."""
    counts = tuple(range(1, CLASSES + 1))
    inputs = 9 * D
    transform = torch.eye(inputs, inputs + 1) if config.input_transform != "none" else None
    return build_model(config, inputs, CLASSES, seed=0, window=WINDOW,
                       statistics=DataStatistics(counts, transform))


NETWORKS = {
    "relu": ModelConfig(num_layers=2, hidden_dim=32),
    "pnorm": ModelConfig(kind="pnorm", num_layers=2, hidden_dim=40),
    "tdnn": ModelConfig(kind="tdnn", hidden_dim=32, tdnn_offsets="-1,0,1 -1,1 -2,2 0 0", normalize="renormalize"),
    "tdnnf": ModelConfig(kind="tdnnf", hidden_dim=32, bottleneck_dim=8, tdnn_offsets="-1,0,1 -1,0,1"),
    "batchnorm": ModelConfig(num_layers=2, hidden_dim=32, normalize="batchnorm"),
    "dropout": ModelConfig(num_layers=2, hidden_dim=32, dropout_schedule="0.2,0.2"),
    "input transform": ModelConfig(num_layers=2, hidden_dim=32, input_transform="lda"),
    "prior scales": ModelConfig(num_layers=2, hidden_dim=32, prior_scale_power=-0.25),
    "sub-classes": ModelConfig(num_layers=2, hidden_dim=32, num_subclasses=20),
}


def _training(make_model: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], Any],
              shape: tuple[int, ...] = (N, D), words: bool = False) -> Step:
    torch.manual_seed(0)
    model = moved(make_model())
    optimizer = make_optimizer(model)
    x, y = _data(shape)
    if words:
        x = _on_device(torch.randint(16, shape))
    return _stepping(model, optimizer, x, y, "sum")


def _stepping(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor,
              reduction: str = "mean") -> Step:
    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).float(), y, reduction=reduction).backward()
        optimizer.step()

    return step


def _autocast(make_optimizer: Callable[[nn.Module], Any]) -> Step:
    model, (x, y) = moved(mlp().bfloat16()), _data()
    return _stepping(model, make_optimizer(model), x.bfloat16(), y, "sum")


_ng = partial(ngsgd.NGSGD, lr=0.01)


# a combination that no method has
_COMBINED: dict[str, Any] = {"curvature": "exact", "representation": "dimensions", "granularity": "layer", "solver": "eigen"}


def _preconditioner(kind: str) -> Step:
    torch.manual_seed(0)
    # a product for each parameter
    model, (x, y) = moved(mlp(4 if kind == "sfn" else 32)), _data()
    options: dict[str, Any] = {} if kind in EVERY_MINIBATCH else {"curvature_interval": 4, "inverse_interval": 8}
    if kind == "ksd":
        options["dimension"] = 5
    preconditioner = Method(model, **_COMBINED, **options) if kind == "method" else METHODS[kind](model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        preconditioner.evaluate_and_step(lambda: nn.functional.cross_entropy(model(x), y), lr=0.01)
        optimizer.step()

    return step


def _quantity(name: str) -> Step:
    torch.manual_seed(0)
    model, (x, y) = moved(mlp()), _data()
    loss_fn = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(0)

    def step() -> None:
        model.zero_grad()
        with collect(model, name, loss_fn=loss_fn, generator=generator) as found:
            loss_fn(model(x), y).backward()
        getattr(found["0.weight"], name)

    return step


def _objective(kind: Any) -> Step:
    graph = StateGraph(np.array([0, 1, 2]), np.array([0, 1, 2, 0]), np.array([1, 2, 0, 0]),
                       np.log([0.5, 1.0, 1.0, 0.5]), np.zeros(3), np.zeros(3))
    denominator = Denominator(graph, np.log([0.5, 0.3, 0.2]), np.array([0, 0, 1]),
                              np.array([True, False, False]))
    objective = SequenceObjective(ObjectiveConfig(kind=kind), denominator, device=device())
    y_NP = _on_device(torch.randn(7, 3)).requires_grad_()
    labels = _on_device(torch.tensor([0, 1, 2, 0, 0, 1, 2]))
    weight = _on_device(torch.zeros(2, dtype=torch.float64))
    return lambda: objective(y_NP, labels, (4, 3), weight).backward()


def _exchange() -> Step:
    """What a job takes and gives: a vector of the host, and back."""
    model = moved(mlp())
    layout = FlatLayout.of(model)
    return lambda: layout.load(model, layout.flatten(model.state_dict()))


def _average() -> Step:
    models = [moved(mlp()) for _ in range(3)]
    return lambda: average_parameters([model.state_dict() for model in models], [1.0, 2.0, 3.0])


def _local_sgd(outer: str) -> Step:
    if not dist.is_initialized():
        with tempfile.NamedTemporaryFile(delete=False) as file:
            dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1,
                                    timeout=timedelta(seconds=30))
    model, (x, y) = moved(mlp()), _data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    local, step = ngsgd.LocalSGD(model, optimizer, sync_every=4, outer=outer), _stepping(model,
                                 optimizer, x, y)
    return lambda: (step(), local.step(len(x)))


def _rows(function: Callable[[Tensor], Any]) -> Step:
    x = _on_device(torch.randn(N, D))
    return lambda: function(x)


def _cases() -> dict[str, Case]:
    return {
        "NGSGD": Case(("NGSGD",), lambda: _training(mlp, _ng)),
        "NGSGD, loss is a mean": Case((), lambda: _training(mlp, ngsgd.NGSGD)),
        "NGSGD, momentum and weight decay": Case((), lambda: _training(
            mlp, partial(_ng, momentum=0.9, loss_reduction="mean", weight_decay=1e-4))),
        "NGSGD, limit of rows": Case((), lambda: _training(
            mlp, partial(_ng, max_change_per_sample=0.075))),
        "NGSGD, masked rows": Case((), lambda: _training(mlp, partial(_ng, ignore_zero_rows=True))),
        "NGSGD, schedule of nnet2": Case((), lambda: _training(mlp, partial(_ng, schedule="nnet2"))),
        "NGSGD, bfloat16": Case((), lambda: _autocast(_ng)),
        "NGSGD, convolutions": Case((), lambda: _training(_convolutions, _ng)),
        "NGSGD, normalization": Case((), lambda: _training(_norms, _ng)),
        "NGSGD, attention": Case((), lambda: _training(_Attention, _ng, (N, 3, D))),
        "NGSGD, embedding, a layer used twice": Case((), lambda: _training(_Words, _ng, (N, 3), words=True)),
        "SGD": Case(("SGD",), lambda: _training(mlp, partial(SGD, lr=1e-4))),
        "NaturalMuon": Case(("NaturalMuon",), lambda: _training(
            mlp, partial(ngsgd.NaturalMuon, lr=0.01))),
        "ReversibleSGD": Case(("ReversibleSGD",),
                              lambda: _training(mlp, partial(ReversibleSGD, lr=0.01))),
        "torch.optim.SGD": Case((), lambda: _training(mlp, lambda model: torch.optim.SGD(
            model.parameters(), lr=1e-4, foreach=True))),
        "OnlineNaturalGradient": Case(("OnlineNaturalGradient",), lambda: _rows(
            ngsgd.OnlineNaturalGradient(rank=5, update_period=4, on_nonfinite="skip").precondition)),
        "precondition_simple": Case(("precondition_simple",), lambda: _rows(
            ngsgd.precondition_simple)),
        "average_parameters": Case(("average_parameters",), _average),
        "exchange of parameters": Case((), _exchange),
        **{f"LocalSGD, {outer}": Case(("LocalSGD",), partial(_local_sgd, outer))
           for outer in ("average", "bmuf", "diloco")},
        **{f"preconditioner {kind}": Case((METHODS[kind].__name__,), partial(_preconditioner, kind))
           for kind in METHODS if kind not in NOT_RUN},
        "preconditioner method": Case(("Method",), partial(_preconditioner, "method")),
        **{f"curvature {name}": Case((name,), partial(_quantity, name)) for name in QUANTITIES if name not in NOT_RUN},
        **{f"objective {kind}": Case((kind,), partial(_objective, kind))
           for kind in ("mmi", "bmmi", "mpe", "smbr", "lfmmi")},
        **{f"network {kind}": Case((config.kind,), partial(
            _training, partial(network, config), _ng, (N, 9 * D)))
           for kind, config in NETWORKS.items()},
    }


CASES = _cases()
