"""Names of the quantities, and their computation from the sums of a backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.forms.kronecker import Gram, Kronecker, add_inputs
from ngsgd.curvature.forms.layer_inputs import Inputs
from ngsgd.curvature.products.block import Pass, Products

# Signals to backpropagate for a quantity, and the forms computed from them.
SIGNALS = {
    "batch_grad": ("gradient", "individual"), "batch_l2": ("gradient", "norms"), "sum_grad_squared": ("gradient", "squares"),
    "second_moment": ("gradient", "squares"), "variance": ("gradient", "moments"), "kfac_emp": ("gradient", "factors"),
    "diag_ggn": ("exact", "squares"), "batch_diag_ggn": ("exact", "by_sample"), "sqrt_ggn": ("exact", "individual"),
    "kflr": ("exact", "factors"),
    "diag_ggn_mc": ("sampled", "squares"), "batch_diag_ggn_mc": ("sampled", "by_sample"), "sqrt_ggn_mc": ("sampled", "individual"),
    "kfac": ("sampled", "factors"),
    "kfra": ("averages", "factors"),
    "diag_h": ("hessian", "squares"), "batch_diag_h": ("hessian", "by_sample"),
}
PRODUCTS = ("hmp", "ggnmp", "pchmp")
QUANTITIES = (*SIGNALS, *PRODUCTS)
NORMALIZATIONS = ("paper", "backpack")


@dataclass(frozen=True)
class CollectOptions:
    """Options of quantities; see `collect`."""

    sharing: str
    normalization: str
    reduction: str | None
    # whether the quantities use the reduction, and it is that of loss_fn
    is_reduction_inferred: bool
    mc_samples: int
    generator: torch.Generator | None
    max_floats: int


@dataclass
class Accumulators:
    """Sums of one parameter, by (signal, form)."""

    shape: torch.Size
    found: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    # (backward pass, sample) at which the last one starts in `found`
    last: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    num_samples: int = 0
    # output factors by signal
    B_OO: defaultdict[str, Gram] = field(default_factory=lambda: defaultdict(Gram))
    # of input rows, for all signals
    moment_II: Gram = field(default_factory=Gram)
    num_rows: int = 0                               # number of rows
    # inputs that wait for their product
    waiting: Inputs | None = None
    # mean, once final
    A_II: Tensor | None = None
    variance: Tensor | None = None
    # set when no further backward pass follows
    is_settled: bool = False

    def take_inputs(self, inputs: Inputs, sharing: str) -> None:
        """Add input rows to the factor A.

        Inputs that are far smaller than A wait for the end of the backward pass, which has freed
        its memory by then.
        """
        self.multiply(sharing)
        if 2 * inputs.num_floats <= inputs.width**2:
            self.waiting = inputs.copied()
        else:
            self.num_rows += add_inputs(self.moment_II, inputs, sharing)

    def multiply(self, sharing: str) -> None:
        """Multiply all waiting inputs."""
        inputs, self.waiting = self.waiting, None
        if inputs is not None:
            self.num_rows += add_inputs(self.moment_II, inputs, sharing)


class PassResults:
    """Results of one backward pass by (parameter, form), which arrive in blocks of vectors."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, form: str, value: Tensor) -> None:
        """Add to the sum of a form."""
        key = name, form
        self.found[key] = self.found[key].add_(value) if key in self.found else value

    def append(self, name: str, form: str, value: Tensor) -> None:
        """Append a block of vectors."""
        key = name, form
        self.found[key] = torch.cat([self.found[key], value]) if key in self.found else value


class Quantities:
    """The quantities of one parameter as attributes: `q["fc.weight"].variance`.

    Example:
        >>> import torch
        >>> from ngsgd.curvature import collect
        >>> model, loss_fn = torch.nn.Linear(4, 3), torch.nn.MSELoss()
        >>> with collect(model, "variance", loss_fn=loss_fn) as q:
        ...     loss_fn(model(torch.randn(8, 4)), torch.zeros(8, 3)).backward()
        >>> q["weight"].variance.shape
        torch.Size([3, 4])
    """

    def __init__(self, name: str, asked: Sequence[str], sums: Accumulators,
                 bias_of: Accumulators | None, options: CollectOptions,
                 passes: list[Pass]) -> None:
        self._name, self._asked, self._sums, self._weight, self._options = name, asked, sums, bias_of, options
        self._passes = passes

    def __getattr__(self, quantity: str) -> Any:
        if quantity.startswith("_"):
            raise AttributeError(quantity)
        if quantity not in self._asked:
            raise AttributeError(f"{quantity} of {self._name} was not requested; use "
                                 f"collect(model, {quantity!r}, ..).")
        if quantity in PRODUCTS:
            return getattr(Products(self._name, self._passes), quantity)
        try:
            return _value(quantity, self._sums, self._weight, self._options)
        except KeyError:
            raise AttributeError(f"{quantity} of {self._name} is missing: no backward pass from "
                                 "the loss reached the layer inside collect().") from None

    def __dir__(self) -> list[str]:
        return list(self._asked)


def _value(quantity: str, sums: Accumulators, weight: Accumulators | None,
           options: CollectOptions) -> Any:
    signal, form = SIGNALS[quantity]
    shape = sums.shape
    if form == "factors":
        return _factors(signal, sums, weight, options)
    if quantity in ("second_moment", "variance"):
        return _moment(quantity, sums, options)
    x = sums.found[signal, form]
    if form == "squares":
        return x.view(shape)
    if form == "norms":
        return x[0]
    if form == "by_sample":
        return x.view(-1, *shape)
    return x[0].view(-1, *shape) if signal == "gradient" else x.view(*x.shape[:2], *shape)


def _moment(quantity: str, sums: Accumulators, options: CollectOptions) -> Tensor:
    """Compute second moment or variance from sums.

    "paper": 1/N sum_n g_n^2, minus the square of 1/N sum_n g_n; "backpack": the same with g_n / N.
    """
    if quantity == "variance" and sums.variance is not None:
        return sums.variance.view(sums.shape)
    return _moment_of(quantity, sums.found["gradient", "squares"].clone(), sums, options).view(sums.shape)


def _moment_of(quantity: str, squares: Tensor, sums: Accumulators,
               options: CollectOptions) -> Tensor:
    """Compute it in the memory of the squares."""
    N = sums.num_samples
    # With a mean over samples, the backward pass contains g_n / N.
    scale = N if options.reduction == "mean" and options.normalization == "paper" else 1
    second = squares.mul_(scale**2 / N)
    if quantity == "second_moment":
        return second
    mean = sums.found["gradient", "sum"] * (scale / N)
    # Rounding could leave negative variances.
    return second.sub_(mean.square_()).clamp_(min=0.0)


def finalize(sums: Accumulators, asked: Sequence[str], options: CollectOptions) -> None:
    """Convert sums to the requested quantities in place, when no further backward pass follows."""
    if ("gradient", "squares") in sums.found and not {"sum_grad_squared", "second_moment"} & set(asked) and "variance" in asked:
        sums.variance = _moment_of("variance", sums.found.pop(("gradient", "squares")), sums, options)
        del sums.found["gradient", "sum"]
    for B_OO in sums.B_OO.values():
        B_OO.total()
    sums.is_settled = True
    sums.multiply(options.sharing)
    if sums.num_rows:
        sums.A_II = sums.moment_II.total().div_(sums.num_rows)


def _factors(signal: str, sums: Accumulators, weight: Accumulators | None,
             options: CollectOptions) -> Kronecker:
    sums.multiply(options.sharing)
    outputs = (sums if weight is None else weight).B_OO
    if signal not in outputs:
        raise KeyError(signal)
    B_OO = outputs[signal].total() if sums.is_settled else outputs[signal].total().clone()
    if signal == "gradient" and options.reduction == "mean":
        # e e^T of the empirical Fisher matrix, with 1/N instead of its square.
        B_OO = B_OO * sums.num_samples
    if weight is not None or not sums.num_rows:
        return Kronecker(B_OO, None)
    return Kronecker(B_OO, sums.moment_II.total() / sums.num_rows if sums.A_II is None else sums.A_II)
