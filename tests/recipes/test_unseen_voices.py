"""The script that lets other synthesizers speak digits, with made-up voices."""

from __future__ import annotations

import importlib.util
import wave
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ngsgd.asr.corpora import data_dir

pytest.importorskip("soxr")
pytest.importorskip("kaldi_native_fbank")

SCRIPT = Path(__file__).parents[2] / "recipes" / "digits" / "local" / "unseen_voices.py"
FULL_SCALE = 32767


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unseen_voices", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def speak(_text: str, path: Path) -> None:
        """A square wave at full scale, which exceeds it after resampling."""
        with wave.open(str(path), "wb") as wav:
            wav.setparams((1, 2, 16000, 0, "NONE", ""))
            wav.writeframes(np.tile(np.repeat([FULL_SCALE, -FULL_SCALE], 80), 20).astype("<i2").tobytes())

    vars(module).update(VOICES={"f-one": speak, "m-two": speak, "m-three": speak}, PHONEMES={})
    return module


def test_a_training_directory_has_all_voices_but_those_left_out(script: ModuleType, tmp_path: Path) -> None:
    script.write_training_set(tmp_path / "train", 2, ["m-two"])
    read = data_dir.read(tmp_path / "train", given_features=False)
    assert sorted(one.speaker for one in read) == ["f-one", "f-one", "m-three", "m-three"]
    assert all(set(one.words) <= set(script.DIGITS) for one in read)


def test_training_and_test_strings_differ(script: ModuleType, tmp_path: Path) -> None:
    script.write_training_set(tmp_path / "train", script.STRINGS_PER_VOICE, [])
    script.write_test_sets(tmp_path / "test")
    train, test = (data_dir.read(tmp_path / name, given_features=False) for name in ("train", "test/clean"))
    assert len(train) == len(test)
    assert sum(a.words == b.words for a, b in zip(train, test, strict=True)) < 0.1 * len(test)


def test_loud_voices_are_scaled_down_to_16_bits(script: ModuleType, tmp_path: Path) -> None:
    script.write_training_set(tmp_path, 1, ["m-two", "m-three"])
    (path,) = (tmp_path / "wav").iterdir()
    with wave.open(str(path)) as wav:
        samples = np.frombuffer(wav.readframes(wav.getnframes()), "<i2").astype(float)
    # a wrapped sample is next to one of the opposite sign inside a half period of 40 samples
    starts = np.flatnonzero(np.diff(np.sign(samples[np.abs(samples) > 0.5 * FULL_SCALE])))
    assert (np.diff(starts) > 20).all()
