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
from ngsgd.launcher.console import Parser
from ngsgd.pipeline.tuning_proxy import Proxy

# these bring torch, and --help shall answer at once
if TYPE_CHECKING:
    from ngsgd.hypergrad import HyperSpace, SearchResult, SearchTrial

COMMANDS = ("probe", "check", "run", "transfer")
# minibatches between averagings of the slice that probe and check run on
_PROBE_STEPS = 20
# of logarithms, in float64; the nearest counts: a unit or a limit that switches in between spoils
# wide ones, rounding narrow ones
_CHECK_STEPS = (1e-6, 1e-4, 1e-2)
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
    import torch

    from ngsgd.hypergrad import choose_engine
    from ngsgd.hypergrad.gradient import hypergradient
    from ngsgd.hypergrad.training_task import Flat

    with _proxy(_slice(config), report) as proxy:
        space = replace(proxy.space, num_steps=_PROBE_STEPS, num_jobs=1, num_outer_iters=1)
        plan, gradients = space.build(space.centre()), proxy.gradients()
        whole_space = replace(proxy.space, num_steps=config.tune.proxy.steps)
        flat, num_steps = Flat.of(proxy.task), whole_space.num_steps * whole_space.num_jobs
        if gradients is None and bool((plan.momentum_TG > 0).all()):
            found = hypergradient(proxy.task, plan, "reversible").report
            bits = 8 * found.spill_bytes / flat.size / _PROBE_STEPS
            print(f"reversal   {_PROBE_STEPS} steps there and back: every digest equal; {bits:.3f} bits per parameter and step "
                  "were put aside")
        else:
            found = hypergradient(proxy.task, plan, "checkpoint", gradients=gradients).report
            print(f"reversal   not possible with {'momentum 0' if gradients is None else 'the online natural gradient'}")
        whole = whole_space.build(whole_space.centre())
        element = next(iter(proxy.task.start.values())).element_size()
        choice = choose_engine(whole, flat.size, element, memory_bytes=1e9 * config.tune.memory_gb,
                               can_reverse=gradients is None)
        ratio = 1.0 + found.seconds_reverse / found.seconds_forward
        run_s = found.seconds_forward * num_steps / _PROBE_STEPS
        bits = -float(whole.momentum_TG.clamp(min=2.0 ** -64).log2().mean())
        print(f"derivative second derivatives are there; preconditioner: {found.preconditioner}"
              f"{'' if found.exact else ' (approximate)'}")
        print(f"cost       a hypergradient takes {ratio:.1f} plain runs ({run_s:.0f} s each); tune.budget={config.tune.budget:g}: "
              f"{config.tune.budget * run_s / 60:.1f} minutes")
        reversible = flat.size * proxy.space.num_jobs * (16 * proxy.space.num_outer_iters + bits * whole_space.num_steps / 8)
        print(f"memory     {flat.size:,} parameters; store {2 * element * flat.size * num_steps / 1e9:.2f} GB, reversible "
              f"{reversible / 1e9:.2f} GB")
        print(f"engine     {choice.engine}: {choice.why}")
        print(f"threads    {torch.get_num_threads()}")


def _check(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    """On a slice: the slope along each part of the space, beside that of measured losses."""
    import torch

    from ngsgd.hypergrad import final_value
    from ngsgd.hypergrad.gradient import hypergradient

    with _proxy(_slice(config), report) as proxy:
        proxy.task.double()
        space = proxy.space
        theta_D = space.centre().requires_grad_()
        plan, gradients = space.build(theta_D), proxy.gradients()
        found = hypergradient(proxy.task, plan, "store" if gradients is None else "checkpoint", gradients=gradients)
        slope_D = found.by(plan, theta_D)
        print(f"float64, {space.num_steps} steps, preconditioner: {found.report.preconditioner}"
              f"{'' if found.report.exact else ' (approximate)'}")
        print("part        hypergradient   finite differences  relative difference")
        for part, where in space.slices.items():
            ours = float(slope_D[where].sum())

            def secant(step: float, where: slice = where) -> float:
                step_D = torch.zeros_like(slope_D)
                step_D[where] = step
                ends = [final_value(proxy.task, space.build((theta_D + sign * step_D).detach()), gradients=gradients)
                        for sign in (1, -1)]
                return (ends[0] - ends[1]) / (2.0 * step)
            measured = min(map(secant, _CHECK_STEPS), key=lambda value: abs(value - ours))
            print(f"{part:11} {ours:+.6e}   {measured:+.6e}       {abs(ours - measured) / max(abs(measured), 1e-12):.1e}")


# run and transfer ---------------------------------------------------------------------------------


def _tune(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    from ngsgd.hypergrad import tune_hyperparameters
    from ngsgd.launcher.tuning.tpe import seeder
    from ngsgd.launcher.tuning.tracker import TuneTracker

    with _proxy(config, report) as proxy:
        folder = _folder(config)
        report(f"folder     {folder}")
        name, search_coarsely = seeder()
        if config.tune.coarse_fraction:
            report(f"coarse     {'Optuna TPE' if name == 'tpe' else 'at random: Optuna is not installed'}")
        tracker = TuneTracker(config, folder, report)
        began = time.monotonic()
        try:
            search = tune_hyperparameters(proxy.evaluate, proxy.space, budget=config.tune.budget,
                                          seed_share=config.tune.coarse_fraction,
                          seeder=search_coarsely, seed=config.seed, watch=tracker.trial)
            result = _write_result(config, proxy, search, folder)
            tracker.finished(search, result)
        finally:
            tracker.close()
        _tell(proxy, search, result, folder, time.monotonic() - began)


def _transfer(config: RunConfig, options: argparse.Namespace, report: Report) -> None:
    import torch

    from ngsgd.hypergrad.search import transfer

    if not options.source:
        raise ConfigError("ngsgd tune transfer needs --from FOLDER, the folder that ngsgd tune run wrote.")
    source = Path(options.source)
    try:
        theta = read_json(source / "tuned.json")["theta"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{source / 'tuned.json'} cannot be read ({error}); give the folder that ngsgd tune run wrote.") from None
    steps = config.tune.transfer_steps or 4 * config.tune.proxy.steps
    with _proxy(config, report, steps=steps) as proxy:
        if len(theta) != proxy.space.size:
            raise ConfigError(f"{source} was tuned over {len(theta)} numbers and tune.space has {proxy.space.size}; give the "
                              "settings of ngsgd tune run again.")
        began, theta_D = time.monotonic(), torch.tensor(theta, dtype=torch.float64)
        search = transfer(proxy.evaluate, proxy.space, theta_D, config.tune.multipliers)
        for factor, trial in zip(config.tune.multipliers, search.trials, strict=True):
            print(f"rates x {factor:<6g} valid {trial.value:.4f}")
        result = _write_result(config, proxy, search, source)
        _tell(proxy, search, result, source, time.monotonic() - began)


def _folder(config: RunConfig) -> Path:
    root = Path(config.output_dir).absolute() / "tune"
    name = config.name or f"{config.data.corpus}-{config.model.label}-{config.optimizer.kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = root / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another name=NAME, or remove it.") from None
    return folder


def _write_result(config: RunConfig, proxy: Proxy, search: SearchResult, folder: Path) -> dict[str,
                                                                                               Any]:
    """tuned.yaml for training, tuned.json with all there is to know, the plot of the schedule; returns the second."""
    import torch

    from ngsgd.hypergrad import final_value
    from ngsgd.launcher.config import tuned_file
    from ngsgd.launcher.reports.plots import draw_schedule

    best = search.best
    if not math.isfinite(best.value):
        raise DataError("no run of the proxy ended in finite numbers; lower schedule.lr_initial, or set limits on change.")
    theta_D = torch.tensor(best.theta, dtype=torch.float64)
    space = proxy.space
    values = space.values(space.clamp(theta_D) if best.kind != "transfer" else theta_D)
    held_out = final_value(proxy.task.held_out, space.build(theta_D), gradients=proxy.gradients())
    settings = tuned_file.settings_of(config, space, values, space.num_jobs)
    reports = [trial.report for trial in search.trials if trial.report is not None]
    proxy_facts = {"steps": space.num_steps, "jobs": space.num_jobs, "outer_iters": space.num_outer_iters,
                   "frames": proxy.task.num_frames}
    result = {"valid": best.value, "held_out": held_out, "theta": list(best.theta), "names": space.names(), "values": values,
              "cost": search.spent, "preconditioner": reports[-1].preconditioner if reports else "none",
              "exact": all(report.exact for report in reports), "proxy": proxy_facts}
    approximate = [] if result["exact"] else ["its hypergradients were approximate: constant preconditioner"]
    tuned_file.write(folder / "tuned.yaml", settings, [
        "made by ngsgd tune; train with: ngsgd train +tuned=THIS_FILE",
        f"on {proxy.task.num_frames:,} frames in {space.num_jobs} jobs: objf {-best.value:.4f}, held out {-held_out:.4f}",
        *approximate])
    write_text(folder / "tuned.json", json.dumps(result, indent=1))
    write_text(folder / "trials.jsonl", "".join(json.dumps(_line(trial)) + "\n" for trial in search.trials))
    if "schedule" in values:
        draw_schedule(values["schedule"], [_rate_before(space, knot) for knot in range(space.knots)], folder / "schedule.png")
    return result


def _rate_before(space: HyperSpace, knot: int) -> float:
    """A job's rate of the schedule before tuning."""
    s = space.settings
    return float(s.lr_initial * (s.lr_final / s.lr_initial) ** (knot / (space.knots - 1)))


def _line(trial: SearchTrial) -> dict[str, Any]:
    return {**asdict(trial), "value": trial.value if math.isfinite(trial.value) else None}


def _tell(proxy: Proxy, search: SearchResult, result: dict[str, Any], folder: Path,
          seconds: float) -> None:
    first = search.trials[0].value
    print(f"valid      {result['valid']:.4f} (first trial: {first:.4f}); held out {result['held_out']:.4f}; per frame, minus objf")
    for part, values in result["values"].items():
        print(f"{part:11}{' '.join(f'{value:.4g}' for value in values)}")
    print(f"cost       {search.spent:.1f} plain runs of the proxy, {seconds:.0f} s; preconditioner: {result['preconditioner']}"
          f"{'' if result['exact'] else ' (approximate)'}")
    print(f"use        ngsgd train +tuned={folder / 'tuned.yaml'}")
