"""Other words, language models, grammars and weights, wherever a model recognizes speech."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import soundfile

from ngsgd.asr.bundle import Bundle
from ngsgd.asr.recognizer import Recognizer
from ngsgd.errors import ArgumentError, ConfigError, DataError
from ngsgd.launcher.cli import main
from tests.asr import tiny_recognizer
from tests.launcher.records import Command

SAID = ["YES", "NO", "YES"]
ARPA = "\\data\\\nngram 1=4\n\n\\1-grams:\n0 YES\n-90 NO\n-99 <s>\n0 </s>\n\n\\end\\\n"
# option -> content of its file, and the words that are then recognized
FILES = {"grammar": ("<a> = YES NO;", ["YES", "NO"]), "words": ("YES\n", ["YES"] * 3),
         "lexicon": ("ja Y\nnee N\n", ["ja", "nee", "ja"]), "lm": (ARPA, ["YES"] * 3),
         "hotwords": ("YES NO YES YES :8\n", ["YES", "NO", "YES", "YES"])}
WRONG = {"grammar": "<a> = MAYBE;", "words": "MAYBE\n", "lexicon": "MAYBE M\n", "lm": "no model\n", "hotwords": "MAYBE\n"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recognizer.write(tmp_path_factory.mktemp("model") / "model.ngsgd")


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "a.wav"
    soundfile.write(path, tiny_recognizer.say(SAID), 8000)
    return path


def written(folder: Path, option: str, text: str) -> Path:
    path = folder / option
    path.write_text(text)
    return path


def commands(model: Path, audio: Path, folder: Path) -> list[list[str]]:
    return [["transcribe", str(model), str(audio)], ["decode", str(model), "--data", str(folder)],
            ["export", "--format", "bundle", str(model), str(folder / "out")]]


@pytest.mark.parametrize("option", FILES)
@pytest.mark.entry("Nc5", "a trained model and other words: `--lm`, `--words`, `--lexicon`, `--grammar`, `--hotwords`",
                   "works", "`transcribe`, `export`, `decode --data` and `Recognizer` take the same files, with the same checks.")
def test_every_way_to_recognize_takes_other_words(model: Path, audio: Path, tmp_path: Path, option: str,
                                                  command: Command) -> None:
    pytest.importorskip("kaldi_decoder")
    text, expected = FILES[option]
    path = written(tmp_path, option, text)
    assert Recognizer.load(model).transcribe(audio).text.split() == SAID
    given: dict[str, Any] = {option: path}
    for recognizer in (Recognizer.load(model, **given), Recognizer(Bundle.load(model), **given)):
        assert recognizer.transcribe(audio).text.split() == expected
    told = command("transcribe", str(model), str(audio), f"--{option}", str(path), "-q")
    assert told.out.split() == expected
    other = tmp_path / "other.ngsgd"
    command("export", "--format", "bundle", str(model), str(other), f"--{option}", str(path))
    assert command("transcribe", str(other), str(audio), "-q").out.split() == expected
    assert "wer" not in Bundle.load(other).provenance


@pytest.mark.slow
@pytest.mark.entry("Nc5")
def test_processes_take_the_same_words(model: Path, audio: Path, tmp_path: Path, command: Command) -> None:
    pytest.importorskip("kaldi_decoder")
    words = str(written(tmp_path, "words", "YES\n"))
    told = command("transcribe", str(model), str(audio), str(audio), "--words", words, "--processes", "2")
    assert [line.split()[1:] for line in told.out.splitlines()] == [["YES"] * 3] * 2


def test_scale_and_penalty_replace_those_of_the_model(model: Path, audio: Path, tmp_path: Path) -> None:
    found = Recognizer.load(model, scale=0.2, penalty=50.0)
    assert found.bundle.search.acoustic_scale == 0.2 and len(found.transcribe(audio).words) < len(SAID)
    other = tmp_path / "other.ngsgd"
    assert main(["export", "--format", "bundle", str(model), str(other), "--scale", "0.2"]) == 0
    assert Bundle.load(other).weights.acoustic_scale == 0.2


@pytest.mark.parametrize("option", WRONG)
@pytest.mark.entry("Nc5")
def test_a_file_that_does_not_match_the_model_is_the_same_error_everywhere(
        model: Path, audio: Path, tmp_path: Path, option: str) -> None:
    path = written(tmp_path, option, WRONG[option])
    for name in (path, tmp_path / "missing", tmp_path):
        given: dict[str, Any] = {option: name}
        with pytest.raises(DataError):
            Recognizer.load(model, **given)
        for words in commands(model, audio, tmp_path):
            assert main([*words, f"--{option}", str(name)]) == DataError.exit_code
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [
    ("scale", 0.0), ("scale", -1.0), ("scale", float("nan")), ("scale", 1e9), ("scale", "0.1"), ("penalty", float("inf")),
    ("penalty", -1e9), ("words", ["YES"]), ("lexicon", 3), ("lm", b"lm"), ("grammar", {"a": 1}), ("hotwords", ["YES"])])
@pytest.mark.entry("Nc5")
def test_wrong_values_are_one_error_that_names_the_option(model: Path, audio: Path, tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        Recognizer.load(model, **{name: value})
    if isinstance(value, float):
        for words in commands(model, audio, tmp_path):
            assert main([*words, f"--{name}={value}"]) == ConfigError.exit_code


@pytest.mark.entry("Nc5")
def test_options_without_effect_are_errors(model: Path, tmp_path: Path) -> None:
    grammar, lm = (written(tmp_path, option, FILES[option][0]) for option in ("grammar", "lm"))
    with pytest.raises(ConfigError):
        Recognizer.load(model, grammar=grammar, lm=lm)
    assert main(["export", "--format", "nnet3", str(model), str(tmp_path / "out"), "--lm", str(lm)]) == ConfigError.exit_code
