"""Networks of the rows of the support table of docs/curvature.md, and the losses of its cells."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect

LOSSES = ("cross-entropy", "summed cross-entropy", "weighted cross-entropy", "soft targets", "squared error",
          "binary cross-entropy")
DOCS = Path(__file__).parents[2] / "docs" / "curvature.md"

# the problems of a row, each of which every cell of the row is tested with
ROWS = {
    "Linear, with any dimensions between the first and the last": ("linear", "linear without bias", "linear over frames"),
    'Conv1d, Conv2d, Conv3d (stride, dilation, "same", padding modes)': (
        "conv1d", "conv1d dilated same", "conv2d", "conv2d circular", "conv3d"),
    "the same with groups": ("conv1d same",),
    "TDNN (ngsgd)": ("tdnn",),
    "TDNN-F (ngsgd) with renormalization": ("tdnnf",),
    "TDNN-F (ngsgd) with batch norm": ("tdnnf with batch norm",),
    "LSTM, GRU, RNN (layers, directions, projections)": ("lstm", "lstm with projection", "gru", "rnn"),
    "MultiheadAttention": ("attention", "cross-attention"),
    "BatchNorm (eval)": ("batch norm", "batch norm of rows"),
    "LayerNorm, RMSNorm, GroupNorm": ("layer norm", "rms norm over frames", "group norm"),
    "Embedding, also tied to the output layer": ("embedding",),
    "a layer used several times": ("functional",),
    "between layers: ReLU in place or not, LeakyReLU, Hardtanh, pooling, dropout, padding, reshaping": (
        "linear", "conv2d", "conv2d circular", "conv3d", "dropout", "pieces"),
    "between layers: sigmoid, tanh, ELU, softplus, GELU, SiLU and other elementwise functions": (
        "linear without bias", "linear over frames", "conv1d dilated same", "activations"),
    "between layers: residual sums": ("residual",),
    "between layers: p-norm, renormalization": ("p-norm",),
    "between layers: sub-classes, attention, products of two branches": ("sub-classes", "attention", "tdnnf"),
}
# parameters of normalizations and embeddings have no factors; other rows skip them by layers=
WITHOUT_FACTORS = ("conv1d same", "batch norm", "batch norm of rows", "layer norm", "rms norm over frames", "group norm",
                   "embedding")

# with every loss also where slow tests are skipped
_FAST = ("linear", "conv2d", "residual", "gru")


def cells(names: Iterable[str]) -> list[Any]:
    """Every problem with every loss; cases that depend little on the loss are marked slow."""
    return [pytest.param(name, loss, marks=[] if loss == "cross-entropy" or name in _FAST else pytest.mark.slow)
            for name in names for loss in LOSSES]


def pairs(params: Iterable[Any]) -> set[tuple[str, str]]:
    """(problem, loss) of parametrised cells."""
    return {(param.values[0], param.values[1]) for param in params}


def targets(name: str, output: Tensor) -> tuple[Any, Tensor]:
    """The loss of that name, and something to compare the output with."""
    rows = output.shape[:1] + output.shape[2:]
    y = torch.randint(output.shape[1], rows)
    if name == "cross-entropy":
        return nn.CrossEntropyLoss(), y
    if name == "summed cross-entropy":
        return nn.CrossEntropyLoss(reduction="sum"), y
    if name == "weighted cross-entropy":
        y = torch.arange(y.numel()).view_as(y) % output.shape[1]  # frame 1 is ignored
        weight = torch.rand(output.shape[1], dtype=torch.float64) + 0.1
        return nn.CrossEntropyLoss(weight=weight, ignore_index=1, label_smoothing=0.1), y
    if name == "soft targets":
        return nn.CrossEntropyLoss(label_smoothing=0.2), torch.rand_like(output).softmax(dim=1)
    if name == "squared error":
        return nn.MSELoss(), torch.randn_like(output)
    return nn.BCEWithLogitsLoss(pos_weight=torch.rand(output.shape[1], dtype=torch.float64) + 0.5), torch.rand_like(output).round()


def close(fast: Tensor, reference: Tensor) -> None:
    """float64 on both sides; a few hundred roundings."""
    scale = float(reference.detach().abs().max())
    torch.testing.assert_close(fast.reshape(reference.shape), reference, rtol=1e-10, atol=1e-11 * max(scale, 1e-3))


def drawn(loss_fn: Any, f_NC: Tensor, y: Tensor, *, num_draws: int, seed: int) -> Tensor:
    """V x N x C: the samples at the network's output with this seed, as a layer there sees it."""
    head = nn.Linear(f_NC.shape[1], f_NC.shape[1]).to(f_NC)
    with torch.no_grad():
        head.weight.copy_(torch.eye(f_NC.shape[1]))
        head.bias.zero_()
    generator = torch.Generator().manual_seed(seed)
    with collect(head, "sqrt_ggn_mc", loss_fn=loss_fn, mc_samples=num_draws, generator=generator) as q:
        loss_fn(head(f_NC), y).backward()
    draws: Tensor = q["bias"].sqrt_ggn_mc
    return draws


def documented() -> tuple[list[tuple[str, ...]], dict[str, list[str]]]:
    """(quantities of each column, cells of each row by its label) of the table in the page."""
    lines = DOCS.read_text().split("## Support\n\n")[1].split("\n\n")[0].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    columns = [tuple(re.findall(r"`(\w+)`", cell)) for cell in header[1:]]
    return columns, {row[0]: row[1:] for row in rows}
