"""Check the Triton kernels without a GPU: in Triton's interpreter, and by its compiler; JSON lines.

    python -m tests.device.kernels interpret      largest difference from the torch operations
    python -m tests.device.kernels compile        size of the code for two processors
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import polar_update
from ngsgd.ops.device import limited_update, packed_rows
from ngsgd.ops.device.packed_rows import Packing, Sides
from ngsgd.ops.natural_gradient import Smoothing

CPU = torch.device("cpu")
STACK, RANK, DIM = 10, 80, 132
# sides of each shape, and whether columns are summed
PACKINGS: dict[str, tuple[list[Sides], bool]] = {
    "layers": ([Sides(50, 36, 7, (0, 1, 2), 1), Sides(50, 48, 40, (3, 4, 5)), Sides(33, 64, 33, (6,), 1),
                Sides(33, 130, 80, (8,)), Sides(5, 20, 3, (7,)), Sides(5, 9, 4, (9,))], False),
    "rows": ([Sides(70, 36, 7, (0, 1, 4)), Sides(5, 100, 33, (2,))], True),
    "channels": ([Sides(60, 8, 4, (0, 1, 4), 0, 20), Sides(36, 70, 33, (2,), 0, 12)], True),
    # more than a chunk of rows
    "many rows": ([Sides(2100, 40, 20, (0, 1)), Sides(4100, 70, 33, (2, 3))], True),
    "filters": ([Sides(8, 10, 4, (0, 2), 0, 1, 1), Sides(70, 70, 33, (1,))], False)}
COLUMNS = [Sides(10, 8, 4, (3, 5), 0, 10), Sides(70, 70, 20, (4,), 0, 70)]


def _of_packing(name: str) -> Callable[[Any], Iterator[Tensor]]:
    """Return all that the operators of a module compute for a packing."""
    torch.manual_seed(0)
    sides, sums_columns = PACKINGS[name]
    packing, columns = Packing(sides, CPU, sums_columns=sums_columns), Packing(COLUMNS, CPU)
    X, R_LRD = torch.randn(packing.size), torch.zeros(STACK, RANK, DIM)
    for one in (*packing.placed, *columns.placed):
        for place in one.sides.places:
            width = one.sides.num_columns + one.sides.num_appended
            R_LRD[place, :one.sides.rank, :width] = torch.randn(one.sides.rank, width) / width**0.5
    moving = tuple(number % 3 != 1 for number in range(packing.num_sides))

    def run(module: Any) -> Iterator[Tensor]:
        Xhat, H, sums_T2, of_tiles, squares_S = _memory(packing)
        module.project_rows(X, Xhat, H, sums_T2, of_tiles, R_LRD, R_LRD / 2, packing.table, packing.number)
        if name == "layers":
            found = torch.zeros(sum(one.num_sides * one.sides.num_columns for one in packing.placed[1::2]))
            module.rescale_layers(Xhat, sums_T2, squares_S, found, packed_rows.layer_table(packing), packing.number)
        elif name == "filters":
            Phat, of_columns_H, of_columns_T2, _, of_columns_S = _memory(columns)
            found = torch.zeros(packing.size)
            module.project_rows(Xhat, Phat, of_columns_H, of_columns_T2, of_tiles, R_LRD, R_LRD / 2, columns.table, columns.number)
            module.rescale_filters(Phat, sums_T2, of_columns_T2, squares_S, of_columns_S, found,
                                   packed_rows.filter_table(packing, columns), packing.number, columns.number)
            yield from (Phat, of_columns_S)
        else:
            found = torch.zeros(sum(one.num_sides * one.sides.num_columns for one in packing.placed))
            module.scaled_sums(of_tiles, sums_T2, squares_S, found, packed_rows.sum_table(packing), packing.number)
        products = packing.products(moving)
        J_LRD, sum_sq_L = torch.zeros_like(R_LRD), torch.zeros(STACK, dtype=torch.float64)
        partials = torch.zeros(products.num_partials)
        module.row_products(X, H, squares_S, J_LRD, sum_sq_L, partials, products.table, packing.number, products.key)
        if products.sums is not None:
            module.sum_products(partials, J_LRD, products.sums)
        yield from (Xhat, H, squares_S, found, J_LRD, sum_sq_L)
    return run


def _memory(packing: Packing) -> tuple[Tensor, ...]:
    return (torch.zeros(packing.size), torch.zeros(packing.size_h), torch.zeros(packing.num_tiles, 2),
            torch.zeros(packing.size_sums), torch.zeros(packing.num_sides))


def _of_step(bad: float, others: bool | None) -> Callable[[Any], Iterator[Tensor]]:
    """Return what a step computes, with a number in the directions that may not be finite."""
    torch.manual_seed(0)
    params = [[torch.randn(70, 90), torch.randn(70)], [torch.randn(9000)], [torch.randn(3)]]
    directions = [[torch.randn_like(p) for p in own] for own in params]
    directions[1][0][8000] = bad
    constants_2C = torch.tensor([[1.0, 0.5, -2.0], [0.75, 0.3, math.inf]])

    def run(module: Any) -> Iterator[Tensor]:
        layout = limited_update.Layout(*([[one.clone() for one in own] for own in kind] for kind in (params, directions)))
        numbers = torch.zeros(9)
        module.direction_norms(layout.directions, layout.partials_T, layout.table)
        module.update_limits(layout.partials_T, layout.starts, constants_2C, None if others is None else torch.tensor(others),
                             numbers, 0.8, 1.5, 0.1)
        module.limited_update(layout.params, layout.directions, numbers, layout.table, layout.components)
        found = limited_update.Found.of(numbers)
        # The others have no meaning in a skipped step.
        yield from (found.total, found.is_skipped, *layout.params, *layout.directions)
    return run


def _of_update(bad: float) -> Callable[[Any], Iterator[Tensor]]:
    """Return what the R x R algebra computes, with a matrix that may not be finite."""
    torch.manual_seed(0)
    dims, ranks, R = (30, 40, 100), (20, 7, 16), 20
    constants = polar_update.Constants.of(dims, ranks, [Smoothing(4.0, 1e-10, 5e-4, False)] * 3, CPU)
    rows = torch.randn(3, R, 60, dtype=torch.float64)
    Z_LRR, S_LRR = torch.bmm(rows, rows.mT), torch.randn(3, 2 * R, R, dtype=torch.float64)[:, R:]
    Z_LRR[2, 3, 3] *= bad
    shares_4L, sum_sq_L = torch.rand(4, 3, dtype=torch.float64), torch.full((3,), 1e4, dtype=torch.float64)

    def run(module: Any) -> Iterator[Tensor]:
        M_LRR, rho_L, Z = torch.bmm(rows, rows.mT) / 10, torch.ones(3, dtype=torch.float64), Z_LRR.clone()
        now, inverse_root_L, past_LRR = torch.zeros(3, 3, R, R, dtype=torch.float64), torch.zeros_like(rho_L), torch.zeros(3, R, R)
        PA_LRR, B_LRR, ratio_L = torch.zeros(3, 2 * R, R, dtype=torch.float64), torch.zeros_like(M_LRR), torch.zeros_like(rho_L)
        is_finite_L = torch.zeros(3, dtype=torch.bool)
        module.polar_kept(M_LRR, rho_L, shares_4L[1], past_LRR)
        module.polar_roots_start(Z, shares_4L[3], now, inverse_root_L)
        module.polar_spectrum(S_LRR, torch.bmm(Z, Z), sum_sq_L, shares_4L, constants.numbers_6L, M_LRR, rho_L, is_finite_L)
        module.polar_inverse_start(M_LRR, torch.bmm(M_LRR, M_LRR), rho_L, constants.numbers_6L, PA_LRR, B_LRR, ratio_L)
        yield from (past_LRR, now[:2, 1:], inverse_root_L[:2], Z[:2], M_LRR, rho_L, is_finite_L.double(), PA_LRR, B_LRR, ratio_L)
    return run


# module of the torch operations -> cases
CASES: dict[str, tuple[Any, Callable[[], Callable[[Any], Iterator[Tensor]]]]] = {
    **{name: (packed_rows, partial(_of_packing, name)) for name in PACKINGS},
    **{f"step, {bad}, {others}": (limited_update, partial(_of_step, bad, others))
       for bad, others in ((0.0, None), (math.nan, None), (math.inf, None), (0.0, True), (0.0, False))},
    **{f"update, {bad}": (polar_update, partial(_of_update, bad)) for bad in (1.0, math.nan)}}
# kernels of each module, their constants and the types of their arguments
KERNELS = {"packed_rows": ("_project", "_rescale_layers", "_scaled_sums", "_rescale_filters", "_products", "_sum_products"),
           "limited_update": ("_norms", "_limits", "_update"),
           "polar_update": ("_kept", "_roots_start", "_spectrum", "_inverse_start")}
CONSTANTS = {"SMALL": 32, "RANK": 128, "CHUNK_N": packed_rows.CHUNK_N, "BLOCK_N": packed_rows.BLOCK_N,
             "BLOCK_D": packed_rows.BLOCK_D, "BLOCK_T": 128, "BLOCK": 2048, "COMPONENTS": 16, "HAS_OTHERS": True,
             "IS_INNER": True, "SUMS": True, "SIZE": 128, "BLOCK_R": 16}
_DOUBLES = ("sum_sq_L", "M_LRR", "rho_L", "keep_L", "Z_LRR", "factor_L", "now_L3RR", "inverse_root_L", "S_LRR", "square_LRR",
            "shares_4L", "numbers_6L", "PA_LRR", "B_LRR", "ratio_L")
_INTEGERS = ("stride_l", "stride_r", "stride_s", "C", "L", "R")
_TYPES = {**dict.fromkeys(_DOUBLES, "*fp64"), **dict.fromkeys(_INTEGERS, "i32"), **dict.fromkeys(("table", "starts"), "*i64"),
          **dict.fromkeys(("max_param_change", "scale", "size_scale"), "fp32"), **dict.fromkeys(("is_finite_L", "others"), "*i1")}


def interpret() -> None:
    for name, (module, make) in CASES.items():
        kernels, run = importlib.import_module(f"ngsgd.ops.device.{module.__name__.rpartition('.')[2]}_triton"), make()
        pairs = list(zip(run(module), run(kernels), strict=True))
        worst = max(float((one - other).abs().nan_to_num(0.0).max() / one.abs().nan_to_num(0.0).max().clamp(min=1e-30))
                    for one, other in pairs)
        equal = all(torch.equal(one.isnan(), other.isnan()) for one, other in pairs)
        # the last result is 0 if nothing has happened, or if a step is skipped
        print(json.dumps({name: {"worst": worst, "nan": equal, "moved": bool(pairs[-1][1].any())}}), flush=True)


def compiled() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for module, names in KERNELS.items():
        for name in names:
            kernel = getattr(importlib.import_module(f"ngsgd.ops.device.{module}_triton"), name)
            constants = {key: value for key, value in CONSTANTS.items() if key in kernel.arg_names}
            types = {key: "constexpr" if key in constants else _TYPES.get(key, "*fp32") for key in kernel.arg_names}
            found = {}
            for capability in (80, 90):
                made = triton.compile(ASTSource(kernel, types, constants), target=GPUTarget("cuda", capability, 32))
                found[capability] = [made.metadata.shared, len(made.asm["cubin"])]
            print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if sys.argv[1] == "interpret":
        # read when the kernels are imported
        os.environ["TRITON_INTERPRET"] = "1"
        interpret()
    else:
        compiled()
