"""What curvature quantities cost beside the plain gradient, ours and BackPACK's in turns.

    python benchmarks/curvature.py time [--nets mlp tdnn] [--quantities variance kfac] [--rounds 7]
    python benchmarks/curvature.py memory

Times are processor times of one thread; a ratio is the median of ratios of neighbouring runs (plain, ours, plain, BackPACK's),
with its quartiles.  Memory is what the process grew by, beyond what it held before the first pass.  BackPACK is taken if
`backpack-for-pytorch` is installed.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ngsgd.curvature import collect


def conv_net_3c3d() -> nn.Sequential:
    """3C3D of DeepOBS, on 32 x 32 images of 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 5), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(64, 96, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True),
        nn.Conv2d(96, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(),
        nn.Linear(1152, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))


def all_cnn_c() -> nn.Sequential:
    """All-CNN-C (Springenberg et al. 2015), on 32 x 32 images of 100 classes, without dropout."""
    layers: list[nn.Module] = []
    for num_in, num_out, kernel, stride, padding in ((3, 96, 3, 1, 1), (96, 96, 3, 1, 1), (96, 96, 3, 2, 1), (96, 192, 3, 1, 1),
                                                     (192, 192, 3, 1, 1), (192, 192, 3, 2, 1), (192, 192, 3, 1, 0),
                                                     (192, 192, 1, 1, 0), (192, 100, 1, 1, 0)):
        layers += [nn.Conv2d(num_in, num_out, kernel, stride, padding), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(6), nn.Flatten())


def mlp() -> nn.Sequential:
    """A feed-forward acoustic model: 360 inputs, four hidden layers of 1024, 2000 states."""
    dims = [360, 1024, 1024, 1024, 1024]
    hidden = [part for pair in itertools.pairwise(dims) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(1024, 2000))


def small_mlp() -> nn.Sequential:
    """Two hidden layers of 512 and 100 classes, small enough for what sends a vector for each class."""
    return nn.Sequential(nn.Linear(360, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100))


def tdnn() -> nn.Sequential:
    """A TDNN of dilated convolutions over time, 3.0 million parameters, one target for a window of 29 frames."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    width = 40
    for index, dilation in enumerate((1, 1, 3, 3, 3), start=1):
        layers[f"tdnn{index}"], layers[f"relu{index}"] = nn.Conv1d(width, 384, 3, dilation=dilation), nn.ReLU()
        width = 384
    layers["flatten"], layers["output"] = nn.Flatten(), nn.Linear(384 * 7, 1000 // 3)
    return nn.Sequential(layers)


@dataclass(frozen=True)
class Net:
    """A network and the minibatch that it is measured on."""

    build: Callable[[], nn.Sequential]
    input_shape: tuple[int, ...]
    num_classes: int
    batch: int


NETS = {
    "3c3d": Net(conv_net_3c3d, (3, 32, 32), 10, 16),
    "allcnnc": Net(all_cnn_c, (3, 32, 32), 100, 8),
    "mlp": Net(mlp, (360,), 2000, 512),
    "tdnn": Net(tdnn, (40, 29), 333, 32),
    "smallmlp": Net(small_mlp, (360,), 100, 64),
}
QUANTITIES = ("batch_grad", "batch_l2", "sum_grad_squared", "variance", "diag_ggn_mc", "kfac", "diag_ggn", "kflr", "diag_h",
              "batch_diag_ggn", "batch_diag_ggn_mc", "sqrt_ggn", "sqrt_ggn_mc")
_TOO_LARGE = {("mlp", name) for name in ("batch_grad", "diag_ggn", "kflr", "diag_h", "batch_diag_ggn", "batch_diag_ggn_mc",
                                         "sqrt_ggn", "sqrt_ggn_mc")}
_TOO_LARGE |= {(net, name) for net in ("allcnnc", "tdnn") for name in ("diag_ggn", "kflr", "diag_h", "batch_diag_ggn", "sqrt_ggn")}


class Work:
    """One network with its minibatch."""

    def __init__(self, net: Net, batch: int) -> None:
        torch.manual_seed(0)
        self.model, self.loss_fn = net.build(), nn.CrossEntropyLoss()
        self.x, self.y = torch.randn(batch, *net.input_shape), torch.randint(net.num_classes, (batch,))

    def clear(self) -> None:
        for p in self.model.parameters():
            for name in ("grad", "grad_batch", "batch_l2", "sum_grad_squared", "variance", "diag_ggn_mc", "diag_ggn_exact", "kfac",
                         "kflr", "diag_h", "diag_ggn_exact_batch", "diag_ggn_mc_batch", "sqrt_ggn_exact", "sqrt_ggn_mc"):
                if getattr(p, name, None) is not None:
                    p.grad = None if name == "grad" else p.grad
                    if name != "grad":
                        delattr(p, name)

    def plain(self) -> None:
        self.clear()
        self.loss_fn(self.model(self.x), self.y).backward()

    def ours(self, quantity: str) -> dict[str, Tensor]:
        self.clear()
        with collect(self.model, quantity, loss_fn=self.loss_fn, sharing="backpack") as q:
            self.loss_fn(self.model(self.x), self.y).backward()
        return {name: getattr(q[name], quantity) for name in q}


class PeerWork(Work):
    """The same, extended by BackPACK."""

    def __init__(self, net: Net, batch: int) -> None:
        super().__init__(net, batch)
        import backpack
        self.model, self.loss_fn = backpack.extend(self.model), backpack.extend(self.loss_fn)

    def theirs(self, quantity: str) -> None:
        from backpack import backpack
        from backpack import extensions as e
        extension = {"batch_grad": e.BatchGrad, "batch_l2": e.BatchL2Grad, "sum_grad_squared": e.SumGradSquared,
                     "variance": e.Variance, "diag_ggn_mc": e.DiagGGNMC, "kfac": e.KFAC, "diag_ggn": e.DiagGGNExact, "kflr": e.KFLR,
                     "diag_h": e.DiagHessian, "batch_diag_ggn": e.BatchDiagGGNExact, "batch_diag_ggn_mc": e.BatchDiagGGNMC,
                     "sqrt_ggn": e.SqrtGGNExact, "sqrt_ggn_mc": e.SqrtGGNMC}[quantity]
        self.clear()
        with backpack(extension()):
            self.loss_fn(self.model(self.x), self.y).backward()


def has_peer() -> bool:
    try:
        import backpack  # noqa: F401
    except ImportError:
        return False
    return True


def processor_s(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def quartiles(ratios: list[float]) -> str:
    ordered = sorted(ratios)
    return f"{statistics.median(ordered):.2f} ({ordered[len(ordered) // 4]:.2f} to {ordered[-1 - len(ordered) // 4]:.2f})"


def times(nets: list[str], quantities: list[str], rounds: int, batch: int | None, *, peer: bool) -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, {rounds} rounds")
    for net_name in nets:
        net = NETS[net_name]
        num = batch or net.batch
        work = Work(net, num)
        work.plain()
        print(f"\n{net_name}, minibatch {num}: plain {1e3 * statistics.median(processor_s(work.plain) for _ in range(5)):.1f} "
              "ms", flush=True)
        for quantity in quantities:
            if (net_name, quantity) not in _TOO_LARGE:
                _compare(quantity, work, PeerWork(net, num) if peer else None, rounds)


def _compare(quantity: str, work: Work, other: PeerWork | None, rounds: int) -> None:
    runs: dict[str, Callable[[], object]] = {"ours": partial(work.ours, quantity)}
    if other is not None:
        runs["BackPACK"] = partial(other.theirs, quantity)
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            ratios[name].append(processor_s(run) / processor_s(work.plain))
    print(f"  {quantity:18s} " + "   ".join(f"{name} {quartiles(values)}" for name, values in ratios.items()), flush=True)


def memory(nets: list[str], quantities: list[str], *, peer: bool) -> None:
    """Each in a process of its own."""
    for net in nets:
        base = _peak_of(net, "plain", "plain")
        print(f"\n{net}: plain {base:.0f} MiB")
        for quantity in quantities:
            if (net, quantity) not in _TOO_LARGE:
                sides = ["ours", "theirs"] if peer else ["ours"]
                found = {side: _peak_of(net, side, quantity) for side in sides}
                cells = "   ".join(f"{side} {mib:.0f} MiB, {mib / base:.2f} x" for side, mib in found.items())
                print(f"  {quantity:18s} {cells}", flush=True)


def _peak_of(net: str, side: str, quantity: str) -> float:
    command = [sys.executable, __file__, "peak", "--nets", net, "--side", side, "--quantities", quantity]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peak(net: Net, side: str, quantity: str) -> None:
    torch.set_num_threads(1)
    work = PeerWork(net, net.batch) if side == "theirs" else Work(net, net.batch)
    small = PeerWork(net, 1) if side == "theirs" else Work(net, 1)
    run = work.plain if side == "plain" else partial(getattr(work, side), quantity)
    warm = small.plain if side == "plain" else partial(getattr(small, side), quantity)
    warm()  # libraries and code
    small.clear()
    before = _resident_mib()
    kept = [run() for _ in range(1)]
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before, len(kept) * 0 or "", sep="")


def _resident_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "peak"))
    parser.add_argument("--nets", nargs="+", default=list(NETS), choices=list(NETS))
    parser.add_argument("--quantities", nargs="+", default=list(QUANTITIES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, help="in place of each net's own")
    parser.add_argument("--side", default="ours", choices=("plain", "ours", "theirs"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    if args.what == "time":
        times(args.nets, args.quantities, args.rounds, args.batch, peer=has_peer())
    elif args.what == "memory":
        memory(args.nets, args.quantities, peer=has_peer())
    else:
        peak(NETS[args.nets[0]], args.side, args.quantities[0])


if __name__ == "__main__":
    main()
