"""The production code of small runs under simulated faults, seed by seed (docs/fault-tests.md).

    python -m tests.simulation --seeds 1000                  exit code 1 if a seed fails
    python -m tests.simulation --seconds 60 --processes 2 --until-failure
    python -m tests.simulation --seed 134 --only-faults 0,3  one seed with two of its faults, and its trace
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED
from tests.simulation.campaign import Verdict, run_seeds, share_of_seeds, simulator

_DEFAULT_SEEDS = 100
_POLL_S = 1.0
_STOPPING = (signal.SIGINT, signal.SIGTERM)
# pairs of a fault and a phase that are named
_NUM_RARE = 8


class StopFlag:
    """A stop request, set by a signal; the second signal ends the process.

    The code of a seed may take a KeyboardInterrupt as a request to itself.
    """

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def handle(self, _signum: int, _frame: FrameType | None) -> None:
        if self._is_set:
            os._exit(EXIT_INTERRUPTED)
        self._is_set = True


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    old = {number: signal.signal(number, handler) for number in _STOPPING}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


@dataclass
class Tally:
    """Sums over all seeds."""

    num_seeds: int = 0
    num_faults: int = 0
    num_coordinators: int = 0
    # jobs that were repeated by the audit
    num_audited: int = 0
    failed: list[int] = field(default_factory=list)
    # "fault, phase" -> seeds in which they occurred together
    covered: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.num_seeds += 1
        self.num_faults += verdict.num_occurred
        self.num_coordinators += verdict.num_processes
        self.num_audited += verdict.num_audited
        self.covered.update(", ".join(pair) for pair in verdict.covered)
        if verdict.problems:
            self.failed.append(verdict.seed)


def main(arguments: list[str]) -> int:
    """Run the seeds; the exit code is 1 if one failed. A signal stops after the current seed."""
    options = _options(arguments)
    if options.seed is not None:
        return _replay(options)
    tally, began, stop = Tally(), time.perf_counter(), StopFlag()
    with _handled_by(stop.handle):
        for verdict in _verdicts(options, stop):
            tally.add(verdict)
            if verdict.problems and not options.json:
                print("\n".join(failure_lines(verdict)), flush=True)
            if verdict.problems and options.until_failure:
                break
    tally.seconds = time.perf_counter() - began
    if options.json:
        # asdict counts the pairs of a Counter
        print(json.dumps({**asdict(tally), "covered": dict(tally.covered)}))
    else:
        print(f"{tally.num_seeds} seeds, {tally.num_faults} faults, {tally.num_coordinators} coordinator "
              f"processes, {tally.num_audited} audited jobs in {tally.seconds:.1f} s "
              f"({tally.num_seeds / max(tally.seconds, 1e-9):.1f} seeds/s): {len(tally.failed)} failed")
        rare = sorted(tally.covered.items(), key=lambda pair: pair[1])[:_NUM_RARE]
        print(f"{len(tally.covered)} pairs of a fault and a phase; rarest: " + "; ".join(f"{pair} ({n})" for pair, n in rare))
    return EXIT_RUN_FAILED if tally.failed else EXIT_INTERRUPTED if stop.is_set() else EXIT_OK


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, metavar="N", help=f"number of seeds (default: {_DEFAULT_SEEDS})")
    parser.add_argument("--seconds", type=float, metavar="S", help="maximum time, in seconds")
    parser.add_argument("--first-seed", type=int, default=0, metavar="S", help="first of the seeds (default: 0)")
    parser.add_argument("--seed", type=int, metavar="S", help="one seed; prints its trace")
    parser.add_argument("--only-faults", metavar="N,N",
                        help="numbers of the faults of --seed that occur, or none (default: all)")
    parser.add_argument("--until-failure", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--audit-all", action="store_true", help="audit every job of every seed, in longer runs")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes that run seeds (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--quiet", "-q", action="store_true", help="do not print the trace of --seed")
    options = parser.parse_args(arguments)
    if options.only_faults is not None and options.seed is None:
        parser.error("--only-faults needs --seed")
    return options


def failure_lines(verdict: Verdict) -> list[str]:
    """A failed seed after shrinking, as text."""
    return [f"seed {verdict.seed} failed: {verdict.problems[0]}", *(f"  and: {one}" for one in verdict.problems[1:5]),
            f"  settings: {verdict.setting}",
            f"  faults: {'; '.join(str(verdict.faults[number]) for number in verdict.kept) or 'none'}",
            f"  replay: python -m tests.simulation {verdict.replay()}"]


def _replay(options: argparse.Namespace) -> int:
    numbers = options.only_faults
    kept = None if numbers is None else [] if numbers == "none" else [int(number) for number in numbers.split(",")]
    with simulator(audits_all=options.audit_all) as one:
        verdict = one.run(options.seed, kept, with_lines=True)
    if options.json:
        print(json.dumps(asdict(verdict)))
    else:
        if not options.quiet:
            print("\n".join(verdict.lines))
        print("\n".join(failure_lines(verdict)) if verdict.problems
              else f"seed {verdict.seed}: no problem; {verdict.setting}")
        print(f"trace {verdict.trace}")
    return EXIT_RUN_FAILED if verdict.problems else EXIT_OK


def _verdicts(options: argparse.Namespace, stop: StopFlag) -> Iterator[Verdict]:
    count = _DEFAULT_SEEDS if options.seeds is None and options.seconds is None else options.seeds
    if options.processes == 1:
        yield from run_seeds(options.first_seed, count, options.seconds, audits_all=options.audit_all,
                             is_stopped=stop.is_set)
        return
    # a process that was forked from a process with threads may hang
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    stopped: Any = context.Event()
    shares = [None if count is None else len(range(number, count, options.processes))
              for number in range(options.processes)]
    processes = [context.Process(target=share_of_seeds, args=(options, number, share, os.getpid(), results, stopped), daemon=True)
                 for number, share in enumerate(shares)]
    # A signal may be sent to all processes, as by Ctrl-C; only this one handles it. Here it waits
    # until the processes, which begin with the same mask, are there.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    for process in processes:
        process.start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        while any(process.is_alive() for process in processes) or not results.empty():
            if stop.is_set():
                stopped.set()
            with contextlib.suppress(queue.Empty):
                yield results.get(timeout=_POLL_S)
    finally:
        stopped.set()
    if any(process.exitcode for process in processes):
        raise RuntimeError("a process of the fault simulation ended early")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
