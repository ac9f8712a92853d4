"""The files that a run reads back when it is resumed."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from ngsgd.cluster.fingerprint import Fingerprint, FingerprintFile
from ngsgd.config import OptimizerConfig, OuterConfig, RunConfig
from ngsgd.errors import CheckpointError, DataError, RunLockedError
from ngsgd.files import DIGEST, keep_digest, matches_digest
from ngsgd.launcher.console import run_guarded
from ngsgd.runs import config_file
from ngsgd.runs.config_file import read_config
from ngsgd.runs.failure_record import write_record
from ngsgd.runs.run_folder import RunFolder, require_unchanged, run_name


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = RunConfig(output_dir=str(tmp_path / "deep" / "runs"), name="one")
    return RunFolder.create(config, config_file.to_yaml(config))


def test_an_unchanged_configuration_comes_back(folder: RunFolder) -> None:
    assert not require_unchanged(folder.config)
    assert read_config(folder.config).name == "one"


@pytest.mark.parametrize(("config", "name"), [
    (RunConfig(), "digits-relu-ngsgd-j2-s0"),
    (RunConfig(optimizer=OptimizerConfig("kfac")), "digits-relu-kfac-j2-s0"),
    (RunConfig(outer=OuterConfig("average")), "digits-relu-ngsgd-average-j2-s0"),
    (RunConfig(name="mine", outer=OuterConfig("average")), "mine")])
def test_the_name_of_a_run_has_the_optimizer_and_an_outer_rule_that_is_not_the_default(config: RunConfig, name: str) -> None:
    assert run_name(config) == name


@pytest.mark.parametrize(("old", "new"), [("seed: 0", "seed: 1"), ("name: one", "name: one "), ("0: ", "0: 0")])
def test_a_changed_configuration_is_refused_until_it_is_accepted(folder: RunFolder, old: str, new: str) -> None:
    text = folder.config.read_text()
    folder.config.write_text(text.replace(old, new, 1) if old in text else text[:-3] + "abc")
    with pytest.raises(CheckpointError, match=r"accept.changed.config"):
        require_unchanged(folder.config)
    assert require_unchanged(folder.config, accept=True)
    assert not require_unchanged(folder.config)


@pytest.mark.parametrize("content", ["", "{", "5", "null", "[]", "{}", '{"digest": 3}',
                                     '{"digest": "x", "egs": "y", "sha256_of_index": "z"}', "[" * 50_000])
def test_a_damaged_note_of_the_data_is_one_typed_error(folder: RunFolder, content: str) -> None:
    folder.remember_data("d1", Path("egs"), None)
    folder.remember_data("d1", Path("egs"), None)
    with pytest.raises(CheckpointError, match="changed"):
        folder.remember_data("d2", Path("egs"), None)
    folder.data.write_text(content)
    with pytest.raises(CheckpointError, match=r"data\.json"):
        folder.remember_data("d1", Path("egs"), None)


@pytest.mark.entry("C2")
def test_a_file_of_a_run_without_its_checksum_is_damaged(folder: RunFolder) -> None:
    folder.remember_data("d1", Path("egs"), None)
    FingerprintFile(folder.fingerprint).append(Fingerprint(), 0)
    write_record(folder.error, {"exit_code": 4, "message": "m"})
    model = folder.path / "model.safetensors"
    model.write_bytes(b"model")
    keep_digest(model)
    assert folder.last_error() and FingerprintFile(folder.fingerprint).newest() and matches_digest(model)
    for path in (folder.data, folder.fingerprint, folder.error):
        content = json.loads(path.read_text())
        del content[DIGEST]
        path.write_text(json.dumps(content))
    model.with_suffix(".sha256").unlink()
    assert not folder.last_error() and not matches_digest(model)
    with pytest.raises(CheckpointError, match=r"data\.json"):
        folder.remember_data("d1", Path("egs"), None)
    with pytest.raises(CheckpointError, match=r"fingerprint\.json"):
        FingerprintFile(folder.fingerprint).newest()


def test_a_full_disk_is_an_error_with_the_folder_and_leaves_none_behind(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    config = RunConfig(output_dir=str(tmp_path / "runs"))
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(os, "fsync", full)

    def train() -> int:
        RunFolder.create(config, config_file.to_yaml(config))
        return 0
    assert run_guarded(train) == DataError.exit_code
    assert str(tmp_path / "runs") in capsys.readouterr().err
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_run_folder_is_locked_once_and_cleaned(folder: RunFolder) -> None:
    (folder.path / ".final.0123abcd.tmp").mkdir()
    folder.ledger.write_text('{"event": "started", "fence": 4}\n')
    with folder.locked("train", print) as lock:
        assert lock.fence == 5 and not (folder.path / ".final.0123abcd.tmp").exists()
        with pytest.raises(RunLockedError), folder.locked("resume", print):
            pass
    with folder.locked("resume", print) as lock:
        assert lock.fence == 6


def test_a_repeated_commit_of_an_earlier_process_does_not_lower_the_fencing_number(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    lines = [{"event": "started", "fence": 1}, {"event": "committed", "outer_iter": 0, "fence": 1},
             {"event": "started", "fence": 2}, {"event": "committed", "outer_iter": 0, "fence": 1}]
    folder.ledger.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with folder.locked("resume", print) as lock:
        assert lock.fence == 3


def test_files_needed_by_a_resume_are_synced_with_their_folder_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)
    monkeypatch.setattr(os, "fsync", noted)
    config = RunConfig(output_dir=str(tmp_path / "deep" / "runs"), name="one")
    folder = RunFolder.create(config, config_file.to_yaml(config))
    folder.remember_data("d1", Path("egs"), None)
    names = [Path(path).name for path in synced]
    assert any(name.startswith(".config.yaml.") for name in names) and any(name.startswith(".data.json.") for name in names)
    assert {str(tmp_path), str(tmp_path / "deep"), config.output_dir, str(folder.path)} <= set(synced)
