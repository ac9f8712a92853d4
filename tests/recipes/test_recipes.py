"""Every recipe composes, and its preparation makes what the recipe reads."""

from __future__ import annotations

import gzip
import json
import re
import runpy
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import yaml

from ngsgd.asr.corpora import an4, kaldi_dirs
from ngsgd.asr.lang import lexicon
from ngsgd.config import FeatureConfig
from ngsgd.launcher.config.compose import compose
from ngsgd.launcher.config.sources import conf_dir
from ngsgd.pipeline.recipes import recipe
from ngsgd.pipeline.run import build_run
from ngsgd.word_errors import WordErrors
from tests.asr.made_up_speech import draw_words, say

ROOT = Path(__file__).parents[2]
PREPARE = ROOT / "recipes/mini_librispeech/local/prepare.py"
RECIPES = sorted(path.stem for path in conf_dir().glob("recipe/*.yaml"))
ARPA = "\\data\\\nngram 1=4\n\n\\1-grams:\n-0.6 </s>\n-99 <s>\n-0.6 NO\n-0.6 YES\n\n\\end\\\n"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes(recipe: str) -> None:
    written = yaml.safe_load((conf_dir() / "recipe" / f"{recipe}.yaml").read_text(encoding="utf-8"))
    # digits are synthesized
    source = "SOMEWHERE" if written.get("data", {}).get("corpus", "digits") != "digits" else ""
    assert compose([f"recipe={recipe}", f"data.source={source}"]).data.source == source


@pytest.mark.parametrize("recipe", sorted(set(RECIPES) - {"kaldi", "lhotse"}))
def test_recipe_has_a_readme_and_a_command_for_its_results(recipe: str) -> None:
    folder = ROOT / "recipes" / recipe.removesuffix("_robust").removesuffix("_triphones")
    assert f"recipe={recipe}" in (folder / "README.md").read_text()
    assert re.search("ngsgd train|make train", (folder / "RESULTS.md").read_text())


def write_librispeech(folder: Path, *, num_utterances: int = 2) -> None:
    """A chapter of four readers for each part, a lexicon with stress marks, a packed model."""
    soundfile = pytest.importorskip("soundfile")
    rng = np.random.default_rng(0)
    for number, part in enumerate(("train-clean-5", "dev-clean-2")):
        for speaker in range(number * 10, number * 10 + 4):
            chapter = folder / "LibriSpeech" / part / str(speaker) / "7"
            chapter.mkdir(parents=True)
            lines = []
            for utterance in range(num_utterances):
                utt_id = f"{speaker}-7-{utterance:04d}"
                words = ["YES", "NO"] if num_utterances == 2 else draw_words(rng)
                soundfile.write(chapter / f"{utt_id}.flac", say(words, rng, 16000), 16000)
                lines.append(f"{utt_id} {' '.join(words)}")
            (chapter / f"{speaker}-7.trans.txt").write_text("\n".join(lines) + "\n")
    (folder / "librispeech-lexicon.txt").write_text("NO\tN OW1\nYES\tY EH1 S\nYES\tY EH0 S\n")
    (folder / "3-gram.pruned.3e-7.arpa.gz").write_bytes(gzip.compress(ARPA.encode()))


def prepare(downloaded: Path, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PREPARE), str(downloaded), str(output)], capture_output=True, text=True, check=False)


def test_prepared_mini_librispeech_is_read_by_its_recipe(tmp_path: Path) -> None:
    pytest.importorskip("kaldi_native_fbank")
    write_librispeech(tmp_path / "downloaded")
    done = prepare(tmp_path / "downloaded", tmp_path / "prepared")
    assert done.returncode == 0, done.stderr
    config = compose(["recipe=mini_librispeech", f"data.source={tmp_path / 'prepared'}"])
    sets, language = kaldi_dirs.make(config.data, FeatureConfig(kind="mfcc", sample_rate_hz=16000), config.augment)
    assert {name: len(speech.texts) for name, speech in sets.items()} == {"train": 6, "valid": 2, "test": 8}
    assert language.topology.lexicon == {"NO": (("N", "OW"),), "YES": (("Y", "EH", "S"),), "<UNK>": (("SPN",),)}
    assert language.arpa == ARPA.replace("\n\n", "\n")
    again = prepare(tmp_path / "downloaded", tmp_path / "prepared")
    assert again.stdout.count("is there already") == 4


@pytest.mark.slow
def test_mini_librispeech_runs_to_a_word_error_rate(tmp_path: Path) -> None:
    """Layout of OpenSLR, data directories, labels, network and decoding with the given model."""
    for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldialign"):
        pytest.importorskip(module)
    write_librispeech(tmp_path / "downloaded", num_utterances=8)
    done = prepare(tmp_path / "downloaded", tmp_path / "prepared")
    assert done.returncode == 0, done.stderr
    config = recipe(
        "mini_librispeech", output_dir=tmp_path / "runs", data={"source": tmp_path / "prepared"},
        cluster={"kind": "in_process", "num_workers": 1},
        egs={"left_context": 4, "right_context": 4, "samples_per_iter": 4000},
        model={"hidden_dim": 32, "num_layers": 1}, schedule={"num_epochs": 2})
    run = build_run(config)
    run.train()
    # chords in little noise; valid is one of the readers
    assert WordErrors.of_json(run.metrics["test"]).wer <= 20.0


def test_broken_download_is_named_and_leaves_no_half_of_a_set(tmp_path: Path) -> None:
    write_librispeech(tmp_path / "downloaded")
    next((tmp_path / "downloaded/LibriSpeech/dev-clean-2").glob("*/*/*.flac")).unlink()
    done = prepare(tmp_path / "downloaded", tmp_path / "prepared")
    assert done.returncode == 1
    assert "archive" in done.stderr
    assert [path.name for path in (tmp_path / "prepared").iterdir()] == ["train"]


def write_an4(folder: Path, *, num_frames: int = 3) -> dict[str, np.ndarray]:
    """CMU's distribution with two utterances, and their cepstra by name."""
    rng = np.random.default_rng(0)
    (folder / "etc").mkdir(parents=True)
    for name in ("an4.dic", "an4.ug.lm"):
        (folder / "etc" / name).write_text(name)
    (folder / "etc" / "an4_train.transcription").write_text("<s> GO ON </s> (an1-fash-b)\n")
    # the transcripts of test have no marks
    (folder / "etc" / "an4_test.transcription").write_text("STOP (cen8-mwhw2-b)\n")
    found = {}
    for place, utt_id in (("an4_clstk/fash/an1-fash-b", "fash-an1-b"), ("an4test_clstk/mwhw2/cen8-mwhw2-b", "mwhw2-cen8-b")):
        path = folder / "feat" / f"{place}.mfc"
        path.parent.mkdir(parents=True)
        found[utt_id] = rng.normal(size=(num_frames, 13)).astype(np.float32)
        path.write_bytes((13 * num_frames).to_bytes(4, "big") + found[utt_id].astype(">f4").tobytes())
    return found


@pytest.mark.entry("Nc4")
def test_an4_is_packed_from_the_public_cepstra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kaldiio = pytest.importorskip("kaldiio")
    main = runpy.run_path(str(ROOT / "recipes/an4/local/prepare.py"))["main"]
    cepstra = write_an4(tmp_path / "an4")
    monkeypatch.setattr(an4, "released_checksums", dict)
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "an4"), str(tmp_path / "out")])
    main()
    assert {path.name for path in (tmp_path / "out").iterdir()} >= set(an4.SPEECH)
    read = dict(pair for name in ("train", "test") for pair in kaldiio.load_ark(str(tmp_path / "out" / f"feats_{name}.ark")))
    assert read.keys() == cepstra.keys() and all(np.array_equal(read[name], cepstra[name]) for name in read)
    assert (tmp_path / "out" / "text_train").read_text() == "fash-an1-b GO ON\n"
    assert (tmp_path / "out" / "text_test").read_text() == "mwhw2-cen8-b STOP\n"
    assert (tmp_path / "out" / "utt2spk_test").read_text() == "mwhw2-cen8-b mwhw2\n"
    # another release, a cut file, a folder that exists: a message, and no folder
    with pytest.raises(SystemExit):
        main()
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "an4"), str(tmp_path / "new")])
    monkeypatch.setattr(an4, "released_checksums", lambda: {"text_test": "0"})
    with pytest.raises(SystemExit):
        main()
    monkeypatch.setattr(an4, "released_checksums", dict)
    cut = tmp_path / "an4" / "feat" / "an4_clstk" / "fash" / "an1-fash-b.mfc"
    cut.write_bytes(cut.read_bytes()[:-4])
    with pytest.raises(SystemExit):
        main()
    assert not (tmp_path / "new").exists()


SPEECHOCEAN = ROOT / "recipes/speechocean/local"


def write_speechocean(folder: Path, audio: str) -> None:
    """The layout of the corpus with `audio` WAVE, else a packed folder; 0005 is held out."""
    rng = np.random.default_rng(0)
    soundfile = pytest.importorskip("soundfile")
    for name, speakers in (("train", {"0005": "m 6", "0001": "f 30"}), ("test", {"0003": "f 9"})):
        (folder / name).mkdir(parents=True)
        tables: dict[str, str] = dict.fromkeys(("text", "utt2spk", "wav.scp", "spk2gender", "spk2age"), "")
        for speaker, about in speakers.items():
            place = f"{audio}/SPEAKER{speaker}/0{speaker}0001.wav"
            path = (folder if audio == "WAVE" else folder / name) / place
            path.parent.mkdir(parents=True)
            soundfile.write(path, say(["YES"], rng, 16000), 16000)
            for table, value in zip(tables, ("YES NO", speaker, place), strict=False):
                tables[table] += f"0{speaker}0001\t{value}\n"
            for table, value in zip(("spk2gender", "spk2age"), about.split(), strict=True):
                tables[table] += f"{speaker} {value}\n"
        for table, text in tables.items():
            (folder / name / table).write_text(text)
    path = folder / ("resource/lexicon.txt" if audio == "WAVE" else "lexicon.txt")
    path.parent.mkdir(exist_ok=True)
    path.write_text("NO\tN OW1\nNO\tN OW0\nYES\tY EH1 S\n")


@pytest.mark.parametrize("audio", ["WAVE", "audio"])
def test_prepared_speechocean_is_read_by_its_recipe(tmp_path: Path, audio: str) -> None:
    write_speechocean(tmp_path / "corpus", audio)
    command = [sys.executable, str(SPEECHOCEAN / "prepare.py"), str(tmp_path / "corpus"), str(tmp_path / "prepared")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    data = recipe("speechocean", data={"source": tmp_path / "prepared"}).data
    found = kaldi_dirs.read_sets(data, FeatureConfig())
    assert {name: [one.speaker for one in listed] for name, listed in found.items()} == {
        "train": ["0001"], "valid": ["0005"], "test": ["0003"]}
    assert lexicon.read(tmp_path / "prepared/lexicon.txt", 1).lexicon == {"NO": (("N", "OW"),), "YES": (("Y", "EH", "S"),)}
    assert (tmp_path / "prepared/valid/spk2age").read_text() == "0005 6\n"
    next((tmp_path / "corpus").rglob("000030001.wav")).unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "000030001.wav" in done.stderr


def test_errors_of_speechocean_are_those_of_the_groups(tmp_path: Path) -> None:
    write_speechocean(tmp_path, "audio")
    (tmp_path / "test/spk2gender").write_text("a f\nb m\nc f\n")
    (tmp_path / "test/spk2age").write_text("a 6\nb 43\nc 20\n")
    counts = {speaker: asdict(WordErrors(10 * number, number, 0, 1)) for number, speaker in enumerate("abc", 1)}
    (tmp_path / "run/decode").mkdir(parents=True)
    (tmp_path / "run/decode/wer.json").write_text(json.dumps({"test_by_speaker": counts}))
    done = subprocess.run([sys.executable, str(SPEECHOCEAN / "groups.py"), str(tmp_path / "run"), str(tmp_path)],
                          capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "women and girls: 15.0 %WER, 6 of 40 words, 2 speakers", "men and boys: 15.0 %WER, 3 of 20 words, 1 speakers",
        "adults: 14.0 %WER, 7 of 50 words, 2 speakers", "children: 20.0 %WER, 2 of 10 words, 1 speakers"]
