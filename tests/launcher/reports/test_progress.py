"""Progress on a terminal of 80 columns, in a pipe, and where nobody reads."""

from __future__ import annotations

import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace

import pytest

from ngsgd.counting import duration
from ngsgd.launcher.reports.progress import ProgressTracker, compact, figures_in, final_lines, iteration_line, status_line
from ngsgd.launcher.screen import loading
from ngsgd.phase import Phase
from ngsgd.training.records import Incident, OuterIterationRecord
from ngsgd.word_errors import WordErrors
from tests.launcher.records import final_report, job, outer_iteration

WIDTH = 80
EXTREMES = [outer_iteration(999, num_outer_iters=1000, left_s=123456.0, valid_objf=-12.345),
            outer_iteration(jobs=tuple(job(number=n, objf=float("nan")) for n in range(1000))),
            outer_iteration(jobs=(job(accepted=False),), left_s=float("nan"))]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SCRIPT = """
from ngsgd.launcher.reports.progress import ProgressTracker
from ngsgd.phase import Phase
from ngsgd.training.records import Incident
from tests.launcher.records import final_report, outer_iteration
tracker = ProgressTracker(output_dir="runs")
tracker.report(Phase("preparing the corpus"))
for outer_iter in range(3):
    tracker.outer_iteration(outer_iteration(outer_iter, num_outer_iters=1000, left_s=123456.0, valid_objf=-12.345))
    tracker.incident(Incident("worker_died", "worker 1 died (process 1234 on a-machine-with-a-long-name); its job runs again.", 1))
tracker.report(Phase("decoding the test set"))
tracker.finished(final_report())
tracker.close("FINISHED")
"""


def on_terminal(script: str = SCRIPT, **environment: str) -> str:
    """What a script writes to a terminal of 80 columns."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    unset = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs,
                               env={**unset, "TERM": "xterm", **environment})
    os.close(theirs)
    written = b""
    try:
        while part := os.read(ours, 65536):
            written += part
    except OSError:
        # Linux reports the end of the other side so
        pass
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


def test_no_line_is_wider_than_a_terminal_of_80_columns() -> None:
    text = on_terminal()
    assert "\x1b[2K" in text, "there is a status line"
    assert re.search(r"\x1b\[[0-9;]*3[0-9]m", text), "there are colors"
    lines = re.split(r"[\r\n]+", CONTROL.sub("", text))
    assert max(map(len, lines)) <= WIDTH
    evaluations = [line for line in lines if line.startswith("iter ")]
    assert len(evaluations) == 3 and all("-12.345" in line and "61.2%" in line for line in evaluations)
    assert any("34h17m left" in line for line in lines)


def test_imports_of_a_command_are_shown_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = on_terminal("from ngsgd.launcher.screen import loading\nwith loading():\n    pass\nprint('first line')")
    assert text.index("loading ngsgd") < text.rindex("\x1b[2K") < text.index("first line")
    with loading():
        pass
    assert capsys.readouterr() == ("", "")


def test_a_wait_for_a_server_is_shown_in_logs_too(capsys: pytest.CaptureFixture[str]) -> None:
    with loading("asking http://me:secret@head"):
        (line,) = capsys.readouterr().err.splitlines()
    assert "head" in line
    assert "secret" not in line
    assert capsys.readouterr() == ("", "")


def test_no_color_leaves_no_color() -> None:
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", on_terminal(NO_COLOR="1"))


def test_a_dumb_terminal_gets_no_control_codes() -> None:
    assert "\x1b" not in on_terminal(TERM="dumb")


def test_one_line_per_outer_iteration_has_everything() -> None:
    figures = [word for word in iteration_line(outer_iteration()).split() if any(map(str.isdigit, word))]
    assert figures == ["12/40", "1.20/4", "-1.790", "-1.920", "61.2%", "0.0021", "2/2", "1m20s"]


def test_a_narrow_line_keeps_the_epoch() -> None:
    record = replace(outer_iteration(119, num_outer_iters=400), num_accepted=128, num_jobs=128, epoch=12.5, num_epochs=15.0)
    line = iteration_line(record, width=80)
    assert "epoch 12.50/15" in line and "jobs" not in line


@pytest.mark.parametrize("record", EXTREMES)
@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_lines_fit_into_the_width(record: OuterIterationRecord, width: int) -> None:
    assert len(iteration_line(record, width=width)) <= width
    assert len(status_line(record, 123456.0, width)) <= width


@pytest.mark.entry("Nc16")
@pytest.mark.parametrize("record", EXTREMES)
@pytest.mark.parametrize("is_speech", [True, False])
def test_a_log_is_read_as_it_was_written(record: OuterIterationRecord, is_speech: bool) -> None:
    lines = [iteration_line(outer_iteration(2), is_speech=is_speech), "iter and other words", "! iter 3: worker 0 died",
             iteration_line(record, is_speech=is_speech), "decoding the test set ..."]
    found = figures_in("\n".join(lines))
    assert found.keys() == {"progress"}
    number, value = f"{record.outer_iter + 1}/{record.num_outer_iters}", record.valid.objf
    assert found["progress"]["iter"] == number and found["progress"]["epoch"].startswith(f"{record.epoch:.2f}/")
    assert float(found["progress"]["valid"]) == pytest.approx(value if is_speech else -value, rel=1e-2, nan_ok=True)
    report = final_report()
    for errors in (report.test_errors, WordErrors(0, 2, 0, 0)):
        found = figures_in("\n".join([*lines, *final_lines(replace(report, test_errors=errors))]))
        assert found["wer"] == str(errors) and found["progress"]["iter"] == number
    assert found["wer_percent"] is None
    assert figures_in("\n".join([*final_lines(report), *lines])).keys() == {"progress"}, "a run after the one that ended"
    assert figures_in("said\n") == {}


def test_the_time_left_counts_down_while_jobs_run() -> None:
    assert status_line(outer_iteration(), 1.0, WIDTH, waited_s=20.0).endswith("1m00s left")
    assert status_line(outer_iteration(), 1.0, WIDTH, waited_s=1e6).endswith("0s left")


def test_a_task_has_losses_and_its_own_metrics() -> None:
    record = outer_iteration()
    record.diagnostics["valid/f1"] = 0.5
    line = iteration_line(record, is_speech=False)
    assert "1.92" in line and "f1 0.5" in line and "-1.92" not in line


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (940, "940"), (16234, "16.2k"), (999949, "1000k"), (3.1e6, "3.1M")])
def test_numbers_are_compact(value: float, text: str) -> None:
    assert compact(value) == text


def test_the_result_names_the_interval_the_model_and_the_next_commands() -> None:
    files = {"run folder": "runs/a", "final model": "runs/a/final", "recognizer": "runs/a/final/bundle.json"}
    report = replace(final_report(), files=files, interval={"low": 2.0, "high": 4.5})
    lines = final_lines(report, "runs")
    assert lines[0].endswith("2.00 to 4.50")
    assert [line[line.index("ngsgd"):] for line in lines[-3:]] == [
        "ngsgd transcribe a recording.wav", "ngsgd report a", "ngsgd ui"]
    assert all(len(line) <= WIDTH for line in lines)


def told_of_a_run(stream: io.StringIO, *, quiet: bool = False) -> str:
    tracker = ProgressTracker(quiet=quiet, stream=stream, output_dir="runs")
    tracker.report(Phase("preparing data"))
    tracker.outer_iteration(outer_iteration(0))
    tracker.incident(Incident("worker_died", "worker 1 died; its job runs again on worker 0.", 1))
    tracker.outer_iteration(outer_iteration(1))
    tracker.finished(final_report())
    tracker.close("FINISHED")
    return stream.getvalue()


def test_a_pipe_gets_plain_lines_and_the_result() -> None:
    text = told_of_a_run(io.StringIO())
    lines = text.splitlines()
    assert "\x1b" not in text
    assert [line.split()[0] for line in lines if line.startswith("iter")] == ["iter", "iter"]
    assert any(line.startswith("! iter 2: worker 1 ") for line in lines)
    assert "test   %WER 3.10 [ 31 / 1000, 4 ins, 7 del, 20 sub ]" in lines
    assert lines[0].startswith("preparing data")
    assert lines[-1].endswith("ngsgd ui")


def test_quiet_leaves_incidents_and_result() -> None:
    text = told_of_a_run(io.StringIO(), quiet=True)
    assert "preparing" not in text and "iter 1/" not in text
    assert "! iter 2: worker 1" in text and "%WER 3.10" in text


def test_a_reader_that_goes_away_does_not_stop_training() -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError
    assert told_of_a_run(Gone()) == ""


@pytest.mark.parametrize(("seconds", "reported"), [(0, "0s"), (59.6, "1m00s"), (80, "1m20s"),
                                               (11100, "3h05m"), (float("inf"), "?")])
def test_duration(seconds: float, reported: str) -> None:
    assert duration(seconds) == reported
