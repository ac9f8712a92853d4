"""The i-vectors of a run: whose extractor is taken, and what stands next to which frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.asr.ivectors import model as ivector_model
from ngsgd.asr.ivectors.model import read
from ngsgd.asr.ivectors.training import extract
from ngsgd.asr.lang.language import Language
from ngsgd.asr.speech_set import SpeechSet, assemble
from ngsgd.asr.utterance import FramedUtterance
from ngsgd.config import FeatureConfig, IvectorConfig, RunConfig
from ngsgd.errors import DataError
from ngsgd.pipeline.adaptation import extractor_of, with_ivectors
from ngsgd.runs import config_file
from ngsgd.runs.run_folder import RunFolder
from tests.reported import Reported, nothing, silent

CONFIG = RunConfig(ivectors=IvectorConfig(dim=2, num_gaussians=4))


@pytest.fixture(autouse=True)
def few_frames_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ivector_model, "POSTERIOR_SCALE", 1.0)


def speech(seed: int) -> SpeechSet:
    random = np.random.default_rng(seed)
    said = [FramedUtterance(f"{seed}-{number}", "ab"[number % 2], ("one",), random.normal(size=(length, 3)).astype(np.float32),
                            np.zeros(length, np.int32)) for number, length in enumerate([145, 130, 61, 10, 150, 1])]
    return assemble(said, FeatureConfig(cmvn="utterance"))


@pytest.fixture
def corpus() -> Corpus:
    return Corpus("toy", speech(0), speech(1), speech(2), Language(TOPOLOGY), "digest")


def test_every_frame_has_the_ivector_of_its_period(corpus: Corpus, tmp_path: Path) -> None:
    extractor = extractor_of(CONFIG, corpus, tmp_path, silent, None)
    found = with_ivectors(CONFIG, corpus, extractor, tmp_path)
    model = read(extractor, CONFIG.ivectors)
    for name, most in (("train", 2), ("valid", 0), ("test", 0)):
        side, lengths = getattr(found, name).frames.side, np.diff(getattr(corpus, name).frames.offsets)
        rows_U = extract(getattr(corpus, name), model, most_utterances=most)
        expected = [rows[np.arange(length) // 10] for rows, length in zip(rows_U, lengths, strict=True)]
        np.testing.assert_array_equal(side.rows_RS[side.row_T], np.concatenate(expected))
    assert found.digest != corpus.digest
    again = with_ivectors(CONFIG, corpus, extractor, tmp_path)
    assert again.digest == found.digest


def test_the_extractor_is_the_runs_own_or_the_starting_runs_or_that_in_the_cache(corpus: Corpus, tmp_path: Path) -> None:
    cached = extractor_of(CONFIG, corpus, tmp_path, silent, None)
    assert cached.parent == tmp_path and extractor_of(CONFIG, corpus, tmp_path, pytest.fail, None) == cached
    start = tmp_path / "start"
    (start / "final").mkdir(parents=True)
    (start / "final" / "model.json").write_text("{}")
    (start / "final" / "ivectors.safetensors").write_bytes(cached.read_bytes())
    from_start = RunConfig(ivectors=CONFIG.ivectors, init_model=str(start))
    assert extractor_of(from_start, corpus, tmp_path, pytest.fail, None) == start / "final" / "ivectors.safetensors"
    folder = RunFolder.create(RunConfig(output_dir=str(tmp_path)), config_file.to_yaml(CONFIG))
    assert extractor_of(CONFIG, corpus, tmp_path, pytest.fail, folder) == cached
    folder.remember_data("digest", tmp_path / "egs", cached)
    assert extractor_of(from_start, corpus, tmp_path, pytest.fail, folder) == folder.path / "ivectors.safetensors"
    assert (folder.path / "ivectors.safetensors").read_bytes() == cached.read_bytes()


def flip_a_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 64
    path.write_bytes(bytes(content))


@pytest.mark.parametrize(("name", "is_lost"), [("train.npy", False), ("test.npy", False),
                                               ("index.json", False), ("index.json", True)])
def test_damaged_ivectors_are_extracted_again_with_one_line(corpus: Corpus, tmp_path: Path, name: str,
                                                            is_lost: bool) -> None:
    extractor = extractor_of(CONFIG, corpus, tmp_path, silent, None)
    with_ivectors(CONFIG, corpus, extractor, tmp_path, nothing)
    with_ivectors(CONFIG, corpus, extractor, tmp_path, nothing)
    (path,) = tmp_path.glob(f"ivectors-*/{name}")
    before = path.read_bytes()
    if is_lost:
        path.unlink()
    else:
        flip_a_bit(path, -6)
    reports = Reported()
    with_ivectors(CONFIG, corpus, extractor, tmp_path, reports.append)
    assert len(reports) == 1 and "damaged" in reports[0]
    assert path.read_bytes() == before


def test_a_damaged_extractor_in_the_cache_is_trained_again_with_one_line(corpus: Corpus, tmp_path: Path) -> None:
    path = extractor_of(CONFIG, corpus, tmp_path, silent, None)
    before = path.read_bytes()
    flip_a_bit(path, -3)
    with pytest.raises(DataError, match="digest"):
        read(path, CONFIG.ivectors)
    reports = Reported()
    assert extractor_of(CONFIG, corpus, tmp_path, reports.append, None) == path
    assert "damaged" in reports[0]
    assert path.read_bytes() == before
