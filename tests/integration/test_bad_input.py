"""Ten kinds of bad input and more: one message, the right exit code, no traceback, nothing
half-written.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ngsgd.launcher.cli import main

TINY = ["data.train_minutes=0.2", "data.valid_minutes=0.1", "data.test_minutes=0.1", "tracking.kind=none", "cluster=in_process"]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit code and the lines on stderr."""
    code = main(list(arguments))
    return code, capsys.readouterr().err.splitlines()


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(("setting", "code", "says"), [
    ("optimizer.max_chnage=1", 2, "optimizer.max_change"),
    ("schedule.num_epochs=many", 2, "schedule.num_epochs is 'many'"),
    ("optimizer.momentum=1.5", 2, "optimizer.momentum is 1.5"),
    ("model=transformer", 2, "relu"),
    ("+optimizer.extra=1", 2, "optimizer.extra"),
    ("schedule.lr_final=1.0", 2, "schedule.lr_final is 1.0"),
    ("data.source=/no/such/place", 3, "data.source is /no/such/place"),
])
def test_one_sentence_the_right_code_and_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, code: int,
                                                 says: str) -> None:
    extra = ["recipe=fsdd"] if "source" in setting else []
    found, lines = call(capsys, "train", *extra, *TINY, f"output_dir={tmp_path}", setting)
    assert found == code
    assert len(lines) == 1
    assert says.lower() in lines[0].lower()
    assert contents(tmp_path) == []


def test_all_mistakes_are_reported_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "train", f"output_dir={tmp_path}", "optimizer.max_chnage=1", "schedule.num_epochs=-1", "model=cnn")
    assert code == 2
    assert len(lines) == 3


def test_a_folder_without_speech(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    code, lines = call(capsys, "train", "recipe=fsdd", *TINY, f"output_dir={tmp_path}", f"data.source={tmp_path / 'empty'}")
    assert code == 3 and len(lines) == 1
    assert "wav" in lines[0]
    assert contents(tmp_path) == ["empty"]


def test_an_archive_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "recordings.tar.xz"
    archive.write_bytes(b"not an archive")
    code, lines = call(capsys, "train", "recipe=fsdd", *TINY, f"output_dir={tmp_path}/runs", f"data.source={archive}")
    assert code == 3 and len(lines) == 1
    assert "recordings.tar.xz" in lines[0]
    assert contents(tmp_path) == ["recordings.tar.xz", "runs"]  # the output directory, empty


def test_resuming_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "resume", str(tmp_path))
    assert code == 2 and len(lines) == 1
    assert "run folder" in lines[0]


def test_an_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "trian")
    assert code == 2
    assert "train" in " ".join(lines)


@pytest.mark.slow
def test_an_output_directory_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "train", *TINY, "output_dir=/proc/ngsgd-runs")
    assert code == 2 and len(lines) == 1
    assert "output_dir is /proc/ngsgd-runs" in lines[0]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a second or two."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", *TINY, f"output_dir={folder}", "model.hidden_dim=16", "model.num_layers=1", "schedule.num_epochs=0.5",
                 "egs.samples_per_iter=200", "name=tiny"]) == 0
    (run,) = folder.glob("tiny-*")
    return run


@pytest.mark.slow
def test_an_archive_of_examples_with_a_flipped_bit(tmp_path: Path, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_run.parent / "data", tmp_path / "data")
    (archive,) = (tmp_path / "data").glob("egs-*/egs.0000.safetensors")
    content = bytearray(archive.read_bytes())
    content[-1] ^= 1
    archive.write_bytes(content)
    code, lines = call(capsys, "train", *TINY, f"output_dir={tmp_path}", "model.hidden_dim=16", "model.num_layers=1",
                       "schedule.num_epochs=0.5", "egs.samples_per_iter=200")
    assert code == 3 and len(lines) == 1
    assert "egs.0000.safetensors is missing or does not match its checksum" in lines[0]


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped_and_the_run_continues(tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = sorted((tiny_run / "checkpoints").iterdir())[-1]
    (newest / "model.safetensors").write_bytes(b"")
    # as of a process that was killed before its end
    (tiny_run / "finished.json").unlink()
    assert main(["resume", str(tiny_run)]) == 0
    said = capsys.readouterr()
    assert f"{newest.name} is damaged" in said.out + said.err


@pytest.mark.slow
def test_a_damaged_configuration_of_a_run(tmp_path: Path, tiny_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    (run / "config.yaml").write_text("schedule: [")
    code, lines = call(capsys, "resume", str(run))
    assert code == 2 and len(lines) == 1
    assert "config.yaml" in lines[0]
