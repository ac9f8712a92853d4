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


def divergence(reader: EgsReader) -> float:
    """2 n KL(archive || corpus) / (K - 1) of K speakers, a mean: 1 for random samples."""
    groups = reader.groups()[1]
    names = sorted(set(groups))
    group_U = np.array([names.index(group) for group in groups])
    found = []
    for archive in range(reader.info.num_archives):
        count_G = np.bincount(group_U[reader.archive_arrays(archive)["utterance"]], minlength=len(names))
        share_G = count_G / count_G.sum()
        found.append(2 * count_G.sum() * np.sum(share_G * np.log(np.maximum(share_G * len(names), 1e-12))) / (len(names) - 1))
    return float(np.mean(found))


def test_archives_resemble_random_samples_of_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffled = prepare(tmp_path / "shuffled")
    # eight speakers with equally many frames; five standard deviations of the mean
    assert divergence(shuffled) < 1.0 + 5.0 * (2 / 7 / shuffled.info.num_archives) ** 0.5
    monkeypatch.setattr(archives, "shuffled", in_order)
    assert divergence(prepare(tmp_path / "in order")) > 50.0


def test_info_describes_archives_and_finds_a_missing_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = prepare(tmp_path)
    assert main(["info", str(reader.directory)]) == 0
    lines = capsys.readouterr().out.splitlines()
    lines = lines[next(at for at, line in enumerate(lines) if line.startswith("examples")) :]
    assert lines[1].startswith(f"archives   {reader.info.num_archives}, of ")
    altered = reader.directory / "egs.0001.safetensors"
    altered.write_bytes(altered.read_bytes()[:-1] + b"x")
    assert main(["info", str(reader.directory)]) == 3
    assert "egs.0001.safetensors" in capsys.readouterr().err
    (reader.directory / "egs.0000.safetensors").unlink()
    assert main(["info", str(reader.directory)]) == 3
    assert "egs.0000.safetensors" in capsys.readouterr().err


def test_a_run_prints_the_location_of_its_examples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "data.json").write_text(json.dumps({"digest": "x", "egs": "/some/where/egs-1"}))
    assert main(["info", str(tmp_path)]) == 0
    assert "examples   /some/where/egs-1" in capsys.readouterr().out.splitlines()
