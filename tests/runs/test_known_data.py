"""Data of a resumed run that are used without reading them again."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ngsgd.config import ClusterConfig, DataConfig, ObjectiveConfig, RunConfig
from ngsgd.runs import config_file
from ngsgd.runs.known_data import known_archives, preparation_key
from ngsgd.runs.run_folder import RunFolder
from tests import toy


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of a Kaldi data directory with 300 recordings elsewhere."""
    source, audio = tmp_path / "source", tmp_path / "audio"
    (source / "train").mkdir(parents=True)
    audio.mkdir()
    for number in range(300):
        (audio / f"{number}.wav").write_text("audio")
    (source / "train/text").write_text("a one\n")
    (source / "train/wav.scp").write_text("".join(f"rec{n} {audio / f'{n}.wav'}\n" for n in range(300)))
    (source / "lexicon.txt").write_text("one w ah n\n")
    return RunConfig(data=DataConfig(corpus="kaldi", source=str(source)), output_dir=str(tmp_path / "runs"), name="one")


@pytest.fixture
def folder(config: RunConfig, tmp_path: Path) -> RunFolder:
    """Of a run that has begun."""
    made = RunFolder.create(config, config_file.to_yaml(config))
    made.remember_data("digest", toy.Run(tmp_path).egs, None, key=preparation_key(config))
    return made


def test_a_begun_run_knows_its_archives(config: RunConfig, folder: RunFolder) -> None:
    archives = known_archives(config, folder)
    assert archives is not None and (archives / "info.json").exists()
    other_workers = dataclasses.replace(config, cluster=ClusterConfig(num_workers=7))
    assert known_archives(other_workers, folder) == archives


def _overwritten(path: Path) -> None:
    """The same size and the same modification time."""
    times = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _replaced(path: Path) -> None:
    """Another file with the same content and the same times."""
    shutil.copy2(path, path.with_name("new"))
    path.with_name("new").replace(path)


@pytest.mark.parametrize("change", [_overwritten, _replaced, Path.unlink])
@pytest.mark.parametrize("name", ["source/train/text", "source/train/wav.scp", "source/lexicon.txt", "audio/0.wav"])
def test_changed_sources_are_prepared_again(config: RunConfig, folder: RunFolder, tmp_path: Path, name: str,
                                            change: Callable[[Path], None]) -> None:
    change(tmp_path / name)
    assert known_archives(config, folder) is None


def test_audio_that_was_converted_as_a_whole_is_noticed(config: RunConfig, folder: RunFolder, tmp_path: Path) -> None:
    # some of the files are not in the sample
    for path in sorted((tmp_path / "audio").iterdir())[:150]:
        path.write_text("other audio")
    assert known_archives(config, folder) is None


def test_an_added_table_is_noticed(config: RunConfig, folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "source/train/segments").write_text("a rec0 0 1\n")
    assert known_archives(config, folder) is None


def test_another_machine_compares_the_data(config: RunConfig, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    archives = known_archives(config, folder)
    assert archives is not None
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert known_archives(config, folder) is None
    # and then remembers that they are equal
    folder.remember_data("digest", archives, None, key=preparation_key(config))
    assert known_archives(config, folder) == archives
    monkeypatch.undo()
    assert known_archives(config, folder) is None


def test_other_settings_and_sequences_prepare_other_data(config: RunConfig, folder: RunFolder) -> None:
    assert known_archives(config, folder) is not None
    fewer = dataclasses.replace(config, egs=dataclasses.replace(config.egs, samples_per_iter=1000))
    assert known_archives(fewer, folder) is None
    assert known_archives(dataclasses.replace(config, objective=ObjectiveConfig(kind="lfmmi")), folder) is None


@pytest.mark.parametrize("content", ["", "{", '{"digest": "d", "egs": "nowhere"}'])
def test_a_damaged_note_or_index_is_left_to_the_preparation(config: RunConfig, folder: RunFolder, content: str) -> None:
    archives = known_archives(config, folder)
    assert archives is not None
    (archives / "info.json").write_text(content)
    assert known_archives(config, folder) is None
    folder.data.write_text(content)
    assert known_archives(config, folder) is None
