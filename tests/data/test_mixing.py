"""Statistics that distinguish well-mixed and badly mixed archives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.config import EgsConfig
from ngsgd.data import archives
from ngsgd.data.archives import prepare_archives
from ngsgd.data.examples import ExampleSource, begins
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader
from ngsgd.data.shuffle_quality import divergences, mixing
from ngsgd.launcher.cli import main
from tests.toy import NUM_CLASSES, frame_set

CONFIG = EgsConfig(left_context=1, right_context=1, frames_per_eg=4, samples_per_iter=400, num_diagnostic_frames=50)


def prepare(folder: Path, num_frames: int = 20_000) -> EgsReader:
    train = frame_set(num_frames, 1)
    # one after the other
    speakers = [f"s{utterance * 8 // len(train.utt_ids)}" for utterance in range(len(train.utt_ids))]
    return EgsReader(prepare_archives(train, frame_set(300, 2), CONFIG, num_classes=NUM_CLASSES, digest="toy", cache_root=folder,
                                      groups=speakers))


def in_order(frames: FrameSet, random: np.random.Generator, **numbers: Any) -> ExampleSource:
    """What an archive would hold if nobody shuffled."""
    begin_U = begins(frames.offsets, numbers["frames_per_eg"])
    return ExampleSource(frames.features_TD, frames.pdf_T, frames.weight_T, frames.offsets, np.arange(begin_U[-1]), begin_U,
                         **numbers)


def test_the_divergence_of_random_orders_is_about_1() -> None:
    """4000 random divisions of 3000 samples into 5 archives, seed 0."""
    random = np.random.default_rng(0)
    values = random.choice(7, 3000, p=[0.4, 0.3, 0.1, 0.1, 0.05, 0.03, 0.02])
    found = []
    for _ in range(4000):
        parts = np.array_split(random.permutation(values), 5)
        found.append(divergences(np.stack([np.bincount(part, minlength=7) for part in parts]).astype(float)))
    divergence = np.array(found)[:, 0]
    assert divergence.mean() == pytest.approx(1.0, abs=0.05)
    assert divergence.std() == pytest.approx((2 / 6) ** 0.5, rel=0.1)


def test_archives_in_the_order_of_the_corpus_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "shuffled", in_order)
    classes, groups = mixing(prepare(tmp_path))
    assert not groups.is_well_mixed
    assert groups.divergence > 50.0
    assert classes.is_well_mixed  # drawn at random along the toy corpus


def test_archives_as_they_are_written_are_well_mixed_and_info_prints_it(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = prepare(tmp_path)
    classes, groups = mixing(reader)
    assert (classes.what, groups.what) == ("classes", "groups")
    assert (classes.num_values, groups.num_values) == (NUM_CLASSES, 8)
    assert classes.is_well_mixed and groups.is_well_mixed
    assert main(["info", str(reader.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("examples")) :]
    assert lines[1].startswith(f"archives   {reader.info.num_archives}, of ")
    assert lines[3].startswith("classes    divergence ") and lines[3].endswith(": well mixed")
    assert lines[4].startswith("groups     divergence ") and lines[4].endswith(": well mixed")
    (reader.directory / "egs.0000.safetensors").unlink()
    assert main(["info", str(reader.directory)]) == 3
    assert "egs.0000.safetensors is missing" in capsys.readouterr().err


def test_a_single_archive_has_nothing_to_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = prepare(tmp_path, 1000)
    assert mixing(reader) == []
    assert main(["info", str(reader.directory)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("mixing ")


def test_a_run_prints_the_location_of_its_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "data.json").write_text(json.dumps({"digest": "x", "egs": "/some/where/egs-1"}))
    assert main(["info", str(tmp_path)]) == 0
    assert "examples   /some/where/egs-1" in capsys.readouterr().out.splitlines()
