"""Passwords stay out of every file and line, and what a terminal obeys is shown as text."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd import masking
from ngsgd.errors import ConfigError
from ngsgd.launcher import cli, console
from ngsgd.launcher.commands import train as service
from ngsgd.launcher.config import compose
from ngsgd.launcher.mlflow import store
from ngsgd.launcher.mlflow.store import with_login
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.launcher.reports.progress import ProgressTracker
from ngsgd.masking import is_masked, masked, printable
from ngsgd.pipeline.run import Run
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import with_digest
from ngsgd.training.records import Incident
from ngsgd.training.storage.event_log import EventLog
from tests.launcher.mlflow.test_mlflow_tracker import Client
from tests.launcher.records import Command, final_report, outer_iteration

SECRET = "hunter2-S3cret"
URI = f"http://anna:{SECRET}@127.0.0.1:9"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("text", [
    URI, f"could not reach {URI}/api, is it up", f"http://{SECRET}@host", f"postgresql+psycopg://u:{SECRET}@h:5432/db?sslmode=on",
    f"http://u:{SECRET}/with/slash@h", f"http://u:{SECRET}@more@h", f"https://h/?token={SECRET}", f"https://h/?x=1&api_key={SECRET}&y=2",
    f"https://h/blob?sv=1&sig={SECRET}", f"s3://b/k?X-Amz-Signature={SECRET}", f"Authorization: Bearer {SECRET}",
    f"authorization: Basic {SECRET}==", f"connection to db failed: password={SECRET} host=h", f'"http://a:{SECRET}@h"'])
def test_masked_values(text: str) -> None:
    assert SECRET not in masked(text)
    assert masked(masked(text)) == masked(text)


@pytest.mark.parametrize("text", [
    "http://127.0.0.1:5000/#/experiments/1", "sqlite:////home/a@b/mlflow.db", "http://host:5000/path@2", "iter 1: objf -1.2",
    "give --token-file FILE", "the cluster refuses this token, or none was given", "user@host:/path", "https://h/?page=2"])
def test_unchanged_models(text: str) -> None:
    assert masked(text) == text


@pytest.mark.entry("At5", "a worker prints a line of 1 MB and dies", "works",
                   "its last words are cut at 4 kB, and passwords are masked in linear time")
@pytest.mark.parametrize("part", [
    "a", "ab", "@", "?", "://", "?key", "?keykey", "://u:p", "a://", "a://b:1", ";a", "token=", "Bearer ", "password", "a.", "x@://u:p"])
@pytest.mark.parametrize("end", ["", "@", "://", "="])
def test_a_long_word_of_a_worker_is_masked_in_linear_time(part: str, end: str) -> None:
    """A quadratic pattern would need hours and end by the guard against hanging."""
    text = part * (1_000_000 // len(part)) + end
    assert masked(masked(text)) == masked(text)
    assert SECRET not in masked(f"{text} http://u:{SECRET}@h")


def make_run(root: Path, config: Any) -> Path:
    run = root / "runs" / "first-20260101-000000"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(with_digest(config_file.to_yaml(config)))
    log = EventLog(run / "events.jsonl")
    for number in range(2):
        log.outer_iteration(outer_iteration(number, num_outer_iters=2))
    log.finished(final_report())
    log.close("FINISHED")
    return run


@pytest.mark.slow
def test_no_file_and_no_line_of_a_run_has_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose.compose([f"tracking.uri={URI}", "name=first", f"output_dir={tmp_path}/runs"])
    run = make_run(tmp_path, config)
    client, opened = Client(), list[str]()

    def make_client(uri: str) -> Client:
        opened.append(uri)
        if len(opened) == 1:
            raise OSError(f"no answer from {uri}, nor from {SECRET}@127.0.0.1")
        return client

    tracker = MlflowTracker(config, run, ProgressTracker().warn, make_client=make_client)
    tracker.outer_iteration(outer_iteration())
    tracker.finished(final_report())
    tracker.close("FINISHED")
    assert opened[-1] == URI  # the run itself still logs in
    assert [run["status"] for run in client.runs.values()] == ["FINISHED"]
    assert is_masked(client.params["tracking.uri"])
    for words in (["report", "first"], ["compare", "first"], ["status"], ["status", "first", "--json"],
                  ["info", "first"], ["logs", "first"], ["train", "--debug", f"tracking.uri={URI}", f"nothing={URI}"],
                  ["doctor", "--tracking-uri", URI, "--output-dir", str(tmp_path)]):
        cli.main(words)
    said = capsys.readouterr()
    assert "no answer" in said.out
    assert SECRET not in said.out + said.err + json.dumps([client.params, client.runs, client.artifacts])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "tracking.json", "report.html", "compare.html"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_known_password_is_masked_in_lines_and_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "speech")
    assert "speech" not in masked("nonnumeric port: 'speech@host'")
    assert "/data/speech" in config_file.to_yaml(compose.compose(["data.cache_dir=/data/speech"]))


@pytest.mark.slow
def test_a_sweep_leaves_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "train", lambda *_, **__: final_report())
    assert cli.main(["train", "-m", "seed=0,1", f"tracking.uri={URI}", f"output_dir={tmp_path}"]) == 0
    (file,) = tmp_path.glob("sweeps/*/multirun.yaml")
    assert SECRET not in file.read_text() and "127.0.0.1" in file.read_text()


def test_a_masked_address_takes_its_login_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = masked(URI)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_USERNAME"):
        with_login(stored)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "p@ss/word")
    assert with_login(stored) == "http://127.0.0.1:9"  # MLflow reads the environment itself
    assert with_login("postgresql://***@h/db") == "postgresql://anna:p%40ss%2Fword@h/db"
    assert with_login("http://h:5000") == "http://h:5000"
    with pytest.raises(ConfigError):
        with_login("https://h/?token=***")


def test_resume_reports_a_missing_login_at_once_and_continue_accepts_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    ran: list[Any] = []
    monkeypatch.setattr(Run, "train", lambda run: ran.append(run.config))
    words = [f"tracking.uri={URI}", "name=first", "output_dir=runs"]
    make_run(tmp_path, compose.compose(words))
    assert "MLFLOW_TRACKING_PASSWORD" in command("resume", "first", code=2).err and not ran
    assert cli.main(["train", "--continue", *words]) == 0
    assert ran[0].tracking.uri == URI
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "anna")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRET)
    assert cli.main(["resume", "first"]) == 0
    assert store.tracking_uri(ran[1]) == "http://127.0.0.1:9"


@pytest.mark.slow
def test_the_same_store_is_recognized_however_one_logs_in(tmp_path: Path) -> None:
    config = compose.compose([f"tracking.uri={URI}", f"output_dir={tmp_path}/runs"])
    run, client = make_run(tmp_path, config), Client()
    for uri in (URI, "http://127.0.0.1:9", "http://otto:another-one@127.0.0.1:9"):
        again = replace(config, tracking=replace(config.tracking, uri=uri))
        MlflowTracker(again, run, print, make_client=lambda _: client).close("FINISHED")
        assert [run["status"] for run in client.runs.values()] == ["FINISHED"]


# Terminals ----------------------------------------------------------------------------------------

HOSTILE = "\x1b]0;title\x07 \x1b[2J \x9b31m \r over \x7f \u202e rtl \u2066 \x00 \x08 \ud83d"


def is_harmless(text: str) -> bool:
    return all(letter in "\n\t" or (letter.isprintable() and not 0xd800 <= ord(letter) < 0xe000) for letter in text)


def test_printable_keeps_text_lines_and_tabs() -> None:
    assert is_harmless(printable(HOSTILE))
    assert printable("\x1b[36mcolored\x1b[0m\tgrün\n中文 ok") == "colored\tgrün\n中文 ok"


@pytest.mark.parametrize("words", [["status"], ["status", "first"], ["info", "first"], ["logs", "first"], ["stop", "first"],
                                   ["compare", "first"]], ids=" ".join)
def test_no_escape_in_a_run_reaches_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str],
                                                 command: Command) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path, compose.compose(["name=first"]))
    log = EventLog(run / "events.jsonl")
    log.incident(Incident("worker_died", f"worker 1: {HOSTILE}", 1))
    log.finished(replace(final_report(), files={HOSTILE: HOSTILE}))
    (run / "data.json").write_text(json.dumps({"egs": HOSTILE}))
    said = command(*words)
    assert is_harmless(said.out) and is_harmless(said.err)
    # half characters cannot be printed; an error for that reason would hide everything else
    assert "UnicodeEncodeError" not in said.err


def test_no_escape_in_an_error_reaches_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ConfigError(f"{HOSTILE} is wrong.")

    def fall() -> int:
        raise TypeError(HOSTILE)

    console.run_guarded(fail)
    console.run_guarded(fall)
    console.run_guarded(fall, debug=True)
    said = capsys.readouterr()
    assert said.err and is_harmless(said.err)
