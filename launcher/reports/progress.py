"""Progress of a run for a person: phases, a line per evaluation, a status line, and the result."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ngsgd.counting import duration
from ngsgd.errors import NgsgdError
from ngsgd.launcher.reports.efficiency import efficiency_of, samples_per_second, sites_of
from ngsgd.launcher.screen import SCREEN, Screen
from ngsgd.launcher.why.faults import bad_examples
from ngsgd.object_storage.urls import is_url
from ngsgd.phase import Phase
from ngsgd.runs import stored_run
from ngsgd.runs.config_file import read_config
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord
from ngsgd.training.storage.event_log import events_of

# examples with a non-finite loss or gradient in the summary
_MOST_BAD = 5
# columns of a line of a log
WIDTH = 100
LEGEND = ("train, valid: objective in nats per frame, on fixed frames of the training and",
          "validation sets; acc: frame accuracy on valid; lr: effective, per frame")
TASK_LEGEND = ("train, valid: mean loss of fixed training and validation examples; lr: effective, per example",)

# text, and how soon it is dropped where the line is too long; 0 stays
Part = tuple[str, int]


class ProgressTracker:
    """Shows a run on this terminal; `output_dir` holds the database of the dashboard, or None."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None,
                 output_dir: Path | str | None = None, is_speech: bool = True) -> None:
        self._quiet = quiet
        self._is_speech = is_speech
        self.screen = Screen(stream) if stream else SCREEN
        self._output_dir = output_dir
        self._last: OuterIterationRecord | None = None

    def report(self, message: str) -> None:
        if self._quiet:
            return
        if isinstance(message, Phase):
            self.screen.phase(message)
        else:
            self.screen.line(message)

    def warn(self, message: str) -> None:
        self.screen.line(f"! {message}", "yellow")

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        """Show the line of an evaluation, and the status until the next one."""
        if self._quiet:
            return
        per_s = samples_per_second(record, self._last.elapsed_s if self._last else 0.0)
        began = time.monotonic()
        # the status takes the place of the phase that ends
        self.screen.status(lambda width: status_line(record, per_s, width, waited_s=time.monotonic() - began,
                                                     is_speech=self._is_speech))
        if self._last is None:
            for line in LEGEND if self._is_speech else TASK_LEGEND:
                self.screen.line(line, "dim")
        self._last = record
        self.screen.line(self.iteration_line(record))

    def iteration_line(self, record: OuterIterationRecord) -> str:
        return iteration_line(record, width=self.screen.width, is_speech=self._is_speech)

    def incident(self, incident: Incident) -> None:
        self.warn(f"iter {incident.outer_iter + 1}: {incident.message}")

    def finished(self, report: FinalReport) -> None:
        self.screen.close()
        self.screen.rule(Path(report.files.get("run folder", "")).name)
        for line in final_lines(report, self._output_dir):
            # as one line each, so that a command can be copied
            self.screen.line(line, wraps=False)
        self.screen.rule()

    def close(self, status: str) -> None:
        self.screen.close()


def iteration_line(record: OuterIterationRecord, *, width: int = WIDTH, ending: str = "", is_speech: bool = True) -> str:
    """One evaluation in one line, which ends with the time left or with `ending`."""
    number = f"{record.outer_iter + 1:{len(str(record.num_outer_iters))}}"
    return fitted([(f"iter {number}/{record.num_outer_iters}", 0), (f"epoch {record.epoch:.2f}/{record.num_epochs:g}", 2),
                   *_scores(record, is_speech=is_speech),
                   # the status line has these too
                   (f"lr {record.effective_lr:#.2g}", 3), (f"jobs {record.num_accepted}/{record.num_jobs}", 4),
                   (ending, 0) if ending else (f"left {duration(record.left_s)}", 5)], width)


def figures_in(log: str) -> dict[str, Any]:
    """Read the newest evaluation, and the WER after it, from lines of this module in a log.

    Returns:
        "progress", the figures of `iteration_line` by name, "wer" and "wer_percent"; each if it
        is in the log.
    """
    found: dict[str, Any] = {}
    for words in map(str.split, log.splitlines()):
        if words[:1] == ["iter"] and "/" in "".join(words[1:2]):
            found = {"progress": dict(zip(words[::2], words[1::2], strict=False))}
        elif words[:2] == ["test", "%WER"]:
            has_words = words[3:4] == ["["]
            found |= {"wer": " ".join(words[1:words.index("]") + 1]), "wer_percent": float(words[2]) if has_words else None}
    return found


def status_line(record: OuterIterationRecord, per_s: float, width: int, *, waited_s: float = 0.0, is_speech: bool = True) -> str:
    """The state of training after an outer iteration, `waited_s` seconds ago."""
    number = min(record.outer_iter + 2, record.num_outer_iters)
    left_s = max(record.left_s - waited_s, 0.0)
    return fitted([(f"iter {number}/{record.num_outer_iters}", 0), *_scores(record, is_speech=is_speech),
                   (f"lr {record.effective_lr:#.2g}", 4),
                   (f"{compact(per_s)} {'frames' if is_speech else 'examples'}/s", 2),
                   (f"jobs {record.num_accepted}/{record.num_jobs}", 3), (f"{duration(left_s)} left", 0)], width)


def _scores(record: OuterIterationRecord, *, is_speech: bool) -> list[Part]:
    if is_speech:
        return [(f"train {record.train.objf:.3f}", 0), (f"valid {record.valid.objf:.3f}", 0),
                (f"acc {100 * record.valid.accuracy:.1f}%", 1)]
    own = [(f"{name.removeprefix('valid/')} {value:.4g}", 1) for name, value in record.diagnostics.items()
           if name.startswith("valid/")]
    return [(f"train {-record.train.objf:.4g}", 0), (f"valid {-record.valid.objf:.4g}", 0), *own]


def fitted(parts: Sequence[Part], width: int) -> str:
    """Join the parts that fit into `width` columns; the highest numbers are dropped first."""
    kept = list(parts)
    while True:
        line = "  ".join(text for text, _ in kept)
        line = line if len(line) <= width else line.replace("  ", " ")
        last = max((drop for _, drop in kept), default=0)
        if len(line) <= width or not last:
            return line
        kept.remove([part for part in kept if part[1] == last][-1])


def compact(value: float) -> str:
    """A number in at most five characters, such as 940, 16.2k or 3.1M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}" if value < 100 * size else f"{value / size:.0f}{unit}"
    return f"{value:.0f}"


def final_lines(report: FinalReport, output_dir: Path | str | None = None) -> list[str]:
    trained = f"{report.frames_processed:,} {'examples' if report.metrics else 'frames'} in {duration(report.seconds)}"
    if report.metrics:
        lines = [f"{name}  {value:.4g}" for name, value in report.metrics.items()]
    else:
        interval = f"  95% CI {report.interval['low']:.2f} to {report.interval['high']:.2f}" if report.interval else ""
        lines = [f"test   {report.test_errors}{interval}"] if report.test_errors else []
        lines += [f"valid  {report.valid_errors}"] if report.valid_errors else []
        lines += [f"objf   valid {report.valid.objf:.3f}, train {report.train.objf:.3f}; "
                  f"frame accuracy {100 * report.valid.accuracy:.1f}%"]
    lines.append(f"used   {trained}")
    lines += _of_events(Path(report.files["events"]), is_speech=not report.metrics) if "events" in report.files else []
    if "final model" in report.files:
        lines.append(f"model  {short_path(report.files['final model'])}")
    commands = enumerate(_next_commands(report, output_dir))
    return [*lines, *(f"{'' if index else 'next':5}  {command}" for index, command in commands)]


def _of_events(path: Path, *, is_speech: bool) -> list[str]:
    events = list[dict[str, Any]]()
    # in one pass: the records of jobs of a long run do not fit into memory
    efficiency = efficiency_of(_without_jobs(path, events))
    bad = bad_examples(events)
    lines = [f"       {efficiency.text}"] if efficiency.num_possible else []
    sites = sites_of(events)
    lines += [f"sites  {sites.text}"] if sites.num_rounds else []
    price = 0.0
    # without its settings
    with contextlib.suppress(NgsgdError):
        price = read_config(path.parent / "config.yaml").cluster.price_per_hour
    lines += [f"cost   {efficiency.cost_text(price, is_speech=is_speech)}"] if price and efficiency.num_possible else []
    shown = [f"{name} ({reason})" for name, reason in [*bad.items()][:_MOST_BAD]]
    more = f" and {len(bad) - _MOST_BAD} more (ngsgd why)" if len(bad) > _MOST_BAD else ""
    return [*lines, *([f"bad    {', '.join(shown)}{more}"] if bad else [])]


def _without_jobs(path: Path, kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the events of a log; keep those of averages over sites and of bad examples."""
    for event in events_of(path):
        bad = [job for job in event.get("jobs", ()) if job.get("bad_examples")] if event["event"] == "outer_iteration" else []
        if bad or event.get("sites"):
            kept.append({"event": event["event"], "jobs": bad, "sites": event.get("sites")})
        yield event


def _next_commands(report: FinalReport, output_dir: Path | str | None) -> list[str]:
    if "run folder" not in report.files:
        return []
    path = stored_run.url_of(Path(report.files["run folder"])) or short_path(report.files["run folder"])
    # the commands find a run below runs/ by its name
    run = shlex.quote(Path(path).name if Path(path).parent == Path("runs") else path)
    transcribe = [f"ngsgd transcribe {run} recording.wav"] if "recognizer" in report.files else []
    return [*transcribe, f"ngsgd report {run}", *([dashboard_command(output_dir)] if output_dir is not None else [])]


def short_path(path: str) -> str:
    """The path from the current folder where that is below it, else the path itself."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def dashboard_command(output_dir: Path | str) -> str:
    folder = str(output_dir) if is_url(str(output_dir)) else short_path(str(output_dir))
    return "ngsgd ui" if folder == "runs" else f"ngsgd ui {shlex.quote(folder)}"
