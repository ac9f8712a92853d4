"""nn.MultiheadAttention with the natural gradient of its projections in the backward pass.

Torch passes all parameters to one function, which projects, attends and projects again. The
projection of queries, keys and values is an affine layer with three times as many outputs; the
projection of the heads is a second one. Letters: B sequences, T queries, S keys, E dimensions, H
heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from ngsgd.optim.layers.base import NaturalGradientLayer, is_plain_context
from ngsgd.optim.layers.kronecker import KroneckerPreconditioner
from ngsgd.optim.layers.linear import NaturalGradientLinear, affine


class NaturalGradientOutProjection(NaturalGradientLinear, nn.modules.linear.NonDynamicallyQuantizableLinear):
    """Replacement of the output projection under `NGSGD`."""


class NaturalGradientMultiheadAttention(NaturalGradientLayer, nn.MultiheadAttention):
    """Replacement of an `nn.MultiheadAttention` under `NGSGD`."""

    preconditioner: KroneckerPreconditioner

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the same values as torch's forward."""
        # Torch raises its own error for nested tensors.
        if not torch.is_grad_enabled() or is_plain_context(query) or query.is_nested:
            return self.plain_forward(query, key, value, key_padding_mask,  # type: ignore[no-any-return]
                                      need_weights, attn_mask, average_attn_weights, is_causal)
        is_causal, mask = _masks(self, query, key_padding_mask, attn_mask, need_weights, is_causal)
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in self._projected(query, key, value))
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = q * math.sqrt(1.0 / q.shape[-1]) @ k.transpose(-2, -1)
            weights = functional.softmax(scores if mask is None else scores + mask, dim=-1)
            weights = functional.dropout(weights, dropout) if dropout else weights
            heads = weights @ v
            weights = weights.mean(dim=1) if average_attn_weights else weights
            weights = weights if query.ndim == 3 else weights.squeeze(0)
        else:
            heads = functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        y = self.out_proj(heads.transpose(1, 2).flatten(2))
        return (y.squeeze(0) if query.ndim == 2 else y if self.batch_first else y.transpose(0, 1)), weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Project queries B x T x E, and keys and values B x S x E."""
        given = [query] if key is query and value is key else [query, key] if value is key else [query, key, value]
        inputs = [x.unsqueeze(0) if x.ndim == 2 else x if self.batch_first else x.transpose(0, 1) for x in given]
        if len(inputs) == 1:
            return list(affine(self, inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1))
        # All rows pass through one layer; unused outputs have zero derivatives.
        y = affine(self, torch.cat([x.flatten(0, 1) for x in inputs]), self.in_proj_weight, self.in_proj_bias)
        parts = [part.view(*x.shape[:2], -1).chunk(3, dim=-1)
                 for part, x in zip(y.split([x.shape[:2].numel() for x in inputs]), inputs, strict=True)]
        return [parts[0][0], parts[1][1], parts[-1][2]]


def _masks(layer: nn.MultiheadAttention, query: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None,
           need_weights: bool, is_causal: bool) -> tuple[bool, Tensor | None]:
    """Return (whether the kernel is causal, what to add to the scores B x H x T x S)."""
    if is_causal and attn_mask is None:
        raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
    key_padding_mask = functional._canonical_mask(
        key_padding_mask, "key_padding_mask", functional._none_or_dtype(attn_mask), "attn_mask", query.dtype)
    if is_causal and key_padding_mask is None and not need_weights:
        return True, None
    mask = functional._canonical_mask(attn_mask, "attn_mask", None, "", query.dtype, check_other=False)
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, layer.num_heads))
    if key_padding_mask is not None:
        padding = key_padding_mask.reshape(-1, 1, 1, key_padding_mask.shape[-1])
        mask = padding if mask is None else mask + padding
    return False, mask
