"""Cost of preconditioners relative to plain SGD, for ngsgd and `asdfghjkl` (ASDL), which is used if
it is installed.

    python benchmarks/preconditioners.py time [--nets mlp] [--batches 128 512] [--methods kfac shampoo]
    python benchmarks/preconditioners.py memory [--nets mlp]
    python benchmarks/preconditioners.py table      # preconditioners.csv, for docs/preconditioners.md (10 min)
    python benchmarks/preconditioners.py pairs --out FILE.csv --before CHECKOUT [--nets smallmlp 3c3d] [--batches 128]

A complete step (forward, backward, preconditioner, SGD) in processor time of one thread, relative
to an SGD step timed right before it.  There are steps with a curvature update, one in T, and steps
without.  Both are timed; figures for T are (update + (T - 1) plain) / T of their medians.  Memory
is the growth of a process over three steps, the first two of which are curvature updates (all three
of methods that do nothing else in ASDL).

`pairs` compares this checkout, another one and ASDL, each in its own process; they alternate step
by step. Figures are the median processor time of a step in ms, and the ratio of ours to it.

Marked *: ASDL's code does not compute what its paper describes (a plain gradient, a Q that does not
fit, products of sums), so its time is that of other arithmetic.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import io
import math
import os
import resource
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
from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.nets import NETS, Net
else:   # a script finds the files in its folder
    from nets import NETS, Net

from ngsgd import NGSGD
from ngsgd.errors import ConfigError
from ngsgd.ops import gemm
from ngsgd.preconditioners import METHODS

INTERVALS = (1, 10, 100)
TABLE, TABLE_NET, TABLE_BATCH = Path(__file__).with_suffix(".csv"), "smallmlp", 128
DAMPING = 1e-3
# name in ngsgd -> (options, ASDL's class, its options, whether it computes what its paper
# describes)
OPTIONS: dict[str, dict[str, Any]] = {
    "kfac-mc": {"fisher": "mc"}, "seng-256": {"sketch": 256}, "shampoo": {"damping": 1e-6}, "soap": {"damping": 1e-8},
}
_FIRST_UPDATES = 12   # steps of NG-SGD, past the updates that come at every step
# ema_decay 0: ASDL's averages raise an error on CPUs
LAST_ONLY = ("kfac", "diagonal", "shampoo", "ekfac", "unit")

PEERS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "kfac": ("KfacGradientMaker", {"fisher_type": "fisher_emp"}, True),
    "kfac-mc": ("KfacGradientMaker", {"fisher_type": "fisher_mc"}, True),
    "skfac": ("KfacGradientMaker", {"fisher_type": "fisher_emp", "swift": True}, True),
    "ekfac": ("EkfacGradientMaker", {"fisher_type": "fisher_emp"}, False),
    "diagonal": ("DiagNaturalGradientMaker", {"fisher_type": "fisher_emp"}, True),
    "unit": ("UnitWiseNaturalGradientMaker", {"fisher_type": "fisher_emp"}, True),
    "shampoo": ("ShampooGradientMaker", {}, True),
    "psgd": ("KronPsgdGradientMaker", {}, False),
    "kbfgs": ("KronBfgsGradientMaker", {}, False),
    "seng-256": ("SengGradientMaker", {"sketching_size": 256}, False),
    "smw": ("SmwEmpNaturalGradientMaker", {}, True),
}
PEER_ALWAYS_LOOKS = ("smw",)   # ASDL's has no steps between updates
METHODS_TIMED = ("ngsgd", "kfac", "kfac-mc", "skfac", "ekfac", "diagonal", "seng", "seng-256", "smw", "kbfgs", "psgd", "shampoo",
                 "soap")


class Work:
    """A network with its minibatch; `step` is a complete training step, and `look` requests a
    curvature update.
    """

    num_steps = 1   # steps that are timed as one

    def __init__(self, net: Net, batch: int) -> None:
        torch.manual_seed(0)
        self.model, self.loss_fn = net.build(), nn.CrossEntropyLoss()
        self.x, self.y = torch.randn(batch, *net.input_shape), torch.randint(net.num_classes, (batch,))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def loss(self) -> Tensor:
        loss: Tensor = self.loss_fn(self.model(self.x), self.y)
        return loss

    def step(self, look: bool) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


class Online(Work):
    """NGSGD, whose estimates update at every fourth step after the first eleven."""

    num_steps = 4

    def __init__(self, net: Net, batch: int) -> None:
        super().__init__(net, batch)
        self.optimizer = NGSGD(self.model, lr=1e-6)
        for _ in range(_FIRST_UPDATES):
            self.step(False)


class Ours(Work):
    """A preconditioner by its name in ngsgd."""

    def __init__(self, net: Net, batch: int, name: str) -> None:
        super().__init__(net, batch)
        method = METHODS[name.partition("-")[0]]
        self.look_now = True
        options = {"damping": DAMPING, **OPTIONS.get(name, {})}
        if name.partition("-")[0] in LAST_ONLY:
            options["ema_decay"] = 0.0
        if not method.traits.every_step:
            options["curvature_interval"] = options["inverse_interval"] = lambda _: 1 if self.look_now else 1 << 30
        if method.traits.one_minibatch:
            options["ema_decay"] = 0.0
        self.preconditioner = method(self.model, **options)

    def step(self, look: bool) -> None:
        self.look_now = look
        self.optimizer.zero_grad()
        self.preconditioner.evaluate_and_step(self.loss)
        self.optimizer.step()


class Theirs(Work):
    """ASDL's gradient maker for the method."""

    def __init__(self, net: Net, batch: int, name: str) -> None:
        super().__init__(net, batch)
        import asdl

        self.name = name
        kind, options, _ = PEERS[name]
        if name == "smw":
            own = asdl.SmwEmpNaturalGradientConfig(data_size=batch, damping=DAMPING)
            self.maker = asdl.SmwEmpNaturalGradientMaker(self.model, own)
        else:
            config = asdl.PreconditioningConfig(data_size=batch, damping=DAMPING, preconditioner_upd_interval=1 << 30)
            self.maker = getattr(asdl, kind)(self.model, config, **options)

    def step(self, look: bool) -> None:
        self.optimizer.zero_grad()
        if look and self.name != "smw":
            # a multiple of the interval; some methods count from 0 again
            self.maker.state["step"] = 0
        output = self.maker.setup_model_call(self.model, self.x)
        self.maker.setup_loss_call(self.loss_fn, output, self.y)
        self.maker.forward_and_backward()
        self.optimizer.step()


def make(side: str, net: Net, batch: int, name: str) -> Work:
    if side == "plain":
        return Work(net, batch)
    if side == "theirs":
        return Theirs(net, batch, name)
    return Online(net, batch) if name == "ngsgd" else Ours(net, batch, name)


def processor_s(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def steps_of(work: Work, look: bool, num_steps: int) -> None:
    for _ in range(num_steps):
        work.step(look)


def ratios(work: Work, plain: Work, rounds: int, budget_s: float) -> tuple[float, float]:
    """(step with a curvature update, step without) relative to SGD, medians of so many."""
    began = time.process_time()
    work.step(True)
    work.step(False)
    kinds: tuple[list[float], list[float], list[float]] = [], [], []
    for _ in range(rounds):
        for look, found in zip((True, False, False), kinds, strict=True):
            base = processor_s(partial(steps_of, plain, False, work.num_steps))
            found.append(processor_s(partial(steps_of, work, look, work.num_steps)) / base)
        if time.process_time() - began > budget_s:
            break
    look_, after, use = map(statistics.median, kinds)
    # some methods run a second pass at the beginning of the next step
    return look_ + max(0.0, after - use) * (after > 1.1 * use), use


def times(nets: list[str], batches: list[int], methods: list[str], rounds: int, budget_s: float, *, peer: bool) -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread, at most {rounds} rounds")
    for net_name in nets:
        net = NETS[net_name]
        for batch in batches:
            plain = Work(net, batch)
            plain.step(False)
            base = statistics.median(processor_s(lambda: plain.step(False)) for _ in range(7))  # noqa: B023
            print(f"\n{net_name}, minibatch {batch}: SGD {1e3 * base:.0f} ms; T = {', '.join(map(str, INTERVALS))}", flush=True)
            for name in methods:
                cells = []
                for side in ("ours", "theirs") if peer and name in PEERS else ("ours",):
                    try:
                        with contextlib.redirect_stdout(io.StringIO()):
                            look, use = ratios(make(side, net, batch, name), plain, rounds, budget_s)
                    except Exception as error:
                        cells.append(f"{side} {type(error).__name__}: {str(error)[:50]}")
                        continue
                    told = " ".join(f"{(look + (T - 1) * use) / T:6.2f}" for T in INTERVALS)
                    star = "*" if side == "theirs" and not PEERS[name][2] else ""
                    cells.append(f"{'ASDL' if side == 'theirs' else 'ours'}{star} {told} (look {look:.2f}, use {use:.2f})")
                print(f"  {name:10s} " + "   ".join(cells), flush=True)


def memory(nets: list[str], batches: list[int], methods: list[str], *, peer: bool) -> None:
    """Measure each method in a separate process."""
    for net in nets:
        for batch in batches:
            base = _peak_of(net, batch, "plain", "sgd")
            print(f"\n{net}, minibatch {batch}: SGD {base:.0f} MiB")
            for name in methods:
                cells = []
                for side in ("ours", "theirs") if peer and name in PEERS else ("ours",):
                    mib = _peak_of(net, batch, side, name)
                    cells.append(f"{side} failed" if math.isnan(mib) else f"{side} {mib:.0f} MiB, {mib / base:.2f} x")
                print(f"  {name:10s} " + "   ".join(cells), flush=True)


class Server:
    """A process that runs steps of one side on request and reports their processor time."""

    def __init__(self, side: str, net: str, batch: int, name: str, checkout: Path) -> None:
        command = [sys.executable, __file__, "serve", "--side", side, "--nets", net, "--batches", str(batch), "--methods", name]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self.figures: dict[bool, list[float]] = {True: [], False: []}

    def step(self, look: bool) -> float:
        """Return the seconds of one step."""
        assert self._process.stdin and self._process.stdout
        print(int(look), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline().split()[-1])

    def measure(self, look: bool) -> None:
        self.figures[look].append(self.step(look))

    def mean_ms(self, interval: int) -> float:
        """Return the time of a step if one of so many updates the curvature."""
        look, use = (1e3 * statistics.median(self.figures[key]) for key in (True, False))
        return (look + (interval - 1) * use) / interval

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def serve(net: Net, batch: int, side: str, name: str) -> None:
    """Run the steps that `Server` requests."""
    torch.set_num_threads(1)
    work = make(side, net, batch, name)
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()):
            seconds = processor_s(partial(work.step, line.strip() == "1"))
        print(seconds, flush=True)


def pairs(out: Path, before: Path | None, nets: list[str], batches: list[int], methods: list[str], rounds: int, *,
          peer: bool) -> None:
    """Measure ours in alternation with an earlier checkout and with ASDL, and append to a file."""
    here = Path(__file__).parents[1]
    with out.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not file.tell():
            writer.writerow(("net", "minibatch", "method", "interval", "other", "ms", "ms of other", "ratio"))
        for net in nets:
            for batch in batches:
                for name in methods:
                    servers = {"ours": Server("ours", net, batch, name, here)}
                    if before is not None:
                        servers["before"] = Server("ours", net, batch, name, before)
                    if peer and name in PEERS:
                        servers["asdl"] = Server("theirs", net, batch, name, here)
                    _alternate(list(servers.values()), rounds)
                    ours = servers.pop("ours")
                    for other, server in servers.items():
                        for T in INTERVALS:
                            mine, their = ours.mean_ms(T), server.mean_ms(T)
                            writer.writerow((net, batch, name, T, other, f"{mine:.2f}", f"{their:.2f}", f"{mine / their:.3f}"))
                        file.flush()
                        server.end()
                    ours.end()


def _alternate(servers: list[Server], rounds: int) -> None:
    for look in (True, True, False):
        for server in servers:
            server.step(look)
    for _ in range(rounds):
        for look in (True, False, False, False):
            for server in servers:
                server.measure(look)


def write_table(rounds: int, budget_s: float) -> None:
    """Measure every method on one net: the cost of a step for each interval, and the memory."""
    torch.set_num_threads(1)
    net = NETS[TABLE_NET]
    base = _peak_of(TABLE_NET, TABLE_BATCH, "plain", "sgd")
    # before this process grows: a child begins with the largest size of its parent
    memory_of = {name: _peak_of(TABLE_NET, TABLE_BATCH, "ours", name) - base for name in METHODS}
    plain = Work(net, TABLE_BATCH)
    plain.step(False)
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("method", *(f"step {T}" for T in INTERVALS), "MiB over SGD"))
        for name, method in METHODS.items():
            try:
                look, use = ratios(make("ours", net, TABLE_BATCH, name), plain, rounds, budget_s)
            except ConfigError:
                # a dense matrix of a layer of this net
                writer.writerow((name, *("" for _ in INTERVALS), ""))
                continue
            intervals = INTERVALS[:1] if method.traits.every_step else INTERVALS
            costs = [f"{(look + (T - 1) * use) / T:.2f}" for T in intervals] + [""] * (len(INTERVALS) - len(intervals))
            writer.writerow((name, *costs, f"{memory_of[name]:.0f}"))
            file.flush()


def _peak_of(net: str, batch: int, side: str, name: str) -> float:
    command = [sys.executable, __file__, "peak", "--nets", net, "--batches", str(batch), "--side", side, "--methods", name]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else float("nan")


def peak(net: Net, batch: int, side: str, name: str) -> None:
    torch.set_num_threads(1)
    small = make(side, NETS["smallmlp"], 4, name)   # libraries and code
    for look in (True, False):
        small.step(look)
    del small
    x = torch.randn(300, 300)   # larger matrices use oneDNN there
    for product in (gemm.mm(x, x), gemm.mm(x.T, x), gemm.sub_matmul(x, x, x),
                    gemm.linear(x, x, None)):
        del product
    del x
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * resource.getpagesize() / 2**20
    work = make(side, net, batch, name)
    for look in (True, True, name in PEER_ALWAYS_LOOKS):
        work.step(look)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "table", "pairs", "peak", "serve"))
    parser.add_argument("--nets", nargs="+", default=["mlp"], choices=list(NETS))
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 512])
    parser.add_argument("--methods", nargs="+", default=list(METHODS_TIMED))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-s", type=float, default=30.0, help="time limit per method, in seconds")
    parser.add_argument("--no-peer", action="store_true", help="measure ngsgd alone")
    parser.add_argument("--out", type=Path, help="pairs: the file")
    parser.add_argument("--before", type=Path, help="pairs: another checkout")
    parser.add_argument("--side", default="ours", choices=("plain", "ours", "theirs"))
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    try:
        import asdl  # noqa: F401
        peer = not args.no_peer
    except ImportError:
        peer = False
    if args.what == "time":
        times(args.nets, args.batches, args.methods, args.rounds, args.budget_s, peer=peer)
    elif args.what == "pairs":
        pairs(args.out, args.before, args.nets, args.batches, args.methods, args.rounds, peer=peer)
    elif args.what == "serve":
        serve(NETS[args.nets[0]], args.batches[0], args.side, args.methods[0])
    elif args.what == "table":
        write_table(args.rounds, args.budget_s)
    elif args.what == "memory":
        memory(args.nets, args.batches, args.methods, peer=peer)
    else:
        peak(NETS[args.nets[0]], args.batches[0], args.side, args.methods[0])


if __name__ == "__main__":
    main()
