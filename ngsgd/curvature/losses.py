"""Losses: their Hessians with respect to the network output, and interception of their calls.

A row is one loss term: for cross-entropy the C logits of one frame, otherwise a single number. The
loss is sum_r w_r l_r over rows; H_r is the second derivative of l_r. Letters: R rows, C classes, N
samples, V columns.

    loss                  H                  root                     sample
    cross-entropy         diag(p) - p p^T    C - 1 Cholesky columns   p - onehot(y), y ~ p
    mean squared error    2                  sqrt 2                   2 (f - y), y ~ N(f, 1/2)
    binary cross-entropy  s (1 - s)          sqrt(s (1 - s))          s - y, y ~ Bernoulli(s)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.overrides import TorchFunctionMode

from ngsgd.curvature.graph import describe, is_linear
from ngsgd.errors import ConfigError, DataError

FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    nn.functional.cross_entropy: nn.CrossEntropyLoss,
    nn.functional.mse_loss: nn.MSELoss,
    nn.functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss}
CLASSES = tuple(FUNCTIONS.values())
# second derivative or weight of rows unknown; the last one is new in torch 2.11 or later
_NAMES = """kl_div nll_loss ctc_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss gaussian_nll_loss binary_cross_entropy
    cosine_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss soft_margin_loss hinge_embedding_loss triplet_margin_with_distance_loss linear_cross_entropy"""
OTHERS = frozenset(getattr(nn.functional, name) for name in _NAMES.split() if hasattr(nn.functional, name))
# arguments whose effect on the second derivative is known
_ARGUMENTS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing", "pos_weight")
DEFAULTS = {function: {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}
             for function in FUNCTIONS}


@dataclass(frozen=True)
class LossEvaluation:
    """One evaluation of a loss, with the inputs of its second derivative."""

    # the network output, with its graph
    output: Tensor
    # Cross-entropy: dimension 1 of the output contains the classes (the last one for a single row
    # per sample).
    classes: bool
    # w_r; 0 for masked or ignored frames
    weight_R: Tensor
    # without classes: s (1 - s) of binary cross-entropy, 2 of the squared error
    second_R: Tensor | float = 2.0

    def rows_of(self, num_samples: int) -> int:
        """Return the rows of each sample; ConfigError if the loss does not cover all samples."""
        if len(self.output) % num_samples:
            raise ConfigError(f"the loss has {len(self.output)} rows of the output and the layers "
                              f"{num_samples} samples, so rows cannot be assigned to samples. "
                              "Compute one loss of the complete output, include rows of all "
                              "samples in each loss, or give num_samples= if layers have several "
                              "rows per sample.")
        return len(self.weight_R) // num_samples

    def rows(self) -> Tensor:
        """Return R x C (classes) or R, in at least float32, without a graph."""
        f = self.output.detach()
        f = f if f.dtype == torch.float64 else f.float()
        return f.movedim(1, -1).flatten(0, -2) if self.classes else f.flatten()

    def like_output(self, rows_VR: Tensor) -> Tensor:
        """Return rows (V x R x C or V x R) in the layout and dtype of the output."""
        f = self.output
        if not self.classes:
            return rows_VR.view(-1, *f.shape).to(f.dtype)
        moved = rows_VR.view(-1, f.shape[0], *f.shape[2:], f.shape[1])
        return moved.movedim(-1, 2).to(f.dtype)

    def product(self, u_V: Tensor) -> Tensor:
        """Return H u for vectors in the layout of the output (V x shape of the output)."""
        f, w_R = self.rows(), self.weight_R
        if not self.classes:
            u_VR = u_V.flatten(1).to(f.dtype)
            return self.like_output(u_VR * (w_R * self.second_R))
        u_VRC = u_V.movedim(2, -1).flatten(1, -2).to(f.dtype)
        p_RC = f.softmax(dim=1)
        Hu_VRC = p_RC * (u_VRC - (p_RC * u_VRC).sum(dim=-1, keepdim=True))
        return self.like_output(Hu_VRC * w_R[:, None])

    def columns(self, num_samples: int, chunk: int) -> Iterator[Tensor]:
        """Yield blocks of at most `chunk` columns of sqrt(w) S, V x shape of the output, S S^T = H.

        A column covers one frame of each sample; those of a sample sum up to its curvature.
        """
        f, root_w_R = self.rows(), self.weight_R.sqrt()
        K = self.rows_of(num_samples)
        if self.classes:
            C = f.shape[1]
            B = max(1, C - 1)  # columns of a frame
            p_NKC, root_w_NK1 = f.softmax(dim=1).view(num_samples, K, C), root_w_R.view(num_samples, K, 1)
            for first in range(0, K * B, chunk):
                block = f.new_zeros(min(chunk, K * B - first), num_samples, K, C)
                for v, column in enumerate(range(first, first + len(block))):
                    k, c = divmod(column, B)
                    torch.mul(_class_column(p_NKC[:, k], c), root_w_NK1[:, k], out=block[v, :, k])
                yield self.like_output(block.flatten(1, 2))
            return
        second_R = torch.as_tensor(self.second_R, dtype=f.dtype, device=f.device)
        root_NK = (root_w_R * second_R.sqrt()).view(num_samples, K)
        for first in range(0, K, chunk):
            block = f.new_zeros(min(chunk, K - first), num_samples, K)
            for v in range(len(block)):
                block[v, :, first + v] = root_NK[:, first + v]
            yield self.like_output(block.flatten(1))

    def sampled(self, num_draws: int, generator: torch.Generator | None) -> Tensor:
        """Return M Monte Carlo samples, M x output; outer products have the mean sum_r w_r H_r."""
        f, M = self.rows(), num_draws
        scale_R = (self.weight_R / M).sqrt()
        if self.classes:
            p_RC = f.softmax(dim=1)
            y_RM = _drawn(p_RC, M, generator)
            draws_MRC = p_RC.expand(M, -1, -1).clone()
            draws_MRC.scatter_add_(2, y_RM.T[:, :, None], -torch.ones_like(y_RM.T, dtype=f.dtype)[:, :, None])
            return self.like_output(draws_MRC.mul_(scale_R[:, None]))
        if not isinstance(self.second_R, Tensor):
            noise_MR = torch.randn(M, len(f), dtype=f.dtype, device=f.device, generator=generator)
            return self.like_output(noise_MR * (2.0**0.5 * scale_R))  # 2 (f - y), y of variance 1/2
        s_R = f.sigmoid()
        y_MR = torch.bernoulli(s_R.expand(M, -1), generator=generator)
        # pos_weight
        extra_R = torch.where(self.second_R > 0, self.second_R / (s_R * (1 - s_R)).clamp(min=1e-30), 0.0)
        return self.like_output((s_R - y_MR) * (scale_R * extra_R.sqrt()))


def _drawn(p_RC: Tensor, num_draws: int, generator: torch.Generator | None) -> Tensor:
    """Sample R x M classes from the probabilities p; torch.multinomial samples for every class."""
    total_RC = p_RC.cumsum(dim=1, dtype=torch.float64)
    u_RM = torch.rand(len(p_RC), num_draws, dtype=torch.float64, device=p_RC.device, generator=generator)
    # The first class with a larger sum, so never one of probability 0; a product may round up to
    # the complete sum.
    return torch.searchsorted(total_RC, u_RM * total_RC[:, -1:], right=True).clamp_(max=p_RC.shape[1] - 1)


def _class_column(p_NC: Tensor, c: int) -> Tensor:
    """Return column c, N x C, of the Cholesky factor of diag(p) - p p^T (Tanabe and Sagae 1992).

    With r the sum after c: L_cc = sqrt(p_c r / (p_c + r)), L_jc = -p_j sqrt(p_c / (r (p_c + r))).
    """
    after_NJ = p_NC[:, c + 1:]
    r_N = after_NJ.sum(dim=1)
    # If the remaining probabilities have underflowed, the column is 0.
    tiny = torch.finfo(p_NC.dtype).tiny
    share_N = (p_NC[:, c] / (p_NC[:, c] + r_N).clamp(min=tiny)).sqrt()
    column_NC = torch.zeros_like(p_NC)
    column_NC[:, c] = share_N * r_N.sqrt()
    column_NC[:, c + 1:] = after_NJ * -(share_N / r_N.sqrt().clamp(min=tiny**0.5))[:, None]
    return column_NC


def reduction_of(loss_fn: object) -> str | None:
    """Return the reduction over samples: "mean" or "sum"; None if unknown."""
    if not isinstance(loss_fn, nn.Module):
        return "mean" if _is_function(loss_fn) else None
    # A subclass that overrides `forward` may reduce in another way.
    if not type(loss_fn).forward.__module__.startswith("torch.nn.") or "forward" in vars(loss_fn):
        return None
    reduction = getattr(loss_fn, "reduction", None)
    return {"mean": "mean", "batchmean": "mean", "sum": "sum"}.get(reduction) if isinstance(reduction, str) else None


def check(loss_fn: object) -> None:
    """Raise ConfigError for a loss without a supported second derivative, as of its base class."""
    if not (isinstance(loss_fn, CLASSES) or _is_function(loss_fn)):
        if loss_fn is None:
            raise ConfigError("second-order quantities need the loss: give collect() the loss_fn that is called inside of "
                              "the context, such as loss_fn=nn.CrossEntropyLoss().")
        name = type(loss_fn).__name__ if isinstance(loss_fn, nn.Module) else getattr(loss_fn, "__name__", repr(loss_fn))
        raise ConfigError(f"loss_fn is {name}, whose second derivative is not supported; "
                          "second-order quantities need CrossEntropyLoss, MSELoss, "
                          "BCEWithLogitsLoss or their functional forms.")


def _is_function(loss_fn: object) -> bool:
    # Comparison instead of a lookup, because a callable object may have no hash.
    return any(loss_fn is function for function in FUNCTIONS)


class LossCall(NamedTuple):
    """A call of one of `FUNCTIONS`, without its first argument, the network output."""

    function: Callable[..., Any]
    target: Tensor
    settings: dict[str, Any]

    def of(self, output: Tensor) -> Tensor:
        """Return the loss of another output."""
        loss: Tensor = self.function(output, self.target, **self.settings)
        return loss

    def evaluation(self, output: Tensor, upstream: Tensor) -> LossEvaluation:
        """Return the evaluation of an output, with the gradient of its value upstream."""
        settings, target, kind = self.settings, self.target, FUNCTIONS[self.function]
        f = output.detach()
        dtype = f.dtype if f.dtype == torch.float64 else torch.float32
        second_R: Tensor | float = 2.0
        if issubclass(kind, nn.CrossEntropyLoss):
            if f.ndim < 2:
                raise DataError(f"the logits of a cross-entropy have shape {tuple(f.shape)}, without a "
                                "dimension of samples; pass a minibatch.")
            w_R = _class_weights(settings, f, target, dtype)
        else:
            if f.shape != target.shape:
                raise DataError(f"the loss got an output of shape {tuple(f.shape)} and a target of "
                                f"shape {tuple(target.shape)}; give them equal shapes.")
            w_R = torch.ones(f.numel(), dtype=dtype, device=f.device)
            if settings.get("weight") is not None:
                w_R = settings["weight"].to(dtype).expand_as(f).reshape(-1)
            if issubclass(kind, nn.BCEWithLogitsLoss):
                s = f.to(dtype).sigmoid()
                gain: Tensor | float = 1.0
                if settings.get("pos_weight") is not None:
                    gain = 1.0 + (settings["pos_weight"].to(dtype) - 1.0) * target.to(dtype)
                second_R = (gain * s * (1.0 - s)).flatten()
        if settings["reduction"] == "mean":
            w_R = w_R / _mean_divisor(settings, kind, f, target, dtype)
        up = upstream.detach().to(dtype)
        w_R = w_R * (up if up.ndim == 0 else up.reshape(-1))
        if bool((w_R < 0).any()) or (isinstance(second_R, Tensor) and bool((second_R < 0).any())):
            raise DataError("the loss has rows of negative weight, whose generalized Gauss-Newton "
                            "matrix has no square root; minimize a loss, not its negative.")
        return LossEvaluation(output, issubclass(kind, nn.CrossEntropyLoss), w_R, second_R)

    def require_fixed(self) -> None:
        """Raise ConfigError for a target or weight that depends on parameters."""
        for name, value in {"target": self.target, **self.settings}.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise ConfigError(f"the {name} of the loss depends on parameters, which the curvature "
                                  "would ignore: call detach() on it, or request first-order "
                                  "quantities (of a preconditioner: fisher=\"empirical\").")


def arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LossCall]:
    """Return (output, the call) of a functional loss; ConfigError for an unknown argument."""
    defaults = DEFAULTS[function]
    settings = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
    for name, value in settings.items():
        if name not in _ARGUMENTS and (isinstance(value, Tensor) or value != defaults[name]):
            raise ConfigError(f"the argument {name} of {function.__name__} is not supported for "
                              f"curvature; supported are {', '.join(_ARGUMENTS)}.")
    deprecated = settings.pop("size_average", None), settings.pop("reduce", None)
    if deprecated != (None, None):
        # They override reduction=, each with the default True.
        average, reduce = (value is None or value for value in deprecated)
        settings["reduction"] = "none" if not reduce else "mean" if average else "sum"
    return settings.pop("input"), LossCall(function, settings.pop("target"), settings)


def _class_weights(settings: dict[str, Any], f: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the factor of diag(p) - p p^T for each row: sum of weight times smoothed target."""
    C = f.shape[1]
    weight_C = settings.get("weight")
    weight_C = torch.ones(C, dtype=dtype, device=f.device) if weight_C is None else weight_C.to(dtype)
    smoothing = settings.get("label_smoothing", 0.0)
    if target.is_floating_point():
        q_RC = target.to(dtype).movedim(1, -1).flatten(0, -2)
        own_R = q_RC @ weight_C
        spread: Tensor = (1.0 - smoothing) * own_R + smoothing / C * weight_C.sum()
        return spread
    y_R = target.flatten()
    counts_R = y_R != settings.get("ignore_index", -100)
    own_R = weight_C[torch.where(counts_R, y_R, 0)]
    return torch.where(counts_R, (1.0 - smoothing) * own_R + smoothing / C * weight_C.sum(), 0.0)


def _mean_divisor(settings: dict[str, Any], kind: type[nn.Module], f: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor | float:
    if issubclass(kind, nn.MSELoss) and settings.get("weight") is not None:
        total: Tensor = settings["weight"].to(dtype).sum()
        return total
    if not issubclass(kind, nn.CrossEntropyLoss):
        return float(f.numel())
    if target.is_floating_point():
        return float(f.numel() // f.shape[1])
    return _class_weights({**settings, "label_smoothing": 0.0}, f, target, dtype).sum()


def require_linear(roots: Iterable[Node], values: Iterable[Node], layers: set[Node]) -> set[Node]:
    """Return the losses of an objective; ConfigError unless it is linear in them alone."""
    ends = set(values)
    leading: set[Node] = set()
    seen: set[Node] = set()
    # Depth first, children before parents.
    stack = [(root, False) for root in roots]
    while stack:
        node, is_done = stack.pop()
        if node in ends:
            leading.add(node)
        elif node in layers:
            raise ConfigError("the objective depends on the layers not only through the losses whose "
                              "curvature is known: it has another part, or another loss. Run a pass "
                              "with cross-entropy, mean squared error or binary cross-entropy alone, "
                              "or " + _WAY_OUT)
        elif not is_done and node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
        elif is_done and any(child in leading for child, _ in node.next_functions):
            if not is_linear(node, leading):
                raise ConfigError(f"the objective is not linear in the loss ({describe(node)}), so its "
                                  "curvature is not that of the loss. Call backward() for the loss, "
                                  "a sum or a mean of losses, detach() the factor, or " + _WAY_OUT)
            leading.add(node)
    return leading & ends


# quantities that are defined for every objective
_WAY_OUT = ("request first-order quantities (of a preconditioner: fisher=\"empirical\", with num_rows= "
            "for other losses, or products=\"hessian\" of HessianFree).")
# by which a backward pass starts
_BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


class LossCalls(TorchFunctionMode):
    """Function mode that observes calls of torch's loss functions.

    `watch` gets the call of a loss with a supported second derivative, its first argument and its
    value; `other` the name of any other loss, its first tensor with a graph and its value.
    """

    def __init__(self, watch: Callable[[LossCall, Tensor, Tensor], None],
                 other: Callable[[str, Tensor, Tensor], None] | None = None) -> None:
        super().__init__()
        self._watch, self._other = watch, other
        # nodes that the current backward pass starts at
        self._roots: list[Node] = []
        # values of losses that were not differentiated yet
        self._losses: dict[int, Node] = {}
        self._num_losses = 0
        # the last backward pass whose objective was checked, and its losses
        self._checked = -1
        self._terms: dict[int, Node] = {}

    @property
    def is_differentiating(self) -> bool:
        """Whether a backward pass that started inside the context is running."""
        return bool(self._roots)

    def add(self, value: Tensor) -> int:
        """Count a loss among the known ones and return its number."""
        assert value.grad_fn is not None
        number = self._num_losses
        self._num_losses += 1
        self._losses[number] = value.grad_fn
        return number

    def require_term(self, loss: int, layers: Iterable[GradientEdge]) -> None:
        """Raise ConfigError unless this pass is linear in its losses, one of which is this."""
        if (number := torch._C._current_graph_task_id()) != self._checked:
            if not self._roots:
                raise ConfigError("the objective of the backward pass is unknown: start it inside of the context, by "
                                  "loss.backward() or torch.autograd.grad().")
            # A graph may be differentiated again.
            known = {**self._terms, **self._losses}
            terms = require_linear(self._roots, known.values(), {edge.node for edge in layers})
            self._terms = {place: node for place, node in known.items() if node in terms}
            for place in self._terms:
                self._losses.pop(place, None)
            self._checked = number
        if loss not in self._terms:
            raise ConfigError("the input of a loss depends on another loss, so the curvature of the "
                              "objective is not that of its losses; " + _WAY_OUT)

    def require_known(self) -> None:
        """Raise ConfigError if `require_term` did not check the current backward pass."""
        if torch._C._current_graph_task_id() != self._checked:
            raise ConfigError("the backward pass is not of a loss whose curvature is known: inside of "
                              "the context, call cross-entropy, mean squared error or binary "
                              "cross-entropy with logits of torch; or " + _WAY_OUT)

    def forget(self) -> None:
        """Free the graphs of losses that were not differentiated."""
        self._losses.clear()
        self._terms.clear()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BACKWARD and args:
            starts = [args[0]] if isinstance(args[0], (Tensor, GradientEdge)) else list(args[0])
            nodes = [start.node if isinstance(start, GradientEdge) else start.grad_fn for start in starts]
            before, self._roots = self._roots, [node for node in nodes if node is not None]
            try:
                return func(*args, **kwargs)
            finally:
                self._roots = before
        value = func(*args, **kwargs)
        if func in FUNCTIONS:
            output, call = arguments(func, args, kwargs)
            self._watch(call, output, value)
        elif self._other is not None and func in OTHERS and value.requires_grad:
            seen = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad]
            self._other(func.__name__, seen[0], value)
        return value
