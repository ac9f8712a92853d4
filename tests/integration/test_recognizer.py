"""From training to words: `final/` recognizes recordings where the corpus is not."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ngsgd.asr.bundle import INDEX
from ngsgd.asr.recognizer import Recognizer
from ngsgd.errors import CheckpointError
from ngsgd.launcher.cli import main
from ngsgd.pipeline import recipe
from ngsgd.pipeline.run import build_run
from tests.asr.made_up_speech import write_yesno

for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldialign", "webrtcvad"):
    pytest.importorskip(module)

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module", params=["utterance", "online"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose test set are recordings in waves_yesno next to it."""
    root = tmp_path_factory.mktemp("run")
    source = write_yesno(root / "waves_yesno", num_recordings=12)
    config = recipe(
        "yesno",
        data={"source": str(source)},
        output_dir=str(root / "runs"),
        cluster={"kind": "in_process"},
        features={"cmvn": request.param},
        model={"hidden_dim": 32, "num_layers": 1},
        schedule={"num_epochs": 2},
    )
    trained = build_run(config)
    trained.train()
    return trained.folder.path


def hypotheses(run: Path) -> dict[str, list[str]]:
    """Words that decoding found, by recording of the test set."""
    found = re.findall(
        r"^(\S+):\thyp=(.*)$", (run / "decode" / "test.recogs.txt").read_text(), re.MULTILINE
    )
    return {name: re.findall(r"'(\w+)'", words) for name, words in found}


def test_words_are_those_of_the_decoded_test_set(run: Path, tmp_path: Path) -> None:
    expected = hypotheses(run)
    assert len(expected) >= 5 and any(expected.values())
    final = shutil.copytree(run / "final", tmp_path / "elsewhere")
    recognizer = Recognizer.load(final)
    for number, (name, words) in enumerate(expected.items()):
        # with causal means, decoding remembers the speaker of the recordings before
        if number and recognizer.bundle.features.cmvn == "online":
            break
        [recording] = (run.parents[1] / "waves_yesno").glob(f"{name.removeprefix('yesno-')}.wav")
        assert [word.word for word in recognizer.transcribe(recording).words] == words


def test_scores_of_a_bundle_are_bitwise_identical_to_the_run(run: Path, tmp_path: Path) -> None:
    [*_, recording] = sorted((run.parents[1] / "waves_yesno").iterdir())
    assert main(["export", "--format", "bundle", str(run), str(tmp_path / "model.ngsgd")]) == 0
    of_run = Recognizer.load(run).transcribe(recording, num_best=5)
    assert Recognizer.load(tmp_path / "model.ngsgd").transcribe(recording, num_best=5) == of_run


def test_a_run_of_an_earlier_version_is_exported_with_instructions(run: Path, tmp_path: Path) -> None:
    old = shutil.copytree(run, tmp_path / "old")
    (old / "final" / INDEX).unlink()
    with pytest.raises(CheckpointError, match="ngsgd resume"):
        Recognizer.load(old)
    assert main(["transcribe", str(old), str(run)]) == 3
    assert main(["export", "--format", "bundle", str(old), str(tmp_path / "model.ngsgd")]) == 0
    assert main(["export", "--format", "bundle", str(run), str(tmp_path / "new.ngsgd")]) == 0
    old_bundle, new_bundle = (
        Recognizer.load(tmp_path / name).bundle for name in ("model.ngsgd", "new.ngsgd")
    )
    assert old_bundle.weights == new_bundle.weights and old_bundle.language == new_bundle.language


def test_export_asks_for_one_file(run: Path, tmp_path: Path) -> None:
    assert main(["export", "--format", "bundle", str(run)]) == 2
    assert main(["export", "--format", "bundle", str(run), "a", "--egs", "1"]) == 2
    assert main(["export", str(run)]) == 2
    assert main(["export", "--format", "bundle", str(run), str(tmp_path / "no" / "folder")]) == 3
