"""What the preconditioned layers of one optimiser have in common."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import packed_gemm
from ngsgd.ops.packed_gemm import PackedMatrix
from ngsgd.preconditioners.online import OnlineNaturalGradient
from ngsgd.preconditioners.update_queue import UpdateQueue

# of the derivatives of a sum of cross-entropies that were computed from N rows; those of their mean are N times smaller
_MAX_ROW_NORM = 2.0
# fewer rows do not tell a sum from a mean
_MIN_ROWS = 8
# of a network's minibatches, before they are forgotten: utterances have many lengths
_MANY_SHAPES = 200


@dataclass(frozen=True)
class FisherSettings:
    """How one layer's Fisher estimates are made; see `NGSGD`."""

    rank_in: int = 20
    rank_out: int = 80
    update_period: int = 4
    num_samples_history: float = 2000.0
    alpha: float = 4.0
    schedule: str = "nnet3"

    def __post_init__(self) -> None:
        if self.rank_in < 1 or self.rank_out < 1:
            raise ValueError(f"Invalid rank_in, rank_out: {self.rank_in}, {self.rank_out}; both must be at least 1")
        OnlineNaturalGradient(1, self.update_period, self.num_samples_history, alpha=self.alpha, schedule=self.schedule)


class Scratch:
    """Memory that one layer's backward pass uses and the next one uses again; fresh pages cost more than what is done in them."""

    def __init__(self) -> None:
        self._flat: dict[Any, Tensor] = {}
        # views of that, which cost as much to make as a small product
        self._shaped: dict[Any, Any] = {}
        self._ones: dict[Any, Tensor] = {}

    def like(self, name: str, rows_ND: Tensor) -> Tensor:
        """An uninitialised matrix of the shape of `rows_ND`, which the next call of the same name overwrites."""
        key = (name, rows_ND.shape, rows_ND.dtype, rows_ND.device)
        found: Tensor | None = self._shaped.get(key)
        if found is None:
            found = self._shaped[key] = self._memory(name, rows_ND.numel(), rows_ND).view(rows_ND.shape)
        return found

    def panels(self, name: str, rows_ND: Tensor, room: int) -> PackedMatrix:
        """The same in panels, with room for as many rows more."""
        key = (name, room, rows_ND.shape, rows_ND.dtype, rows_ND.device)
        found: PackedMatrix | None = self._shaped.get(key)
        if found is None:
            num_rows, num_columns = rows_ND.shape
            flat = self._memory(name, packed_gemm.size(num_rows + room, num_columns), rows_ND)
            found = self._shaped[key] = PackedMatrix.over(flat, num_rows, num_columns, room)
        return found

    def _memory(self, name: str, size: int, like: Tensor) -> Tensor:
        key = (name, like.dtype, like.device)
        flat = self._flat.get(key)
        if flat is None or flat.numel() < size:
            flat = self._flat[key] = like.new_empty(size)
            # they would keep what they are views of
            self._shaped.clear()
        if len(self._shaped) >= _MANY_SHAPES:
            self._shaped.clear()
        return flat[:size]

    def ones(self, rows_ND: Tensor) -> Tensor:
        """As many ones as there are rows; nobody may change them."""
        num_rows = rows_ND.shape[0]
        key = (num_rows, rows_ND.dtype, rows_ND.device)
        if key not in self._ones:
            # minibatches are of one size, but for the last of a shard
            self._ones.clear()
            self._ones[key] = rows_ND.new_ones(num_rows)
        return self._ones[key]

    def __getstate__(self) -> dict[str, Any]:
        # what the last minibatch left there is nobody's business
        return {"_flat": {}, "_shaped": {}, "_ones": {}}


@dataclass
class LayerContext:
    """State and options that all layers of one optimiser share."""

    ignore_zero_rows: bool = False
    # for the limit of C.3
    sums_row_products: bool = False
    # gradients stay plain, and the estimates see the rows
    observes: bool = False
    on_nonfinite: str = "skip"
    grad_scaler: Any = None           # torch.amp.GradScaler
    # in the next backward pass, at the price of a plain gradient
    measures_cosine: bool = False
    # why the optimizer may not step any more
    retired: str = ""
    # backward passes of layers that were preconditioned, since the last step
    num_passes: int = 0
    num_steps: int = 0
    # of the layer next to the loss since the last step, which are the terms of the loss
    num_loss_rows: int = 0
    # whether the first derivatives are those of a mean, where nobody said what the loss is
    asks_reduction: bool = False
    looks_like_mean: Tensor | None = None
    # that layer, and the last backward pass of it
    loss_layer: int | None = None
    loss_task: int | None = None
    # a BatchedPass, for layers on a device
    batch: Any = None
    scratch: Scratch = field(default_factory=Scratch)
    queue: UpdateQueue = field(default_factory=lambda: UpdateQueue(deferred=True))

    def loss_scale(self) -> Tensor | float:
        """The factor that the derivatives of this backward pass carry."""
        if self.grad_scaler is None or not self.grad_scaler.is_enabled():
            return 1.0
        # get_scale(), which is public, would wait for the device at every call
        scale: Tensor | None = self.grad_scaler._get_scale_async()
        return 1.0 if scale is None else scale

    def preconditioner(self, rank: int, dim: int, settings: FisherSettings, *,
                       num_minibatches_history: float = 0.0,
                       update_period: int | None = None) -> OnlineNaturalGradient:
        """A Fisher estimate for rows of dimension `dim`; the rank is lowered to (dim + 1) / 2, as in Kaldi."""
        estimate = OnlineNaturalGradient(min(rank, (dim + 1) // 2), update_period or settings.update_period,
                                         settings.num_samples_history, num_minibatches_history, settings.alpha,
                                         schedule=settings.schedule, relative_floor=True, on_nonfinite=self.on_nonfinite,
                                         queue=self.queue)
        estimate.dim = dim
        return estimate


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, LayerPreconditioner] = weakref.WeakValueDictionary()


def layer_of(number: int) -> LayerPreconditioner:
    """The layer whose `number` it is, as long as it lives."""
    return _by_number[number]


class LayerPreconditioner:
    """The Fisher estimates of one layer; its `number` is what operators in a compiled graph know it by."""

    def __init__(self, context: LayerContext, sides: Mapping[str, OnlineNaturalGradient]) -> None:
        self.context = context
        self.sides = dict(sides)
        self._register()
        # the parameter whose gradients are preconditioned
        self.weight: Tensor | None = None
        # of the last backward pass
        self._task: int | None = None
        # a compiled graph asks for the node below
        self.needs_node = False
        # of autograd, which adds to `weight.grad`; it is another for another dtype
        self.node: Any = None
        self._node_is_for: Any = None
        # sum over rows of |xhat| |yhat|, scaled; since the last step (C.3)
        self.row_products: Tensor | None = None
        # rows in that sum
        self.num_rows: Tensor | float = 0.0
        # between preconditioned and plain gradient, when last measured
        self.cosine: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # a copy is of no layer
        return {**self.__dict__, "weight": None, "node": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # a copy is another layer
        self._register()

    def begin_pass(self, dY: Tensor, num_rows: int) -> None:
        """Called at the start of each preconditioned gradient, with the output derivatives of the layer, `num_rows` rows.

        Passes since the last step whose gradients were cleared do not count, as those of a discriminator in the backward pass
        of its generator.  A use of the layer in the same backward pass has not reached `grad` yet, and counts.
        """
        context = self.context
        context.num_passes += 1
        task = torch._C._current_graph_task_id()
        if context.loss_layer in (None, self.number) and context.loss_task != task:
            # gradients that were cleared since do not count
            is_new = context.loss_layer is None or self.weight is None or self.weight.grad is None
            context.num_loss_rows = num_rows + (0 if is_new else context.num_loss_rows)
            context.loss_layer, context.loss_task = self.number, task
            if context.asks_reduction and num_rows >= _MIN_ROWS:
                context.asks_reduction = False
                context.looks_like_mean = num_rows * dY.square().sum() < (_MAX_ROW_NORM * context.loss_scale()) ** 2
        if task != self._task and self.context.num_steps and self.weight is not None and self.weight.grad is None:
            for side in self.sides.values():
                side.withdraw()
        self._task = task

    def _register(self) -> None:
        self.number = next(_numbers)
        # for operators in a compiled graph
        self.number_tensor = torch.tensor(self.number)
        _by_number[self.number] = self

    def sync_hyperparameters(self, alpha: float, update_period: int,
                             num_samples_history: float) -> None:
        """Takes over settings that may change while training."""
        if self.needs_node and self.weight is not None and self._node_is_for != (self.weight.dtype, self.weight.device):
            self._node_is_for = self.weight.dtype, self.weight.device
            self.node = torch.autograd.graph.get_gradient_edge(self.weight).node
        for side in self.sides.values():
            if side.smoothing.alpha != alpha:
                side.set_alpha(alpha)
            if not side.num_minibatches_history:
                side.update_period, side.num_samples_history = update_period, num_samples_history

    def pop_row_products(self) -> tuple[Tensor | None, Tensor | float]:
        """The sum for the limit of C.3 and its number of rows, and starts them again."""
        taken = self.row_products, self.num_rows
        self.row_products, self.num_rows = None, 0.0
        return taken


def upcast(rows: Tensor) -> Tensor:
    """Rows in at least float32: half precision has neither the digits for X - H W nor the range for squares."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def compute_dtype(input: Tensor) -> torch.dtype | None:  # noqa: A002  the name is torch's
    """What autocast would cast to; None outside of it, and for float64, which it leaves alone."""
    device = input.device.type
    if not torch.is_autocast_enabled(device) or input.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    """The tensors in `dtype`, as they are if it is None."""
    return [tensor if tensor is None or dtype in (None, tensor.dtype) else tensor.to(dtype) for tensor in tensors]


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Products of Fisher estimates stay in float32, even where backward is called inside autocast."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
