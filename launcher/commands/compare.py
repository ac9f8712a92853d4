"""`ngsgd compare RUN RUN ...`: several runs on one page that reads like the paper's Figure 1.

`ngsgd compare recipe=digits optimizer=ngsgd,kfac` trains the runs first.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import read_json, write_text
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.text import duration, masked, printable
from ngsgd.pipeline.runs.run_folder import RunFolder, find_run
from ngsgd.pipeline.runs.saved_config import read_config
from ngsgd.training.storage.event_log import read_events

if TYPE_CHECKING:
    from ngsgd.launcher.reports.charts import Chart
    from ngsgd.launcher.reports.plots import Curve

_DPI = 130
# settings that say where a run lay, not what it was
_NO_DIFFERENCE = ("name", "output_dir", "tracking.uri", "tracking.experiment_name", "data.cache_dir", "cluster.address")


def command(arguments: Sequence[str]) -> int:
    """Prints a table and writes the page."""
    parser = Parser("compare")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or their names under runs/; words with = are settings "
                        "of runs to train first, one for each value between commas: recipe=digits optimizer=ngsgd,kfac,shampoo")
    parser.add_argument("--output", "-o", metavar="FILE", default="compare.html", help="the page (default: %(default)s)")
    parser.add_argument("--png", metavar="FILE", help="the curves as a picture, too")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    options = parser.parse_args(list(arguments))
    folders = [RunFolder.open(find_run(run)) for run in options.runs if "=" not in run]
    if settings := [word for word in options.runs if "=" in word]:
        from ngsgd.launcher.reports.sweep_runner import trained

        folders += trained(settings, lambda line: print(printable(masked(line)), file=sys.stderr, flush=True))
    runs = [read(folder) for folder in folders]
    target = Path(options.output)
    write_text(target, _page(runs))
    if options.png:
        from ngsgd.launcher.reports.plots import compare

        compare([(name_of(run, runs), run.events) for run in runs], Path(options.png))
    if options.json:
        objf = common_objf(runs)
        print(json.dumps({"page": str(target), "common_objf": objf, "runs": [run.figures(objf) for run in runs]}, indent=1))
    else:
        print(printable("\n".join([*_text_table(runs), f"page {target}"])))
    return EXIT_OK


@dataclass(frozen=True)
class ComparedRun:
    """What is compared of a run."""

    label: str
    events: list[dict[str, Any]]
    settings: dict[str, Any]
    # per cent, and its 95% interval
    wer: tuple[float, float, float] | None
    # largest resident memory of the processes of the run
    peak_mib: int | None = None

    @property
    def curve(self) -> Curve:
        from ngsgd.launcher.reports.plots import Curve

        return Curve(self.events)

    @property
    def num_jobs(self) -> int:
        """The most of any outer iteration."""
        return max(int(event["num_jobs"]) for event in self.curve.iterations)

    def seconds_to(self, objf: float) -> float:
        """Seconds of training until the held-out objf is reached, between two outer iterations by the straight line; or NaN."""
        before: Mapping[str, Any] | None = None
        for event in self.curve.iterations:
            value = event["valid"]["objf"]
            if value >= objf:
                if before is None:
                    return float(event["elapsed_s"])
                share = (objf - before["valid"]["objf"]) / (value - before["valid"]["objf"])
                return float(before["elapsed_s"] + share * (event["elapsed_s"] - before["elapsed_s"]))
            before = event
        return math.nan

    def figures(self, objf: float) -> dict[str, Any]:
        """For JSON and the table."""
        last, seconds = self.curve.iterations[-1], self.seconds_to(objf)
        return {"run": self.label, "num_jobs": self.num_jobs, "optimizer": self.settings["optimizer.kind"],
                "frames_per_s": last["frames_processed"] / last["elapsed_s"] if last["elapsed_s"] else None,
                "peak_resident_mib": self.peak_mib,
                "outer": self.settings["outer.kind"], "seed": self.settings["seed"], "wer_percent": self.wer and self.wer[0],
                "wer_interval_95": self.wer and list(self.wer[1:]), "valid_objf": last["valid"]["objf"],
                "valid_accuracy": last["valid"]["accuracy"], "epochs": last["epoch"], "frames_processed": last["frames_processed"],
                "seconds": last["elapsed_s"], "seconds_to_common_objf": None if math.isnan(seconds) else seconds}


def read(folder: RunFolder) -> ComparedRun:
    """Raises ConfigError for a run that has nothing to show."""
    from ngsgd.config.build import flatten

    events = read_events(folder.events)
    if not any(event.get("event") == "outer_iteration" for event in events):
        raise ConfigError(f"{folder.path} has no outer iteration yet; leave it out, or wait for its first.")
    try:
        about = read_json(folder.decode / "wer.json")
        wer = next(event["wer_percent"] for event in reversed(events) if event.get("event") == "finished")
        found = (float(wer), float(about["test_interval_95"]["low"]), float(about["test_interval_95"]["high"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError, StopIteration):
        # not decoded, or not yet
        found = None
    try:
        peak = int(read_json(folder.measured)["peak_resident_mib"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        # not measured, or damaged
        peak = None
    settings = flatten(read_config(folder.config))
    shown = {name: masked(value) if isinstance(value, str) else value for name, value in settings.items()}
    return ComparedRun(folder.path.name, events, shown, found, peak)


def common_objf(runs: Sequence[ComparedRun]) -> float:
    """The held-out objf that every run reached: the lowest of their best."""
    return min(max(float(event["valid"]["objf"]) for event in run.curve.iterations) for run in runs)


def differences(runs: Sequence[ComparedRun]) -> dict[str, list[Any]]:
    """Setting -> its value in each run, where they are not all equal."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    found = {path: [run.settings.get(path) for run in runs] for path in paths if path not in _NO_DIFFERENCE}
    return {path: values for path, values in found.items() if any(value != values[0] for value in values)}


# Pictures -----------------------------------------------------------------------------------------


def charts(runs: Sequence[ComparedRun]) -> list[Chart]:
    """Objf against epochs and against time, as in Figure 1; word errors and time against the number of jobs."""
    from ngsgd.launcher.reports.charts import Chart, narrow_axes
    from ngsgd.launcher.reports.plots import RUN_COLOURS, label

    colours = [RUN_COLOURS[index % len(RUN_COLOURS)] for index in range(len(runs))]
    found = []
    for name, key, scale, unit in (("epochs", "epoch", 1.0, "epochs"), ("time", "elapsed_s", 1 / 60, "minutes of training")):
        figure, axes = narrow_axes()
        for run, colour in zip(runs, colours, strict=True):
            across = run.curve.values(key, scale)
            axes.plot(across, run.curve.values("valid.objf"), color=colour, linewidth=2.0, label=name_of(run, runs))
            axes.plot(across, run.curve.values("train.objf"), color=colour, linewidth=1.0, linestyle="--", alpha=0.7)
        label(axes, f"Objective function against {unit.partition(' ')[0]}", "nats per frame", legend="lower right")
        axes.legend(fontsize=7, frameon=False, loc="lower right")
        axes.set_xlabel(unit)
        found.append(Chart(name, f"Objective function against {unit}", "Solid: held-out frames; dashed: training frames.", figure))
    # runs with equally many jobs stand beside each other
    places = [run.num_jobs + 0.08 * sum(other.num_jobs == run.num_jobs for other in runs[:index]) for index, run in enumerate(runs)]
    if any(run.wer for run in runs):
        figure, axes = narrow_axes()
        for run, colour, place in zip(runs, colours, places, strict=True):
            if run.wer:
                axes.errorbar([place], [run.wer[0]], yerr=_reach(run.wer), fmt="o", color=colour, capsize=3)
        label(axes, "Word errors against jobs", "% of words, 95% interval")
        _whole_numbers(axes, runs)
        found.append(Chart("wer", "Word errors against jobs",
                           "One point a run: the most jobs of its outer iterations, and its %WER on the test set.", figure))
        for name, title, unit in (("wer_frames", "frames processed", "millions"), ("wer_time", "time", "minutes of training")):
            figure, axes = narrow_axes()
            for run, colour in zip(runs, colours, strict=True):
                if run.wer:
                    last = run.curve.iterations[-1]
                    across = last["elapsed_s"] / 60 if name == "wer_time" else last["frames_processed"] / 1e6
                    axes.errorbar([across], [run.wer[0]], yerr=_reach(run.wer), fmt="o", color=colour, capsize=3,
                                  label=name_of(run, runs))
            axes.set_xlim(left=0)
            label(axes, f"Word errors against {title}", "% of words, 95% interval")
            axes.legend(fontsize=7, frameon=False)
            axes.set_xlabel(unit)
            found.append(Chart(name, f"Word errors against {title}", "One point a run, of its final model.", figure))
    objf = common_objf(runs)
    figure, axes = narrow_axes()
    for run, colour, place in zip(runs, colours, places, strict=True):
        axes.plot([place], [run.seconds_to(objf)], "o", color=colour)
    axes.set_ylim(bottom=0)
    label(axes, f"Time to a held-out objf of {objf:.3f}", "seconds")
    _whole_numbers(axes, runs)
    told = (f"Seconds of training until each run has reached {objf:.3f} nats per frame on held-out frames, the most that all "
            "reached.")
    return [*found, Chart("speed", "Time to a common objf", told, figure)]


def _reach(wer: tuple[float, float, float]) -> list[list[float]]:
    """Of an error bar, below and above."""
    value, low, high = wer
    return [[max(0.0, value - low)], [max(0.0, high - value)]]


def _whole_numbers(axes: Any, runs: Sequence[ComparedRun]) -> None:
    counts = sorted({run.num_jobs for run in runs})
    axes.set_xticks(counts)
    axes.set_xlim(counts[0] - 0.6, counts[-1] + 0.6)
    axes.set_xlabel("jobs")


def name_of(run: ComparedRun, runs: Sequence[ComparedRun]) -> str:
    """What tells this run from the others, if that is short; else its folder."""
    different = differences(runs)

    def told(one: ComparedRun) -> str:
        of = one.settings
        texts = {"schedule.num_jobs_final": f"{one.num_jobs} jobs",
                 "optimizer.kind": of["optimizer.kind"],
                 "outer.kind": of["outer.kind"], "seed": f"seed {of['seed']}", "model.kind": of["model.kind"]}
        return ", ".join(text for path, text in texts.items() if text and path in different)

    name = told(run)
    return name if name and [told(one) for one in runs].count(name) == 1 else run.label


# The page and the table ---------------------------------------------------------------------------


_HEADER = ("run", "jobs", "optimizer", "outer", "%WER", "95% interval", "valid objf", "frames right", "epochs", "training",
           "frames/s", "memory", "to common objf")


def _rows(runs: Sequence[ComparedRun]) -> list[tuple[str, ...]]:
    objf, rows = common_objf(runs), list[tuple[str, ...]]()
    for run in runs:
        one = run.figures(objf)
        wer, interval, seconds = one["wer_percent"], one["wer_interval_95"], one["seconds_to_common_objf"]
        speed, memory = one["frames_per_s"], one["peak_resident_mib"]
        rows.append((run.label, str(one["num_jobs"]), one["optimizer"], one["outer"], "-" if wer is None else f"{wer:.2f}",
                     f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-", f"{one['valid_objf']:.4f}",
                     f"{100 * one['valid_accuracy']:.1f}%", f"{one['epochs']:.2f}", duration(one["seconds"]),
                     "-" if speed is None else f"{speed:,.0f}", "-" if memory is None else f"{memory:,} MiB",
                     "-" if seconds is None else f"{seconds:.1f} s"))
    return rows


def _text_table(runs: Sequence[ComparedRun]) -> list[str]:
    rows = [_HEADER, *_rows(runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _page(runs: Sequence[ComparedRun]) -> str:
    from ngsgd.launcher.reports import page as html

    different = [(path, *map(str, values)) for path, values in differences(runs).items()]
    settings = html.table(("setting", *(run.label for run in runs)), different) if different else "<p>None.</p>"
    body = [html.pictures(charts(runs)), html.heading("Runs"), html.table(_HEADER, _rows(runs)),
            html.heading("Settings that differ"), settings]
    footer = (f"ngsgd {version('ngsgd')}. Points of one run each: seeds differ by more than intervals over test utterances show. "
              "Times are those of the machine at the time.")
    return html.page("Comparison of runs", ", ".join(run.label for run in runs), body, footer)
