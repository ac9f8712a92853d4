"""Rows of many layers in one memory, preconditioned by a few operators.

On a GPU the launch of an operator costs more than the product of a narrow layer with a factor of
low rank. Rows of many layers are therefore packed into one memory, and each operator below handles
all of them: a Triton kernel on a GPU (`ngsgd.ops.device.packed_rows_triton`), and one batched
product for each shape elsewhere.

A side is a matrix of rows of one estimate, such as the inputs of a layer. Letters: L sides of one
shape, S sides, N rows, D columns, R rank of the estimate, T tiles, I inputs, O outputs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.device import triton_kernels

# Rows and columns of a tile; the kernels and the tables agree on them.
BLOCK_N, BLOCK_D = 32, 64
# Rows that one program reads; with more, several programs share a sum.
CHUNK_N = 2048
# Matrices begin at multiples of so many numbers, which is faster on a GPU.
_ALIGNED = 4


class Sides(NamedTuple):
    """Sides of one shape, which follow each other in the packed memory."""

    num_rows: int
    # without the appended 1
    num_columns: int
    rank: int
    # numbers of their estimates in the stack
    places: tuple[int, ...]
    # 1 if the estimate is of rows with an appended 1
    num_appended: int = 0
    # K rows have their numbers of one column next to each other. 1: row after row. N: the
    # transpose. Otherwise: channels of images.
    num_inner: int = 1
    # 1 if the last column of a gradient is that of the bias
    num_biases: int = 0


class Placed(NamedTuple):
    """Sides and where they are."""

    sides: Sides
    # number of the first side
    number: int
    # of the first number of the rows, of the column that belongs to the appended 1, and of the
    # coefficients
    offset: int
    offset_one: int
    offset_h: int
    # first tile, and first sum of columns
    tile: int
    offset_sums: int

    @property
    def num_sides(self) -> int:
        return len(self.sides.places)

    @property
    def num_tiles(self) -> int:
        """Tiles of each side."""
        return -(-self.sides.num_rows // BLOCK_N)

    def matrices(self, memory: Tensor) -> Tensor:
        """Return their memory, L x N / K x D x K."""
        N, D, K = self.sides.num_rows, self.sides.num_columns, self.sides.num_inner
        return self._part(memory, self.offset, D).view(self.num_sides, N // K, D, K)

    def rows(self, memory: Tensor) -> Tensor:
        """Return their rows, L x N x D; a view if rows or the transpose lie one after another."""
        L, N, D, K = self.num_sides, *self.sides[:2], self.sides.num_inner
        return self._part(memory, self.offset, D) if K == 1 else self.matrices(memory).transpose(2, 3).reshape(L, N, D)

    def appended(self, memory: Tensor) -> Tensor:
        """Return what became of their appended 1, L x N x 1."""
        return self._part(memory, self.offset_one, 1)

    def coefficients(self, memory: Tensor) -> Tensor:
        """Return their coefficients H, L x N x R."""
        return self._part(memory, self.offset_h, self.sides.rank)

    def tiles(self, of_tiles: Tensor) -> Tensor:
        """Return their part of the numbers of all tiles, L x T of a side x 2"""
        return of_tiles.narrow(0, self.tile, self.num_sides * self.num_tiles).view(self.num_sides, self.num_tiles, -1)

    def column_sums(self, sums: Tensor) -> Tensor:
        """Return the sums over the rows of each tile, L x T of a side x D."""
        size = self.num_sides * self.num_tiles * self.sides.num_columns
        return sums.narrow(0, self.offset_sums, size).view(self.num_sides, self.num_tiles, self.sides.num_columns)

    def factors(self, stack_LRD: Tensor) -> Tensor:
        """Return their part of a stack of factors, L x R x (D + 1 if appended)."""
        _, dim, rank, places, num_appended, *_ = self.sides
        dim += num_appended
        if places == tuple(range(places[0], places[0] + len(places))):
            return stack_LRD[places[0]:places[-1] + 1, :rank, :dim]
        return torch.stack([stack_LRD[place, :rank, :dim] for place in places])

    def _part(self, memory: Tensor, offset: int, width: int) -> Tensor:
        L, N = self.num_sides, self.sides.num_rows
        return memory.narrow(0, offset, L * N * width).view(L, N, width)


class Packing:
    """Places of some sides in a packed memory, and the tables of their kernels.

    Args:
        sides: of each shape.
        device: of the rows.
        sums_columns: whether `project_rows` also sums the columns of Xhat.
    """

    def __init__(self, sides: Sequence[Sides], device: torch.device, *, sums_columns: bool = False) -> None:
        self.placed: list[Placed] = []
        self.device, self.sums_columns = device, sums_columns
        self.num_sides = self.size = self.size_h = self.num_tiles = self.size_sums = 0
        for one in sides:
            L, N, D = len(one.places), one.num_rows, one.num_columns
            size = -(-L * N * D // _ALIGNED) * _ALIGNED
            placed = Placed(one, self.num_sides, self.size, self.size + size, self.size_h,
                            self.num_tiles, self.size_sums)
            self.placed.append(placed)
            self.num_sides += L
            self.size += size + -(-L * N * one.num_appended // _ALIGNED) * _ALIGNED
            self.size_h += L * N * one.rank
            self.num_tiles += L * placed.num_tiles
            self.size_sums += L * placed.num_tiles * D if self.sums_columns else 0
        self.is_inner = any(one.num_inner > 1 for one in sides)
        self.max_rank = max(one.rank for one in sides)
        self._products: dict[tuple[bool, ...], Products] = {}
        self.number = next(_numbers)
        _by_number[self.number] = self
        self.table = triton_kernels.upload(
            [(tile * BLOCK_N, one.offset_sums + (index * one.num_tiles + tile) * one.sides.num_columns, *numbers)
             for one, index, numbers in self._sides() for tile in range(one.num_tiles)], device)

    def _sides(self) -> Iterator[tuple[Placed, int, tuple[int, ...]]]:
        """Yield (group, number in it, numbers) of each side.

        The numbers are: first number, N, D, appended 1, first of what becomes of it, place, first
        coefficient, R, K.
        """
        for one in self.placed:
            N, D, R, places, num_appended, K, _ = one.sides
            for index, place in enumerate(places):
                yield one, index, (one.offset + index * N * D, N, D, num_appended, one.offset_one + index * N, place,
                                   one.offset_h + index * N * R, R, K)

    def products(self, moving: tuple[bool, ...]) -> Products:
        """Return the tables of the sides with an update in this minibatch."""
        if moving not in self._products:
            found, sums, size = [], [], 0
            for one, index, numbers in self._sides():
                chunks, width = range(0, one.sides.num_rows, CHUNK_N), one.sides.num_columns + one.sides.num_appended
                for first in range(0, width, BLOCK_D) if moving[one.number + index] else ():
                    partials = size if len(chunks) > 1 else -1
                    found += [(first, one.number + index, *numbers, row, -1 if partials < 0 else
                               partials + number * BLOCK_D * one.sides.rank) for number, row in enumerate(chunks)]
                    if len(chunks) > 1:
                        sums.append((first, width, one.sides.places[index], one.sides.rank, partials, len(chunks)))
                        size += len(chunks) * BLOCK_D * one.sides.rank
            key = sum(moves << number for number, moves in enumerate(moving))
            self._products[moving] = Products(key, triton_kernels.upload(found, self.device),
                                              triton_kernels.upload(sums, self.device) if sums else None, size)
        return self._products[moving]


class Products(NamedTuple):
    """Tables of the products of an update."""

    # which sides have an update
    key: int
    # for each block of columns and chunk of rows: first column, side, the numbers of
    # `Packing._sides`, first row, first partial sum or -1
    table: Tensor
    # for each block with several chunks: first column, columns, place, R, first partial sum, chunks
    sums: Tensor | None
    num_partials: int


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Packing] = weakref.WeakValueDictionary()


def packing_of(number: int) -> Packing:
    """Return the live packing with this number."""
    return _by_number[number]


def layer_table(packing: Packing) -> Tensor:
    """Return the table of `rescale_layers` for groups of inputs, each followed by its outputs.

    Biases of layers with several chunks of rows are left to the caller. The table has for each
    block of outputs of a layer and chunk of rows these numbers.

    First column, first tile of the inputs, that of the outputs, number of tiles of a side. First
    number of the derivatives, N, O. First number of the column of the bias, or -1. First bias, side
    of the inputs, side of the outputs, first row.
    """
    found, bias = [], 0
    for inputs, outputs in _pairs(packing):
        N, D = outputs.sides[:2]
        for index in range(outputs.num_sides):
            column = inputs.offset_one + index * N if inputs.sides.num_appended and N <= CHUNK_N else -1
            found += [(first, inputs.tile + index * inputs.num_tiles, outputs.tile + index * outputs.num_tiles,
                       inputs.num_tiles, outputs.offset + index * N * D, N, D, column, bias, inputs.number + index,
                       outputs.number + index, row) for first in range(0, D, BLOCK_D) for row in range(0, N, CHUNK_N)]
            bias += D
    return triton_kernels.upload(found, packing.device)


def sum_table(packing: Packing) -> Tensor:
    """Return the table of `scaled_sums`.

    It has for each block of columns of a side: first column, first tile, number of tiles, first sum
    of a tile, D, first number of the result, side.
    """
    found, first_total = [], 0
    for one in packing.placed:
        D = one.sides.num_columns
        for index in range(one.num_sides):
            found += [(first, one.tile + index * one.num_tiles, one.num_tiles, one.offset_sums + index * one.num_tiles * D, D,
                       first_total, one.number + index) for first in range(0, D, BLOCK_D)]
            first_total += D
    return triton_kernels.upload(found, packing.device)


def filter_table(filters: Packing, columns: Packing) -> Tensor:
    """Return the table of `rescale_filters`, whose groups are those of both packings.

    It has for each block of numbers of a gradient these numbers.

    First number, first number after the gradient. First tile and number of tiles of the filters,
    those of the columns. Side, columns, columns of the weight. First number of the weight's
    gradient, that of the bias's, that of the gradient.
    """
    found = []
    for first, second in zip(filters.placed, columns.placed, strict=True):
        L, N, D, num_biases = first.num_sides, *first.sides[:2], first.sides.num_biases
        for index in range(L):
            start, width = first.offset + index * N * D, D - num_biases
            found += [(block, start + N * D, first.tile + index * first.num_tiles, first.num_tiles,
                       second.tile + index * second.num_tiles, second.num_tiles, first.number + index, D, width,
                       first.offset + index * N * width, first.offset + L * N * width + index * N, start)
                      for block in range(start, start + N * D, BLOCK_N * BLOCK_D)]
    return triton_kernels.upload(found, filters.device)


def _pairs(packing: Packing) -> Iterator[tuple[Placed, Placed]]:
    return zip(packing.placed[::2], packing.placed[1::2], strict=True)


def project_rows(X: Tensor, Xhat: Tensor, H: Tensor, sums_T2: Tensor, column_sums: Tensor, R_LRD: Tensor, V_LRD: Tensor,
                 table: Tensor, packing: int) -> None:
    """Compute H = X R^T and Xhat = X - H V of all sides, and sums of squares.

    Args:
        X: packed rows.
        Xhat: set to the packed result.
        H: set to the coefficients.
        sums_T2: set to sums of squares of X and Xhat; those of a side are the sums over its tiles.
        column_sums: set to the sums over the rows of each tile of Xhat, if the packing has them.
        R_LRD: stack of the left factors.
        V_LRD: stack of the right factors.
        table: `Packing.table`.
        packing: `Packing.number`.
    """
    own = packing_of(packing)
    sums_T2.zero_()
    for one in own.placed:
        X_LND, H_LNR, D = one.rows(X), one.coefficients(H), one.sides.num_columns
        R_part_LRD, V_part_LRD = one.factors(R_LRD), one.factors(V_LRD)
        of_first_L2 = one.tiles(sums_T2)[:, 0]
        if one.sides.num_appended:
            torch.baddbmm(R_part_LRD[:, :, D:].mT, X_LND, R_part_LRD[:, :, :D].mT, out=H_LNR)
            one_LN1 = one.appended(Xhat)
            torch.bmm(H_LNR, V_part_LRD[:, :, D:], out=one_LN1)
            one_LN1.neg_().add_(1.0)
            of_first_L2[:, 0] += one.sides.num_rows
            of_first_L2[:, 1] += one_LN1.square().sum(dim=(1, 2))
        else:
            torch.bmm(X_LND, R_part_LRD.mT, out=H_LNR)
        Xhat_LND = torch.baddbmm(X_LND, H_LNR, V_part_LRD[:, :, :D], alpha=-1)
        one.matrices(Xhat).copy_(Xhat_LND.unflatten(1, (-1, one.sides.num_inner)).transpose(2, 3))
        for column, rows_LND in enumerate((X_LND, Xhat_LND)):
            of_first_L2[:, column] += torch.linalg.vector_norm(rows_LND, dim=(1, 2)).square()
        if own.sums_columns:
            of_tiles_LTD = one.column_sums(column_sums).zero_()
            of_tiles_LTD[:, 0] = Xhat_LND.sum(dim=1)


def rescale_layers(Xhat: Tensor, sums_T2: Tensor, squares_S: Tensor, biases: Tensor, table: Tensor, packing: int) -> None:
    """Multiply the derivatives of each layer by both scales (38); compute bias gradients.

    Args:
        Xhat: packed rows of `project_rows`; those of output sides are changed.
        sums_T2: of `project_rows`.
        squares_S: set to tr X X^T of each side.
        biases: set to the bias gradients of all layers with at most `CHUNK_N` rows.
        table: of `layer_table`.
        packing: `Packing.number`; groups are those of `layer_table`.
    """
    bias = 0
    for inputs, outputs in _pairs(packing_of(packing)):
        scale_L = _scales((inputs, sums_T2, squares_S), (outputs, sums_T2, squares_S))
        dYhat_LNO = outputs.rows(Xhat).mul_(scale_L[:, None, None])
        size = outputs.num_sides * outputs.sides.num_columns
        if inputs.sides.num_appended:
            biases[bias:bias + size] = torch.bmm(dYhat_LNO.mT, inputs.appended(Xhat)).flatten()
        bias += size


def scaled_sums(column_sums: Tensor, sums_T2: Tensor, squares_S: Tensor, totals: Tensor, table: Tensor, packing: int) -> None:
    """Compute the sum of the preconditioned rows of each side, times its scale (38).

    Args:
        column_sums: of `project_rows`.
        sums_T2: of `project_rows`.
        squares_S: set to tr X X^T of each side.
        totals: set to the sums of all sides.
        table: of `sum_table`.
        packing: `Packing.number`.
    """
    first = 0
    for one in packing_of(packing).placed:
        total_LD = one.column_sums(column_sums).sum(dim=1) * _scales((one, sums_T2, squares_S))[:, None]
        totals[first:first + total_LD.numel()] = total_LD.flatten()
        first += total_LD.numel()


def rescale_filters(Phat: Tensor, sums_T2: Tensor, column_sums_T2: Tensor, squares_S: Tensor, column_squares_S: Tensor,
                    gradients: Tensor, table: Tensor, filters: int, columns: int) -> None:
    """Multiply gradients whose rows and columns are preconditioned by both scales (38).

    Args:
        Phat: packed gradients.
        sums_T2: of `project_rows` of the rows, the filters.
        column_sums_T2: of `project_rows` of the columns.
        squares_S: set to tr X X^T of each side of filters.
        column_squares_S: set to tr X X^T of each side of columns.
        gradients: set to the result; see `gradients_of`.
        table: of `filter_table`.
        filters: `Packing.number` of the filters.
        columns: `Packing.number` of the columns.
    """
    for first, second in zip(packing_of(filters).placed, packing_of(columns).placed, strict=True):
        scale_L = _scales((first, sums_T2, squares_S), (second, column_sums_T2, column_squares_S))
        weights_LOI, biases_LO = gradients_of(first, gradients)
        P_LOD = first.rows(Phat) * scale_L[:, None, None]
        weights_LOI.copy_(P_LOD[:, :, :weights_LOI.shape[2]])
        biases_LO.copy_(P_LOD[:, :, weights_LOI.shape[2]:])


def gradients_of(filters: Placed, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weights, L x O x I, and of the biases, L x O x 1 (0 without)."""
    L, N, D, num_biases = filters.num_sides, *filters.sides[:2], filters.sides.num_biases
    weights, biases = memory.narrow(0, filters.offset, L * N * D).split([L * N * (D - num_biases), L * N * num_biases])
    return weights.view(L, N, D - num_biases), biases.view(L, N, num_biases)


def _scales(*sides: tuple[Placed, Tensor, Tensor]) -> Tensor:
    """Return the product of the scales of some (sides, sums_T2, squares_S); note their squares."""
    norms_L2 = None
    for one, sums_T2, squares_S in sides:
        own_L2 = one.tiles(sums_T2).sum(dim=1)
        squares_S[one.number:one.number + one.num_sides] = own_L2[:, 0]
        norms_L2 = own_L2.sqrt() if norms_L2 is None else norms_L2 * own_L2.sqrt()
    assert norms_L2 is not None
    return torch.nan_to_num(norms_L2[:, 0] / norms_L2[:, 1], nan=1.0, posinf=1.0)


def row_products(X: Tensor, H: Tensor, squares_S: Tensor, J_LRD: Tensor, sum_sq_L: Tensor, partials: Tensor, table: Tensor,
                 packing: int, moving: int) -> None:
    """Compute J = H^T X and tr X X^T of sides whose estimates have an update.

    Args:
        X: packed rows.
        H: coefficients of `project_rows`.
        squares_S: tr X X^T of each side.
        J_LRD: stack of the products; those of the sides are set.
        sum_sq_L: tr X X^T of the stack, float64; those of the sides are set.
        partials: memory of `Products.num_partials` sums, for `sum_products`.
        table: `Products.table`.
        packing: `Packing.number`.
        moving: `Products.key`.
    """
    for one in packing_of(packing).placed:
        X_LND, H_LNR, R, D = one.rows(X), one.coefficients(H), one.sides.rank, one.sides.num_columns
        for index, place in enumerate(one.sides.places):
            if moving >> (one.number + index) & 1:
                J_LRD[place, :R, :D] = H_LNR[index].T @ X_LND[index]
                if one.sides.num_appended:
                    J_LRD[place, :R, D] = H_LNR[index].sum(dim=0)
                sum_sq_L[place] = squares_S[one.number + index]


def sum_products(partials: Tensor, J_LRD: Tensor, table: Tensor) -> None:
    """Sum the partial products that `row_products` has computed of sides with many rows."""


triton_kernels.register("packed_rows", {
    project_rows: "Tensor X, Tensor(a!) Xhat, Tensor(b!) H, Tensor(c!) sums_T2, Tensor(d!) "
                  "column_sums, Tensor R_LRD, Tensor V_LRD, Tensor table, int packing",
    rescale_layers: "Tensor(a!) Xhat, Tensor sums_T2, Tensor(b!) squares_S, Tensor(c!) biases, "
                    "Tensor table, int packing",
    scaled_sums: "Tensor column_sums, Tensor sums_T2, Tensor(a!) squares_S, Tensor(b!) totals, "
                 "Tensor table, int packing",
    rescale_filters: "Tensor Phat, Tensor sums_T2, Tensor column_sums_T2, Tensor(a!) squares_S, "
                     "Tensor(b!) column_squares_S, Tensor(c!) gradients, Tensor table, int "
                     "filters, int columns",
    row_products: "Tensor X, Tensor H, Tensor squares_S, Tensor(a!) J_LRD, Tensor(b!) sum_sq_L, "
                  "Tensor(c!) partials, Tensor table, int packing, int moving",
    sum_products: "Tensor partials, Tensor(a!) J_LRD, Tensor table"})
