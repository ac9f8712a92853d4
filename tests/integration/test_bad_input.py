"""Damaged runs on the command line: one message and the right exit code."""

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


def test_resuming_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = call(capsys, "resume", str(tmp_path))
    assert code == 2 and len(lines) == 1
    assert "run folder" in lines[0]


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a second or two."""
    folder = tmp_path_factory.mktemp("runs")
    assert main(["train", *TINY, f"output_dir={folder}", "model.hidden_dim=16", "model.num_layers=1", "schedule.num_epochs=0.5",
                 "egs.samples_per_iter=200", "name=tiny"]) == 0
    (run,) = folder.glob("tiny-*")
    return run


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
