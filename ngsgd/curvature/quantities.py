"""Quantities: their sums over the uses of every parameter, and the results of these sums."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.forms.grad_forms import DenseGrad, GradForm, Inputs, OuterProduct, RowSum
from ngsgd.curvature.forms.kronecker import Gram, Kronecker, add_inputs, output_rows
from ngsgd.curvature.layers import LayerCall
from ngsgd.curvature.products import Pass, Products
from ngsgd.errors import ConfigError
from ngsgd.ops.linalg import damped_cholesky, shared_damping

# The signal to backpropagate for a quantity (the gradient, columns of the loss Hessian, ..), and
# the form (squares, norms, factors, ..) that is computed from it.
SIGNALS = {
    "batch_grad": ("gradient", "individual"), "batch_l2": ("gradient", "norms"), "sum_grad_squared": ("gradient", "squares"),
    "second_moment": ("gradient", "squares"), "variance": ("gradient", "moments"), "kfac_emp": ("gradient", "factors"),
    "diag_ggn": ("exact", "squares"), "batch_diag_ggn": ("exact", "by_sample"), "sqrt_ggn": ("exact", "individual"),
    "kflr": ("exact", "factors"),
    "diag_ggn_mc": ("sampled", "squares"), "batch_diag_ggn_mc": ("sampled", "by_sample"), "sqrt_ggn_mc": ("sampled", "individual"),
    "kfac": ("sampled", "factors"),
    "kfra": ("averages", "factors"),
    "diag_h": ("hessian", "squares"), "batch_diag_h": ("hessian", "by_sample")}
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
    num_rows: int = 0
    # inputs that wait for their product
    waiting: Inputs | None = None
    # mean, once final
    A_II: Tensor | None = None
    variance: Tensor | None = None
    # set when no further backward pass follows
    is_settled: bool = False

    def take_inputs(self, inputs: Inputs, sharing: str) -> None:
        """Add input rows to A; those far smaller than A wait for the end of the backward pass."""
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
                 bias_of: Accumulators | None, options: CollectOptions, passes: list[Pass]) -> None:
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


def _value(quantity: str, sums: Accumulators, weight: Accumulators | None, options: CollectOptions) -> Any:
    (signal, form), shape = SIGNALS[quantity], sums.shape
    if form == "factors":
        return _factors(signal, sums, weight, options)
    if quantity == "variance" and sums.variance is not None:
        return sums.variance.view(shape)
    if quantity in ("second_moment", "variance"):
        return _moment(quantity, sums.found["gradient", "squares"].clone(), sums, options).view(shape)
    x = sums.found[signal, form]
    if form == "squares":
        return x.view(shape)
    if form == "norms":
        return x[0]
    if form == "by_sample":
        return x.view(-1, *shape)
    return x[0].view(-1, *shape) if signal == "gradient" else x.view(*x.shape[:2], *shape)


def _moment(quantity: str, squares: Tensor, sums: Accumulators, options: CollectOptions) -> Tensor:
    """Return second moment or variance ("backpack": of g_n / N), in the memory of the squares."""
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
        sums.variance = _moment("variance", sums.found.pop(("gradient", "squares")), sums, options)
        del sums.found["gradient", "sum"]
    for B_OO in sums.B_OO.values():
        B_OO.total()
    sums.is_settled = True
    sums.multiply(options.sharing)
    if sums.num_rows:
        sums.A_II = sums.moment_II.total().div_(sums.num_rows)


def _factors(signal: str, sums: Accumulators, weight: Accumulators | None, options: CollectOptions) -> Kronecker:
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


class Accumulation:
    """Sums of every parameter for the requested quantities."""

    def __init__(self, asked: Iterable[str], parameters: Mapping[str, Tensor], options: CollectOptions) -> None:
        self.forms: dict[str, set[str]] = defaultdict(set)   # of each signal
        for signal, form in (SIGNALS[quantity] for quantity in asked if quantity in SIGNALS):
            self.forms[signal].add(form)
        if "moments" in self.forms["gradient"]:
            self.forms["gradient"].add("squares")
        self.has_factors = any("factors" in forms for forms in self.forms.values())
        self.sums = {name: Accumulators(p.shape) for name, p in parameters.items()}
        self.weight_of: dict[str, str] = {}                  # by name of the bias
        self._weights: set[str] = set()
        self._options = options

    def note(self, call: LayerCall) -> None:
        """Register which parameters belong together."""
        if call.weight is not None:
            self._weights.add(call.weight)
            if call.bias is not None:
                self.weight_of[call.bias] = call.weight

    def accumulate(self, name: str, signal: str, share: GradForm, fresh: PassResults, *,
                   without_sum: bool = False, signs_VN: Tensor | None = None) -> None:
        """Add the share of one block of vectors to a parameter."""
        forms = self.forms[signal]
        # The factor of a bias is part of its weight.
        if "factors" in forms and not (isinstance(share, RowSum) and name in self.weight_of):
            if not (isinstance(share, RowSum) and name not in self._weights) \
                    and not (isinstance(share, OuterProduct) and share.groups == 1):
                raise ConfigError(f"parameter {name} has no Kronecker factors: they are defined "
                                  "for Linear, Conv1d, Conv2d and Conv3d without groups and for "
                                  "the GEMMs of recurrent and attention layers; exclude its layer "
                                  "with layers=.")
            self.sums[name].B_OO[signal].add(output_rows(share.e_VNTO, self._options.sharing))
        if "individual" in forms:
            g_VNP = share.individual(0, share.num_samples)
            fresh.append(name, "individual", g_VNP)
            share = share if isinstance(share, OuterProduct) and share.is_rank_one else DenseGrad(g_VNP)
        if "norms" in forms:
            fresh.append(name, "norms", share.squared_norms())
        if "by_sample" in forms:
            fresh.add(name, "by_sample", share.squares_by_sample(signs_VN))
        if "moments" in forms and not without_sum:
            total, squares = share.moments()
            fresh.add(name, "sum", total)
            fresh.add(name, "squares", squares)
        elif "squares" in forms:
            fresh.add(name, "squares", share.sum_of_squares(signs_VN))

    def keep(self, signal: str, fresh: PassResults) -> None:
        """Merge new results: another pass has other samples, another loss of a pass the same."""
        number = torch._C._current_graph_task_id()
        for (name, form), value in fresh.found.items():
            sums, key = self.sums[name], (signal, form)
            before, dim = sums.found.get(key), 0 if form == "by_sample" else 1
            is_of_samples = form in ("individual", "norms", "by_sample")
            if before is None:
                sums.found[key] = value
                if is_of_samples:
                    sums.last[key] = number, 0
            elif not is_of_samples:
                sums.found[key] = before + value
            elif sums.last[key][0] != number or signal == "gradient":
                sums.last[key] = number, before.shape[dim]
                # Pad with zeros if there are fewer vectors (a loss of fewer classes).
                V, parts = max(len(before), len(value)), [before, value]
                if dim == 1 and len(before) != len(value):
                    parts = [torch.cat([x, x.new_zeros(V - len(x), *x.shape[1:])]) for x in parts]
                sums.found[key] = torch.cat(parts, dim=dim)
            elif form == "by_sample":
                before[sums.last[key][1]:] += value
            else:
                more_VNP = value.new_zeros(len(value), *before.shape[1:])
                more_VNP[:, sums.last[key][1]:] = value
                sums.found[key] = torch.cat([before, more_VNP])


def damped_direction(gradient: Tensor, parameter: Tensor, curvature: Tensor | Kronecker, *, damping: float,
                     l2: float = 0.0) -> Tensor:
    """Return (G + (damping + l2) I)^-1 (gradient + l2 parameter); a step subtracts it.

    Kronecker factors are damped one by one as in Martens and Grosse (2015), with pi^2 = (tr A / dim
    A) / (tr B / dim B):

        (B (x) A + d I)^-1  ~  (B + sqrt(d) / pi I)^-1 (x) (A + pi sqrt(d) I)^-1

    Args:
        gradient: of the parameter.
        parameter: theta.
        curvature: diagonal of G in the shape of the parameter, or its Kronecker factors.
        damping: > 0, typically 1e-4 to 1.
        l2: >= 0; l2 / 2 |theta|^2 is added to the loss.

    Raises:
        ValueError: damping + l2 is not positive.
        DivergenceError: a factor is not finite, or not positive definite in spite of its damping.

    Source: arXiv 1912.10985, equations 27 to 29.

    Example:
        >>> damped_direction(torch.tensor([2.0]), torch.tensor([0.0]), torch.tensor([3.0]), damping=1.0)
        tensor([0.5000])
    """
    total = damping + l2
    if not (damping >= 0.0 and l2 >= 0.0 and total > 0.0):
        raise ValueError(f"damping is {damping} and l2 is {l2}; both must be at least 0 and one of "
                         "them positive")
    right = gradient if l2 == 0.0 else gradient + l2 * parameter
    if isinstance(curvature, Tensor):
        return right / (curvature + total)
    if curvature.A_II is None:
        return _solved(curvature.B_OO, total, right.reshape(len(curvature.B_OO), -1)).view_as(right)
    of_B, of_A = shared_damping(curvature.B_OO, curvature.A_II, total)
    half_OI = _solved(curvature.B_OO, of_B, right.reshape(len(curvature.B_OO), -1))
    return _solved(curvature.A_II, of_A, half_OI.T).T.reshape(right.shape)


def _solved(factor_DD: Tensor, damping: float, right_DX: Tensor) -> Tensor:
    """Return (factor + damping I)^-1 right."""
    root_DD = damped_cholesky(factor_DD, damping)
    return torch.cholesky_solve(right_DX.to(root_DD.dtype), root_DD).to(right_DX.dtype)


@dataclass(frozen=True)
class GradientNoise:
    """Gradient noise of one parameter or a complete model."""

    trace: float           # S
    # of the true gradient; an estimate, so it may be negative on a small minibatch
    squared_norm: float

    @property
    def noise_scale(self) -> float:
        """Noise scale in samples; infinite if the gradient is not above its noise."""
        return self.trace / self.squared_norm if self.squared_norm > 0.0 else float("inf")

    @property
    def signal_to_noise(self) -> float:
        """Squared norm of the gradient over the trace of the per-sample covariance."""
        return self.squared_norm / self.trace if self.trace > 0.0 else float("inf")


def gradient_noise(quantities: Mapping[str, Any], num_samples: int) -> dict[str, GradientNoise]:
    """Compute the noise of every parameter by name, and of all together as "".

        trace of the per-sample covariance    S = N / (N - 1) times the sum of the variances
        squared norm of the true gradient     |g|^2 - S / N
        simple noise scale                    S / |true g|^2

    The noise scale is the minibatch size above which averaging saturates.

    Args:
        quantities: result of `collect(model, "variance", "second_moment", ..)`.
        num_samples: N, of the minibatch; at least 2.

    Source: McCandlish et al. 2018.

    Example:
        >>> from types import SimpleNamespace
        >>> q = {"w": SimpleNamespace(variance=torch.tensor([3.0]), second_moment=torch.tensor([7.0]))}
        >>> gradient_noise(q, 4)["w"]
        GradientNoise(trace=4.0, squared_norm=3.0)
    """
    if num_samples < 2:
        raise ValueError(f"num_samples is {num_samples}; a variance needs at least 2")
    found = {}
    for name in quantities:
        variance = float(quantities[name].variance.sum(dtype=torch.float64))
        trace = variance * num_samples / (num_samples - 1)
        mean = float(quantities[name].second_moment.sum(dtype=torch.float64)) - variance
        found[name] = GradientNoise(trace, mean - trace / num_samples)
    found[""] = GradientNoise(sum(noise.trace for noise in found.values()), sum(noise.squared_norm for noise in found.values()))
    return found
