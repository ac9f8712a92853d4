"""Gradients of many layers, preconditioned together at the end of a backward pass.

On a GPU the launch of an operator costs more than the products of a narrow layer. A layer therefore
only records its rows in its backward node. When autograd has finished, the rows of all layers are
packed and preconditioned by a few operators (`ngsgd.ops.device.packed_rows`). Results equal those
of the layers' own `gradient` up to the order of sums.

A layer takes part if its rows are on a device and nothing reads its gradient before the end of the
backward pass. Parameter hooks and DistributedDataParallel do read it. `gradient` serves all others,
and the first minibatch, which initializes the estimates.

Letters: L layers, N rows, D columns, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.device import packed_rows
from ngsgd.ops.device.packed_rows import Packing, Sides
from ngsgd.ops.device.triton_kernels import Tables
from ngsgd.ops.tensors import without_autocast
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.fisher.stack import Shares, Stacked
from ngsgd.optim.layers.base import asked_for
from ngsgd.optim.layers.common import LayerContext, LayerPreconditioner, upcast

# Largest rank whose products fit into the fast memory of a GPU.
_MOST_RANK = 256
# Limit of waiting rows; at this size launches are cheap compared with the GEMMs.
_MOST_WAITING_BYTES = 1 << 28


class Leaves(NamedTuple):
    """Parameters to whose `grad` the gradient of a layer is added."""

    weight: Tensor
    bias: Tensor | None


class _Affine(NamedTuple):
    """Rows of an affine layer."""

    layer: LayerPreconditioner
    X_NI: Tensor
    dY_NO: Tensor
    leaves: Leaves
    # of the GEMM
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        """Key of layers that follow each other in the packed memory."""
        return self.X_NI.shape, self.dY_NO.shape, self.dtype, self.has_one, self.ranks

    @property
    def has_one(self) -> int:
        """1 if the inputs have an appended 1."""
        return self.estimates[0].polar_state.R_RD.shape[1] - self.X_NI.shape[1]

    @property
    def estimates(self) -> list[OnlineNaturalGradient]:
        return list(self.layer.sides.values())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(len(one.polar_state.M_RR) for one in self.estimates)


class _Sum(NamedTuple):
    """Rows whose preconditioned sum is a gradient: x, or x times `factor`."""

    estimate: OnlineNaturalGradient
    # .. x D x K: K rows whose numbers of a column are next to each other
    x: Tensor
    factor: Tensor | None
    leaf: Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """Key of sides that follow each other in the packed memory."""
        return self.x.shape, self.factor is not None, len(self.estimate.polar_state.M_RR)


class _Filters(NamedTuple):
    """The gradient of a convolution, with its bias as a last column."""

    layer: LayerPreconditioner
    P_OI: Tensor
    leaves: Leaves

    @property
    def estimates(self) -> list[OnlineNaturalGradient]:
        return [self.layer.sides["filters"], self.layer.sides["columns"]]

    @property
    def has_bias(self) -> int:
        """1 if the last column is the bias, also a frozen one."""
        return self.P_OI.shape[1] - self.leaves.weight[0].numel()

    @property
    def shape(self) -> tuple[Any, ...]:
        """Key of layers that follow each other in the packed memory."""
        return self.P_OI.shape, self.has_bias, tuple(len(one.polar_state.M_RR) for one in self.estimates)


class _Memory(NamedTuple):
    """The memory of some sides."""

    packing: Packing
    X: Tensor
    Xhat: Tensor
    # coefficients of the rows
    H: Tensor
    # of each tile, and of each side
    sums_T2: Tensor
    column_sums: Tensor
    squares_S: Tensor
    table: Tensor

    def project(self, part: Stacked) -> None:
        torch.ops.ngsgd.project_rows(self.X, self.Xhat, self.H, self.sums_T2, self.column_sums, part.R_LRD, part.V_LRD,
                                     self.packing.table, self.packing.number)


class _Plan(NamedTuple):
    """The memory of one kind of backward pass; None without such layers."""

    affine: _Memory | None
    # of rows, and of channels of images
    sums: tuple[_Memory | None, _Memory | None]
    # of the gradients of convolutions, and of their transpose
    filters: tuple[_Memory, _Memory] | None
    # where rows, and their factors, are copied to
    rows: list[Tensor]
    factors: list[Tensor]


def leaves_of(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Any) -> Leaves | None:
    """Return the leaves of a layer that may take part; None if its node computes the gradient."""
    if x.is_cpu or layer is None or torch.compiler.is_compiling() or layer.context.ranks is not None:
        return None
    parameters = [p for p in (weight, bias) if p is not None and p.requires_grad]
    if any(not p.is_leaf or p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
        return None
    return Leaves(weight, bias if bias is not None and bias.requires_grad else None)


def batches(ctx: Any) -> bool:
    """Return whether the layer of a backward node defers its gradient to the end of the pass."""
    if ctx.leaves is None or ctx.layer.context.batch is None \
            or not ctx.layer.context.batch.takes(ctx.layer):
        return False
    return ctx.leaves.bias is None or asked_for(ctx, 2)[1]


class BatchedPass:
    """Deferred gradients of the layers of one optimizer."""

    def __init__(self, context: LayerContext) -> None:
        self._context = context
        self._affine: list[_Affine] = []
        self._sums: list[_Sum] = []
        self._filters: list[_Filters] = []
        # numbers of the layers that wait
        self._waiting = set[int]()
        # autograd task of the waiting layers
        self._task: int | None = None
        self._num_bytes = 0
        self._plans = Tables[_Plan]()
        # memory that all plans share
        self._memory: dict[Any, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy packs its own rows.
        return {**self.__dict__, "_affine": [], "_sums": [], "_filters": [], "_waiting": set(), "_task": None, "_num_bytes": 0,
                "_plans": Tables(), "_memory": {}}

    def takes(self, layer: LayerPreconditioner) -> bool:
        """Return whether the optimizer options allow it, and all estimates are in polar form."""
        c = self._context
        return (c.on_nonfinite == "skip" and all(side.is_polar and side.rank <= _MOST_RANK for side in layer.sides.values())
                and not (c.observes or c.ignore_zero_rows or c.sums_row_products or c.measures_cosine))

    def record(self, layer: LayerPreconditioner, X_NI: Tensor, dY_NO: Tensor, leaves: Leaves) -> None:
        """Record rows of an affine layer; called in its backward node."""
        self._wait_for(layer, dY_NO, len(dY_NO), 4 * (X_NI.numel() + dY_NO.numel()))
        self._affine.append(_Affine(layer, upcast(X_NI), upcast(dY_NO), leaves, X_NI.dtype))

    def record_sums(self, layer: LayerPreconditioner, x: Tensor, dY: Tensor, leaves: Leaves, num_inner: int) -> None:
        """Record the rows of a normalization, x times dY and dY, both .. x D x `num_inner`."""
        dim = leaves.weight.numel()
        self._wait_for(layer, dY, dY.numel() // dim, 8 * dY.numel())
        x, dY = (upcast(one).reshape(-1, dim, num_inner) for one in (x, dY))
        self._sums.append(_Sum(layer.sides["scale"], dY, x, leaves.weight))
        if leaves.bias is not None:
            self._sums.append(_Sum(layer.sides["offset"], dY, None, leaves.bias))

    def record_filters(self, layer: LayerPreconditioner, dY: Tensor, dW: Tensor, db: Tensor | None, leaves: Leaves) -> None:
        """Record the plain gradients of a convolution with the derivatives `dY`."""
        self._wait_for(layer, dY, dY.numel() // dY.shape[1], 8 * dW.numel())
        P_OI = upcast(dW).reshape(len(dW), -1)
        self._filters.append(_Filters(layer, P_OI if db is None else torch.cat([P_OI, upcast(db)[:, None]], dim=1), leaves))

    def _wait_for(self, layer: LayerPreconditioner, dY: Tensor, num_rows: int, num_bytes: int) -> None:
        layer.begin_pass(dY, num_rows)
        task = torch._C._current_graph_task_id()
        if task != self._task:
            # Rows that remain belong to a pass that ended with an error.
            self._clear()
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(self.run)
        if layer.number in self._waiting or self._num_bytes + num_bytes > _MOST_WAITING_BYTES:
            self.run()
        self._waiting.add(layer.number)
        self._num_bytes += num_bytes

    def _clear(self) -> None:
        self._affine, self._sums, self._filters, self._num_bytes = [], [], [], 0
        self._waiting.clear()

    @torch.no_grad()
    def run(self) -> None:
        """Add the gradients of all waiting layers to the `grad` of their parameters."""
        affine, sums, filters = self._affine, self._sums, self._filters
        self._clear()
        of_first = {(rows.dtype, rows.device): None for rows in (
            *(one.dY_NO for one in affine), *(one.x for one in sums), *(one.P_OI for one in filters))}
        for dtype, device in of_first:
            with without_autocast(device.type):
                self._precondition(
                    _grouped([one for one in affine if (one.dY_NO.dtype, one.dY_NO.device) == (dtype, device)]),
                    [_grouped([one for one in sums if (one.x.dtype, one.x.device) == (dtype, device)
                               and (one.x.shape[2] > 1) == is_inner]) for is_inner in (False, True)],
                    _grouped([one for one in filters if (one.P_OI.dtype, one.P_OI.device) == (dtype, device)]), dtype)

    def _precondition(self, affine: Sequence[Sequence[_Affine]], sums: Sequence[Sequence[Sequence[_Sum]]],
                      filters: Sequence[Sequence[_Filters]], dtype: torch.dtype) -> None:
        """Precondition rows of one dtype on one device, grouped by their shape."""
        estimates = ([estimate for own in affine for side in range(2) for estimate in (one.estimates[side] for one in own)],
                     *([one.estimate for own in kind for one in own] for kind in sums),
                     *([one.estimates[side] for own in filters for one in own] for side in range(2)))
        flat = [estimate for own in estimates for estimate in own]
        for estimate in flat:
            # Apply updates that wait.
            estimate.current(estimate.polar_state.R_RD)
        places, part = self._context.queue.places_of(flat, dtype)
        kinds: Sequence[Sequence[Sequence[Any]]] = (affine, *sums, filters)
        key = (id(part), places, *((own[0].shape, len(own)) for kind in kinds for own in kind))
        plan = self._plans.get(key, lambda: self._plan(affine, sums, filters, iter(places), part))
        rows = [matrix for own in affine for side in range(2) for matrix in ((one.X_NI, one.dY_NO)[side] for one in own)]
        rows += [one.x for kind in sums for own in kind for one in own]
        rows += [one.P_OI for own in filters for one in own]
        torch._foreach_copy_(plan.rows, rows)
        if plan.factors:
            factors = [one.factor for kind in sums for own in kind for one in own]
            torch._foreach_mul_(plan.factors, [factor for factor in factors if factor is not None])
        loss_scale = self._context.loss_scale()
        if plan.affine is not None:
            self._add_affine(plan.affine, affine, part)
            scales = [scale for own in affine for scale in (1.0, loss_scale) for _ in own]
            self._record_updates(plan.affine, estimates[0], scales, part)
        for memory, kind, own in zip(plan.sums, sums, estimates[1:3], strict=True):
            if memory is not None:
                self._add_sums(memory, kind, part)
                self._record_updates(memory, own, [loss_scale] * len(own), part)
        if plan.filters is not None:
            self._add_filters(*plan.filters, filters, part)
            for memory, own in zip(plan.filters, estimates[3:], strict=True):
                self._record_updates(memory, own, [loss_scale] * len(own), part)

    def _plan(self, affine: Sequence[Sequence[_Affine]], sums: Sequence[Sequence[Sequence[_Sum]]],
              filters: Sequence[Sequence[_Filters]], places: Any, part: Stacked) -> _Plan:
        def sides(shape: Sequence[int], rank: int, num_sides: int, **others: Any) -> Sides:
            return Sides(shape[0], shape[1], rank, tuple(itertools.islice(places, num_sides)))._replace(**others)

        rows: list[Tensor] = []
        factors: list[Tensor] = []
        groups = [one for own in affine for one in (
            sides(own[0].X_NI.shape, own[0].ranks[0], len(own), num_appended=own[0].has_one),
            sides(own[0].dY_NO.shape, own[0].ranks[1], len(own)))]
        of_affine = self._made("affine", groups, part, packed_rows.layer_table)
        of_sums = []
        for name, kind in zip(("rows", "channels"), sums, strict=True):
            groups = [sides((own[0].x.shape[0] * own[0].x.shape[2], own[0].x.shape[1]), own[0].shape[2], len(own),
                            num_inner=own[0].x.shape[2]) for own in kind]
            of_sums.append(self._made(name, groups, part, packed_rows.sum_table, sums_columns=True))
        groups = [sides(own[0].P_OI.shape, own[0].shape[2][0], len(own), num_biases=own[0].has_bias) for own in filters]
        of_rows = self._made("filters", groups, part, None)
        of_filters = None
        if of_rows is not None:
            groups = [sides(own[0].P_OI.shape[::-1], own[0].shape[2][1], len(own),
                            num_inner=own[0].P_OI.shape[1]) for own in filters]
            of_columns = self._made("columns", groups, part, None, X=of_rows.Xhat)
            assert of_columns is not None
            table = packed_rows.filter_table(of_rows.packing, of_columns.packing)
            of_filters = of_rows, of_columns._replace(table=table)
        for memory in (of_affine, *of_sums, of_rows):
            if memory is not None:
                rows += [matrix for one in memory.packing.placed for matrix in (
                    one.matrices(memory.X).unbind() if memory in of_sums else one.rows(memory.X).unbind())]
        for memory, kind in zip(of_sums, sums, strict=True):
            if memory is not None:
                factors += [matrix for own, one in zip(kind, memory.packing.placed, strict=True) if own[0].factor is not None
                            for matrix in one.matrices(memory.X).unbind()]
        return _Plan(of_affine, (of_sums[0], of_sums[1]), of_filters, rows, factors)

    def _made(self, name: str, groups: Sequence[Sides], part: Stacked, table: Callable[[Packing], Tensor] | None, *,
              sums_columns: bool = False, X: Tensor | None = None) -> _Memory | None:
        """Make the memory of some sides; None without any."""
        if not groups:
            return None
        like = part.R_LRD
        packing = Packing(groups, like.device, sums_columns=sums_columns)

        def memory(kind: str, size: int) -> Tensor:
            key = (name, kind, like.dtype, like.device)
            if key not in self._memory or len(self._memory[key]) < size:
                self._memory[key] = like.new_empty(size)
            return self._memory[key]

        X = memory("X", packing.size) if X is None else X
        return _Memory(packing, X, memory("Xhat", packing.size), memory("H", packing.size_h),
                       like.new_empty(packing.num_tiles, 2), like.new_empty(packing.size_sums),
                       like.new_empty(packing.num_sides), packing.table if table is None else table(packing))

    def _add_affine(self, memory: _Memory, groups: Sequence[Sequence[_Affine]], part: Stacked) -> None:
        packing, placed = memory.packing, memory.packing.placed
        memory.project(part)
        biases = memory.X.new_empty(sum(len(own) * own[0].dY_NO.shape[1] for own in groups))
        torch.ops.ngsgd.rescale_layers(memory.Xhat, memory.sums_T2, memory.squares_S, biases, memory.table, packing.number)
        first = 0
        for own, inputs, outputs in zip(groups, placed[::2], placed[1::2], strict=True):
            dtype, dYhat_LON = own[0].dtype, outputs.rows(memory.Xhat).mT
            dW_LOI = torch.bmm(dYhat_LON.to(dtype), inputs.rows(memory.Xhat).to(dtype))
            last = first + dW_LOI.shape[0] * dW_LOI.shape[1]
            db_LO = biases[first:last].view(dW_LOI.shape[:2])
            if inputs.sides.num_rows > packed_rows.CHUNK_N and inputs.sides.num_appended:
                db_LO = torch.bmm(dYhat_LON, inputs.appended(memory.Xhat)).flatten(1)
            for one, dW_OI, db_O in zip(own, dW_LOI.unbind(), db_LO.unbind(), strict=True):
                _add(one.leaves.weight, dW_OI)
                if one.leaves.bias is not None:
                    _add(one.leaves.bias, db_O)
            first = last

    def _add_sums(self, memory: _Memory, groups: Sequence[Sequence[_Sum]], part: Stacked) -> None:
        memory.project(part)
        sides = [one for own in groups for one in own]
        totals = memory.X.new_empty(sum(one.leaf.numel() for one in sides))
        torch.ops.ngsgd.scaled_sums(memory.column_sums, memory.sums_T2, memory.squares_S, totals, memory.table,
                                    memory.packing.number)
        for one, total_D in zip(sides, totals.split([one.leaf.numel() for one in sides]), strict=True):
            _add(one.leaf, total_D)

    def _add_filters(self, memory: _Memory, of_columns: _Memory, groups: Sequence[Sequence[_Filters]], part: Stacked) -> None:
        memory.project(part)
        of_columns.project(part)
        gradients = memory.X.new_empty(memory.packing.size)
        torch.ops.ngsgd.rescale_filters(of_columns.Xhat, memory.sums_T2, of_columns.sums_T2, memory.squares_S, of_columns.squares_S,
                                        gradients, of_columns.table, memory.packing.number, of_columns.packing.number)
        for own, placed in zip(groups, memory.packing.placed, strict=True):
            for one, dW_OI, db_O in zip(own, *packed_rows.gradients_of(placed, gradients), strict=True):
                _add(one.leaves.weight, dW_OI)
                if one.leaves.bias is not None:
                    _add(one.leaves.bias, db_O)

    def _record_updates(self, memory: _Memory, estimates: Sequence[OnlineNaturalGradient], loss_scales: Sequence[Tensor | float],
                        part: Stacked) -> None:
        num_rows = (float(one.sides.num_rows) for one in memory.packing.placed for _ in one.sides.places)
        shares: dict[OnlineNaturalGradient, Shares] = {}
        for estimate, number, loss_scale in zip(estimates, num_rows, loss_scales, strict=True):
            share = estimate.shares(number, loss_scale) if estimate.updates_now() else None
            if share is not None:
                shares[estimate] = share
            estimate.count_call()
        if shares:
            found = memory.packing.products(tuple(estimate in shares for estimate in estimates))
            self._context.queue.record_all(shares)
            partials = memory.X.new_empty(found.num_partials)
            torch.ops.ngsgd.row_products(memory.X, memory.H, memory.squares_S, part.J_LRD, self._context.queue.sum_sq_of(part),
                                         partials, found.table, memory.packing.number, found.key)
            if found.sums is not None:
                torch.ops.ngsgd.sum_products(partials, part.J_LRD, found.sums)


def _grouped(layers: Sequence[Any]) -> list[list[Any]]:
    by_shape: dict[Any, list[Any]] = {}
    for one in layers:
        by_shape.setdefault(one.shape, []).append(one)
    return list(by_shape.values())


def _add(p: Tensor, gradient: Tensor) -> None:
    own = gradient.reshape(p.shape).to(p.dtype)
    if p.grad is None:
        p.grad = own
    else:
        p.grad.add_(own)
