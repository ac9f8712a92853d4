"""Cost of curvature quantities relative to the plain gradient, of ngsgd and BackPACK, interleaved.

    python benchmarks/curvature.py time --out FIGURES.jsonl [--nets mlp tdnn] [--quantities variance kfac] [--rounds 5]
    python benchmarks/curvature.py memory --out FIGURES.jsonl
    python benchmarks/curvature.py warm-memory --out FIGURES.jsonl --quantities kfac
    python benchmarks/curvature.py table --out FIGURES.jsonl

Each cell is written to the file as soon as it is measured and is not measured again; `table` prints
all cells.  Times are processor times of one thread.  A ratio is the median of ratios of neighboring
runs (plain, ngsgd, plain, BackPACK) with quartiles.  Memory is the peak increase of the resident
set in the first pass of a new process, loaded code included; freed memory is returned immediately.
`warm-memory` measures the second pass, when code is loaded and kernels have their workspaces:
tensors alone.  Quantities that BackPACK does not have are measured alone.  BackPACK is used if
`backpack-for-pytorch` is installed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks.nets import NETS, Net
else:   # a script finds the files in its folder
    from nets import NETS, Net

from ngsgd.curvature import collect

PRODUCTS = ("hmp", "ggnmp", "pchmp")
EXACT = ("diag_ggn", "batch_diag_ggn", "sqrt_ggn", "kflr", "diag_h", "batch_diag_h", "kfra")
QUANTITIES = ("batch_grad", "batch_l2", "sum_grad_squared", "second_moment", "variance", "diag_ggn_mc", "batch_diag_ggn_mc",
              "sqrt_ggn_mc", "kfac", "kfac_emp", *EXACT, *PRODUCTS)
PEER = {"batch_grad": "BatchGrad", "batch_l2": "BatchL2Grad", "sum_grad_squared": "SumGradSquared", "variance": "Variance",
        "diag_ggn_mc": "DiagGGNMC", "batch_diag_ggn_mc": "BatchDiagGGNMC", "sqrt_ggn_mc": "SqrtGGNMC", "kfac": "KFAC",
        "diag_ggn": "DiagGGNExact", "batch_diag_ggn": "BatchDiagGGNExact", "sqrt_ggn": "SqrtGGNExact", "kflr": "KFLR",
        "diag_h": "DiagHessian", "batch_diag_h": "BatchDiagHessian", "kfra": "KFRA", "hmp": "HMP", "ggnmp": "GGNMP",
        "pchmp": "PCHMP"}
NO_PEER = {("tdnn", name) for name in PRODUCTS}   # BackPACK does not support Conv1d for these
# a matrix of 2000 x 2000 numbers for each of 512 samples
NO_PEER |= {("mlp", name) for name in PRODUCTS}
# one vector per class, or gradients of every sample: too large for the usual minibatch
_BATCH = {("allcnnc", name): 2 for name in (*EXACT, "batch_diag_ggn_mc", "sqrt_ggn_mc")}
_BATCH |= {("tdnn", name): 2 for name in EXACT}
_TOO_LARGE = {("mlp", name) for name in ("batch_grad", "batch_diag_ggn_mc", "sqrt_ggn_mc", *EXACT) if name != "kfra"}
_TOO_LARGE |= {(net, "sqrt_ggn") for net in ("allcnnc", "tdnn", "smallmlp")}
# a matrix of 50176 x 50176 numbers at the first layer
_TOO_LARGE |= {(net, "kfra") for net in ("3c3d", "allcnnc", "tdnn")}


class Work:
    """One network with its minibatch."""

    def __init__(self, net: Net, batch: int) -> None:
        torch.manual_seed(0)
        self.model, self.loss_fn = net.build(), nn.CrossEntropyLoss()
        self.x, self.y = torch.randn(batch, *net.input_shape), torch.randint(net.num_classes, (batch,))
        # results are kept until the next run, as BackPACK keeps them on the parameters
        self.found: Any = None
        self.vectors = {name: torch.randn(1, *p.shape) for name, p in self.model.named_parameters()}

    def clear(self) -> None:
        self.found = None
        for p in self.model.parameters():
            p.grad = None
            for name in list(vars(p)):
                delattr(p, name)

    def plain(self) -> None:
        self.clear()
        self.loss_fn(self.model(self.x), self.y).backward()

    def ours(self, quantity: str) -> None:
        self.clear()
        with collect(self.model, quantity, loss_fn=self.loss_fn, sharing="backpack") as q:
            self.loss_fn(self.model(self.x), self.y).backward()
        found = {name: getattr(q[name], quantity) for name in q}
        self.found = {name: product(self.vectors[name]) for name, product in found.items()} if quantity in PRODUCTS else found


class PeerWork(Work):
    """The network and minibatch, extended by BackPACK."""

    def __init__(self, net: Net, batch: int) -> None:
        super().__init__(net, batch)
        import backpack
        self.model, self.loss_fn = backpack.extend(self.model), backpack.extend(self.loss_fn)

    def theirs(self, quantity: str) -> None:
        from backpack import backpack, extensions
        self.clear()
        extension = getattr(extensions, PEER[quantity])()
        with backpack(extension):
            self.loss_fn(self.model(self.x), self.y).backward()
        self.found = [getattr(p, extension.savefield)(self.vectors[name]) for name, p in self.model.named_parameters()
                      if quantity in PRODUCTS]


def has_peer() -> bool:
    try:
        import backpack  # noqa: F401
    except ImportError:
        return False
    return True


def sides(net: str, quantity: str) -> list[str]:
    """The libraries that have this cell."""
    return ["ours", "theirs"] if quantity in PEER and (net, quantity) not in NO_PEER and has_peer() else ["ours"]


def batch_of(net: str, quantity: str) -> int:
    return int(_BATCH.get((net, quantity), NETS[net].batch))


class Figures:
    """Finished cells, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cells = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has(self, what: str, net: str, quantity: str) -> bool:
        return self.of(what, net, quantity) is not None

    def of(self, what: str, net: str, quantity: str) -> dict[str, Any] | None:
        return next((cell for cell in self.cells if (cell["what"], cell["net"], cell["quantity"]) == (what, net, quantity)), None)

    def add(self, **cell: Any) -> None:
        self.cells.append(cell)
        with self._path.open("a") as file:
            file.write(json.dumps(cell) + "\n")
        print(cell, flush=True)


def processor_s(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure_times(figures: Figures, net: str, quantity: str, rounds: int) -> None:
    torch.set_num_threads(1)
    batch = batch_of(net, quantity)
    work = Work(NETS[net], batch)
    runs: dict[str, Callable[[], object]] = {"ours": partial(Work(NETS[net], batch).ours, quantity)}
    if "theirs" in sides(net, quantity):
        runs["theirs"] = partial(PeerWork(NETS[net], batch).theirs, quantity)
    ratios: dict[str, list[float]] = {side: [] for side in runs}
    plain_s = []
    # the first passes load code and settle the memory
    for run in 5 * [work.plain, *runs.values()]:
        run()
    for _ in range(rounds):
        for side, run in runs.items():
            plain_s.append(processor_s(work.plain))
            ratios[side].append(processor_s(run) / plain_s[-1])
    figures.add(what="time", net=net, quantity=quantity, batch=batch, plain_ms=round(1e3 * statistics.median(plain_s), 1),
                **{side: [round(ratio, 3) for ratio in sorted(values)] for side, values in ratios.items()})


def measure_memory(figures: Figures, what: str, net: str, quantity: str) -> None:
    batch = batch_of(net, quantity)
    peak_of = "warm-peak" if what == "warm-memory" else "peak"
    mib = {side: _peak_of(peak_of, net, side, quantity) for side in ["plain", *sides(net, quantity)]}
    figures.add(what=what, net=net, quantity=quantity, batch=batch, **{side: round(value, 1) for side, value in mib.items()})


def _peak_of(what: str, net: str, side: str, quantity: str) -> float:
    command = [sys.executable, __file__, what, "--nets", net, "--side", side, "--quantities", quantity]
    # glibc would keep freed blocks, some of them from before the first measurement
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout)


def peak(net: str, side: str, quantity: str, *, is_warm: bool) -> None:
    """Print the growth of the resident set in MiB, in the first pass of a process or in a pass with
    loaded code.
    """
    torch.set_num_threads(1)
    # 36 MiB that every optimizer of PyTorch loads, and some quantities without one
    importlib.import_module("torch._dynamo")
    kind = PeerWork if side == "theirs" else Work
    if is_warm:
        warm = kind(NETS[net], batch_of(net, quantity))
        _run(warm, side, quantity)
        warm.clear()
        del warm
        gc.collect()
    work = kind(NETS[net], batch_of(net, quantity))
    Path("/proc/self/clear_refs").write_text("5")   # reset the peak
    before = _status_mib("VmRSS")
    _run(work, side, quantity)
    print(_status_mib("VmHWM") - before)


def _run(work: Any, side: str, quantity: str) -> None:
    if side == "plain":
        work.plain()
    else:
        getattr(work, side)(quantity)


def _status_mib(field: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) / 1024


def table(figures: Figures, what: str) -> None:
    """Markdown, a row for each quantity."""
    nets = [net for net in NETS if any(cell["what"] == what and cell["net"] == net for cell in figures.cells)]
    print(f"\n| quantity | {' | '.join(f'{net}, {NETS[net].batch}' for net in nets)} |\n|{'---|' * (len(nets) + 1)}")
    for quantity in QUANTITIES:
        cells = [(figures.of(what, net, quantity), net) for net in nets]
        if any(cell for cell, _ in cells):
            print(f"| {quantity} | {' | '.join(_shown(cell, net) for cell, net in cells)} |")


def _shown(cell: dict[str, Any] | None, net: str) -> str:
    if cell is None:
        return "-"
    small = f" (minibatch {cell['batch']})" if cell["batch"] != NETS[net].batch else ""
    if cell["what"] != "time":
        return ", ".join(f"{cell[side] / cell['plain']:.2f}" for side in ("ours", "theirs") if side in cell) + small
    return ", ".join(_quartiles(cell[side]) for side in ("ours", "theirs") if side in cell) + small


def _quartiles(ordered: list[float]) -> str:
    return f"{statistics.median(ordered):.2f} ({ordered[len(ordered) // 4]:.2f}-{ordered[-1 - len(ordered) // 4]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "warm-memory", "table", "peak", "warm-peak"))
    parser.add_argument("--out", type=Path, default=Path("curvature-figures.jsonl"))
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--quantities", nargs="+", default=list(QUANTITIES), choices=QUANTITIES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=1e9, help="start no cell after so many minutes")
    parser.add_argument("--side", default="ours", choices=("plain", "ours", "theirs"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.what in ("peak", "warm-peak"):
        peak(args.nets[0], args.side, args.quantities[0], is_warm=args.what == "warm-peak")
        return
    figures, end = Figures(args.out), time.monotonic() + 60.0 * args.minutes
    if args.what == "table":
        for what in ("time", "memory", "warm-memory"):
            table(figures, what)
        return
    for net in args.nets:
        for quantity in args.quantities:
            if (net, quantity) in _TOO_LARGE or figures.has(args.what, net, quantity) or time.monotonic() > end:
                continue
            if args.what == "time":
                measure_times(figures, net, quantity, args.rounds)
            else:
                measure_memory(figures, args.what, net, quantity)


if __name__ == "__main__":
    main()
