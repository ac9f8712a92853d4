"""Checks that captured rows are those of single samples, and complete.

    graph     not all paths from the loss to a layer repeat a tensor along the leading dimension,
              as `pos(torch.arange(T))` does, whose derivative is a sum over samples
    numbers   derivatives of a sample's rows reach no rows of another sample
    sums      captured gradients of a parameter add up to its gradient

Each runs once for each model and way of calling it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

from ngsgd.curvature.forms.grad_forms import DenseGrad, EmbeddingGrad, OuterProduct
from ngsgd.curvature.layers import LayerCall, Record, UseShare

# Zero derivatives (a zero-initialized output layer) are inconclusive; limit the number of attempts.
MAX_TRIES = 3
# Fraction of squares below which values are rounding noise; a layer that runs once has about 1.
_ROUNDING = 1e-10
# The same in float16; two of 512 samples that are exchanged have about 0.004.
_UNDERFLOW = 1e-3
# Rows of an output with another number of rows than samples that are differentiated.
_ROWS = 4

# Operations that broadcast a smaller input; others, such as stack, may have these shapes by chance.
_BROADCASTING = ("Add", "Sub", "Rsub", "Mul", "Div", "Pow", "Where", "Expand", "Lerp", "Maximum", "Minimum", "MaskedFill", "Atan2")

# By model and kind of check: number of attempts for each (layer, input dimensions, ratio of its
# rows to those of the first layer, whether there are several rows).
_TRIED: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, dict[Any, int]]] = weakref.WeakKeyDictionary()


def tries_of(model: nn.Module) -> dict[Hashable, dict[Any, int]]:
    """Return the number of attempts of each check of a model, by kind of check."""
    try:
        return _TRIED.setdefault(model, {})
    except TypeError:
        # A module with an equality and no hash.
        return {}


class Tries:
    """Calls of the layers of a model that need a check; shared by all captures of the model."""

    def __init__(self, model: nn.Module, check: Hashable) -> None:
        self._tried = tries_of(model).setdefault(check, {})

    def are_due(self, calls: Iterable[LayerCall], num_rows: int) -> bool:
        """Return whether one of the calls was not checked."""
        return any(self._tried.get(self._key(call, num_rows), 0) < MAX_TRIES for call in calls)

    def count(self, call: LayerCall, num_rows: int, *, is_clear: bool) -> None:
        """Count a check of a call, which is the last one if it was conclusive."""
        key = self._key(call, num_rows)
        self._tried[key] = MAX_TRIES if is_clear else self._tried.get(key, 0) + 1

    def _key(self, call: LayerCall, num_rows: int) -> tuple[Any, ...]:
        # Ratios instead of sizes, which may differ in every minibatch.
        M = len(call.input)
        # A single row cannot be mixed, so it decides nothing about more rows.
        return call.layer, call.input.ndim, (num_rows < M) - (num_rows > M), min(num_rows, M) > 1


def run_once(outputs: Iterable[GradientEdge], calls: Mapping[LayerCall, GradientEdge]) -> list[LayerCall]:
    """Return the calls that outputs depend on only through tensors repeated for every sample."""
    roots = [edge.node for edge in outputs]
    by_any, by_rows = _reached(roots, with_repeats=True), _reached(roots, with_repeats=False)
    return [call for call, edge in calls.items() if edge.node in by_any and edge.node not in by_rows]


def has_reentrant_checkpoint(output: Tensor) -> bool:
    """Return whether the graph of the output contains a `checkpoint(use_reentrant=True)`."""
    nodes = set() if output.grad_fn is None else _reached([output.grad_fn], with_repeats=True)
    return any(node.name() == "CheckpointFunctionBackward" for node in nodes)


def _reached(roots: list[Node], *, with_repeats: bool) -> set[Node]:
    found, stack = set(roots), list(roots)
    while stack:
        node = stack.pop()
        for child, number in node.next_functions:
            if child is not None and child not in found and (with_repeats or not _repeats_rows(node, child, number)):
                found.add(child)
                stack.append(child)
    return found


def _repeats_rows(node: Node, child: Node, number: int) -> bool:
    """Return whether the node repeats the output of the child along the leading dimension."""
    if not node.name().startswith(_BROADCASTING):
        return False
    mine, theirs = ([tuple(metadata.shape) for metadata in getattr(one, "_input_metadata", ())] for one in (node, child))
    if len(mine) != 1 or number >= len(theirs):
        return False
    whole, part = mine[0], theirs[number]
    if not whole or whole[0] < 2 or math.prod(part) >= math.prod(whole) or len(part) > len(whole):
        return False
    part = (1,) * (len(whole) - len(part)) + part
    return part[0] == 1 and all(size in (1, other) for size, other in zip(part, whole, strict=True))


def next_calls(source: GradientEdge, calls: Mapping[LayerCall, GradientEdge]) -> dict[LayerCall, GradientEdge]:
    """Return the calls that the source depends on directly; the source itself if it is one."""
    call_at: dict[Node, list[LayerCall]] = {}
    for call, edge in calls.items():
        call_at.setdefault(edge.node, []).append(call)
    found: dict[LayerCall, GradientEdge] = {}
    seen, stack = {source.node}, [source.node]
    while stack:
        node = stack.pop()
        for call in call_at.get(node, ()):
            found[call] = calls[call]
        if node not in call_at:
            fresh = {child for child, _ in node.next_functions if child is not None} - seen
            seen |= fresh
            stack.extend(fresh)
    return found


def mixed_rows(source: GradientEdge, like: Tensor, before: Mapping[LayerCall, GradientEdge],
               num_samples: int | None) -> dict[LayerCall, bool | None]:
    """Return whether rows of the calls before a source depend on other rows of it; None: not clear.

    Derivatives of sample n are multiplied by a power of two, which is exact; rows of sample n
    without this factor contain derivatives of others. Powers are the octal digits of n, a backward
    pass for each. Without num_samples a row of the source, or of a smaller call, is a sample.
    """
    found: dict[LayerCall, bool | None] = dict.fromkeys(before)
    rows = {call: call.output_shape[0] for call in before}
    fitting = [call for call, M in rows.items() if min(M, len(like)) > 1 and (M % len(like) == 0 or len(like) % M == 0)]
    groups = num_samples or math.gcd(len(like), *(rows[call] for call in fitting))
    if not fitting or groups < 2 or any(M % groups for M in (len(like), *(rows[call] for call in fitting))):
        return found
    samples = (torch.arange(len(like), device=like.device) // (len(like) // groups)).view(-1, *[1] * (like.ndim - 1))
    edges, u, n_N = [before[call] for call in fitting], probe(like), torch.arange(groups, device=like.device)
    # Products with a power of two are exact, except where float16 underflows.
    tolerance = max(_ROUNDING, torch.finfo(like.dtype).eps ** 2)

    def rows_of(u: Tensor) -> list[Tensor | None]:
        nonlocal tolerance
        pulled: Any = torch.autograd.grad([source], edges, [u], retain_graph=True, allow_unused=True)
        if any(e_M is not None and e_M.dtype == torch.float16 for e_M in pulled):
            tolerance = _UNDERFLOW
        return [None if e_M is None else e_M.double().reshape(groups, -1) for e_M in pulled]
    plain = rows_of(u)
    errors = [0.0] * len(fitting)
    for shift in range(0, (groups - 1).bit_length(), 3):
        for place, e_NX in enumerate(rows_of(u * (2.0 ** (samples >> shift & 7)).to(u.dtype))):
            own_NX = plain[place]
            if e_NX is not None and own_NX is not None:
                errors[place] += float((e_NX / 2.0 ** (n_N >> shift & 7)[:, None] - own_NX).square().sum())
    for call, e_NX, error in zip(fitting, plain, errors, strict=True):
        own = 0.0 if e_NX is None else float(e_NX.square().sum())
        if own > 0.0 and math.isfinite(error):
            found[call] = error > tolerance * own
    return found


def mixed_output(source: GradientEdge, like: Tensor, before: Mapping[LayerCall, GradientEdge],
                 num_samples: int) -> dict[LayerCall, bool | None]:
    """Return `mixed_rows` of a model output, or of a few rows if these are not samples."""
    if len(like) % num_samples == 0:
        fitting = {call: edge for call, edge in before.items() if call.output_shape[0] % num_samples == 0}
        return {**dict.fromkeys(before), **mixed_rows(source, like, fitting, num_samples)}
    found: dict[LayerCall, bool | None] = dict.fromkeys(before)
    u = probe(like)
    for row in torch.randperm(len(like), generator=torch.Generator().manual_seed(0))[:_ROWS].tolist():
        only = torch.zeros_like(u)
        only[row] = u[row]
        pulled: Any = torch.autograd.grad([source], list(before.values()), [only], retain_graph=True, allow_unused=True)
        for call, e_M in zip(before, pulled, strict=True):
            if e_M is not None and len(e_M) % num_samples == 0:
                squares_N = e_M.double().reshape(num_samples, -1).square().sum(dim=1)
                if float(squares_N.sum()) > 0.0:
                    others = float(squares_N.sum() - squares_N.max())
                    found[call] = bool(found[call]) or others > _ROUNDING * float(squares_N.max())
    return found


# Floats of input rows formed at a time: 8 MB.
_CHUNK = 1 << 21


class Totals:
    """Sums over samples of the captured gradients of parameters, of one backward pass."""

    def __init__(self) -> None:
        # by name: the sum; upper bound of the norm of the sum of absolute values, the scale of its
        # rounding errors; relative rounding error of the summands
        self._of: dict[str, tuple[Tensor, float, float]] = {}

    def add(self, record: Record, dtype: torch.dtype) -> None:
        """Add a record whose derivatives arrived in a dtype."""
        for name, share in record.shares().items():
            value, bound = _summed(share)
            known, known_bound, precision = self._of.get(name, (torch.zeros_like(value), 0.0, 0.0))
            precision = max(precision, _precision(dtype, value.device))
            self._of[name] = known.add_(value), known_bound + bound, precision

    def differ(self, name: str, gradient: Tensor, transposed: Iterable[str] = ()) -> bool:
        """Return whether a gradient differs from the total by more than rounding."""
        # Only the order of additions may differ: 16 roundings of the sum of absolute values. Half
        # of the digits must differ, too, because a missing use changes the first one.
        g = (gradient.T if name in transposed else gradient).detach().flatten().double()
        value, bound, precision = self._of.get(name) or (torch.zeros_like(g), 0.0, _precision(gradient.dtype, g.device))
        found = value.double()
        error, scale = float((found - g).norm()), max(float(found.norm()), float(g.norm()))
        return math.isfinite(error) and error > max(16.0 * precision * bound, 4.0 * precision**0.5 * scale)


def unaccounted(source: GradientEdge, like: Tensor, calls: Mapping[LayerCall, GradientEdge],
                parameters: Mapping[str, Tensor], record: Callable[[LayerCall, Tensor], Record],
                transposed: Iterable[str]) -> tuple[str | None, set[LayerCall]]:
    """Compare both gradients of a random linear function of an output, `like` a tensor.

    Returns (a parameter whose gradients differ, or None; calls with a nonzero derivative).
    """
    ends: list[Any] = [*calls.values(), *parameters.values()]
    found = torch.autograd.grad([source], ends, [probe(like)], retain_graph=True, allow_unused=True)
    totals, reached = Totals(), set()
    for call, e_M in zip(calls, found, strict=False):
        if e_M is not None:
            totals.add(record(call, e_M[None]), e_M.dtype)
            if bool(e_M.any()):
                reached.add(call)
    for name, gradient in zip(parameters, found[len(calls):], strict=True):
        if gradient is not None and totals.differ(name, gradient, transposed):
            return name, reached
    return None, reached


def probe(like: Tensor) -> Tensor:
    """Return random values in the layout of a tensor; torch's global generator is not used."""
    generator = torch.Generator(like.device).manual_seed(0)
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=torch.float32).to(like.dtype)


def _precision(dtype: torch.dtype, device: torch.device) -> float:
    if dtype == torch.float32:
        # A GEMM may round its operands to bfloat16, or to the 10 bits of TF32 on a GPU.
        if torch.get_float32_matmul_precision() != "highest":
            return 2.0**-8
        return 2.0**-11 if device.type == "cuda" else 2.0**-23
    return torch.finfo(dtype).eps


def _summed(share: UseShare) -> tuple[Tensor, float]:
    """Return (sum over samples, bound of its norm) without per-sample gradients."""
    e_VNTO = share.e_VNTO
    size = float(e_VNTO.norm())
    if isinstance(share, EmbeddingGrad):
        one = EmbeddingGrad(share.index_NT.reshape(1, -1), e_VNTO.flatten(1, 2)[:, None], share.num_rows)
        return one.individual(0, 1)[0, 0], size * share.index_NT.numel() ** 0.5
    if not isinstance(share, OuterProduct):
        return e_VNTO.sum(dim=(0, 1, 2)), size * e_VNTO[0, :, :, 0].numel() ** 0.5
    N, square = share.num_samples, 0.0
    value: Tensor | None = None
    step = max(1, _CHUNK // max(1, share.inputs.num_positions * share.inputs.width))
    for first in range(0, N, step):
        last = min(first + step, N)
        a_NTI, e_NTO = share.inputs.rows(first, last), e_VNTO[0, first:last]
        square += float(a_NTI.square().sum())
        if share.groups == 1:
            part = (e_NTO.flatten(0, 1).T @ a_NTI.flatten(0, 1)).flatten()
        else:
            part = DenseGrad(share.individual(first, last)).moments()[0]
        value = part if value is None else value + part
    assert value is not None
    return value, size * square**0.5
