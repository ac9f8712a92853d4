"""What a person sees while a run goes on: one line per outer iteration everywhere, and a bar below on a terminal."""

from __future__ import annotations

import shlex
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from ngsgd.launcher.text import masked, printable
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord

_WIDTH = 120
LEGEND = ("objf, valid: nats per frame on fixed training and held-out frames; acc: held-out; lr: effective;\n"
          "skew: slowest job over the median; max-change: share of layer / whole-model steps that a limit shortened")

TASK_LEGEND = ("loss, valid: mean loss of fixed training and validation examples; lr: effective;\n"
               "skew: slowest job over the median; max-change: share of layer / whole-model steps that a limit shortened")


class ProgressTracker:
    """Tells a run on a text stream; `quiet` leaves only incidents and the result."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None,
                 output_dir: Path | str | None = None, is_speech: bool = True) -> None:
        self._quiet = quiet
        # a task of the user's own has losses and examples, not objf and frames
        self._is_speech = is_speech
        self._stream = stream or sys.stdout
        # where the dashboard's database is; None: there is none
        self._output_dir = output_dir
        # rich.progress.Progress, on a terminal only
        self._bar: Any = None
        self._legend_told = False
        # MLflow's thread reports its troubles here too
        self._lock = threading.Lock()

    def report(self, message: str) -> None:
        """A stage of the preparation, or anything else worth a line."""
        if not self._quiet:
            self._line(message)

    def warn(self, message: str) -> None:
        self._line(f"! {message}")

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        if self._quiet:
            return
        if not self._legend_told:
            self._line(LEGEND if self._is_speech else TASK_LEGEND)
            if record.patience_s:
                self._line(f"a worker that makes no progress for {record.patience_s:.0f} s is replaced")
            self._legend_told = True
        self._line(self.iteration_line(record))
        self._advance(record)

    def iteration_line(self, record: OuterIterationRecord) -> str:
        """What is told of an outer iteration."""
        return iteration_line(record, scores=scores_of(record) if self._is_speech else task_scores_of(record))

    def incident(self, incident: Incident) -> None:
        self.warn(f"iter {incident.outer_iter + 1}: {incident.message}")

    def finished(self, report: FinalReport) -> None:
        self._stop_bar()
        for line in final_lines(report):
            self._line(line)
        if self._output_dir is not None:
            self._line(f"see the curves with: {dashboard_command(self._output_dir)}")

    def close(self, status: str) -> None:
        self._stop_bar()

    def _line(self, text: str) -> None:
        text = printable(masked(text))
        with self._lock:
            try:
                if self._bar is not None:
                    self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
                else:
                    print(text, file=self._stream, flush=True)
            except (OSError, ValueError):
                # the reader has gone (`| head`); training goes on without being watched
                self._quiet = True

    def _advance(self, record: OuterIterationRecord) -> None:
        """Moves the bar; made at the first outer iteration, because only then is the number of them known."""
        if not self._stream.isatty():
            return
        with self._lock:
            if self._bar is None:
                self._bar = _new_bar(self._stream)
                self._bar.add_task("training", total=record.num_outer_iters, left="")
                self._bar.start()
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=record.outer_iter + 1, left=f"{duration(record.left_s)} left")

    def _stop_bar(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


def scores_of(record: OuterIterationRecord) -> str:
    """Objf and accuracy of a speech model."""
    return f"objf {record.train.objf:.3f} valid {record.valid.objf:.3f} acc {100 * record.valid.accuracy:.1f}%"


def task_scores_of(record: OuterIterationRecord) -> str:
    """Losses of a task of the user's own, and its validation metrics by their names."""
    metrics = [f" {name.removeprefix('valid/')} {value:.4g}" for name, value in record.diagnostics.items()
               if name.startswith("valid/")]
    return f"loss {-record.train.objf:.4g} valid {-record.valid.objf:.4g}{''.join(metrics)}"


def iteration_line(record: OuterIterationRecord, *, ending: str = "", scores: str = "") -> str:
    """One outer iteration in at most 120 columns; it ends with the time that is left, or with `ending` if that is given."""
    jobs = f"{record.num_accepted}/{record.num_jobs}"
    width = len(str(record.num_outer_iters))
    line = "  ".join([
        f"iter {record.outer_iter + 1:{width}}/{record.num_outer_iters} jobs {jobs}"
        f" epoch {record.epoch:.2f}/{record.num_epochs:g}",
        f"lr {record.effective_lr:#.2g}",
        scores or scores_of(record),
        f"skew {100 * record.skew:.0f}% max-change {100 * record.max_change_share:.0f}%"
        f"/{100 * record.max_param_change_share:.0f}%",
        ending or f"left {duration(record.left_s)}",
    ])
    return line if len(line) <= _WIDTH else line.replace("  ", " ")


def final_lines(report: FinalReport) -> list[str]:
    if report.metrics:
        scores = ", ".join(f"{name} {value:.4g}" for name, value in report.metrics.items())
        lines = [f"trained on {report.frames_processed:,} examples in {duration(report.seconds)}: {scores}"]
    else:
        lines = [f"trained on {report.frames_processed:,} frames in {duration(report.seconds)}: "
                 f"objf {report.train.objf:.3f} valid {report.valid.objf:.3f} acc {100 * report.valid.accuracy:.1f}%"]
    lines += [f"valid  {report.valid_wer}"] if report.valid_wer else []
    lines += [f"test   {report.wer}"] if report.wer else []
    width = max(map(len, report.files), default=0)
    lines += [f"{label:{width}}  {path}" for label, path in report.files.items()]
    if "recognizer" in report.files:
        run = shlex.quote(report.files["run folder"])
        lines.append(f"recognize recordings with: ngsgd transcribe {run} recording.wav")
    return lines


def duration(seconds: float) -> str:
    """Seconds as 45s, 1m20s or 3h05m."""
    if not 0 <= seconds < 1e9:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _new_bar(stream: TextIO) -> Any:
    """rich obeys NO_COLOR and dumb terminals by itself."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TextColumn("{task.fields[left]}"))
    return Progress(*columns, console=Console(file=stream), transient=True)


def dashboard_command(output_dir: Path | str) -> str:
    """The command that opens the dashboard on this output folder."""
    return "ngsgd ui" if str(output_dir) == "runs" else f"ngsgd ui {shlex.quote(str(output_dir))}"
