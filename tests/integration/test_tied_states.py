"""Runs with tied states, adapted features and an estimated language model, from labels to words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ngsgd.asr.recognizer import Recognizer
from ngsgd.launcher.cli import main
from ngsgd.word_errors import WordErrors
from tests.asr.made_up_speech import write_data

for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldialign", "webrtcvad"):
    pytest.importorskip(module)

pytestmark = pytest.mark.end_to_end

QUICK = ["data.labels=one_step", "cluster=in_process", "cluster.num_workers=1", "cluster.threads_per_worker=1",
         "tracking.kind=none", "features.kind=mfcc", "features.num_mel_bins=23",
         "features.cmvn=speaker", "model.hidden_dim=32", "model.num_layers=1",
         "egs.samples_per_iter=2000", "schedule.num_epochs=6", "egs.left_context=3",
         "egs.right_context=3"]
ADAPTED = ["data.num_leaves=12", "adaptation.lda_dim=12", "adaptation.fmllr=true",
           "data.lm_order=2"]


def wer(of: Any) -> float:
    return WordErrors.of_json(of).wer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "speech", num_utterances=16)


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    words = ["train", "recipe=kaldi", f"data.source={data}", *QUICK, *ADAPTED,
             f"output_dir={data.parent / 'runs'}"]
    assert main(words) == 0
    [folder] = (data.parent / "runs").glob("*/final")
    return folder.parent


def test_wer_is_low_and_the_language_model_is_reported(run: Path) -> None:
    found = json.loads((run / "decode" / "wer.json").read_text())
    # chords in little noise; seed 0 has none, and 20 % lets edges differ by platform
    assert wer(found["test"]) <= 20.0
    assert found["language_model"]["kind"] == "2-gram"
    # two words with equal probability, and the end after three of them
    assert 1.0 < found["language_model"]["perplexity_on_test"] < 4.0


def test_a_bundle_decodes_other_data_and_transcribes(run: Path, data: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "model.ngsgd"
    assert main(["export", "--format", "bundle", str(run), str(bundle)]) == 0
    output = tmp_path / "decoded"
    assert main(["decode", str(bundle), "--data", str(data / "test"), "--output", str(output)]) == 0
    recognizer = Recognizer.load(bundle)
    assert recognizer.bundle.adaptation is not None and recognizer.bundle.language.tree is not None
    texts = dict(line.split(maxsplit=1) for line in (data / "test" / "text").read_text().splitlines())
    right = 0
    for name, text in texts.items():
        found = recognizer.transcribe(data / "test" / f"{name}.wav").words
        right += [word.word for word in found] == text.split()
        assert all(word.start_s < word.end_s for word in found)
    # one recording is little speech for a transform
    assert right >= len(texts) // 2


def test_labels_of_the_run_train_another_one(run: Path, data: Path, tmp_path: Path) -> None:
    labels = tmp_path / "ali.npz"
    given = ["recipe=kaldi", f"data.source={data}", *QUICK, f"output_dir={data.parent / 'runs'}"]
    assert main(["align", "--model", str(run), "--output", str(labels)]) == 0
    assert main(["train", *given, "name=again", f"data.alignment={labels}"]) == 0


@pytest.mark.parametrize("words", [["--format", "onnx"], ["--format", "nnet3", "--include-data"]])
def test_formats_without_adaptation_are_rejected(run: Path, tmp_path: Path, words: list[str]) -> None:
    assert main(["export", *words, str(run), str(tmp_path / "model")]) == 2
