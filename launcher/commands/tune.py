"""`ngsgd tune`: hyperparameters by gradient on a short proxy run; see docs/tuning.md."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.object_storage.urls import is_url
from ngsgd.pipeline.tuning import Proxy, Tuned, coarse_searcher, search, settings_of

# imports torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.hypergrad import SearchResult, SearchTrial


def command(arguments: Sequence[str]) -> int:
    """`ngsgd tune`."""
    options = _parser().parse_with_settings(arguments)
    from ngsgd.launcher.config import compose, tuned_file
    from ngsgd.launcher.mlflow.tune_tracker import TuneTracker
    from ngsgd.pipeline import prepare
    from ngsgd.runs.run_folder import check_output_dir

    config = compose.compose(tuned_file.expanded(options.overrides),
                             config_dir=Path(options.config_dir) if options.config_dir else None)
    config.sites.require_none("ngsgd tune")
    if config.objective.kind != "ce":
        raise ConfigError(f"objective.kind is {config.objective.kind}, and ngsgd tune supports the "
                          "loss of single frames only; tune with objective=ce.")
    stream = sys.stderr if options.json else sys.stdout

    def report(line: str) -> None:
        if not options.quiet:
            print(line, flush=True, file=stream)

    check_output_dir(config)
    proxy = Proxy.of(config, prepare.prepare(config, report).egs_directory)
    space = proxy.space
    report(f"proxy      {counted(space.num_jobs, 'job')} x {counted(space.num_steps, 'minibatch', 'minibatches')}, "
           f"averaged {counted(space.num_outer_iters, 'time')}: {proxy.task.num_frames:,} frames")
    folder = _folder(config)
    report(f"folder     {folder}")
    if config.tune.coarse_fraction:
        report(f"coarse     {'Optuna TPE' if coarse_searcher()[0] == 'tpe' else 'random search: Optuna is not installed'}")
    tracker = TuneTracker(config, folder, report)
    began = time.monotonic()
    try:
        found, result = search(proxy, tracker.trial)
        _write(proxy, found, result, folder)
        tracker.finished(found, result)
    finally:
        tracker.close()
    seconds, first, file = time.monotonic() - began, found.trials[0].value, folder / "tuned.yaml"
    if options.json:
        print(json.dumps({**asdict(result), "first_trial": first, "seconds": seconds, "tuned_file": str(file)}, indent=1))
        return EXIT_OK
    print(f"valid      {result.valid:.4f} (first trial: {first:.4f}); held out {result.held_out:.4f}; per frame, minus objf",
          *(f"{part:11}{' '.join(f'{value:.4g}' for value in values)}" for part, values in result.values.items()),
          f"cost       {result.cost:.1f} proxy runs, {seconds:.0f} s", f"use        ngsgd train +tuned={file}", sep="\n")
    return EXIT_OK


def _parser() -> Parser:
    parser = Parser("tune", epilog="ngsgd settings tune lists the settings of the search.")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of ngsgd train")
    parser.add_argument("--json", action="store_true", help=f"{JSON}; progress goes to stderr")
    parser.add_argument("--quiet", "-q", action="store_true", help="print the result only")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="folder of custom YAML files")
    return parser


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

    space, s = proxy.space, proxy.space.settings
    tuned_file.write(folder / "tuned.yaml", settings_of(proxy.config, space, result.values, space.num_jobs), [
        "written by ngsgd tune; train with: ngsgd train +tuned=THIS_FILE",
        f"on {proxy.task.num_frames:,} frames in {counted(space.num_jobs, 'job')}: objf {-result.valid:.4f}, "
        f"held out {-result.held_out:.4f}"])
    write_text(folder / "tuned.json", json.dumps(asdict(result), indent=1))
    write_text(folder / "trials.jsonl", "".join(json.dumps(_line(trial)) + "\n" for trial in found.trials))
    if "schedule" in result.values:
        before = [float(s.lr_initial * (s.lr_final / s.lr_initial) ** (knot / (space.knots - 1))) for knot in range(space.knots)]
        draw_schedule(result.values["schedule"], before, folder / "schedule.png")


def _line(trial: SearchTrial) -> dict[str, Any]:
    return {**asdict(trial), "value": trial.value if math.isfinite(trial.value) else None}
