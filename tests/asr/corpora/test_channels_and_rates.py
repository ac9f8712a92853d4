"""Channels, sampling rates and transforms that tables and manifests give are applied or refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from ngsgd.asr import recording
from ngsgd.asr.corpora import data_dir, manifests
from ngsgd.asr.corpora.data_dir import of_json, to_json
from ngsgd.asr.features import augment
from ngsgd.config import FeatureConfig
from ngsgd.errors import ConfigError, DataError
from ngsgd.pipeline.recipes import recipe
from tests.asr.audio_forms import FORMS, RATE_HZ, noise

LEFT, RIGHT = noise(8000, seed=1), noise(8000, seed=2)
CONFIG = FeatureConfig(sample_rate_hz=RATE_HZ)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data directory of a stereo and a mono recording."""
    soundfile.write(tmp_path / "stereo.wav", np.stack([LEFT, RIGHT], 1), RATE_HZ)
    soundfile.write(tmp_path / "mono.wav", LEFT, RATE_HZ)
    (tmp_path / "wav.scp").write_text("s stereo.wav\nm mono.wav\n")
    return tmp_path


def read(folder: Path, lines: dict[str, str], config: FeatureConfig = CONFIG) -> dict[str, np.ndarray]:
    """Samples of the utterances: lines of segments, or none for complete recordings."""
    names = lines or {"s": "", "m": ""}
    (folder / "text").write_text("".join(f"{name} A\n" for name in names))
    (folder / "utt2spk").write_text("".join(f"{name} spk\n" for name in names))
    if lines:
        (folder / "segments").write_text("".join(f"{name} {line}\n" for name, line in lines.items()))
    listed = [of_json(json.loads(json.dumps(to_json(one)))) for one in data_dir.read(folder, given_features=False)]
    return {one.utt_id: one.samples for one in data_dir.spoken(listed, config)}


def test_the_fifth_column_of_segments_is_the_channel(folder: Path) -> None:
    found = read(folder, {"a": "s 0 0.5 0", "b": "s 0.25 0.5 1", "c": "m 0 0.5 0", "d": "m 0 0.5"})
    assert all(np.array_equal(found[name], LEFT[:4000]) for name in "acd")
    assert np.array_equal(found["b"], RIGHT[2000:4000])


@pytest.mark.parametrize("line", ["s 0 0.5", "s 0 0.5 2", "m 0 0.5 1", "s 0 0.5 -1", "s 0 0.5 A", "s 0 0.5 0 0"])
def test_a_channel_that_is_missing_or_does_not_exist_is_refused(folder: Path, line: str) -> None:
    with pytest.raises(DataError, match=r"segments:1.*channel"):
        read(folder, {"a": line})


@pytest.mark.parametrize(("side", "samples"), [("B", RIGHT), ("A", LEFT), ("1", LEFT), ("2", RIGHT)])
def test_reco2file_and_channel_names_the_channel_of_recordings_with_several(folder: Path, side: str, samples: np.ndarray) -> None:
    # the line of a mono recording is ignored, as in Kaldi
    (folder / "reco2file_and_channel").write_text(f"s s {side}\nm m B\n")
    found = read(folder, {})
    assert np.array_equal(found["s"], samples) and np.array_equal(found["m"], LEFT)
    assert np.array_equal(read(folder, {"a": "s 0 0.5"})["a"], samples[:4000])


@pytest.mark.parametrize("content", ["", "s\n", "s s X Y\n", "s s 0\n", "other other A\n"])
def test_other_lines_of_reco2file_and_channel_name_none(folder: Path, content: str) -> None:
    (folder / "reco2file_and_channel").write_text(content)
    with pytest.raises(DataError, match=r"wav\.scp:1.*reco2file_and_channel"):
        read(folder, {})


def write_manifests(folder: Path, recording: dict[str, Any], supervision: dict[str, Any]) -> None:
    found = {"id": "r", **stored([0, 1]), "sampling_rate": RATE_HZ, "num_samples": 8000,
             "duration": 1.0, **recording}
    said = {"id": "u", "recording_id": "r", "start": 0.25, "duration": 0.5, "channel": 1, "text": "A", "speaker": "s",
            **supervision}
    for name, item in (("recordings", found), ("supervisions", said)):
        (folder / f"{name}.jsonl").write_text(json.dumps(item) + "\n")


def of_lhotse(folder: Path) -> np.ndarray:
    listed = manifests.read_folder(folder)
    assert listed is not None
    [utterance] = data_dir.spoken(listed, CONFIG)
    return np.asarray(utterance.samples)


def stored(channels: list[int], name: str = "stereo.wav", kind: str = "file") -> dict[str, Any]:
    return {"sources": [{"type": kind, "channels": channels, "source": name}]}


MONO = stored([0], "mono.wav")


@pytest.mark.parametrize(("recording", "supervision", "samples"), [
    ({}, {"channel": 1}, RIGHT), ({}, {"channel": [0]}, LEFT), (MONO, {"channel": 0}, LEFT), ({"transforms": []}, {}, RIGHT),
    ({"transforms": None}, {}, RIGHT), (stored([3, 1]), {"channel": 3}, LEFT)])
def test_a_supervision_names_its_channel(folder: Path, recording: Any, supervision: Any, samples: np.ndarray) -> None:
    write_manifests(folder, recording, supervision)
    assert np.array_equal(of_lhotse(folder), samples[2000:6000])


TRANSFORMS = [
    {"name": "Speed", "kwargs": {"factor": 0.9}}, {"name": "Resample", "kwargs": {"source_sampling_rate": 8000}},
    {"name": "ReverbWithImpulseResponse", "kwargs": {}}, {"name": "Volume", "kwargs": {"factor": 2.0}},
    {"name": "Tempo", "kwargs": {}}, {"name": "Narrowband", "kwargs": {}}, "Speed"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_lhotse_are_refused_by_name(folder: Path, transform: Any) -> None:
    write_manifests(folder, {"transforms": [transform]}, {})
    name = transform["name"] if isinstance(transform, dict) else transform
    with pytest.raises(DataError, match=rf"recordings\.jsonl:1.*{name}"):
        of_lhotse(folder)


@pytest.mark.parametrize(("recording", "supervision"), [
    (MONO, {"channel": 1}), ({}, {"channel": [0, 1]}), ({}, {"channel": []}), ({}, {"channel": "1"}), ({}, {"channel": True}),
    ({}, {"channel": 2}), ({"sampling_rate": 16000}, {}), ({"sampling_rate": "8000"}, {}),
    (stored([0]), {"channel": 0}), (stored([0, 1], "mono.wav"), {}), (stored([]), {"channel": 0}),
    (stored([0, 0]), {"channel": 0}), (stored([0], "cat stereo.wav", "command"), {"channel": 0})])
def test_channels_and_rates_that_do_not_fit_are_refused_with_the_line(folder: Path, recording: Any, supervision: Any) -> None:
    write_manifests(folder, recording, supervision)
    with pytest.raises(DataError, match=r"s\.jsonl:1"):
        of_lhotse(folder)


def test_another_rate_is_resampled_as_in_transcribe_or_refused(folder: Path) -> None:
    (folder / "reco2file_and_channel").write_text("s s A\n")
    with pytest.raises(DataError, match=r"wav\.scp:1.*features\.resample=true"):
        read(folder, {}, FeatureConfig(sample_rate_hz=16000))
    found = read(folder, {"a": "m 0 0.5", "b": "m 0.5 1"}, FeatureConfig(sample_rate_hz=16000, resample=True))
    resampler = recording.Resampler(RATE_HZ, 16000)
    expected = resampler.accept(LEFT[:4000].astype(np.float32), is_last=True)
    assert found["a"].dtype == np.float32 and len(found["a"]) == len(found["b"]) == 8000
    assert np.array_equal(found["a"], expected)
    same = FeatureConfig(sample_rate_hz=RATE_HZ, resample=True)
    assert np.array_equal(read(folder, {"a": "m 0 0.5"}, same)["a"], LEFT[:4000])


@pytest.mark.parametrize(("name", "settings"), [("digits", {}), ("yesno", {"source": "x"}), ("kaldi", {"source": "x"})])
def test_resample_without_an_effect_is_an_error(name: str, settings: dict[str, Any]) -> None:
    features: dict[str, Any] = {"resample": True} | ({"kind": "given"} if name == "kaldi" else {})
    with pytest.raises(ConfigError, match=r"features\.resample"):
        recipe(name, data=settings, features=features)
    assert recipe("kaldi", data={"source": "x"}, features={"resample": True}).features.resample
    assert recipe("digits", data={"added_dirs": ["x"]}, features={"resample": True}).features.resample


@pytest.mark.parametrize("form", ["wav", "extensible", "float", "flac"])
def test_noises_and_other_corpora_use_the_same_reader(tmp_path: Path, form: str) -> None:
    content = FORMS[form]()
    path = tmp_path / "noise.wav"
    path.write_bytes(content)
    expected = soundfile.read(io.BytesIO(content))[0] * 32768
    assert np.array_equal(augment.read_wav(path, RATE_HZ), expected)
    path.write_bytes(content[:-1000])
    with pytest.raises(DataError, match=r"noise\.wav"):
        augment.read_wav(path, RATE_HZ)
