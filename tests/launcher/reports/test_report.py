"""The page about a run and the page about several: complete, self-contained, right in their figures."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest

from ngsgd.errors import NgsgdError
from ngsgd.files import read_json_lines
from ngsgd.launcher import cli
from ngsgd.launcher.commands import compare
from ngsgd.launcher.commands.report import write
from ngsgd.launcher.config import compose
from ngsgd.launcher.mlflow import store
from ngsgd.launcher.reports.charts import charts_of
from ngsgd.pipeline.runs import config_file
from ngsgd.pipeline.runs.fisher_spectra import fisher_spectra
from ngsgd.pipeline.runs.run_folder import RunFolder
from ngsgd.pipeline.runs.saved_config import read_config
from ngsgd.training.records import Incident
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.records import final_report, job, outer_iteration


def make_run(root: Path, name: str, *settings: str, speed: float = 1.0, wer: float = 3.1) -> Path:
    """A run of ten outer iterations whose objf rises from -2 to -1; `speed` is that of its clock."""
    run = root / "runs" / f"{name}-20260101-000000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(config_file.to_yaml(compose.compose([f"name={name}", *settings])))
    log = EventLog(run / "events.jsonl")
    for number in range(10):
        ends = 3.0 * (number + 1) / speed
        jobs = tuple(replace(job(number=worker, worker=worker), ended_s=ends - 0.5, attempt=1 + (number == 4 and worker == 1),
                             health={"affine1/input_effective_rank": 5.0 + worker}) for worker in range(2))
        log.outer_iteration(replace(outer_iteration(number, num_outer_iters=10, jobs=jobs, valid_objf=-2.0 + number / 9),
                                    elapsed_s=ends))
        if number == 4:
            log.incident(Incident("worker_died", "worker 1 <died>.", 4, 1, 1, ends - 1.5))
    log.finished(replace(final_report(), wer_percent=wer))
    log.close("FINISHED")
    (run / "decode").mkdir()
    about = {"valid": "%WER 2.80", "test": "%WER 3.10", "test_interval_95": {"low": wer - 1, "high": wer + 1}}
    (run / "decode" / "wer.json").write_text(json.dumps(about))
    return run


class Page(HTMLParser):
    """What a browser would load and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.images: list[bytes] = []
        self.alts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "link", "br"):
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href") and not (value or "").startswith("data:"):
                self.loaded.append(str(value))
            if tag == "img" and name == "src":
                self.images.append(base64.b64decode(str(value).partition("base64,")[2]))
            if tag == "img" and name == "alt":
                self.alts.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_a_report_is_one_file_without_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first", "seed=7")
    assert cli.main(["report", "first", "--no-spectra"]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.loaded == [] and page.open == [] and "<script" not in text
    assert len(page.images) == len(page.alts) == 7
    for image in page.images:
        assert ElementTree.fromstring(image).tag.endswith("svg")
    assert all(len(alt) > 20 for alt in page.alts)
    assert "3.10%" in text and "10 / 10" in text and "<td>seed</td>" in text
    assert "worker 1 &lt;died&gt;." in text, "what a worker said is no markup"
    assert {path.stem for path in (run / "report").iterdir()} == {
        "objf", "accuracy", "lr", "max_change", "time", "timeline", "fisher_rank"}


@pytest.mark.slow
def test_a_report_goes_into_mlflow_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    assert cli.main(["report", "first", "--no-spectra", "--mlflow"]) == 2
    assert "MLflow" in capsys.readouterr().err
    (run / "tracking.json").write_text(json.dumps({"tracking_uri": "u", "experiment_id": "1", "run_id": "r", "worker_runs": {}}))
    sent: list[tuple[str, ...]] = []
    client = SimpleNamespace(log_artifact=lambda *words: sent.append(words), log_artifacts=lambda *words: sent.append(words))
    monkeypatch.setattr(store, "open_client", lambda uri: client)
    assert cli.main(["report", "first", "--no-spectra", "--mlflow"]) == 0
    assert sent == [("r", str(run / "report.html")), ("r", str(run / "report"), "report")]


def test_a_report_of_a_run_without_an_outer_iteration_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                  capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    (run / "events.jsonl").unlink()
    assert cli.main(["report", "first"]) == 2
    assert "iteration" in capsys.readouterr().err
    assert cli.main(["compare", "first"]) == 2


def test_the_timeline_has_a_bar_for_each_job_and_a_cross_for_each_fault(tmp_path: Path) -> None:
    events = read_json_lines(make_run(tmp_path, "first") / "events.jsonl")
    [timeline] = [chart for chart in charts_of(events, {}) if chart.name == "timeline"]
    [axes] = timeline.figure.axes
    boxes = [bar.get_paths()[0].get_extents() for bar in axes.collections]
    assert len(boxes) == 20
    assert boxes[0].x0 == pytest.approx(0.5) and boxes[0].x1 == pytest.approx(2.5)   # 2 s, ended at 3 - 0.5
    assert sorted({round((box.y0 + box.y1) / 2) for box in boxes}) == [0, 1]
    crosses = [line for line in axes.lines if line.get_marker() == "X"]
    assert [(line.get_xdata()[0], line.get_ydata()[0]) for line in crosses] == [(13.5, 1)]


def test_old_logs_without_times_of_jobs_have_no_timeline(tmp_path: Path) -> None:
    events = read_json_lines(make_run(tmp_path, "first") / "events.jsonl")
    for event in events:
        for one in event.get("jobs", []):
            del one["ended_s"]
    assert "timeline" not in [chart.name for chart in charts_of(events, {})]


def test_spectra_of_a_run_whose_examples_are_gone_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path, "first")
    with pytest.raises(NgsgdError):
        fisher_spectra(RunFolder(run), read_config(run / "config.yaml"))


@pytest.mark.slow
def test_a_page_without_spectra_states_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path, "first")
    said: list[str] = []
    write(RunFolder(run), tmp_path / "page.html", said.append)
    assert len(said) == 1 and said[0].startswith("without Fisher spectra: ")


@pytest.mark.slow
def test_runs_are_compared_at_an_objf_that_all_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path, "slow")
    make_run(tmp_path, "fast", "optimizer=sgd", speed=2.0, wer=4.0)
    assert cli.main(["compare", "slow", "fast", "--json", "--png", "c.png"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["common_objf"] == pytest.approx(-1.0)
    assert [run["seconds_to_common_objf"] for run in found["runs"]] == pytest.approx([30.0, 15.0])
    assert [run["wer_percent"] for run in found["runs"]] == [3.1, 4.0]
    text = (tmp_path / "compare.html").read_text()
    assert Page(text).loaded == [] and "optimizer.kind" in text and "<td>name</td>" not in text
    assert (tmp_path / "c.png").stat().st_size > 1000
    assert cli.main(["compare", "slow", "fast"]) == 0
    assert re.search(r"^slow-20260101-000000 +2 +ngsgd ", capsys.readouterr().out, re.MULTILINE)


def test_time_to_an_objf_lies_on_the_line_between_two_outer_iterations(tmp_path: Path) -> None:
    run = compare.read(RunFolder(make_run(tmp_path, "first")))
    assert run.seconds_to(-2.0) == pytest.approx(3.0)
    assert run.seconds_to(-2.0 + 0.5 / 9) == pytest.approx(4.5)
    assert np.isnan(run.seconds_to(0.0))


@pytest.mark.slow
def test_runs_are_named_by_their_distinguishing_settings(tmp_path: Path) -> None:
    runs = [compare.read(RunFolder(make_run(tmp_path, name, *settings)))
            for name, settings in (("a", ["seed=1"]), ("b", ["seed=2"]), ("c", ["seed=2", "optimizer.alpha=2"]))]
    assert compare.name_of(runs[0], runs[:2]) == "seed 1"
    assert compare.name_of(runs[1], runs) == "b-20260101-000000", "two runs have seed 2"
    assert compare.differences(runs) == {"seed": [1, 2, 2], "optimizer.alpha": [4.0, 4.0, 2.0]}


@pytest.mark.slow
def test_a_page_elsewhere_leaves_the_run_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a run on a read-only disk."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    before = sorted(run.rglob("*"))
    assert cli.main(["report", "first", "--no-spectra", "-o", str(tmp_path / "page.html")]) == 0
    assert sorted(run.rglob("*")) == before
    assert list((tmp_path / "page").glob("*.png"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[]", "{", "[" * 5000, '{"test_interval_95": 3, "valid": 1}'])
def test_damaged_results_do_not_end_a_report_or_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    for name in ("decode/wer.json", "data.json", "measured.json", "process.json"):
        (run / name).write_text(text)
    for words in (["report", "first"], ["compare", "first"], ["info", "first"], ["status", "first"]):
        assert cli.main(words) == 0
