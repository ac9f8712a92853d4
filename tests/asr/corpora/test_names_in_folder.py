"""Relative names of tables and manifests start in their folder, never in the working directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import kaldiio
import numpy as np
import pytest
import soundfile

from ngsgd.asr.corpora import data_dir, manifests
from ngsgd.asr.features.audio import Piece
from ngsgd.asr.kaldi_io import tables
from ngsgd.errors import DataError
from ngsgd.files import named_in

RATE_HZ = 8000
NAME = "sub/one"


def audio_of(listed: data_dir.UtteranceEntry) -> float:
    assert isinstance(listed.content, Piece)
    return float(soundfile.read(listed.content.path, dtype="int16")[0][0])


def of_wav_scp(folder: Path) -> float:
    (folder / "wav.scp").write_text(f"u {NAME}.wav\n")
    return audio_of(data_dir.read(folder, given_features=False)[0])


def of_segments(folder: Path) -> float:
    (folder / "wav.scp").write_text(f"r {NAME}.wav\n")
    (folder / "segments").write_text("u r 0 0.5\n")
    return audio_of(data_dir.read(folder, given_features=False)[0])


def of_feats_scp(folder: Path) -> float:
    (folder / "feats.scp").write_text(f"u {NAME}.ark:2\n")
    [utterance] = data_dir.given(data_dir.read(folder, given_features=True), folder)
    return float(utterance.features_TD[0, 0])


def of_cmvn_scp(folder: Path) -> float:
    (folder / "cmvn.scp").write_text(f"u {NAME}.ark:2\n")
    return float(tables.read_matrix(tables.Table(folder / "cmvn.scp")["u"], folder)[0, 0])


def of_lhotse(folder: Path) -> float:
    recording = {"id": "r", "sources": [{"type": "file", "channels": [0], "source": f"{NAME}.wav"}],
                 "sampling_rate": RATE_HZ, "num_samples": RATE_HZ, "duration": 1.0}
    supervision = {"id": "u", "recording_id": "r", "start": 0.0, "duration": 0.5, "channel": 0, "text": "A"}
    for kind, item in (("recordings", recording), ("supervisions", supervision)):
        (folder / f"{kind}.jsonl").write_text(json.dumps(item) + "\n")
    found = manifests.read_folder(folder)
    assert found is not None
    return audio_of(found[0])


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The data directory, and the working directory with files of the same names."""
    data, here = tmp_path / "data", tmp_path / "here"
    for number, folder in enumerate((data, here), start=1):
        (folder / "sub").mkdir(parents=True)
        soundfile.write(folder / f"{NAME}.wav", np.full(RATE_HZ, number, np.int16), RATE_HZ)
        kaldiio.save_ark(str(folder / f"{NAME}.ark"), {"u": np.full((2, 3), float(number))})
    for table, value in (("text", "A"), ("utt2spk", "s")):
        (data / table).write_text(f"u {value}\n")
    monkeypatch.chdir(here)
    return data, here


@pytest.mark.entry("Sp9", "the working directory has a file with the relative name that a table or a manifest of a data folder "
                   "gives", "works", "relative names start in the data folder, for `wav.scp`, `feats.scp`, `cmvn.scp` and lhotse "
                   "manifests; the working directory is never searched.")
@pytest.mark.parametrize("read", [of_wav_scp, of_segments, of_feats_scp, of_cmvn_scp, of_lhotse])
def test_a_relative_name_starts_in_the_data_folder_alone(
        folders: tuple[Path, Path], read: Callable[[Path], float]) -> None:
    data, _ = folders
    assert read(data) == 1.0
    for path in (data / "sub").iterdir():
        path.unlink()
    with pytest.raises((DataError, soundfile.LibsndfileError), match="sub/one"):
        read(data)


@pytest.mark.entry("Sp9")
def test_home_and_absolute_names_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "data"
    # there is no user none: a file name
    for name, path in {"a b.wav": folder / "a b.wav", "~none/a.wav": folder / "~none/a.wav",
                       "/x/a.wav": Path("/x/a.wav"), "~/a.wav": tmp_path / "a.wav"}.items():
        assert named_in(folder, name) == path
