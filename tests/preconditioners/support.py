"""The support table of docs/preconditioners.md, whose cells `test_support.py` tries."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ngsgd.preconditioners import METHODS
from tests.wired import Wired

PAGE = Path(__file__).parents[2] / "docs" / "preconditioners.md"
N, T, D = 6, 3, 4
SEES_ROWS = tuple(kind for kind in METHODS if METHODS[kind].traits.fisher)
CE = nn.functional.cross_entropy


def _conv1d() -> nn.Module:
    layer: nn.Module = import_module("transformers.pytorch_utils").Conv1D(D, D)
    return layer


@dataclass(frozen=True)
class Feature:
    """One row of the table."""

    label: str
    # the parts of a network by name, in the order in which they run
    parts: Callable[[], Mapping[str, nn.Module]]
    # of parameters that must not keep their plain gradient
    preconditioned: tuple[str, ...]
    # methods that raise ConfigError, words of its message, the way out for the table
    errors: tuple[str, ...] = ()
    named: str = ""
    way_out: str = ""
    # options with which such a method works; None: the way out is another row or method
    remedy: Mapping[str, Any] | None = None
    # how the loop differs: "reentrant", "checkpoint", "ddp", "any loss", "bfloat16"
    loop: str = ""
    # the input is words
    words: bool = False

    def refuses(self, kind: str) -> bool:
        """Whether a method raises ConfigError; KFRA takes chains of layers that have factors."""
        return kind in self.errors or (kind == "kfra" and self.label in NOT_CHAINS)


class Net(nn.Module):
    """The parts one after the other, then the mean over positions."""

    def __init__(self, parts: Mapping[str, nn.Module], loop: str = "") -> None:
        super().__init__()
        self._parts, self._loop = list(parts), loop
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        for name in self._parts:
            part = self.get_submodule(name)
            if self._loop in ("checkpoint", "reentrant"):
                x = checkpoint(part, x.requires_grad_(), use_reentrant=self._loop == "reentrant")
            else:
                x = part(x)
        return x.mean(dim=1)


class Scale(nn.Module):
    """A separate parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((D,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def _over_frames(module: nn.Module, dimensions: int = 1) -> nn.Module:
    """A module of channels first, between frames; further dimensions have size 1."""
    return Wired(lambda m, x: m.inner(x.mT[(..., *[None] * (dimensions - 1))]).flatten(2).mT,
                 inner=module)


def _convolutions() -> Mapping[str, nn.Module]:
    return _linear(conv1=_over_frames(nn.Conv1d(D, D, 2)),
                   conv2=_over_frames(nn.Conv2d(D, D, (2, 1)), 2),
                   conv3=_over_frames(nn.Conv3d(D, D, 1), 3))


def _recurrent(kind: Any) -> nn.Module:
    return Wired(lambda m, x: m.inner(x)[0], inner=kind(D, D, batch_first=True))


def _linear(**between: nn.Module) -> Mapping[str, nn.Module]:
    return {"first": nn.Linear(D, D), "tanh": nn.Tanh(), **between, "last": nn.Linear(D, 3)}


def _tied() -> Mapping[str, nn.Module]:
    table, output = nn.Embedding(7, D), nn.Linear(D, 7, bias=False)
    output.weight = table.weight
    return {"table": table, "inner": nn.Linear(D, D), "output": output}


def _attention() -> nn.Module:
    return Wired(lambda m, x: m.inner(x, x, x, need_weights=False)[0],
                 inner=nn.MultiheadAttention(D, 2, batch_first=True))


def _sdpa() -> nn.Module:
    return Wired(lambda m, x: nn.functional.scaled_dot_product_attention(*m.qkv(x).chunk(3, dim=2)),
                 qkv=nn.Linear(D, 3 * D))


SECOND_ORDER = ("psgd", "hessian_free", "ksd", "lissa", "sfn", "esgd", "adahessian")
SPLIT = tuple(kind for kind in METHODS
              if METHODS[kind].traits.splits_work or METHODS[kind].traits.agrees_over_ranks)
FIRST = ("first.weight",)
NOT_CHAINS = ("convolution with groups", "BatchNorm (training)", "LayerNorm, RMSNorm", "GroupNorm", "Embedding",
              "tied weights (embedding and output)", "MultiheadAttention", "scaled_dot_product_attention",
              "LSTM, GRU, RNN", "any loss, with `num_rows=`")
FEATURES = (
    Feature("Linear", _linear, (*FIRST, "first.bias")),
    Feature("Conv1d, Conv2d, Conv3d", _convolutions,
            ("conv1.inner.weight", "conv2.inner.weight", "conv3.inner.weight")),
    Feature("convolution with groups",
            lambda: _linear(conv=_over_frames(nn.Conv1d(D, D, 2, groups=2))),
            ("conv.inner.weight",)),
    Feature("BatchNorm (training)", lambda: _linear(norm=_over_frames(nn.BatchNorm1d(D))),
            (*FIRST, "norm.inner.weight")),
    Feature("LayerNorm, RMSNorm", lambda: _linear(norm=nn.LayerNorm(D), rms=nn.RMSNorm(D)),
            ("norm.weight", "norm.bias", "rms.weight")),
    Feature("GroupNorm", lambda: _linear(norm=_over_frames(nn.GroupNorm(2, D))),
            ("norm.inner.weight",)),
    Feature("Embedding", lambda: {"table": nn.Embedding(7, D), **_linear()}, ("table.weight",),
            words=True),
    Feature("tied weights (embedding and output)", _tied, ("table.weight",), words=True),
    Feature("MultiheadAttention", lambda: _linear(attention=_attention()),
            ("attention.inner.in_proj_weight", "attention.inner.out_proj.weight")),
    Feature("scaled_dot_product_attention", lambda: _linear(attention=_sdpa()),
            ("attention.qkv.weight",)),
    Feature("LSTM, GRU, RNN", lambda: _linear(LSTM=_recurrent(nn.LSTM), GRU=_recurrent(nn.GRU),
                                              RNN=_recurrent(nn.RNN)),
            ("LSTM.inner.weight_ih_l0", "LSTM.inner.weight_hh_l0", "GRU.inner.weight_hh_l0",
             "RNN.inner.weight_hh_l0")),
    Feature("Conv1D of Hugging Face", lambda: _linear(conv=_conv1d()),
            ("conv.weight", "conv.bias")),
    Feature("parameter of a custom module", lambda: _linear(scale=Scale()), ("scale.gamma",),
            errors=SEES_ROWS, named='skip=("scale.gamma"', remedy={"skip": ("scale.gamma",)},
            way_out='`skip=("scale.gamma",)`: it keeps its plain gradient'),
    Feature("bfloat16 parameters", _linear, FIRST, loop="bfloat16"),
    Feature("any loss, with `num_rows=`", _linear, FIRST, loop="any loss",
            errors=("hessian_free", "ksd"), named='products="hessian"', way_out='`products="hessian"`',
            remedy={"products": "hessian"}),
    Feature("checkpoint(use_reentrant=False)", _linear, FIRST, loop="checkpoint"),
    Feature("checkpoint(use_reentrant=True)", _linear, FIRST, loop="reentrant",
            errors=(*SEES_ROWS, *SECOND_ORDER), named="use_reentrant=False",
            way_out="`use_reentrant=False`"),
    Feature("DistributedDataParallel", _linear, FIRST, loop="ddp",
            errors=tuple(kind for kind in METHODS if kind not in SPLIT), named="KFAC",
            way_out=" or ".join(f"`{kind}`" for kind in SPLIT)))


def made(feature: Feature) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """(the model, what the loop calls, x, y)."""
    torch.manual_seed(0)
    model = Net(feature.parts(), feature.loop)
    x, y = torch.randint(7, (N, T)) if feature.words else torch.randn(N, T, D), torch.arange(N) % 3
    if feature.loop == "bfloat16":
        model, x = model.bfloat16(), x.bfloat16()
    return (model, nn.parallel.DistributedDataParallel(model) if feature.loop == "ddp" else model,
            x, y)


def table() -> str:
    """The table in Markdown: methods that agree in all rows have one column."""
    columns: dict[tuple[bool, ...], list[str]] = {}
    for kind in METHODS:
        columns.setdefault(tuple(feature.refuses(kind) for feature in FEATURES), []).append(kind)
    heads = [", ".join(f"`{kind}`" for kind in kinds) for kinds in columns.values()]
    lines = [f"| | {' | '.join(heads)} | way out of an error |", "|---" * (len(heads) + 2) + "|"]
    for number, feature in enumerate(FEATURES):
        cells = ["error" if errors[number] else "works" for errors in columns]
        way_out = feature.way_out or ("`kfac`" if feature.label in NOT_CHAINS else "")
        lines.append(f"| {' | '.join([feature.label, *cells, way_out])} |")
    return "\n".join(lines)


def choices() -> str:
    """The methods with their choices, and costs from benchmarks/preconditioners.py, in Markdown."""
    with (PAGE.parents[1] / "benchmarks" / "preconditioners.csv").open() as file:
        (_, *heads), *rows = csv.reader(file)
    measured = {kind: cells for kind, *cells in rows}
    lines = ["| class | `optimizer=` | curvature | representation | granularity | solver | DDP | average over workers | "
             + " | ".join(heads) + " |", "|---" * (8 + len(heads)) + "|"]
    for kind, one in METHODS.items():
        traits = one.traits
        ddp = "averages its curvature" if traits.splits_work else "agrees" if traits.agrees_over_ranks else "error"
        cells = (f"`{one.__name__}`", f"`{kind}`", *traits.axes, ddp, "yes" if traits.has_mean else "error", *measured[kind])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """The page with its tables made again; each stands between two marks."""
    for name, made_again in (("support", table()), ("choices", choices())):
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not end:
            raise ValueError(f"{PAGE} has no place for the table of {name}")
        text = f"{before}{start}{made_again}\n{end}{after}"
    return text
