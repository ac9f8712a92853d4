"""Every product of a weight with rows in a forward pass, written out, and Kronecker factors from
them.

Linear and convolutional layers are watched by hooks; recurrent and attention layers are replaced by
the formulas of torch's documentation, one step at a time. Jacobians come from autograd, one output
number of one sample at a time.

Letters: N samples, T positions, I inputs, O outputs, F outputs of the network per sample, E
embedding, P heads.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.reference.curvature import kronecker_factors


class Use(NamedTuple):
    """y = W x (+ b) at T positions of every sample."""

    rows_NTI: Tensor
    y: Tensor             # of the product's own shape
    is_convolution: bool  # then y is N x O x positions, else N x .. x O


class Uses:
    """The products of one forward pass by the weight's name, and its output."""

    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.by_weight: defaultdict[str, list[Use]] = defaultdict(list)
        model = copy.deepcopy(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.LSTM | nn.GRU | nn.RNN):
                model.set_submodule(name, _Recurrent(module, name, self))
            elif isinstance(module, nn.MultiheadAttention):
                model.set_submodule(name, _Attention(module, name, self))
            elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
                module.register_forward_hook(self._hook(f"{name}.weight"))
        # written out; the parameters of a replaced layer are those of its attribute `layer`
        self.model = model
        self.f_NF = model(x).reshape(len(x), -1)

    def product(self, weight: str, x: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
        """x W^T + b, noted."""
        y = x @ W.T
        return self._noted(weight, Use(_positions(x.detach()), y if b is None else y + b, False))

    def factors(self, H_NFF: Tensor, sharing: str) -> dict[str, tuple[Tensor, Tensor]]:
        """(B, A) by the weight's name; the calls of a layer are positions."""
        found = {}
        for weight, uses in self.by_weight.items():
            rows_NTI = torch.cat([use.rows_NTI for use in uses], dim=1)
            found[weight] = kronecker_factors(rows_NTI, self._jacobian(uses), H_NFF, sharing)
        return found

    def _jacobian(self, uses: list[Use]) -> Tensor:
        """N x F x T x O."""
        by_output = []
        for n, f_F in enumerate(self.f_NF):
            for f in f_F:
                slopes = torch.autograd.grad(f, [use.y for use in uses], retain_graph=True)
                parts = [_channels_last(e[n:n + 1]) if use.is_convolution else _positions(e[n:n + 1])
                         for e, use in zip(slopes, uses, strict=True)]
                by_output.append(torch.cat(parts, dim=1)[0])
        return torch.stack(by_output).view(*self.f_NF.shape, *by_output[0].shape)

    def _hook(self, weight: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            if isinstance(layer, nn.Linear):
                return self._noted(weight, Use(_positions(args[0].detach()), y, False))
            return self._noted(weight, Use(_patches(layer, args[0].detach()), y, True))
        return hook

    def _noted(self, weight: str, use: Use) -> Tensor:
        self.by_weight[weight].append(use)
        return use.y.clone()  # the next operation may change it in place


def _positions(x: Tensor) -> Tensor:
    """N x T x D of N x D or N x T x D."""
    return x.reshape(len(x), -1, x.shape[-1])


def _channels_last(x_NO: Tensor) -> Tensor:
    return x_NO.flatten(2).transpose(1, 2)


def _patches(layer: Any, x_NC: Tensor) -> Tensor:
    """N x T x I: a convolution with one output for each element of the patch."""
    I = layer.weight[0].numel()  # noqa: E741
    unit = torch.eye(I, dtype=x_NC.dtype).view(I, *layer.weight.shape[1:])
    convolve = {3: nn.functional.conv1d, 4: nn.functional.conv2d, 5: nn.functional.conv3d}[x_NC.ndim]
    padding = layer.padding
    if layer.padding_mode != "zeros":
        sides = [side for size in reversed(padding) for side in (size, size)]
        x_NC, padding = nn.functional.pad(x_NC, sides, mode=layer.padding_mode), 0
    rows: Tensor = convolve(x_NC, unit, None, layer.stride, padding, layer.dilation)
    return _channels_last(rows)


class _Recurrent(nn.Module):
    """LSTM, GRU or RNN by its formulas."""

    def __init__(self, layer: Any, name: str, uses: Uses) -> None:
        super().__init__()
        self.layer, self.name, self.batch_first = layer, name, layer.batch_first
        self.product = uses.product

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        x_NTI = x if self.batch_first else x.transpose(0, 1)
        for number in range(self.layer.num_layers):
            sides = [self._one_way(x_NTI, f"l{number}")]
            if self.layer.bidirectional:
                sides.append(self._one_way(x_NTI.flip(1), f"l{number}_reverse").flip(1))
            x_NTI = torch.cat(sides, dim=2)
        return x_NTI if self.batch_first else x_NTI.transpose(0, 1), None

    def _product(self, kind: str, suffix: str, x: Tensor) -> Tensor:
        of = dict(self.layer.named_parameters())
        name = f"weight_{kind}_{suffix}"
        y: Tensor = self.product(f"{self.name}.{name}", x, of[name], of.get(f"bias_{kind}_{suffix}"))
        return y

    def _one_way(self, x_NTI: Tensor, suffix: str) -> Tensor:
        layer = self.layer
        h = x_NTI.new_zeros(len(x_NTI), getattr(layer, "proj_size", 0) or layer.hidden_size)
        c = x_NTI.new_zeros(len(x_NTI), layer.hidden_size)
        steps = []
        for x in x_NTI.unbind(1):
            a, b = self._product("ih", suffix, x), self._product("hh", suffix, h)
            if layer.mode == "LSTM":
                i, f, g, o = (a + b).chunk(4, dim=1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                h = self._product("hr", suffix, h) if layer.proj_size else h
            elif layer.mode == "GRU":
                (a_r, a_z, a_n), (b_r, b_z, b_n) = a.chunk(3, dim=1), b.chunk(3, dim=1)
                r, z = torch.sigmoid(a_r + b_r), torch.sigmoid(a_z + b_z)
                h = (1 - z) * torch.tanh(a_n + r * b_n) + z * h
            else:
                h = torch.tanh(a + b) if layer.mode == "RNN_TANH" else torch.relu(a + b)
            steps.append(h)
        return torch.stack(steps, dim=1)


class _Attention(nn.Module):
    """Multi-head attention by its formula; each of query, key and value by the complete matrix."""

    def __init__(self, layer: Any, name: str, uses: Uses) -> None:
        super().__init__()
        self.layer, self.name = layer, name
        self.product = uses.product

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, None]:
        layer, P = self.layer, self.layer.num_heads
        if query is key is value:
            q, k, v = self._in(query).chunk(3, dim=2)
        else:
            q, k, v = (self._in(x).chunk(3, dim=2)[part] for part, x in enumerate((query, key, value)))
        heads = []
        for q_h, k_h, v_h in zip(q.chunk(P, dim=2), k.chunk(P, dim=2), v.chunk(P, dim=2), strict=True):
            weights = torch.softmax(torch.einsum("nte,nse->nts", q_h, k_h) / math.sqrt(q_h.shape[2]), dim=2)
            heads.append(torch.einsum("nts,nse->nte", weights, v_h))
        y = self.product(f"{self.name}.out_proj.weight", torch.cat(heads, dim=2), layer.out_proj.weight, layer.out_proj.bias)
        return y, None

    def _in(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(f"{self.name}.in_proj_weight", x, self.layer.in_proj_weight, self.layer.in_proj_bias)
        return y
