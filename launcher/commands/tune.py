"""`ngsgd tune`: hyperparameters by gradient on a short proxy run; see docs/tuning.md.

- probe measures the cost of a hypergradient on the proxy.
- check compares the hypergradient with finite differences.
- run searches and writes tuned.yaml.
- transfer tries multiples of the learned rates on a longer proxy, and writes the best.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import read_json, write_text
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.object_storage.urls import is_url
from ngsgd.pipeline.tuning.proxy import Proxy

# these import torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.hypergrad import SearchResult, SearchTrial
    from ngsgd.pipeline.tuning.tuned import Tuned

COMMANDS = ("probe", "check", "run", "transfer")
# minibatches between averaging steps in probe and check
_PROBE_STEPS = 20
Report = Callable[[str], None]
# for --json, and lines of text
Result = tuple[dict[str, Any], list[str]]


def command(arguments: Sequence[str]) -> int:
    """`ngsgd tune`."""
    options = _parser().parse_with_settings(arguments)
    if options.what not in COMMANDS:
        raise ConfigError(f"tune {options.what or 'needs a step'}: choose one of "
                          f"{', '.join(COMMANDS)}, such as: ngsgd tune probe recipe=digits")
    from ngsgd.launcher.config import compose, tuned_file

    config = compose.compose(tuned_file.expanded(options.overrides),
                             config_dir=Path(options.config_dir) if options.config_dir else None)
    config.sites.require_none("ngsgd tune")
    if config.objective.kind != "ce":
        raise ConfigError(f"objective.kind is {config.objective.kind}, and ngsgd tune supports the "
                          "loss of single frames only; tune with objective=ce.")
    stream = sys.stderr if options.json else sys.stdout
    report: Report = (lambda line: None) if options.quiet else (lambda line: print(line, flush=True, file=stream))
    found, lines = {"probe": _probe, "check": _check, "run": _tune, "transfer": _transfer}[options.what](config, options, report)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines))
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser("tune", epilog="ngsgd settings tune lists the settings of the search.")
    # optional for argparse, whose message about a missing one also names KEY=VALUE
    parser.add_argument("what", metavar="|".join(COMMANDS), nargs="?", default="",
                        help="measure the cost of a hypergradient; compare it with finite "
                             "differences; search and write tuned.yaml; try multiples of the "
                             "learned rates on a longer proxy run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of ngsgd train")
    parser.add_argument("--from", dest="source", metavar="FOLDER",
                        help="transfer: folder written by ngsgd tune run")
    parser.add_argument("--json", action="store_true", help=f"{JSON}; progress goes to stderr")
    parser.add_argument("--quiet", "-q", action="store_true", help="print the result only")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="folder of custom YAML files")
    return parser


# The proxy ----------------------------------------------------------------------------------------


@contextmanager
def _proxy(config: RunConfig, report: Report, *, steps: int = 0) -> Iterator[Proxy]:
    from ngsgd.pipeline import prepare
    from ngsgd.pipeline.runs.run_folder import check_output_dir

    check_output_dir(config)
    proxy = Proxy.of(config, prepare.prepare(config, report).egs_directory, steps=steps)
    report(f"proxy      {counted(proxy.space.num_jobs, 'job')} x {counted(proxy.space.num_steps, 'minibatch', 'minibatches')}, "
           f"averaged {counted(proxy.space.num_outer_iters, 'time')}: {proxy.task.num_frames:,} frames")
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
    """A proxy with a few minibatches between averaging steps, in this process."""
    outer_iters = config.tune.proxy.outer_iters
    tune = replace(config.tune, proxy=replace(config.tune.proxy, steps=_PROBE_STEPS * outer_iters))
    return replace(config, cluster=replace(config.cluster, kind="in_process"), tune=tune)


def _probe(config: RunConfig, options: argparse.Namespace, report: Report) -> Result:
    from ngsgd.pipeline.tuning.measurements import measure_cost

    with _proxy(_slice(config), report) as proxy:
        cost = measure_cost(proxy, config, _PROBE_STEPS)
    minutes = config.tune.budget * cost.run_s / 60
    if cost.is_reversed:
        reversal = (f"{_PROBE_STEPS} steps forward and back: all digests equal; "
                    f"{cost.reversal_bits:.3f} bits per parameter and step were stored")
    else:
        reversal = f"not possible with {'momentum 0' if config.optimizer.kind == 'sgd' else 'the online natural gradient'}"
    lines = [
        f"reversal   {reversal}",
        f"derivative second derivatives are available; {_of_preconditioner(cost.report)}",
        f"cost       a hypergradient takes {cost.ratio:.1f} proxy runs ({cost.run_s:.0f} s each); "
        f"tune.budget={config.tune.budget:g}: {minutes:.1f} minutes",
        f"memory     {cost.num_parameters:,} parameters; store {cost.store_bytes / 1e9:.2f} GB, "
        f"reversible {cost.reversible_bytes / 1e9:.2f} GB",
        f"engine     {cost.engine}: {cost.reason}", f"threads    {cost.num_threads}"]
    # the report holds arrays
    found = {name: value for name, value in vars(cost).items() if name != "report"}
    return {**found, "preconditioner": cost.report.preconditioner, "exact": cost.report.exact, "budget_minutes": minutes}, lines


def _check(config: RunConfig, options: argparse.Namespace, report: Report) -> Result:
    from ngsgd.pipeline.tuning.measurements import check_gradient

    with _proxy(_slice(config), report) as proxy:
        found, slopes = check_gradient(proxy)
        lines = [f"float64, {counted(proxy.space.num_steps, 'step')}, {_of_preconditioner(found)}",
                 "part        hypergradient   finite differences  relative difference"]
    lines += [f"{slope.part:11} {slope.hypergradient:+.6e}   {slope.finite_differences:+.6e}       "
              f"{slope.relative_difference:.1e}" for slope in slopes]
    rows = [{**asdict(slope), "relative_difference": slope.relative_difference} for slope in slopes]
    return {"preconditioner": found.preconditioner, "exact": found.exact, "parts": rows}, lines


def _of_preconditioner(found: Any) -> str:
    return f"preconditioner: {found.preconditioner}{'' if found.exact else ' (approximate)'}"


# run and transfer ---------------------------------------------------------------------------------


def _tune(config: RunConfig, options: argparse.Namespace, report: Report) -> Result:
    from ngsgd.launcher.tuning.tracker import TuneTracker
    from ngsgd.pipeline.tuning.coarse_search import seeder
    from ngsgd.pipeline.tuning.tuned import search, tuned

    with _proxy(config, report) as proxy:
        folder = _folder(config)
        report(f"folder     {folder}")
        if config.tune.coarse_fraction:
            report(f"coarse     {'Optuna TPE' if seeder()[0] == 'tpe' else 'random search: Optuna is not installed'}")
        tracker = TuneTracker(config, folder, report)
        began = time.monotonic()
        try:
            found = search(proxy, tracker.trial)
            result = tuned(proxy, found)
            _write(proxy, found, result, folder)
            tracker.finished(found, result)
        finally:
            tracker.close()
        return _result(found, result, folder, time.monotonic() - began)


def _transfer(config: RunConfig, options: argparse.Namespace, report: Report) -> Result:
    from ngsgd.hypergrad.search import RATE_MULTIPLIERS
    from ngsgd.pipeline.tuning.tuned import try_multiples, tuned

    if not options.source:
        raise ConfigError("ngsgd tune transfer needs --from FOLDER, the folder written by ngsgd "
                          "tune run.")
    source = Path(options.source)
    try:
        theta = read_json(source / "tuned.json")["theta"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source / 'tuned.json'} cannot be read ({error}); give the folder "
                        "written by ngsgd tune run.") from None
    with _proxy(config, report, steps=4 * config.tune.proxy.steps) as proxy:
        began = time.monotonic()
        found = try_multiples(proxy, theta)
        rates = [f"rates x {factor:<6g} valid {trial.value:.4f}"
                 for factor, trial in zip(RATE_MULTIPLIERS, found.trials, strict=True)]
        result = tuned(proxy, found)
        _write(proxy, found, result, source)
        about, lines = _result(found, result, source, time.monotonic() - began)
        return {**about, "trials": [_line(trial) for trial in found.trials]}, [*rates, *lines]


def _folder(config: RunConfig) -> Path:
    if is_url(config.output_dir):
        raise ConfigError(f"output_dir is {config.output_dir}; ngsgd tune writes to a folder of this machine only, so set "
                          "output_dir=PATH.")
    root = Path(config.output_dir).absolute() / "tune"
    name = config.name or f"{config.data.corpus}-{config.model.label}-{config.optimizer.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = root / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another name=NAME, or remove it.") from None
    return folder


def _write(proxy: Proxy, found: SearchResult, result: Tuned, folder: Path) -> None:
    """Write tuned.yaml, tuned.json, trials.jsonl and the plot of the schedule."""
    from ngsgd.launcher.config import tuned_file
    from ngsgd.launcher.reports.figures import draw_schedule
    from ngsgd.pipeline.tuning.tuned import rates_before, settings_of

    space = proxy.space
    approximate = [] if result.exact else ["its hypergradients were approximate: constant "
                                           "preconditioner"]
    tuned_file.write(folder / "tuned.yaml", settings_of(proxy.config, space, result.values, space.num_jobs), [
        "written by ngsgd tune; train with: ngsgd train +tuned=THIS_FILE",
        f"on {proxy.task.num_frames:,} frames in {counted(space.num_jobs, 'job')}: objf {-result.valid:.4f}, "
        f"held out {-result.held_out:.4f}",
        *approximate])
    write_text(folder / "tuned.json", json.dumps(asdict(result), indent=1))
    write_text(folder / "trials.jsonl", "".join(json.dumps(_line(trial)) + "\n" for trial in found.trials))
    if "schedule" in result.values:
        draw_schedule(result.values["schedule"], rates_before(space), folder / "schedule.png")


def _line(trial: SearchTrial) -> dict[str, Any]:
    return {**asdict(trial), "value": trial.value if math.isfinite(trial.value) else None}


def _result(found: SearchResult, result: Tuned, folder: Path, seconds: float) -> Result:
    first, file = found.trials[0].value, folder / "tuned.yaml"
    lines = [f"valid      {result.valid:.4f} (first trial: {first:.4f}); held out "
             f"{result.held_out:.4f}; per frame, minus objf",
             *(f"{part:11}{' '.join(f'{value:.4g}' for value in values)}" for part, values in result.values.items()),
             f"cost       {result.cost:.1f} proxy runs, {seconds:.0f} s; "
             f"{_of_preconditioner(result)}",
             f"use        ngsgd train +tuned={file}"]
    return {**asdict(result), "first_trial": first, "seconds": seconds, "tuned_file": str(file)}, lines
