"""Decomposition of recurrent and attention layers into affine products that can be captured.

Letters: N samples, T positions (frames), S positions attended to, I inputs, H hidden units, E
embedding, P heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ngsgd.errors import ConfigError, DataError

# (name of the product, x, weight, bias) -> y
Product = Callable[..., Tensor]
Expansion = Callable[[Any, tuple[Any, ...], dict[str, Any], Any, Product], Any]


def plain_product(part: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a product inside a layer that is not captured."""
    return nn.functional.linear(x, weight, bias)


def expansion_of(module: nn.Module) -> Expansion | None:
    """Return the function that computes the output from the products; None for other modules."""
    return next((expand for plain, expand in _EXPANSIONS.items()
                 if isinstance(module, plain) and type(module).forward is plain.forward and "forward" not in vars(module)), None)


def has_other_result(module: Any, output: Any, computed: Any) -> bool:
    """Return whether hooks changed half of the output's digits, or there are any, with dropout."""
    hooks = [hook for hook in module._forward_hooks.values() if not str(getattr(hook, "__module__", "")).startswith("ngsgd.")]
    if not hooks:
        return False
    if module.training and module.dropout:
        return True
    pairs = zip(tree_leaves(output), tree_leaves(computed), strict=False)
    return any(float((a - b).norm()) > 4.0 * torch.finfo(b.dtype).eps ** 0.5 * float(b.norm())
               for a, b in ((a.detach(), b.detach()) for a, b in pairs if isinstance(b, Tensor)))


def _recurrent(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, product: Product) -> Any:
    """Return the output and the last state of an LSTM, GRU or RNN."""
    x, state = _of(args, kwargs, ("input", "hx"))
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise DataError(f"{type(module).__name__} got {type(x).__name__} of "
                        f"{getattr(x, 'ndim', 'no')} dimensions; its curvature needs padded "
                        "minibatches of three dimensions.")
    x_NTI = x if module.batch_first else x.transpose(0, 1)
    num_directions = 2 if module.bidirectional else 1
    last: list[tuple[Tensor, ...]] = []
    for layer in range(module.num_layers):
        sides = []
        for direction in range(num_directions):
            index = layer * num_directions + direction
            start: tuple[Tensor | None, ...] = (None, None)
            if state is not None:
                start = (state[0][index], state[1][index]) if isinstance(module, nn.LSTM) else (state[index], None)
            h_NTH, final = _one_direction(module, index, x_NTI, start, product, backwards=direction == 1)
            sides.append(h_NTH)
            last.append(final)
        x_NTI = torch.cat(sides, dim=2) if len(sides) > 1 else sides[0]
        if module.dropout and layer < module.num_layers - 1:
            x_NTI = nn.functional.dropout(x_NTI, module.dropout, module.training)
    states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return x_NTI if module.batch_first else x_NTI.transpose(0, 1), states if isinstance(module, nn.LSTM) else states[0]


def _one_direction(module: Any, index: int, x_NTI: Tensor, start: tuple[Tensor | None, ...], product: Product, *,
                   backwards: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    names = module._all_weights[index]
    of = {name.split("_")[0] + "_" + name.split("_")[1]: getattr(module, name) for name in names}
    suffix = names[0].removeprefix("weight_ih_")
    N, T = x_NTI.shape[:2]
    from_input_NTG = product(f"ih_{suffix}", x_NTI, of["weight_ih"], of.get("bias_ih"))
    hr = of.get("weight_hr")
    h_NH, c_NH = start
    h_NH = x_NTI.new_zeros(N, len(hr) if hr is not None else module.hidden_size) if h_NH is None else h_NH
    c_NH = x_NTI.new_zeros(N, module.hidden_size) if c_NH is None else c_NH
    steps: list[Tensor] = []
    for t in reversed(range(T)) if backwards else range(T):
        from_state_NG = product(f"hh_{suffix}", h_NH, of["weight_hh"], of.get("bias_hh"))
        h_NH, c_NH = _CELLS[module.mode](from_input_NTG[:, t], from_state_NG, h_NH, c_NH)
        if hr is not None:
            h_NH = product(f"hr_{suffix}", h_NH, hr, None)
        steps.append(h_NH)
    final = (h_NH, c_NH) if module.mode == "LSTM" else (h_NH,)
    return torch.stack(steps[::-1] if backwards else steps, dim=1), final


def _lstm(x_NG: Tensor, h_NG: Tensor, h_NH: Tensor, c_NH: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = (x_NG + h_NG).chunk(4, dim=1)
    c_NH = f.sigmoid() * c_NH + i.sigmoid() * g.tanh()
    return o.sigmoid() * c_NH.tanh(), c_NH


def _gru(x_NG: Tensor, h_NG: Tensor, h_NH: Tensor, c_NH: Tensor) -> tuple[Tensor, Tensor]:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x_NG.chunk(3, dim=1), h_NG.chunk(3, dim=1)
    new_NH = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    z_NH = (x_z + h_z).sigmoid()
    return new_NH + z_NH * (h_NH - new_NH), c_NH


_CELLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "LSTM": _lstm, "GRU": _gru,
    "RNN_TANH": lambda x_NH, h_NH, _, c_NH: ((x_NH + h_NH).tanh(), c_NH),
    "RNN_RELU": lambda x_NH, h_NH, _, c_NH: ((x_NH + h_NH).relu(), c_NH)}

_ATTENTION = ("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


def _attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, product: Product) -> Any:
    """Return the output of nn.MultiheadAttention, and its weights if requested."""
    query, key, value, padding, need_weights, mask, average, _ = _of(args, kwargs, _ATTENTION)
    if module.bias_k is not None or module.add_zero_attn:
        raise ConfigError("MultiheadAttention with add_bias_kv or add_zero_attn is not supported "
                          "for curvature; create it without them.")
    if query.ndim != 3:
        raise DataError(f"MultiheadAttention got a query of {query.ndim} dimensions; its curvature "
                        "needs minibatches of three.")
    q, k, v = _projections(module, query, key, value, product)
    P = module.num_heads
    q, k, v = (x.unflatten(2, (P, -1)).transpose(1, 2) for x in (q, k, v))
    scores_NPTS = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores_NPTS = _masked(scores_NPTS, mask if mask.ndim == 2 else mask.unflatten(0, (-1, P)))
    if padding is not None:
        scores_NPTS = _masked(scores_NPTS, padding[:, None, None])
    weights_NPTS = scores_NPTS.softmax(dim=-1)
    dropped = nn.functional.dropout(weights_NPTS, module.dropout, module.training)
    heads_NTE = (dropped @ v).transpose(1, 2).flatten(2)
    y = product("out_proj", heads_NTE, module.out_proj.weight, module.out_proj.bias)
    weights = None
    if need_weights is not False:
        weights = weights_NPTS.mean(dim=1) if average is not False else weights_NPTS
    return y if module.batch_first else y.transpose(0, 1), weights


def _projections(module: Any, query: Tensor, key: Tensor, value: Tensor, product: Product) -> tuple[Tensor, ...]:
    inputs = [x if module.batch_first else x.transpose(0, 1) for x in (query, key, value)]
    if module.in_proj_weight is None:
        if module.in_proj_bias is not None:
            raise ConfigError("MultiheadAttention with kdim or vdim shares one bias among three "
                              "GEMMs; create it with bias=False.")
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return tuple(product(f"{name}_proj", *parts, None) for name, *parts in zip("qkv", inputs, weights, strict=True))
    if query is key is value:
        return product("in_proj", inputs[0], module.in_proj_weight, module.in_proj_bias).chunk(3, dim=2)
    # The complete matrix each time; unused parts get zero derivatives.
    return tuple(product("in_proj", x, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=2)[part]
                 for part, x in enumerate(inputs))


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def _of(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
    """Return the arguments in order; None for missing ones."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


_EXPANSIONS: dict[type[nn.Module], Expansion] = {
    nn.LSTM: _recurrent, nn.GRU: _recurrent, nn.RNN: _recurrent, nn.MultiheadAttention: _attention}
