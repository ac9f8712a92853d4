"""What a minibatch says of the curvature: input rows and derivative rows of every affine layer, scaled once for all methods.

The curvature meant is that of the loss divided by the total weight of its rows W (torch's mean), whatever the loss's reduction, the
masks and the scale of a GradScaler: F = 1/R sum_r g_r g_r^T over R rows.  `fisher` says whose derivatives g_r are:

    "empirical"  of the loss itself, from the ordinary backward pass
    "mc"         of targets drawn from the model's prediction, the mean of `num_draws`
    "exact"      columns of the root of the loss's second derivative: F is the generalised Gauss-Newton matrix

Letters: V vectors, N samples, T positions, R rows of the loss (frames), I inputs (and 1 for the bias), O outputs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature import losses
from ngsgd.curvature.capture import Call, Capture, Record
from ngsgd.curvature.layers import UseShare, without_autocast
from ngsgd.curvature.rows import Outer, joined
from ngsgd.curvature.watching import LossCalls
from ngsgd.errors import ConfigError

FISHERS = ("empirical", "mc", "exact")
_CHUNK = 64  # columns of the loss's root that are sent through the graph at a time


@dataclass(frozen=True, eq=False)
class Rows:
    """One affine layer's part: F = 1/R sum_vn g_vn g_vn^T with g_vn = sum_t e a^T."""

    weight: str
    bias: str | None
    a_NTI: Tensor       # with a last column of ones where the layer has a bias
    e_VNTO: Tensor
    num_rows: int       # R

    def shared(self, sharing: str) -> tuple[Tensor, Tensor]:
        """(N x T x I, V x N x T x O) with positions as rows ("expand"), or as the one row of a sample ("reduce")."""
        if sharing == "expand" or self.a_NTI.shape[1] == 1:
            return self.a_NTI, self.e_VNTO
        return self.a_NTI.mean(dim=1, keepdim=True), self.e_VNTO.sum(dim=2, keepdim=True)

    def individual(self) -> Tensor:
        """V N x O x I: the gradient of every sample (and vector), written down."""
        return torch.einsum("vnto,nti->vnoi", self.e_VNTO, self.a_NTI).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Signal:
    """A minibatch's curvature, layer by layer."""

    rows: Mapping[str, Rows] = field(default_factory=dict)     # by the name of the weight; copies are made at each access
    squares: dict[str, Tensor] = field(default_factory=dict)   # diagonals of F for parameters that are in no affine layer
    num_rows: int = 0                                          # R
    scale: float = 1.0                                         # empirical: of e over the derivatives of the loss itself
    is_last: bool = False                                      # nobody looks at it again

    def layers(self) -> Iterator[tuple[str, Rows]]:
        """(weight, rows) of each layer; what they are made of is let go if this is the last time."""
        for name in list(self.rows):
            rows = self.rows[name]
            if self.is_last and isinstance(self.rows, _LayerByLayer):
                self.rows.let_go(name)
            yield name, rows


class Watch:
    """Catches the signal of the forward and backward passes inside; several passes count as one minibatch.

    Raises:
        ConfigError: no loss that is known was differentiated (cross-entropy, mean squared error, binary cross-entropy), or
            the model has layers whose curvature is not known.
    """

    def __init__(self, model: nn.Module, *, fisher: str, num_draws: int, generator: torch.Generator | None,
                 layers: tuple[str, ...] | None) -> None:
        self._fisher, self._num_draws, self._generator = fisher, num_draws, generator
        self._capture = Capture(model, layers=layers, arrived=self._arrived)
        self._mode = LossCalls(self._noted)
        self._pass = -1                                      # evaluations of a loss that have been differentiated, less one
        self._total_weight, self._num_rows = 0.0, 0
        self._records: dict[int, list[Record]] = defaultdict(list)

    def __enter__(self) -> Watch:
        self._capture.__enter__()
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._capture.close()
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def forget(self) -> None:
        """For good.  The hooks' owners refer to each other, and rows should go now, not when the garbage collector comes by."""
        self._records.clear()
        self._capture.forget_listeners()

    @torch.no_grad()
    def signal(self) -> Signal:
        """What has been caught, scaled."""
        if self._pass < 0:
            raise ConfigError("the preconditioner saw no loss whose curvature is known; inside of watch(), call cross-entropy, "
                              "mean squared error or binary cross-entropy with logits from torch, and backward().")
        R, W = self._num_rows, self._total_weight
        if not W > 0.0:  # every row is masked
            return Signal()
        scale = R / W if self._fisher == "empirical" else (R / W) ** 0.5
        parts: dict[str, list[list[Record]]] = defaultdict(list)
        squares: dict[str, Tensor] = {}
        for records in self._records.values():
            affine, others = _of_pass(records, scale, R)
            for name, uses in affine.items():
                parts[name].append(uses)
            for name, found in others.items():
                squares[name] = squares[name] + found if name in squares else found
        return Signal(_LayerByLayer(parts, scale, R), squares, R, scale)

    def _noted(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor, value: Tensor,
               again: Callable[[Tensor], Tensor]) -> None:
        if value.requires_grad and not self._capture.is_paused:
            value.register_hook(lambda upstream: self._differentiated(settings, kind, output, target, upstream))

    def _differentiated(self, settings: dict[str, Any], kind: type[nn.Module], output: Tensor, target: Tensor,
                        upstream: Tensor) -> None:
        if self._capture.is_paused or not self._capture.open_calls:
            return
        with torch.no_grad(), without_autocast(output.device.type):
            view = losses.evaluation(settings, kind, output, target, upstream)
            self._pass += 1
            self._total_weight += float(view.weight_R.sum())
            # a row of a loss over single numbers is one vector of them
            counts = view.weight_R if view.classes else view.weight_R.view(-1, output.shape[-1] if output.ndim > 1 else 1)[:, 0]
            self._num_rows += int((counts > 0).sum())
            if self._fisher == "mc":
                self._send(view, [view.sampled(self._num_draws, self._generator)])
            elif self._fisher == "exact":
                N = self._capture.num_samples_of(next(iter(self._capture.open_calls)))
                self._send(view, list(view.columns(N, _CHUNK)))

    def _send(self, view: losses.Evaluation, blocks: list[Tensor]) -> None:
        found: dict[Call, list[Tensor]] = defaultdict(list)
        for vectors_V in blocks:
            with torch.enable_grad():
                swept = self._capture.sweep(view.output, vectors_V)
            for call, e_VM in swept:
                found[call].append(e_VM)
        for call, es in found.items():
            self._records[self._pass].append(self._capture.record(call, es[0] if len(es) == 1 else torch.cat(es)))

    def _arrived(self, call: Call, e_M: Tensor) -> None:
        if self._fisher == "empirical":
            self._records[max(self._pass, 0)].append(self._capture.record(call, e_M[None]))


class _LayerByLayer(Mapping[str, Rows]):
    """Rows that are written down when they are asked for, so that those of one layer alone need memory at a time."""

    def __init__(self, parts: dict[str, list[list[Record]]], scale: float, num_rows: int) -> None:
        self._parts, self._scale, self._num_rows = parts, scale, num_rows

    def __getitem__(self, name: str) -> Rows:
        return _end_to_end([_affine(name, records, self._scale, self._num_rows) for records in self._parts[name]])

    def let_go(self, name: str) -> None:
        """Of the records of a layer, which has no rows from then on."""
        del self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _of_pass(records: list[Record], scale: float, num_rows: int) -> tuple[dict[str, list[Record]], dict[str, Tensor]]:
    """(records of affine layers by weight, squares of all other parameters).

    A layer that is called several times has the positions of all its calls; a weight that is also an embedding's is not affine.
    """
    uses: dict[str, list[tuple[Record, UseShare]]] = defaultdict(list)
    for record in records:
        for name, share in record.shares().items():
            uses[name].append((record, share))
    affine = {name: [record for record, _ in each] for name, each in uses.items()
              if all(record.call.weight == name and isinstance(share, Outer) and share.groups == 1 for record, share in each)}
    covered = {*affine, *(records[0].call.bias for records in affine.values())}
    squares = {name: joined([share for _, share in each]).sum_of_squares() * (scale * scale / num_rows)
               for name, each in uses.items() if name not in covered}
    return affine, squares


def _affine(name: str, records: list[Record], scale: float, num_rows: int) -> Rows:
    bias = records[0].call.bias
    a_NTI = _side_by_side([record.input_rows() for record in records], dim=1)
    if bias is not None:
        a_NTI = torch.cat([a_NTI, a_NTI.new_ones(*a_NTI.shape[:2], 1)], dim=2)
    return Rows(name, bias, a_NTI, _side_by_side([record.derivative_rows() for record in records], dim=2) * scale, num_rows)


def _side_by_side(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)   # cat copies a single one, too


def _end_to_end(parts: list[Rows]) -> Rows:
    """Several passes as one minibatch."""
    if len(parts) == 1:
        return parts[0]
    return Rows(parts[0].weight, parts[0].bias, torch.cat([rows.a_NTI for rows in parts]),
                torch.cat([rows.e_VNTO for rows in parts], dim=1), parts[0].num_rows)
