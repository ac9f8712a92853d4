"""The page about a run: complete, self-contained, right in its figures."""

from __future__ import annotations

import html
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ngsgd.asr.decode.scoring import NOTHING, UtteranceErrors, write_per_utterance
from ngsgd.launcher import cli
from ngsgd.launcher.commands.report import history_of, write
from ngsgd.launcher.mlflow import store
from ngsgd.launcher.reports import page, sections
from ngsgd.launcher.reports.figures import draw, run_figure
from ngsgd.launcher.reports.history import Curve, RunHistory
from ngsgd.pipeline.recipes import recipe
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import RunFolder
from ngsgd.schedules import JOB_RATE
from ngsgd.training.records import Incident
from ngsgd.training.storage.event_log import EventLog
from ngsgd.word_errors import WordErrors
from tests.launcher.records import TEST_ERRORS, VALID_ERRORS, Command, final_report, job, outer_iteration

HEALTH = {"affine1/input_effective_rank": 5.0, "affine1/input_last_e": 0.1, "affine1/limited": 0.7,
          "affine1/cosine": 0.5}


def make_run(root: Path, name: str, *, speed: float = 1.0, wer: float = 3.1, **settings: Any) -> Path:
    """A run of ten outer iterations whose objective rises from -2 to -1; `speed` of its clock."""
    run = root / "runs" / f"{name}-20260101-000000"
    run.mkdir(parents=True)
    config = replace(recipe("digits", **settings), name=name)
    (run / "config.yaml").write_text(config_file.to_yaml(config))
    log = EventLog(run / "events.jsonl")
    for number in range(10):
        ends = 3.0 * (number + 1) / speed
        jobs = tuple(replace(job(number=worker, worker=worker), ended_s=ends - 0.5,
                             attempt=1 + (number == 4 and worker == 1),
                             health={**HEALTH, "affine1/input_effective_rank": 5.0 + worker})
                     for worker in range(2))
        record = outer_iteration(number, num_outer_iters=10, jobs=jobs, valid_objf=-2.0 + number / 9)
        log.outer_iteration(replace(record, elapsed_s=ends))
        if number == 4:
            log.incident(Incident("worker_died", "worker 1 <died>.", 4, 1, 1, ends - 1.5))
    log.finished(replace(final_report(), test_errors=WordErrors(1000, 0, 0, round(10 * wer))))
    log.close("FINISHED")
    decode_files(run, wer)
    return run


def decode_files(run: Path, wer: float) -> None:
    """Results of two utterances with a deletion, a substitution and an insertion."""
    (run / "decode").mkdir()
    about: dict[str, Any] = {"valid": asdict(VALID_ERRORS), "test": asdict(TEST_ERRORS),
                             "test_interval_95": {"low": wer - 1, "high": wer + 1}}
    pairs = (("one", "one"), ("<two>", NOTHING), ("five", "nine"))
    rows = [UtteranceErrors("utt-1", pairs, WordErrors(3, 0, 1, 1)),
            UtteranceErrors("utt-2", (("one", "one"), (NOTHING, "oh")), WordErrors(1, 1, 0, 0))]
    write_per_utterance(run / "decode" / "test.per_utt.txt", rows[0].errors + rows[1].errors, rows)
    by_speaker = {name: asdict(row.errors) for name, row in zip(("anna", "bert"), rows, strict=True)}
    about |= {"test_by_speaker": by_speaker, "sweep_on_valid": []}
    (run / "decode" / "wer.json").write_text(json.dumps(about))


class Page(HTMLParser):
    """Everything that a browser would load and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.alts: list[str] = []
        self.open: list[str] = []
        self.cells: list[str] = []
        self.wrong: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag not in ("meta", "link", "br", "img"):
            self.open.append(tag)
        for name in ("src", "href", "xlink:href"):
            if not (found.get(name) or "data:").startswith(("data:", "#")):
                self.loaded.append(str(found[name]))
        if tag == "img":
            self.alts.append(str(found["alt"]))
        if tag == "td":
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.cells[-1] += data

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_a_report_is_one_file_without_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first", seed=7)
    assert command("report", "first", "--quiet").out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    assert JOB_RATE.lower() in html.unescape(text).lower()
    page = Page(text)
    assert page.loaded == [] and page.open == [] and "<script" not in text
    assert len(page.alts) == 1 and len(page.alts[0]) > 20
    assert {"seed", "3.10", "anna", "affine1"} <= set(page.cells)
    assert "schedule.num_epochs" not in page.cells, "it is the value of the recipe"
    assert "worker 1 &lt;died&gt;." in text, "messages of workers are no markup"


@pytest.mark.slow
def test_a_report_goes_into_mlflow_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                              command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    assert "MLflow" in command("report", "first", "--mlflow", code=2).err
    about = {"tracking_uri": "u", "experiment_id": "1", "run_id": "r"}
    (run / "tracking.json").write_text(json.dumps(about))
    sent: list[tuple[str, ...]] = []
    client = SimpleNamespace(log_artifact=lambda *words: sent.append(words))
    monkeypatch.setattr(store, "open_client", lambda uri: client)
    assert cli.main(["report", "first", "--mlflow"]) == 0
    assert sent == [("r", str(run / "report.html"))]


def test_a_report_of_a_run_without_an_event_is_refused(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    (make_run(tmp_path, "first") / "events.jsonl").unlink()
    assert "iteration" in command("report", "first", code=2).err
    assert cli.main(["compare", "first"]) == 2


def test_a_run_that_failed_before_its_first_outer_iteration_has_a_report(tmp_path: Path) -> None:
    run = make_run(tmp_path, "first")
    (run / "events.jsonl").write_text('{"event": "closed", "status": "FAILED"}\n')
    assert write(RunFolder(run), tmp_path / "page.html").startswith("failed: ")
    assert Page((tmp_path / "page.html").read_text()).alts == []


def history(tmp_path: Path) -> RunHistory:
    return history_of(RunFolder(make_run(tmp_path, "first")))


@pytest.mark.slow
def test_the_figure_has_all_scores_and_marks_where_training_was_resumed(tmp_path: Path) -> None:
    run = history(tmp_path)
    ledger = [{"event": "started", "after": after} for after in (-1, 6)]
    figure = run_figure(run.curve, replace(run, ledger=ledger).stops())
    *curves, time = figure.axes
    assert len(curves) == 4 and len(time.patches) == 4 * 10
    for axes in curves:
        # thousands of frames
        [resumed] = [line for line in axes.lines if line.get_linestyle() == ":"]
        assert list(resumed.get_xdata()) == [7 * 32.0] * 2
        assert all(len(line.get_xdata()) == 10 for line in axes.lines if line is not resumed)
    metrics = {"valid/a": 1.0, "train/a": 2.0, "valid/time": 3.0, "valid/lr": 4.0}
    events = [{**event, "diagnostics": metrics} for event in run.iterations]
    # the loss and three metrics, whose names are those of other panels
    assert len(run_figure(Curve(events, is_speech=False)).axes) == 4 + 3


def test_workers_and_layers_are_summed_up(tmp_path: Path) -> None:
    run = history(tmp_path)
    rows = sorted(run.workers(), key=lambda row: row.worker)
    counts = [(row.num_jobs, row.num_retried, row.num_failed) for row in rows]
    assert counts == [(10, 0, 0), (10, 1, 1)]
    assert rows[0].frames_per_s == pytest.approx(8000.0) and rows[0].busy_s == pytest.approx(20.0)
    [layer] = run.layers()
    assert layer.layer == "affine1" and layer.sides == {"input": (5.5, 0.1)}
    assert (layer.clipped, layer.cosine) == (0.7, 0.5)


def test_words_that_are_wrong_are_counted_and_aligned() -> None:
    rows = [UtteranceErrors("u1", (("a", "b"), ("c", NOTHING)), WordErrors(2, 0, 1, 1)),
            UtteranceErrors("u2", (("a", "b"), (NOTHING, "d"), ("e", "e")), WordErrors(2, 1, 0, 1))]
    text = "".join(sections.words(rows, {"x": WordErrors(2, 0, 0, 1)}))
    page = Page(text)
    # substitutions, deletions, insertions, words, speakers
    expected = ["a", "b", "2", "c", "1", "d", "1", "a", "2", "2", "100.0", "c", "1", "1", "100.0"]
    assert page.cells == [*expected, "x", "2", "1", "50.0"]
    assert text.count("class=wrong") == 4 and page.open == []
    right = [UtteranceErrors("u", (("a", "a"),), WordErrors(1, 0, 0, 0))]
    assert "class=wrong" not in "".join(sections.words(right, {}))


def test_a_speaker_of_a_few_words_does_not_head_the_list() -> None:
    speakers = {"few": WordErrors(5, 0, 0, 3), "many": WordErrors(100, 0, 0, 20)}
    rows = [UtteranceErrors("u", (("a", "b"),), WordErrors(1, 0, 0, 1))]
    cells = Page("".join(sections.words(rows, speakers))).cells
    assert cells.index("many") < cells.index("few")


def test_the_choice_of_scale_and_penalty_is_a_table_on_the_validation_set() -> None:
    sweep = [{"acoustic_scale": scale, "word_penalty": penalty,
              "errors": asdict(WordErrors(100, 0, 0, round(10 * scale + penalty)))}
             for scale, penalty in ((0.2, 0.0), (0.1, 0.0), (0.2, 4.0))]
    about = {"sweep_on_valid": sweep, "acoustic_scale": 0.1, "word_penalty": 0.0}
    text = "".join(sections.decoding_weights(about))
    assert Page(text).cells == ["0.1", "1.00", "", "0.2", "2.00", "6.00"]
    assert not [*sections.decoding_weights({**about, "sweep_on_valid": sweep[:1]})], "there was nothing to choose"


@pytest.mark.slow
def test_a_page_elsewhere_leaves_the_run_as_it_was(tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a run on a read-only disk."""
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    before = sorted(run.rglob("*"))
    assert cli.main(["report", "first", "-o", str(tmp_path / "page.html")]) == 0
    assert sorted(run.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[]", "{", "[" * 5000, '{"test_interval_95": 3, "valid": 1}'])
def test_damaged_results_do_not_end_a_report_or_a_comparison(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, "first")
    names = ("data.json", "process.json", "ledger.jsonl")
    decoded = ("wer.json", "test.per_utt.txt", "test.per_spk.txt")
    for name in (*names, *(f"decode/{one}" for one in decoded)):
        (run / name).write_text(text)
    for command in ("report", "compare", "info", "status"):
        assert cli.main([command, "first"]) == 0


@pytest.mark.slow
def test_draw_writes_a_picture_and_leaves_no_draft(tmp_path: Path) -> None:
    events = [{"event": "outer_iteration", **asdict(record), "max_change_share": 0.1, "max_param_change_share": 0.0}
              for record in map(outer_iteration, (*range(5), 2))]
    draw([*events, {"event": "finished"}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_without_outer_iterations_has_no_picture(tmp_path: Path) -> None:
    draw([{"event": "incident"}], tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []


# what terminals execute or hide: C0 but for tab and newline, DEL, C1, marks that reorder text
CONTROLS = [chr(code) for code in (*range(9), *range(0xb, 0x20), 0x7f, *range(0x80, 0xa0), 0x202e, 0x2066)]


@pytest.mark.entry("Lo4", "make a report of a run whose names contain control characters", "works",
                   "They are written as text, such as `\\x1b`; nothing is executed by `cat` or `less -R`.")
def test_a_page_has_no_control_characters() -> None:
    name = "\x1b]0;pwn\x07".join(["", *CONTROLS, "name"])
    body = [page.heading(name), page.note(name), page.verdict("green", name, name), page.table((name, "b"), [(name, name)]),
            page.bullets([name])]
    text = page.page(name, name, body, name)
    assert "name</h1>" in text and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "\\x1b" in text and text.count("\n") > 10
