"""nn.MultiheadAttention and Conv1D of Hugging Face under NGSGD, against Linear layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.errors import NgsgdWarning

# float64, other orders of the same sums
EQUAL: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
DIM, HEADS, BATCH, QUERIES, KEYS = 8, 2, 3, 5, 7


def inputs(kind: str, *, batch_first: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value)."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> Tensor:
        shape = (
            (length, DIM)
            if kind == "unbatched"
            else (BATCH, length, DIM)
            if batch_first
            else (length, BATCH, DIM)
        )
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key = draw(QUERIES), draw(KEYS)
    return {"self": (query, query, query), "cross": (query, key, key),
            "three": (query, key, draw(KEYS)), "unbatched": (query, key, key)}[kind]


def masks(kind: str, num_keys: int) -> list[dict[str, Any]]:
    future = torch.triu(torch.ones(QUERIES, num_keys, dtype=torch.bool), diagonal=1)
    padding = torch.zeros(BATCH, num_keys, dtype=torch.bool)
    padding[0, -1] = True
    found: list[dict[str, Any]] = [{}, {"attn_mask": future}]
    if kind != "unbatched":
        of_heads = future.expand(BATCH * HEADS, -1, -1)
        found += [{"attn_mask": of_heads, "key_padding_mask": padding},
                  {"key_padding_mask": padding}]
    if kind == "self":
        found.append({"attn_mask": future, "is_causal": True})
    return found


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(DIM, HEADS, **options).double()
    nn.init.normal_(layer.out_proj.bias)
    return layer


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "three", "unbatched"])
def test_outputs_and_weights_are_those_of_the_plain_layer(
    kind: str, batch_first: bool, need_weights: bool
) -> None:
    layer = attention(batch_first=batch_first)
    plain = copy.deepcopy(layer)
    optimizer = NGSGD(layer, lr=0.1)
    given = inputs(kind, batch_first=batch_first)
    for options in masks(kind, QUERIES if kind == "self" else KEYS):
        options["need_weights"] = need_weights
        for average in (True, False):
            y, weights = layer(*given, average_attn_weights=average, **options)
            y_plain, weights_plain = plain(*given, average_attn_weights=average, **options)
            torch.testing.assert_close(y, y_plain, **EQUAL)
            torch.testing.assert_close(weights, weights_plain, **EQUAL)
    assert optimizer.fallbacks == []


class ByLinear(nn.Module):
    """The same attention of two Linear layers; all rows go through the first one."""

    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(DIM, 3 * DIM).double(), nn.Linear(DIM, DIM).double()
        self.in_proj.load_state_dict({"weight": layer.in_proj_weight, "bias": layer.in_proj_bias})
        self.out_proj.load_state_dict(layer.out_proj.state_dict())

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        y = self.in_proj(query if key is query else torch.cat([query, key], dim=1))
        q, k, v = (y[:, :QUERIES, :DIM], y[:, -key.shape[1] :, DIM : 2 * DIM],
                   y[:, -key.shape[1] :, 2 * DIM :])
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in (q, k, v))
        weights = (q @ k.transpose(2, 3) / (DIM // HEADS) ** 0.5).softmax(dim=-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.entry("N2", "the model has an `nn.MultiheadAttention`", "works",
                   "natural gradient for both projections, as of Linear layers; its output is "
                   "torch's. With keys or values of another width (`kdim`, `vdim`), `add_bias_kv` "
                   "or `add_zero_attn` AdamW trains the layer")
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_projections_take_the_steps_of_linear_layers(kind: str) -> None:
    layer = attention(batch_first=True)
    oracle = ByLinear(layer)
    ours, theirs = NGSGD(layer, lr=0.01), NGSGD(oracle, lr=0.01)
    query, key, _ = inputs(kind)
    for _ in range(13):
        for optimizer, y in ((ours, layer(query, key, key, need_weights=False)[0]),
                             (theirs, oracle(query, key))):
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(layer.in_proj_weight, oracle.in_proj.weight, **EQUAL)
    torch.testing.assert_close(layer.in_proj_bias, oracle.in_proj.bias, **EQUAL)
    torch.testing.assert_close(layer.out_proj.weight, oracle.out_proj.weight, **EQUAL)
    assert all(estimate.num_calls == 13 for _, estimate in ours.preconditioners())


@pytest.mark.entry("N2")
@pytest.mark.parametrize("options", [{"kdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_other_attention_is_trained_by_adamw(options: dict[str, Any]) -> None:
    layer = attention(**options)
    with pytest.warns(NgsgdWarning):
        optimizer = NGSGD(layer, lr=0.1)
    assert type(layer) is nn.MultiheadAttention and optimizer.preconditioned == []
    assert set(optimizer.fallbacks) == {name for name, _ in layer.named_parameters()}
    assert {group["rule"] for group in optimizer.param_groups} == {"adamw"}


def test_a_transformer_layer_has_no_fallbacks_and_evaluates_as_before() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True).double().eval()
    x = inputs("self")[0]
    with torch.no_grad():
        before = layer(x)
        optimizer = NGSGD(layer, lr=0.1)
        torch.testing.assert_close(layer(x), before, **EQUAL)
    assert optimizer.fallbacks == []
    optimizer.detach()
    assert type(layer.self_attn) is nn.MultiheadAttention
    assert type(layer.self_attn.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear


@pytest.mark.entry("N3", "the model has a `Conv1D` of Hugging Face (GPT-2)", "works",
                   "natural gradient, as of a Linear layer")
def test_the_conv1d_of_hugging_face_takes_the_steps_of_a_linear_layer() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    model, oracle = (nn.Sequential(layer).double() for layer in (conv1d(5, 8), nn.Linear(8, 5)))
    oracle[0].load_state_dict({"weight": model[0].weight.T, "bias": model[0].bias})
    ours, theirs = NGSGD(model, lr=0.01), NGSGD(oracle, lr=0.01)
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    for _ in range(13):
        for optimizer, y in ((ours, model(x)), (theirs, oracle(x))):
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(model[0].weight.T, oracle[0].weight, **EQUAL)
    assert ours.fallbacks == [] and type(copy.deepcopy(model)[0]) is conv1d
    # a gradient that is returned is plain
    (found,), (expected,) = (
        torch.autograd.grad(one(x).square().sum(), one.get_parameter("0.weight"))
        for one in (model, oracle)
    )
    torch.testing.assert_close(found.T, expected, **EQUAL)
