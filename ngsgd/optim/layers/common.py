"""State and settings that the preconditioned layers of one optimizer share."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ngsgd.errors import ArgumentError
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.fisher.update_queue import UpdateQueue

# Limit of row norms of derivatives of a sum of cross-entropies; those of a mean over N rows are N
# times smaller.
_MAX_ROW_NORM = 2.0
# With fewer rows, a sum and a mean cannot be distinguished.
_MIN_ROWS = 8
# Multiplications of projected rows that are worth the products of a plain gradient, and how many
# times as many they must be.
_MIN_PRODUCTS, _MIN_SAVING = 1 << 18, 4.0
# Number of cached minibatch shapes; utterances have many lengths.
_MANY_SHAPES = 200


@dataclass(frozen=True)
class FisherSettings:
    """Settings of the Fisher estimates of one layer; see `NGSGD`."""

    rank_in: int = 20
    rank_out: int = 80
    update_period: int = 4
    num_samples_history: float = 2000.0
    alpha: float = 4.0
    schedule: str = "nnet3"
    update: str = "auto"

    def __post_init__(self) -> None:
        if self.rank_in < 1 or self.rank_out < 1:
            raise ArgumentError(f"Invalid rank_in, rank_out: {self.rank_in}, {self.rank_out}; both must be at least 1")
        OnlineNaturalGradient(1, self.update_period, self.num_samples_history, alpha=self.alpha, schedule=self.schedule,
                              update=self.update)


class Ranks(NamedTuple):
    """Processes that train one model together."""

    # sums a contiguous tensor of the device over the ranks, in place
    sum_in_place: Callable[[Tensor], object]
    device: torch.device
    size: int
    # whether gradients are means over ranks, not sums
    averages: bool

    def sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums of tensors over the ranks, those of one dtype by one call."""
        found: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
            flat = torch.cat([tensors[place].reshape(-1) for place in places])
            on_device = flat.to(self.device)
            self.sum_in_place(on_device)
            parts = on_device.to(flat.device).split([tensors[place].numel() for place in places])
            found.update((place, part.view(tensors[place].shape)) for place, part in zip(places, parts, strict=True))
        return [found[place] for place in range(len(tensors))]


class Scratch:
    """Buffers that backward passes reuse, because newly mapped pages cost more than their use."""

    def __init__(self) -> None:
        self._flat: dict[Any, Tensor] = {}
        # Cached views; creating one costs as much as a small GEMM.
        self._shaped: dict[Any, Any] = {}
        self._ones: dict[Any, Tensor] = {}

    def like(self, name: str, rows_ND: Tensor) -> Tensor:
        """Return an uninitialized matrix like `rows_ND`; the next call of its name fills it."""
        key = (name, rows_ND.shape, rows_ND.dtype, rows_ND.device)
        found: Tensor | None = self._shaped.get(key)
        if found is None:
            size, place = rows_ND.numel(), (name, rows_ND.dtype, rows_ND.device)
            flat = self._flat.get(place)
            if flat is None or flat.numel() < size:
                flat = self._flat[place] = rows_ND.new_empty(size)
                # Views would keep the old buffers alive.
                self._shaped.clear()
            if len(self._shaped) >= _MANY_SHAPES:
                self._shaped.clear()
            found = self._shaped[key] = flat[:size].view(rows_ND.shape)
        return found

    def ones(self, rows_ND: Tensor) -> Tensor:
        """Return as many ones as there are rows; read-only."""
        num_rows = rows_ND.shape[0]
        key = (num_rows, rows_ND.dtype, rows_ND.device)
        if key not in self._ones:
            # Minibatches have one size, except the last of a shard.
            self._ones.clear()
            self._ones[key] = rows_ND.new_ones(num_rows)
        return self._ones[key]

    def __getstate__(self) -> dict[str, Any]:
        # Contents of the buffers are temporary.
        return {"_flat": {}, "_shaped": {}, "_ones": {}}


@dataclass
class LayerContext:
    """State and options that all layers of one optimizer share."""

    ignore_zero_rows: bool = False
    # for the limit of C.3
    sums_row_products: bool = False
    # Gradients stay plain; the estimates only read the rows.
    observes: bool = False
    # whether the loss is a sum over samples, not a mean
    is_sum: bool = False
    on_nonfinite: str = "skip"
    grad_scaler: Any = None           # torch.amp.GradScaler
    # in the next backward pass; costs a plain gradient
    measures_cosine: bool = False
    # reason why the optimizer may not step any more
    retired: str = ""
    # preconditioned backward passes of layers since the last step
    num_passes: int = 0
    num_steps: int = 0
    # Whether to detect a mean loss from the first derivatives; only if loss_reduction was not
    # given.
    asks_reduction: bool = False
    looks_like_mean: Tensor | None = None
    # its rows
    num_mean_rows: int = 0
    # the weight of the layer of the last pass
    last_weight: Tensor | None = None
    # a weak reference to the DistributedDataParallel module that ran the last such forward pass
    module: Any = None
    # those of another loop that sums gradients
    given_ranks: Ranks | None = None
    # a BatchedPass, for layers on a device, and a SharedPass, for those under DDP
    batch: Any = None
    shared: Any = None
    scratch: Scratch = field(default_factory=Scratch)
    queue: UpdateQueue = field(default_factory=lambda: UpdateQueue(deferred=True))

    @property
    def ranks(self) -> Ranks | None:
        """The ranks with equal estimates, also in a pass outside of DDP; None without any."""
        module = None if self.module is None or not torch.distributed.is_initialized() else self.module()
        if module is None:
            return self.given_ranks
        group = module.process_group
        return Ranks(partial(torch.distributed.all_reduce, group=group), next(module.parameters()).device,
                     torch.distributed.get_world_size(group), True)

    def note_ranks(self) -> None:
        """Note the module at the begin of a forward pass."""
        active = DistributedDataParallel._active_ddp_module
        if active is not None:
            self.module = weakref.ref(active)

    def loss_scale(self) -> Tensor | float:
        """Factor in the derivatives of this backward pass."""
        if self.grad_scaler is None or not self.grad_scaler.is_enabled():
            return 1.0
        # The public get_scale() would wait for the device at every call.
        scale: Tensor | None = self.grad_scaler._get_scale_async()
        return 1.0 if scale is None else scale

    def preconditioner(self, rank: int, dim: int, settings: FisherSettings, *,
                       num_minibatches_history: float = 0.0) -> OnlineNaturalGradient:
        """Create a Fisher estimate of rows of `dim`, of rank at most (dim + 1) / 2 as in Kaldi."""
        estimate = OnlineNaturalGradient(min(rank, (dim + 1) // 2), settings.update_period,
                                         settings.num_samples_history, num_minibatches_history, settings.alpha,
                                         schedule=settings.schedule, relative_floor=True, update=settings.update,
                                         on_nonfinite=self.on_nonfinite, queue=self.queue)
        estimate.dim = dim
        return estimate


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, LayerPreconditioner] = weakref.WeakValueDictionary()


def layer_of(number: int) -> LayerPreconditioner:
    """Return the live layer with this `number`."""
    return _by_number[number]


class LayerPreconditioner:
    """Fisher estimates of one layer; operators in a compiled graph find it by its `number`."""

    def __init__(self, context: LayerContext, sides: Mapping[str, OnlineNaturalGradient]) -> None:
        self.context = context
        self.sides = dict(sides)
        self._register()
        # the parameter whose gradients are preconditioned
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        # the weight is inputs x outputs
        self.is_transposed = False
        # Several layers have this weight; each rank then has separate estimates.
        self.is_tied = False
        # autograd task of the last backward pass
        self._task: int | None = None
        # Set if a compiled graph needs the node below.
        self.needs_node = False
        # autograd node that accumulates into `weight.grad`; a new dtype has a new node
        self.node: Any = None
        self._node_is_for: Any = None
        # sum over rows of |xhat| |yhat|, scaled; since the last step (C.3)
        self.row_products: Tensor | None = None
        # rows in that sum
        self.num_rows: Tensor | float = 0.0
        # cosine of preconditioned and plain gradient at the last measurement
        self.cosine: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no layer.
        return {**self.__dict__, "weight": None, "bias": None, "node": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A copy is a separate layer.
        self._register()

    def begin_pass(self, dY: Tensor, num_rows: int) -> None:
        """Prepare for a preconditioned gradient with `num_rows` rows of output derivatives.

        Passes since the last step whose gradients were cleared do not count, such as those of a
        discriminator in the backward pass of its generator. A second use of the layer in the same
        backward pass has not reached `grad` yet, and counts.
        """
        context = self.context
        context.num_passes += 1
        context.last_weight = self.weight
        task = torch._C._current_graph_task_id()
        # The first layer of the backward pass is next to the loss.
        if context.asks_reduction and context.num_passes == 1 and num_rows >= _MIN_ROWS:
            context.asks_reduction, context.num_mean_rows = False, num_rows
            context.looks_like_mean = num_rows * dY.square().sum() < (_MAX_ROW_NORM * context.loss_scale()) ** 2
        if task != self._task and self.context.num_steps and self.weight is not None and self.weight.grad is None:
            for side in self.sides.values():
                side.withdraw()
        if task != self._task and self.is_shared and self.weight is not None and self.weight.grad is None:
            context.shared.drop(self)
        self._task = task

    @property
    def leaf(self) -> Tensor:
        """The weight of the layer, which has one."""
        assert self.weight is not None
        return self.weight

    # whether estimates are of rows of a pass, or of the gradient
    reads_rows = True

    @property
    def is_shared(self) -> bool:
        """Whether the ranks of DistributedDataParallel have one estimate of all their rows."""
        return not self.is_tied and self.context.ranks is not None

    def may_expect_scales(self, is_cpu: bool, num_rows: Number) -> bool:
        """Return whether a minibatch of `num_rows` rows preconditions its plain gradient.

        Its gamma (38) is then that of the estimates, unless it updates them.
        """
        context, sides = self.context, self.sides.values()
        if not is_cpu or context.sums_row_products or context.ignore_zero_rows or not all(side.may_expect_scale for side in sides):
            return False
        of_rows = float(num_rows) * sum(rank * dim for rank, dim in (side.shape for side in sides))
        return of_rows > max(_MIN_PRODUCTS, _MIN_SAVING * self.num_plain_products())

    def num_plain_products(self) -> int:
        """Half of the multiplications that precondition the plain gradient."""
        return 0

    def precondition_gradient(self, scales: Mapping[OnlineNaturalGradient, Number], db_O: Tensor | None) -> None:
        """Precondition `grad` of the parameters, the plain mean over ranks.

        Args:
            scales: gamma (38) of the sides that have an estimate.
            db_O: plain gradient of a frozen bias.
        """
        raise NotImplementedError

    def _register(self) -> None:
        self.number = next(_numbers)
        # For operators in a compiled graph.
        self.number_tensor = torch.tensor(self.number)
        _by_number[self.number] = self

    def sync_hyperparameters(self, alpha: float, update_period: int, num_samples_history: float) -> None:
        """Apply settings that may change during training."""
        if self.needs_node and self.weight is not None and self._node_is_for != (self.weight.dtype, self.weight.device):
            self._node_is_for = self.weight.dtype, self.weight.device
            self.node = torch.autograd.graph.get_gradient_edge(self.weight).node
        for side in self.sides.values():
            if side.smoothing.alpha != alpha:
                side.set_alpha(alpha)
            side.update_period = update_period
            if not side.num_minibatches_history:
                side.num_samples_history = num_samples_history

    def pop_row_products(self) -> tuple[Tensor | None, Tensor | float]:
        """Return the sum for the limit of C.3 and its number of rows, and reset both."""
        taken = self.row_products, self.num_rows
        self.row_products, self.num_rows = None, 0.0
        return taken


def upcast(rows: Tensor) -> Tensor:
    """Return rows in at least float32: half precision lacks digits for X - H W, range for X^2."""
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def compute_dtype(input: Tensor) -> torch.dtype | None:  # noqa: A002  the name is torch's
    """Return the dtype to which autocast would cast; None outside autocast and for float64."""
    device = input.device.type
    if not torch.is_autocast_enabled(device) or input.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def cast(dtype: torch.dtype | None, *tensors: Tensor | None) -> list[Any]:
    """Cast the tensors to `dtype`; unchanged if it is None."""
    return [tensor if tensor is None or dtype in (None, tensor.dtype) else tensor.to(dtype) for tensor in tensors]


def mean_over_ranks(context: LayerContext, values: Tensor) -> Tensor:
    """Return the mean over the ranks; unchanged without any."""
    ranks = context.ranks
    return values if ranks is None else ranks.sums([values])[0] / ranks.size
