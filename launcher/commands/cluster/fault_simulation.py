"""`ngsgd simulate --faults`: the production code of a run under drawn faults, seed by seed."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, ConfigError
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.signals import StopFlag, signals_ignored, signals_to

# imports torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.pipeline.fault_simulation.campaign import Verdict

_DEFAULT_SEEDS = 100
_POLL_S = 1.0
# options that do not apply to one seed
_OF_MANY_SEEDS = ("seeds", "seconds", "first_seed", "until_failure", "processes")


def add_arguments(parser: Parser) -> None:
    """Add the options of the fault simulation."""
    group = parser.add_argument_group("fault simulation")
    group.add_argument("--faults", action="store_true",
                       help="run the production code under simulated faults instead, one small run per seed; settings and "
                            "the simulated cluster do not apply")
    group.add_argument("--seeds", type=int, metavar="N", help=f"number of seeds (default: {_DEFAULT_SEEDS})")
    group.add_argument("--seconds", type=float, metavar="S", help="maximum time, in seconds")
    group.add_argument("--first-seed", type=int, default=0, metavar="S", help="first of the seeds (default: %(default)s)")
    group.add_argument("--seed", type=int, metavar="S", help="one seed; prints its trace")
    group.add_argument("--only-faults", metavar="N,N",
                       help="numbers of the faults of --seed that occur, or none (default: all)")
    group.add_argument("--until-failure", action="store_true", help="stop at the first seed that fails")
    group.add_argument("--audit-all", action="store_true", help="audit every job of every seed, in longer runs")
    group.add_argument("--processes", type=int, default=1, metavar="N",
                       help="processes that run seeds (default: %(default)s)")


def given(options: argparse.Namespace, names: Collection[str] = ()) -> list[str]:
    """Flags of the fault simulation that differ from their defaults, all or some of them."""
    parser = Parser("simulate")
    add_arguments(parser)
    defaults = vars(parser.parse_args([]))
    return ["--" + name.replace("_", "-") for name in names or defaults if getattr(options, name) != defaults[name]]


@dataclass
class Tally:
    """Sums over all seeds."""

    num_seeds: int = 0
    num_faults: int = 0
    num_coordinators: int = 0
    # jobs that were repeated by the audit
    num_audited: int = 0
    failed: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, verdict: Verdict) -> None:
        self.num_seeds += 1
        self.num_faults += verdict.num_occurred
        self.num_coordinators += verdict.num_processes
        self.num_audited += verdict.num_audited
        if verdict.problems:
            self.failed.append(verdict.seed)


def command(options: argparse.Namespace) -> int:
    """Run the seeds; the exit code is 1 if one failed.

    Ctrl-C and SIGTERM stop after the current seed of each process.
    """
    _check(options)
    if options.seed is not None:
        return _replay(options)
    tally, began, stop = Tally(), time.perf_counter(), StopFlag()
    with signals_to(stop):
        for verdict in _verdicts(options, stop):
            tally.add(verdict)
            if verdict.problems and not options.json:
                print("\n".join(failure_lines(verdict)), flush=True)
            if verdict.problems and options.until_failure:
                break
    tally.seconds = time.perf_counter() - began
    if options.json:
        print(json.dumps(asdict(tally)))
    else:
        print(f"{tally.num_seeds} seeds, {tally.num_faults} faults, {tally.num_coordinators} coordinator processes, "
              f"{tally.num_audited} audited jobs "
              f"in {tally.seconds:.1f} s ({tally.num_seeds / max(tally.seconds, 1e-9):.1f} seeds/s): {len(tally.failed)} failed")
    return EXIT_RUN_FAILED if tally.failed else EXIT_INTERRUPTED if stop.is_set() else EXIT_OK


def failure_lines(verdict: Verdict) -> list[str]:
    """A failed seed after shrinking, as text."""
    return [f"seed {verdict.seed} failed: {verdict.problems[0]}", *(f"  and: {one}" for one in verdict.problems[1:5]),
            f"  settings: {verdict.setting}",
            f"  faults: {'; '.join(str(verdict.faults[number]) for number in verdict.kept) or 'none'}",
            f"  replay: {verdict.replay()}"]


def _check(options: argparse.Namespace) -> None:
    problems = []
    if options.overrides:
        problems.append(f"--faults chooses its own settings; remove {' '.join(options.overrides)}.")
    if options.only_faults is not None and options.seed is None:
        problems.append("--only-faults needs --seed.")
    if options.seed is not None and (unused := given(options, _OF_MANY_SEEDS)):
        problems.append(f"--seed runs one seed, so that {', '.join(unused)} would have no effect; remove one of the two.")
    if options.processes < 1:
        problems.append(f"--processes is {options.processes}; it must be at least 1.")
    if problems:
        raise ConfigError(problems)


def _replay(options: argparse.Namespace) -> int:
    from ngsgd.pipeline.fault_simulation.campaign import simulator

    kept = None if options.only_faults is None else _numbers(options.only_faults)
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


def _numbers(text: str) -> list[int]:
    if text == "none":
        return []
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(f"--only-faults is {text}; give numbers with commas, such as 0,3, or none.") from None


def _verdicts(options: argparse.Namespace, stop: StopFlag) -> Iterator[Verdict]:
    from ngsgd.pipeline.fault_simulation.campaign import run_seeds

    count = _DEFAULT_SEEDS if options.seeds is None and options.seconds is None else options.seeds
    if options.processes == 1:
        yield from run_seeds(options.first_seed, count, options.seconds, audits_all=options.audit_all,
                             is_stopped=stop.is_set)
        return
    # a process that was forked from a process with threads may hang
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    stopped: Any = context.Event()
    shares = [None if count is None else len(range(number, count, options.processes)) for number in range(options.processes)]
    processes = [context.Process(target=_work, args=(options, number, share, os.getpid(), results, stopped), daemon=True)
                 for number, share in enumerate(shares)]
    # a signal may be sent to all processes, as by Ctrl-C; only this one handles it
    with signals_ignored():
        for process in processes:
            process.start()
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


def _work(options: argparse.Namespace, number: int, count: int | None, parent: int, results: Any, stopped: Any) -> None:
    from ngsgd.cluster.newborn import die_with_parent
    from ngsgd.pipeline.fault_simulation.campaign import run_seeds

    die_with_parent(parent)
    for verdict in run_seeds(options.first_seed + number, count, options.seconds, options.processes,
                             audits_all=options.audit_all, is_stopped=stopped.is_set):
        results.put(verdict)
