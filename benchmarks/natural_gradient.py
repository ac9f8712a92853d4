"""Cost of natural gradient: complete training steps and the preconditioner alone, paired with plain
SGD.

    python benchmarks/natural_gradient.py steps [--threads 1] [--rounds 15] [--mkl] [--optimizers "SGD (limits on)" NG-SGD ..]
    python benchmarks/natural_gradient.py narrow [--rounds 15] [--net GPT]
    python benchmarks/natural_gradient.py preconditioner
    python benchmarks/natural_gradient.py inspection
    python benchmarks/natural_gradient.py memory

Every ratio comes from interleaved runs (A B A B ..) of one process, and is the median of the ratios
of neighboring runs. The process keeps freed memory, as a worker does. Kaldi's figures were measured
where one core's sgemm does 108 GFLOP/s; they are scaled by an sgemm of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from benchmarks.nets import NARROW_NETS, NarrowNet
else:   # a script finds the files in its folder
    from nets import NARROW_NETS, NarrowNet

from ngsgd import NGSGD, OnlineNaturalGradient
from ngsgd.cluster.process import keep_freed_memory
from ngsgd.models import PNorm, Renormalize
from ngsgd.ops.kernels import native
from ngsgd.optim import SGD
from ngsgd.optim.inspection import figures

KALDI_SGEMM = 108e9           # FLOP/s of the core on which Kaldi's figures were measured
# seconds of the 512 x 3000 x 301 GEMM with the figures for the preconditioner alone
KALDI_PRODUCT_S = 8.2e-3
PERIOD, RANK_IN, RANK_OUT = 4, 20, 80
# suffix of an optimizer name: all in torch operations, as without a C++ compiler
APART = ", apart"
WARM_UP = 13                  # steps past the first updates, which come at every call


@dataclass(frozen=True)
class Net:
    """A network of the paper or of Kaldi's recipes, and Kaldi's frames per CPU second on it,
    minibatch 512.
    """

    name: str
    num_inputs: int
    hidden: int
    group: int                # group size of the p-norm; 1: ReLU
    num_outputs: int
    kaldi_ng: float
    kaldi_sgd: float

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        width = self.num_inputs
        for _ in range(4):
            layers += [nn.Linear(width, self.hidden), nn.ReLU() if self.group == 1 else PNorm(self.group), Renormalize()]
            width = self.hidden // self.group
        return nn.Sequential(*layers, nn.Linear(width, self.num_outputs))

    def shapes(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the affine layers."""
        width = self.hidden // self.group
        return [(self.num_inputs, self.hidden), *[(width, self.hidden)] * 3, (width, self.num_outputs)]


NETS = (Net("ReLU 360-1024x4-2000", 360, 1024, 1, 2000, 2815.0, 3074.0),
        Net("p-norm 700-(3500/350)x4-12000", 700, 3500, 10, 12000, 971.0, 1019.0))


def flop_floor(net: Net, num_rows: int) -> float:
    """Multiplications of an NG-SGD step relative to a plain one: rows projected and back on both
    sides, and updates.
    """
    plain = ng = 0.0
    for index, (num_in, num_out) in enumerate(net.shapes()):
        # the first layer needs no input gradient
        plain += num_rows * num_in * num_out * (2 if index == 0 else 3)
        for dim, rank in ((num_in + 1, min(RANK_IN, (num_in + 1) // 2)), (num_out, min(RANK_OUT, (num_out + 1) // 2))):
            update = num_rows * dim * rank + 2 * rank * rank * dim + num_rows * rank * rank
            ng += 2 * num_rows * dim * rank + update / PERIOD
    return 1.0 + ng / plain


class Training:
    """One network, its optimizer and one minibatch: `step` is a complete training step."""

    def __init__(self, net: Net, num_rows: int, name: str) -> None:
        self.model = net.build()
        self.is_apart = name.endswith(APART)
        self.optimizers = MAKERS[name](self.model)
        self.x_ND = torch.randn(num_rows, net.num_inputs)
        self.y_N = torch.randint(net.num_outputs, (num_rows,))

    def step(self) -> None:
        with native.in_torch_operations() if self.is_apart else contextlib.nullcontext():
            self._step()

    def _step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(self.model(self.x_ND), self.y_N, reduction="sum").backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def warm_up(self) -> None:
        for _ in range(WARM_UP):
            self.step()


def _muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-4), torch.optim.AdamW(others, lr=1e-4, fused=True)]


def _sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [SGD(model, 1e-5)]


def _ngsgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [NGSGD(model, 1e-5, rank_in=RANK_IN, rank_out=RANK_OUT, update_period=PERIOD)]


MAKERS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "NG-SGD": _ngsgd,
    f"NG-SGD{APART}": _ngsgd,
    "SGD (limits on)": _sgd,
    f"SGD (limits on){APART}": _sgd,
    "torch SGD": lambda model: [torch.optim.SGD(model.parameters(), 1e-5)],
    "torch SGD, momentum": lambda model: [torch.optim.SGD(model.parameters(), 1e-5, momentum=0.9)],
    "torch AdamW": lambda model: [torch.optim.AdamW(model.parameters(), 1e-5)],
    "torch Muon": _muon,
}


# as their authors run them
RIVALS: dict[str, Callable[[nn.Module], list[torch.optim.Optimizer]]] = {
    "NG-SGD": lambda model: [NGSGD(model, 1e-3, loss_reduction="mean")],
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, foreach=True)],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), 1e-3, fused=True)],
    # of matrices alone; AdamW for all others
    "Muon": _muon,
}


def seconds(run: Callable[[], object], repeat: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        run()
    return (time.perf_counter() - start) / repeat


class Sgemm:
    """A 1024 x 1024 x 1024 GEMM."""

    def __init__(self) -> None:
        self.a, self.b, self.out = torch.randn(1024, 1024), torch.randn(1024, 1024), torch.empty(1024, 1024)

    def speed(self) -> float:
        """The current FLOP/s."""
        return 2 * 1024**3 / seconds(lambda: torch.mm(self.a, self.b, out=self.out), 3)


def steps(threads: int, rounds: int, names: list[str], nets: tuple[Net, ...], minibatches: tuple[int, ...]) -> None:
    torch.set_num_threads(threads)
    print(f"{threads} thread(s), torch {torch.__version__}, {rounds} interleaved rounds of {PERIOD} steps")
    sgemm = Sgemm()
    sgemm.speed()
    for net in nets:
        for num_rows in minibatches:
            trainings = {name: Training(net, num_rows, name) for name in names}
            for training in trainings.values():
                training.warm_up()
            times: dict[str, list[float]] = {name: [] for name in names}
            speeds = []
            for _ in range(rounds):
                speeds.append(sgemm.speed() / threads)
                for name, training in trainings.items():
                    times[name].append(seconds(training.step, PERIOD))
            _report(net, num_rows, times, speeds)


def _report(net: Net, num_rows: int, times: dict[str, list[float]], core_speeds: list[float]) -> None:
    print(f"\n{net.name}, minibatch {num_rows}; sgemm {statistics.median(core_speeds) / 1e9:.0f} GFLOP/s per core; "
          f"floor by multiplications {flop_floor(net, num_rows):.3f}")
    base = times["SGD (limits on)"]
    for name, values in times.items():
        ratios = sorted(v / b for v, b in zip(values, base, strict=True))
        median = statistics.median(values)
        line = (f"  {name:20s} {1e3 * median:8.2f} ms  {num_rows / median:7.0f} frames/s  ratio {statistics.median(ratios):.3f} "
                f"({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f})")
        kaldi = {"NG-SGD": net.kaldi_ng, "SGD (limits on)": net.kaldi_sgd}.get(name)
        if kaldi and num_rows == 512 and torch.get_num_threads() == 1:
            scaled = [num_rows / v / (kaldi * speed / KALDI_SGEMM) for v, speed in zip(values, core_speeds, strict=True)]
            line += f"  {statistics.median(scaled):.2f} x Kaldi's"
        print(line, flush=True)


class NarrowTraining:
    """A narrow network under one of `RIVALS`."""

    def __init__(self, net: NarrowNet, name: str) -> None:
        torch.manual_seed(0)
        self.model = net.build()
        self.optimizers = RIVALS[name](self.model)
        self.x, self.y_N = net.inputs(), torch.randint(net.num_classes, (net.num_targets,))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y_N).backward()
        for optimizer in self.optimizers:
            optimizer.step()


def narrow(rounds: int, names: list[str]) -> None:
    """Complete steps of narrow networks: CPU time of NG-SGD relative to torch's own optimizers."""
    torch.set_num_threads(1)

    def cpu_seconds(training: NarrowTraining) -> float:
        start = time.process_time()
        for _ in range(PERIOD):
            training.step()
        return (time.process_time() - start) / PERIOD

    for name in names:
        trainings = {rival: NarrowTraining(NARROW_NETS[name], rival) for rival in RIVALS}
        for training in trainings.values():
            for _ in range(WARM_UP):
                training.step()
        times = [{rival: cpu_seconds(training) for rival, training in trainings.items()} for _ in range(rounds)]
        ours_s = statistics.median(one["NG-SGD"] for one in times)
        print(f"{name:18s} NG-SGD {1e3 * ours_s:.2f} ms", end="")
        for rival in list(RIVALS)[1:]:
            ratios = sorted(one["NG-SGD"] / one[rival] for one in times)
            print(f"; / {rival} {statistics.median(ratios):.2f} ({ratios[len(ratios) // 4]:.2f} to "
                  f"{ratios[-1 - len(ratios) // 4]:.2f})", end="")
        print(flush=True)


def preconditioner(rounds: int) -> None:
    torch.set_num_threads(1)
    a, b, out = torch.randn(512, 3000), torch.randn(3000, 301), torch.empty(512, 301)
    for dim, rank, target in ((300, 20, 0.17e-3), (3000, 80, 5.6e-3)):
        X_ND = torch.randn(512, dim)
        ng = OnlineNaturalGradient(rank, PERIOD)
        for _ in range(WARM_UP):
            ng.precondition(X_ND)
        pairs = [(seconds(lambda: ng.precondition(X_ND), 10 * PERIOD), seconds(lambda: torch.mm(a, b, out=out), 3))  # noqa: B023
                 for _ in range(rounds)]
        time_s, product_s = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"512 x {dim}, rank {rank}, period {PERIOD}: {1e3 * time_s:.3f} ms a call; GEMM {1e3 * product_s:.2f} ms; "
              f"scaled {1e3 * time_s * KALDI_PRODUCT_S / product_s:.3f} ms (Kaldi's bound {1e3 * target:.2f})", flush=True)


def inspection(rounds: int) -> None:
    """Cost of inspecting the estimates, as a fraction of a step: the figures once a job, the cosine
    at times.
    """
    torch.set_num_threads(1)
    for net in NETS:
        training = Training(net, 512, "NG-SGD")
        (optimizer,) = training.optimizers
        assert isinstance(optimizer, NGSGD)
        training.warm_up()
        step_s = statistics.median(seconds(training.step, PERIOD) for _ in range(rounds))
        figures_s = statistics.median(seconds(lambda: figures(optimizer)) for _ in range(rounds))  # noqa: B023
        optimizer.rule.cosine_period = 1
        training.step()
        cosine_s = statistics.median(seconds(training.step, PERIOD) for _ in range(rounds)) - step_s
        print(f"{net.name}: figures of all layers {100 * figures_s / step_s:.2f} % of a step, once a job; cosines "
              f"{100 * cosine_s / step_s:.0f} % of a step, {cosine_s / step_s:.2f} % at the service's period of 100", flush=True)


def memory() -> None:
    """Persistent floats in addition to plain SGD's, and the peak resident size of a training
    process.
    """
    for net in NETS:
        training = Training(net, 512, "NG-SGD")
        training.step()
        (optimizer,) = training.optimizers
        assert isinstance(optimizer, NGSGD)
        worst = max((s.W_RD.numel() + 2 * s.d_R.size + 2) / s.W_RD.numel()
                    for _, p in optimizer.preconditioners() if (s := p.state) is not None)
        print(f"{net.name}: Fisher state at most {worst:.3f} R D floats per side")
        for name in ("SGD (limits on)", "NG-SGD"):
            command = [sys.executable, __file__, "peak", "--net", net.name, "--optimizer", name]
            mebibytes = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
            print(f"  {name:16s} peak resident {mebibytes} MiB")


def peak(net: Net, name: str) -> None:
    torch.set_num_threads(1)
    training = Training(net, 512, name)
    for _ in range(6):
        training.step()
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "what", choices=("steps", "narrow", "preconditioner", "inspection", "memory", "peak")
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--optimizers", nargs="+", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--optimizer", default="NG-SGD", help="optimizer of peak")
    parser.add_argument("--net", default="", help="only networks whose name starts with this")
    parser.add_argument("--minibatches", nargs="+", type=int, default=[512, 128])
    parser.add_argument("--mkl", action="store_true", help="no oneDNN GEMMs, on processors where ngsgd uses them")
    args = parser.parse_args()
    keep_freed_memory()
    torch.backends.mkldnn.enabled = not args.mkl  # type: ignore[assignment]
    nets = tuple(net for net in NETS if net.name.startswith(args.net))
    if args.what == "steps":
        steps(args.threads, args.rounds, args.optimizers, nets, tuple(args.minibatches))
    elif args.what == "narrow":
        narrow(args.rounds, [name for name in NARROW_NETS if name.startswith(args.net)])
    elif args.what == "preconditioner":
        preconditioner(args.rounds)
    elif args.what == "inspection":
        inspection(args.rounds)
    elif args.what == "memory":
        memory()
    else:
        peak(nets[0], args.optimizer)


if __name__ == "__main__":
    main()
