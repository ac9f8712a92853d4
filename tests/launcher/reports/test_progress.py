"""What a person sees: lines that fit, a bar on terminals only, silence when nobody reads."""

from __future__ import annotations

import io

import pytest

from ngsgd.launcher.reports.progress import ProgressTracker, duration, iteration_line
from ngsgd.training.records import Incident
from tests.launcher.records import final_report, job, outer_iteration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_one_line_per_outer_iteration_has_everything() -> None:
    figures = [word for word in iteration_line(outer_iteration()).split() if any(map(str.isdigit, word))]
    assert figures == ["12/40", "2/2", "1.20/4", "0.0021", "-1.790", "-1.920", "61.2%", "0%", "12%/1%", "1m20s"]


@pytest.mark.parametrize("record", [
    outer_iteration(999, num_outer_iters=1000, left_s=123456.0, valid_objf=-12.345),
    outer_iteration(jobs=tuple(job(number=n, objf=float("nan")) for n in range(1000))),
    outer_iteration(jobs=(job(accepted=False),), left_s=float("nan")),
])
def test_line_fits_into_120_columns(record: object) -> None:
    assert len(iteration_line(record)) <= 120  # type: ignore[arg-type]


def test_a_pipe_gets_plain_lines_and_the_result() -> None:
    stream = io.StringIO()
    tracker = ProgressTracker(stream=stream, output_dir="runs")
    tracker.report("preparing data")
    tracker.outer_iteration(outer_iteration(0))
    tracker.incident(Incident("worker_died", "worker 1 died; its job runs again on worker 0.", 1))
    tracker.outer_iteration(outer_iteration(1))
    tracker.finished(final_report())
    tracker.close("FINISHED")
    text = stream.getvalue()
    lines = text.splitlines()
    assert "\x1b" not in text
    assert [line.split()[0] for line in lines if line.startswith("iter")] == ["iter", "iter"]
    assert any(line.startswith("! iter 2: worker 1 ") for line in lines)
    assert "test   %WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]" in lines
    assert "run folder  /r/x" in lines
    assert lines[-1].endswith("ngsgd ui")


def test_quiet_leaves_incidents_and_result() -> None:
    stream = io.StringIO()
    tracker = ProgressTracker(quiet=True, stream=stream)
    tracker.report("preparing data")
    tracker.outer_iteration(outer_iteration(0))
    tracker.incident(Incident("job_rejected", "job 1 was rejected.", 0))
    tracker.finished(final_report())
    text = stream.getvalue()
    assert "preparing" not in text and "iter 1/" not in text
    assert "! iter 1: job 1" in text and "%WER 3.10" in text


def test_a_terminal_gets_a_bar_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    tracker = ProgressTracker(stream=stream)
    for outer_iter in range(3):
        tracker.outer_iteration(outer_iteration(outer_iter))
    tracker.close("KILLED")
    text = stream.getvalue()
    assert "3/40" in text and "1m20s left" in text
    assert text.count("max-change 12%/1%") == 3


def test_no_color_leaves_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    tracker = ProgressTracker(stream=stream)
    tracker.outer_iteration(outer_iteration(0))
    tracker.close("FINISHED")
    assert "\x1b[3" not in stream.getvalue()


def test_a_reader_that_goes_away_does_not_stop_training() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    tracker = ProgressTracker(stream=Gone())
    tracker.report("x")
    tracker.outer_iteration(outer_iteration())
    tracker.finished(final_report())
    tracker.close("FINISHED")


@pytest.mark.parametrize(("seconds", "told"), [
    (0, "0s"), (59.6, "1m00s"), (80, "1m20s"), (11100, "3h05m"), (float("inf"), "?"),
])
def test_duration(seconds: float, told: str) -> None:
    assert duration(seconds) == told
