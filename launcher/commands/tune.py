"""`ngsgd tune`: hyperparameters by gradient on a short proxy run; see docs/tuning.md."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig
from ngsgd.config.build import flatten
from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError, reason_of
from ngsgd.files import write_text
from ngsgd.launcher.arguments import CONFIG, JSON, Parser
from ngsgd.launcher.mlflow.store import experiment_id, open_client, resolved, tracking_uri
from ngsgd.masking import masked
from ngsgd.object_storage.urls import is_url
from ngsgd.pipeline.tuning import Proxy, Tuned, coarse_searcher, search, settings_of
from ngsgd.runs.run_folder import what_is_trained
from ngsgd.yaml_text import dump_yaml

# imports torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.hypergrad import SearchResult, SearchTrial


def command(arguments: Sequence[str]) -> int:
    parser = Parser("tune", epilog="ngsgd settings tune lists the settings of the search.")
    parser.declare({"--json": f"{JSON}; progress goes to stderr", "--quiet -q": "print the result only", **CONFIG})
    options = parser.parse_with_settings(arguments)
    from ngsgd.launcher.config import compose
    from ngsgd.launcher.config.sources import Sources
    from ngsgd.pipeline import prepare
    from ngsgd.runs.run_folder import check_output_dir
    config = compose.compose(options.overrides, Sources.of(options))
    config.sites.require_none("ngsgd tune")
    if config.objective.kind != "ce":
        raise ConfigError(f"objective.kind is {config.objective.kind}, and ngsgd tune supports the "
                          "loss of single frames only; tune with objective=ce.")
    stream = sys.stderr if options.json else sys.stdout

    def report(line: str) -> None:
        if not options.quiet:
            print(line, flush=True, file=stream)

    check_output_dir(config)
    if config.tracking.kind not in ("mlflow", "none"):
        raise ConfigError(f"tracking.kind is {config.tracking.kind}, and ngsgd tune writes to MLflow or its own folder only; set "
                          "mlflow or none.")
    config = resolved(config, report)
    proxy = Proxy.of(config, prepare.prepare(config, report).egs_directory)
    space = proxy.space
    report(f"proxy      {counted(space.num_jobs, 'job')} x {counted(space.num_steps, 'minibatch', 'minibatches')}, "
           f"averaged {counted(space.num_outer_iters, 'time')}: {proxy.task.num_frames:,} frames")
    folder = _folder(config)
    report(f"folder     {folder}")
    if config.tune.coarse_fraction:
        found_optuna = coarse_searcher()[0] == "tpe"
        report(f"coarse     {'Optuna TPE' if found_optuna else 'random search: Optuna is not installed'}")
    tracker = _Tracker(config, folder, report)
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


class _Tracker:
    """A line for each trial, and the same figures in MLflow, over the cost in proxy runs."""

    def __init__(self, config: RunConfig, folder: Path, report: Callable[[str], None]) -> None:
        self._folder, self._report, self._best = folder, report, float("inf")
        self._num_trials = 0
        # until an error
        self._is_tracked = config.tracking.kind == "mlflow"
        self._safely(lambda: self._open(config))

    def _open(self, config: RunConfig) -> None:
        client: Any = open_client(tracking_uri(config))
        self._client, self._run_id = client, config.tracking.run_id
        if not self._run_id:
            experiment, parent = experiment_id(client, config, f"{what_is_trained(config)}-tune"), config.tracking.parent_run_id
            tags = {"mlflow.parentRunId": parent} if parent else {}
            self._run_id = client.create_run(experiment, run_name=self._folder.name, tags=tags).info.run_id
        # MLflow refuses to change those of a run that exists
        known = client.get_run(self._run_id).data.params
        for key, value in flatten(config).items():
            if key.startswith(("tune.", "schedule.", "optimizer.")) and key not in known:
                client.log_param(self._run_id, key, masked(str(value)) or "''")

    def trial(self, trial: SearchTrial) -> None:
        self._num_trials += 1
        mark = "*" if trial.value < self._best else " "
        self._best = min(self._best, trial.value)
        self._report(f"{trial.kind:10} {self._num_trials:4} {trial.cost:7.1f} runs  valid "
                     f"{trial.value:.4f}{mark}  best {self._best:.4f}")
        if trial.value < float("inf"):
            self._log({"tune/val": trial.value, "tune/best": self._best}, trial.cost)

    def finished(self, search: SearchResult, result: Tuned) -> None:
        for one in search.trials:
            if one.report is not None:
                self._log({"tune/hypergrad_norm": one.norm, "tune/adjoint_growth": min(one.report.adjoint_growth, 1e30),
                           "tune/spill_bytes": float(one.report.spill_bytes)}, one.cost)
        self._log({"tune/val": result.valid, "tune/test": result.held_out}, search.spent)
        self._safely(lambda: self._client.log_artifacts(self._run_id, str(self._folder)))

    def close(self) -> None:
        self._safely(lambda: self._client.set_terminated(self._run_id))

    def _log(self, figures: Mapping[str, float], cost: float) -> None:
        def send() -> None:
            for name, value in figures.items():
                self._client.log_metric(self._run_id, name, value, step=round(cost))
        self._safely(send)

    def _safely(self, send: Callable[[], object]) -> None:
        """Send to MLflow, and not again after an error; the folder has all results."""
        try:
            if self._is_tracked:
                send()
        except Exception as error:
            self._is_tracked = False
            self._report(f"MLflow cannot be written ({masked(reason_of(error))}); tuning continues, "
                         f"and {self._folder} holds all results.")


def _folder(config: RunConfig) -> Path:
    if is_url(config.output_dir):
        raise ConfigError(f"output_dir is {config.output_dir}; ngsgd tune writes to a folder of this machine only, so set "
                          "output_dir=PATH.")
    name = config.name or (f"{config.data.corpus}-{config.model.label}-{config.optimizer.label}-"
                           f"{time.strftime('%Y%m%d-%H%M%S')}")
    folder = Path(config.output_dir).absolute() / "tune" / name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(f"{folder} exists; choose another name=NAME, or remove it.") from None
    return folder


def _write(proxy: Proxy, found: SearchResult, result: Tuned, folder: Path) -> None:
    """Write tuned.yaml, tuned.json, trials.jsonl and the plot of the schedule."""
    from ngsgd.launcher.reports.figures import draw_schedule
    space, s = proxy.space, proxy.space.settings
    comments = ("# written by ngsgd tune; train with: ngsgd train +tuned=THIS_FILE\n"
                f"# on {proxy.task.num_frames:,} frames in {counted(space.num_jobs, 'job')}: objf {-result.valid:.4f}, "
                f"held out {-result.held_out:.4f}\n")
    write_text(folder / "tuned.yaml", comments + dump_yaml(settings_of(proxy.config, space, result.values, space.num_jobs)))
    write_text(folder / "tuned.json", json.dumps(asdict(result), indent=1))
    lines = ({**asdict(one), "value": one.value if math.isfinite(one.value) else None} for one in found.trials)
    write_text(folder / "trials.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    if "schedule" in result.values:
        before = [float(s.lr_initial * (s.lr_final / s.lr_initial) ** (knot / (space.knots - 1))) for knot in range(space.knots)]
        draw_schedule(result.values["schedule"], before, folder / "schedule.png")
