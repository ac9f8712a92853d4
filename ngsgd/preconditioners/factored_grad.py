"""Gradients of affine layers in factored form, G = e^T [a 1], until they are preconditioned.

P g = L G R = (e L)^T ([a 1] R) costs X O^2 + X I^2 multiplications instead of I O^2 + O I^2, and
each side uses the cheaper order. Letters: X rows, O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ngsgd.curvature.forms.kronecker import Gram
from ngsgd.curvature.layers import upcast
from ngsgd.ops import gemm
from ngsgd.ops.tensors import without_autocast


class FactoredGrad(NamedTuple):
    """Gradient of a weight, e^T a, and of a bias, the sum of e over rows."""

    a_XI: Tensor        # without the 1
    e_XO: Tensor
    has_bias: bool

    def product(self) -> tuple[Tensor, Tensor | None]:
        """Return (weight gradient, bias gradient)."""
        return _weight(self.e_XO, self.a_XI), self.e_XO.sum(dim=0) if self.has_bias else None

    def norm(self) -> Tensor:
        """Return the Frobenius norm with the bias: |e^T a|^2 is the sum over a a^T * e e^T."""
        X, O, I = len(self.a_XI), self.e_XO.shape[1], self.a_XI.shape[1]  # noqa: E741
        if X * (I + O) >= I * O:
            weight, bias = self.product()
            return weight.norm() if bias is None else torch.hypot(weight.norm(), bias.norm())
        of_a_XX, of_e_XX = products_of(self.a_XI), products_of(self.e_XO)
        if self.has_bias:
            of_a_XX += 1.0
        return torch.dot(of_a_XX.flatten(), of_e_XX.flatten()).clamp(min=0.0).sqrt()

    def preconditioned(self, left_OO: Tensor, right_II: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return L G R, (of the weight, of the bias)."""
        by_rows_in, by_rows_out = is_cheaper_by_rows(len(self.a_XI), len(left_OO), len(right_II))
        e_XO = gemm.mm(self.e_XO, left_OO) if by_rows_out else self.e_XO
        if not by_rows_in:
            weight, bias = multiplied_right(_weight(e_XO, self.a_XI), e_XO.sum(dim=0) if self.has_bias else None, right_II)
        elif not self.has_bias:
            weight, bias = _weight(e_XO, gemm.mm(self.a_XI, right_II)), None
        else:
            # [a 1] R without the last column, and that column
            of_a_II, last_I = right_II[:-1], right_II[-1]
            a_XI = gemm.linear(self.a_XI, of_a_II[:, :-1].T, last_I[:-1])
            one_X = torch.mv(self.a_XI, of_a_II[:, -1]).add_(last_I[-1])
            weight, bias = _weight(e_XO, a_XI), e_XO.T @ one_X
        if not by_rows_out:
            weight, bias = gemm.mm(left_OO, weight), None if bias is None else left_OO @ bias
        return weight, bias


def _weight(e_XO: Tensor, a_XI: Tensor) -> Tensor:
    return gemm.mm(e_XO.T, a_XI, out=a_XI.new_empty(e_XO.shape[1], a_XI.shape[1]))


def multiplied_right(weight: Tensor, bias: Tensor | None, right_II: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return [weight bias] R as (weight, bias), without joining the two."""
    if bias is None:
        return gemm.mm(weight, right_II), None
    last_I = right_II[-1]
    found = gemm.mm(weight, right_II[:-1, :-1]).addr_(bias, last_I[:-1])
    return found, torch.mv(weight, right_II[:-1, -1]) + bias * last_I[-1]


def is_cheaper_by_rows(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[bool, bool]:
    """Return whether to multiply rows before the product, for (input side, output side)."""
    return num_rows < num_outputs, num_rows < num_inputs


def products_of(x_XD: Tensor) -> Tensor:
    """Return x x^T, X x X."""
    total = Gram()
    total.add(x_XD.T)
    return total.total()


class RowGradients(TorchFunctionMode):
    """Function mode that records rows instead of weight gradients of `torch.nn.functional.linear`.

    Args:
        biases: weight name -> bias name or None, of the supported layers.
        joined: record biases with their weights; otherwise `.grad` gets them, as from other uses.
        wanted: called with the weight name and (rows, outputs, inputs with the 1 of the bias) at
            each call; True selects it.
    """

    def __init__(self, model: nn.Module, biases: Mapping[str, str | None], *, joined: bool,
                 wanted: Callable[[str, int, int, int], bool]) -> None:
        super().__init__()
        parameters = dict(model.named_parameters())
        self._bias_of = {id(parameters[name]): (name, None if bias is None else parameters[bias])
                         for name, bias in biases.items() if parameters[name].ndim == 2}
        self._joined, self._wanted = joined, wanted
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._biases = biases

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # not under torch.func or inside a recomputed checkpoint
        if func is nn.functional.linear and torch.is_grad_enabled() and torch._C._functorch.maybe_current_level() is None \
                and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            x, weight, bias = _linear_arguments(*args, **(kwargs or {}))
            name, own_bias = self._bias_of.get(id(weight), ("", None))
            if name and own_bias is bias and x.ndim > 1:
                O, I = weight.shape  # noqa: E741
                if self._wanted(name, x.numel() // I, O, I + (bias is not None and self._joined)):
                    token = torch.empty(0, device=x.device, requires_grad=True)
                    return _LinearWithRows.apply(x, weight, bias, token,  # type: ignore[no-untyped-call]
                                       _RowsSlot(self._rows, name, token), self._joined)
        return func(*args, **(kwargs or {}))

    def collect(self) -> dict[str, FactoredGrad]:
        """Return the rows of all calls since the last `collect`, by weight."""
        # Earlier calls keep the old dict; a later pass through them is not read.
        rows, self._rows = self._rows, {}
        found = {}
        for name, calls in rows.items():
            a_XI, e_XO = (part[0] if len(part) == 1 else torch.cat(part) for part in zip(*calls, strict=True))
            found[name] = FactoredGrad(a_XI, e_XO, self._joined and self._biases[name] is not None)
        return found


class _RowsSlot:
    """Storage for the rows of one call, in which an empty tensor as an argument stands for them."""

    def __init__(self, rows: dict[str, list[tuple[Tensor, Tensor]]], name: str, token: Tensor) -> None:
        self._rows, self._name = rows, name
        self.waiting: tuple[Tensor, Tensor] | None = None
        token.register_hook(self._keep)

    def _keep(self, _: Tensor) -> None:
        if self.waiting is not None:
            self._rows.setdefault(self._name, []).append(self.waiting)
            self.waiting = None


class _LinearWithRows(torch.autograd.Function):
    """`torch.nn.functional.linear` that stores rows instead of a weight gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, token: Tensor, place: _RowsSlot, joined: bool) -> Tensor:
        ctx.place, ctx.has_bias, ctx.joined = place, bias is not None, joined
        ctx.save_for_backward(x, weight)
        return gemm.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        with without_autocast(e.device.type):
            dx = gemm.input_gradient(e, weight).to(x.dtype) if ctx.needs_input_grad[0] else None
            kept = torch.promote_types(weight.dtype, torch.float32)
            a_XI, e_XO = (upcast(each.reshape(-1, each.shape[-1])).to(kept) for each in (x, e))
            # Under create_graph use torch for everything.
            if torch.is_grad_enabled():
                return dx, gemm.mm(e_XO.T, a_XI), e_XO.sum(dim=0) if ctx.has_bias else None, None, None, None
            bias = e_XO.sum(dim=0) if ctx.has_bias and not ctx.joined else None
        ctx.place.waiting = a_XI.detach(), e_XO.detach()
        return dx, None, bias, e.new_empty(0).to(weight.dtype), None, None


def _linear_arguments(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:  # noqa: A002
    return input, weight, bias
