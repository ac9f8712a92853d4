"""`ngsgd tune`: hyperparameters by gradient on a short proxy of a run; docs/tuning.md explains when that pays.

probe says what the proxy can do and costs, check compares its hypergradient with finite differences, run searches and writes
tuned.yaml, transfer tries multiples of the learned rates on a longer run and writes the best.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import read_json, write_text
from ngsgd.launcher.arguments import Parser
from ngsgd.pipeline.tuning.proxy import Proxy

# these import torch, and --help must answer at once
if TYPE_CHECKING:
    from ngsgd.hypergrad import SearchResult, SearchTrial
    from ngsgd.pipeline.tuning.tuned import Tuned

COMMANDS = ("probe", "check", "run", "transfer")
# minibatches between averagings of the slice that probe and check run on
_PROBE_STEPS = 20
Report = Callable[[str], None]


def command(arguments: Sequence[str]) -> int:
    """Reads the arguments and calls one of COMMANDS."""
    options = _parser().parse_intermixed_args(list(arguments))
    if options.what not in COMMANDS:
        raise ConfigError(f"ngsgd tune {options.what}: choose {', '.join(COMMANDS)}; see ngsgd tune --help.")
    from ngsgd.launcher.config import compose, tuned_file

    config = compose.compose(tuned_file.expanded(options.overrides),
                             config_dir=Path(options.config_dir) if options.config_dir else None)
    if config.objective.kind != "ce":
        raise ConfigError(f"objective.kind is {config.objective.kind}, and ngsgd tune knows the loss of single frames alone; tune "
                          "with objective=ce.")
    report: Report = (lambda line: None) if options.quiet else (lambda line: print(line, flush=True))
    {"probe": _probe, "check": _check, "run": _tune, "transfer": _transfer}[options.what](config, options, report)
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser("tune", epilog="Settings (KEY=VALUE) are those of ngsgd train, and tune.*: ngsgd train --cfg job -p tune.")
    parser.add_argument("what", metavar="probe|check|run|transfer")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for ngsgd train")
    parser.add_argument("--from", dest="source", metavar="FOLDER", help="transfer: the folder that ngsgd tune run wrote")
    parser.add_argument("--quiet", "-q", action="store_true", help="only the result")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own YAML files")
    return parser


# The proxy ----------------------------------------------------------------------------------------


@contextmanager
def _proxy(config: RunConfig, report: Report, *, steps: int = 0) -> Iterator[Proxy]:
    from ngsgd.pipeline import prepare
    from ngsgd.pipeline.runs.run_folder import check_output_dir

    check_output_dir(config)
    proxy = Proxy.of(config, prepare.prepare(config, report).egs_directory, steps=steps)
    report(f"proxy      {proxy.space.num_jobs} jobs x {proxy.space.num_steps} minibatches, averaged {proxy.space.num_outer_iters} "
           f"times: {proxy.task.num_frames:,} frames")
    if config.cluster.kind != "ray":
        yield proxy
        return
    from ngsgd.launcher.tuning.ray_trials import RayJobs

    proxy.cluster = RayJobs.start(config, proxy, report)
    try:
        yield proxy
    finally:
        proxy.cluster.close()


# probe and check ----------------------------------------------------------------------------------


def _slice(config: RunConfig) -> RunConfig:
    """A few minibatches between averagings, in this process."""
    outer_iters = config.tune.proxy.outer_iters
    tune = replace(config.tune, proxy=replace(config.tune.proxy, steps=_PROBE_STEPS * outer_iters))
    return replace(config, cluster=replace(config.cluster, kind="in_process"), tune=tune)


def _probe(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    from ngsgd.pipeline.tuning.measurements import measure_cost

    with _proxy(_slice(config), report) as proxy:
        cost = measure_cost(proxy, config, _PROBE_STEPS)
    measured = cost.report
    if cost.is_reversed:
        print(f"reversal   {_PROBE_STEPS} steps there and back: every digest equal; {cost.reversal_bits:.3f} bits per "
              "parameter and step were put aside")
    else:
        reason = "momentum 0" if config.optimizer.kind == "sgd" else "the online natural gradient"
        print(f"reversal   not possible with {reason}")
    print(f"derivative second derivatives are there; preconditioner: {measured.preconditioner}"
          f"{'' if measured.exact else ' (approximate)'}")
    minutes = config.tune.budget * cost.run_s / 60
    print(f"cost       a hypergradient takes {cost.ratio:.1f} plain runs ({cost.run_s:.0f} s each); "
          f"tune.budget={config.tune.budget:g}: {minutes:.1f} minutes")
    print(f"memory     {cost.num_parameters:,} parameters; store {cost.store_bytes / 1e9:.2f} GB, reversible "
          f"{cost.reversible_bytes / 1e9:.2f} GB")
    print(f"engine     {cost.engine}: {cost.reason}")
    print(f"threads    {cost.num_threads}")


def _check(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    from ngsgd.pipeline.tuning.measurements import check_gradient

    with _proxy(_slice(config), report) as proxy:
        found, slopes = check_gradient(proxy)
        print(f"float64, {proxy.space.num_steps} steps, preconditioner: {found.preconditioner}"
              f"{'' if found.exact else ' (approximate)'}")
    print("part        hypergradient   finite differences  relative difference")
    for slope in slopes:
        print(f"{slope.part:11} {slope.hypergradient:+.6e}   {slope.finite_differences:+.6e}       "
              f"{slope.relative_difference:.1e}")


# run and transfer ---------------------------------------------------------------------------------


def _tune(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    from ngsgd.launcher.tuning.tracker import TuneTracker
    from ngsgd.pipeline.tuning.coarse_search import seeder
    from ngsgd.pipeline.tuning.tuned import search, tuned

    with _proxy(config, report) as proxy:
        folder = _folder(config)
        report(f"folder     {folder}")
        if config.tune.coarse_fraction:
            report(f"coarse     {'Optuna TPE' if seeder()[0] == 'tpe' else 'at random: Optuna is not installed'}")
        tracker = TuneTracker(config, folder, report)
        began = time.monotonic()
        try:
            found = search(proxy, tracker.trial)
            result = tuned(proxy, found)
            _write(proxy, found, result, folder)
            tracker.finished(found, result)
        finally:
            tracker.close()
        _print_result(found, result, folder, time.monotonic() - began)


def _transfer(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    from ngsgd.hypergrad.search import RATE_MULTIPLIERS
    from ngsgd.pipeline.tuning.tuned import try_multiples, tuned

    if not options.source:
        raise ConfigError("ngsgd tune transfer needs --from FOLDER, the folder that ngsgd tune run wrote.")
    source = Path(options.source)
    try:
        theta = read_json(source / "tuned.json")["theta"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source / 'tuned.json'} cannot be read ({error}); give the folder that ngsgd tune run wrote.") from None
    steps = 4 * config.tune.proxy.steps
    with _proxy(config, report, steps=steps) as proxy:
        began = time.monotonic()
        found = try_multiples(proxy, theta)
        for factor, trial in zip(RATE_MULTIPLIERS, found.trials, strict=True):
            print(f"rates x {factor:<6g} valid {trial.value:.4f}")
        result = tuned(proxy, found)
        _write(proxy, found, result, source)
        _print_result(found, result, source, time.monotonic() - began)


def _folder(config: RunConfig) -> Path:
    root = Path(config.output_dir).absolute() / "tune"
    name = config.name or f"{config.data.corpus}-{config.model.label}-{config.optimizer.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = root / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another name=NAME, or remove it.") from None
    return folder


def _write(proxy: Proxy, found: SearchResult, result: Tuned, folder: Path) -> None:
    """Write tuned.yaml for training, tuned.json and trials.jsonl with all figures, and the plot of the schedule."""
    from ngsgd.launcher.config import tuned_file
    from ngsgd.launcher.reports.plots import draw_schedule
    from ngsgd.pipeline.tuning.tuned import rates_before, settings_of

    space = proxy.space
    approximate = [] if result.exact else ["its hypergradients were approximate: constant preconditioner"]
    tuned_file.write(folder / "tuned.yaml", settings_of(proxy.config, space, result.values, space.num_jobs), [
        "made by ngsgd tune; train with: ngsgd train +tuned=THIS_FILE",
        f"on {proxy.task.num_frames:,} frames in {space.num_jobs} jobs: objf {-result.valid:.4f}, "
        f"held out {-result.held_out:.4f}",
        *approximate])
    write_text(folder / "tuned.json", json.dumps(asdict(result), indent=1))
    write_text(folder / "trials.jsonl", "".join(json.dumps(_line(trial)) + "\n" for trial in found.trials))
    if "schedule" in result.values:
        draw_schedule(result.values["schedule"], rates_before(space), folder / "schedule.png")


def _line(trial: SearchTrial) -> dict[str, Any]:
    return {**asdict(trial), "value": trial.value if math.isfinite(trial.value) else None}


def _print_result(found: SearchResult, result: Tuned, folder: Path, seconds: float) -> None:
    first = found.trials[0].value
    print(f"valid      {result.valid:.4f} (first trial: {first:.4f}); held out {result.held_out:.4f}; per frame, minus objf")
    for part, values in result.values.items():
        print(f"{part:11}{' '.join(f'{value:.4g}' for value in values)}")
    print(f"cost       {result.cost:.1f} plain runs of the proxy, {seconds:.0f} s; preconditioner: {result.preconditioner}"
          f"{'' if result.exact else ' (approximate)'}")
    print(f"use        ngsgd train +tuned={folder / 'tuned.yaml'}")
