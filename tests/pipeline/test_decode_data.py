"""A small model on data directories of made-up speech."""

import gzip
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode.scoring import NOTHING, Rules
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import ConfigError, DataError
from ngsgd.launcher.cli import main
from ngsgd.launcher.commands import decode as command
from ngsgd.pipeline.decoding import decode_data
from ngsgd.pipeline.decoding.decode_data import DataResult, DecodeRequest
from ngsgd.word_errors import WordErrors
from tests.asr import made_up_speech, tiny_recognizer

pytest.importorskip("kaldi_decoder")
pytest.importorskip("kaldi_native_fbank")

UNIGRAM = "\\data\\\nngram 1=4\n\n\\1-grams:\n-99 <s>\n-0.5 </s>\n{} NO\n{} YES\n\n\\end\\\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recognizer.write(tmp_path_factory.mktemp("model") / "tiny.ngsgd")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_speech.write_data(tmp_path_factory.mktemp("data") / "sets", rate_hz=tiny_recognizer.RATE_HZ)


def decode(model: Path, request: DecodeRequest) -> DataResult:
    bundle = Bundle.load(model)
    # the penalty of the tiny model is too low for pauses
    return decode_data.decode_data(replace(bundle, weights=replace(bundle.weights, word_penalty=8.0)), request)


def arpa(path: Path, no: float, yes: float) -> Path:
    path.write_text(UNIGRAM.format(no, yes))
    return path


def test_the_words_of_a_data_directory_are_recognized(model: Path, data: Path) -> None:
    result = decode(model, DecodeRequest(data / "test", confidences=True))
    assert result.total.num_errors == 0
    assert result.total.num_words == 18
    assert set(decode_data.tables(result)["speaker"]) == {"test-s0", "test-s1"}
    assert list(decode_data.tables(result)["length"]) == ["2-3"]
    assert sum(one.num_words for one in result.reliability) == 18
    assert result.unknown.num_unknown == 0


def test_lhotse_manifests_give_the_same_words(model: Path, data: Path, tmp_path: Path) -> None:
    texts = [line.split(" ", 1) for line in (data / "test" / "text").read_text().splitlines()]
    paths = {name: data / "test" / f"{name}.wav" for name, _ in texts}
    recordings = [{"id": name, "sources": [{"type": "file", "channels": [0], "source": str(path)}],
                   "sampling_rate": 8000, "num_samples": 1, "duration": 1.0}
                  for name, path in paths.items()]
    # 16-bit samples after a header of 44 bytes
    supervisions = [{"id": name, "recording_id": name, "start": 0.0, "text": text, "speaker": "one",
                     "duration": (paths[name].stat().st_size - 44) / 2 / tiny_recognizer.RATE_HZ}
                    for name, text in texts]
    for kind, items in (("recordings", recordings), ("supervisions", supervisions)):
        with gzip.open(tmp_path / f"{kind}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(item) + "\n" for item in items))
    assert decode(model, DecodeRequest(tmp_path)).total.num_errors == 0


def test_weights_are_tuned_unless_given(model: Path, data: Path) -> None:
    own = Bundle.load(model)
    tuned = decode(model, DecodeRequest(data / "test", tune_on=data / "valid"))
    assert tuned.tuned is not None
    assert tuned.total.num_errors == 0
    half = decode(model, DecodeRequest(data / "test", tune_on=data / "valid", acoustic_scale=0.2))
    assert half.weights.acoustic_scale == 0.2
    assert half.weights.word_penalty in own.decode.word_penalties
    given = decode(model, DecodeRequest(data / "test", word_penalty=1.5))
    assert (given.weights.acoustic_scale, given.weights.word_penalty) == (own.weights.acoustic_scale, 1.5)
    assert given.tuned is None


def test_other_words_and_language_models_change_what_is_recognized(model: Path, data: Path, tmp_path: Path) -> None:
    only = tmp_path / "words"
    only.write_text("YES\n")
    result = decode(model, DecodeRequest(data / "test", Vocabulary(words=only)))
    assert {hyp for row in result.rows for _, hyp in row.pairs} <= {"YES", NOTHING}
    assert result.unknown.num_unknown == sum(ref == "NO" for row in result.rows for ref, _ in row.pairs)
    # NO is as good as impossible
    biased = arpa(tmp_path / "biased.arpa", -90.0, -0.2)
    assert decode(model, DecodeRequest(data / "test", Vocabulary(arpa=biased))).total.num_errors > 0


def test_rescoring_replaces_the_language_model(model: Path, data: Path, tmp_path: Path) -> None:
    flat, biased = arpa(tmp_path / "flat.arpa", -0.4, -0.4), arpa(tmp_path / "biased.arpa", -0.9, -0.2)
    same = decode(model, DecodeRequest(data / "test", Vocabulary(arpa=biased), rescore_lm=biased))
    assert same.first_pass == same.total
    back = decode(model, DecodeRequest(data / "test", Vocabulary(arpa=biased), rescore_lm=flat))
    direct = decode(model, DecodeRequest(data / "test", Vocabulary(arpa=flat)))
    assert [row.pairs for row in back.rows] == [row.pairs for row in direct.rows]


def test_a_grammar_excludes_language_models(model: Path, data: Path, tmp_path: Path) -> None:
    rules = tmp_path / "g.jsgf"
    rules.write_text("<answer> = YES NO YES;")
    result = decode(model, DecodeRequest(data / "test", Vocabulary(grammar=rules)))
    assert all([hyp for _, hyp in row.pairs if hyp != NOTHING] in (["YES", "NO", "YES"], []) for row in result.rows)
    with pytest.raises(ConfigError):
        decode(model, DecodeRequest(data / "test", Vocabulary(grammar=rules), rescore_lm=arpa(tmp_path / "a", -1.0, -1.0)))


def test_a_folder_that_is_no_data_is_one_error(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for damage in (lambda: None, folder.mkdir, lambda: (folder / "text").write_text("a YES\n")):
        damage()
        with pytest.raises(DataError):
            decode(model, DecodeRequest(folder))


def test_the_command_prints_and_writes_the_result(model: Path, data: Path, tmp_path: Path,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["decode", str(model), "--data", str(data / "test"), "--json", "--confidences",
                 "--penalty", "8", "--output", str(output)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["wer"] == 0.0
    assert json.loads((output / "wer.json").read_text()) == printed
    assert len((output / "words.ctm").read_text().splitlines()) == 18
    assert {path.name for path in output.iterdir()} == {
        "wer.json", "words.ctm", "per_utt.txt", "per_spk.txt", "ops.txt", "recogs.txt"}


@pytest.mark.parametrize("options", [
    ["--lm", "x"], ["--scale", "1"], ["--data", "x", "--frames"], ["--data", "x", "--streaming"], ["--data", "x", "--scale", "0"],
    ["--data", "x", "--penalty", "nan"], ["--chunk-frames", "0"], ["--data", "x", "--output", "."]])
def test_options_that_exclude_each_other_are_an_error(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "runs/none", *options]) == ConfigError.exit_code
    assert "Traceback" not in capsys.readouterr().err


def test_audio_of_another_rate_is_resampled(model: Path, tmp_path: Path) -> None:
    other = made_up_speech.write_data(tmp_path / "sets", rate_hz=2 * tiny_recognizer.RATE_HZ)
    result = decode(model, DecodeRequest(other / "test"))
    assert result.total.num_words == 18 and result.total.num_errors <= 2


def test_attributes_of_speakers_have_tables(model: Path, data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data / "test", tmp_path / "test"))
    (folder / "spk2gender").write_text("test-s0 f\ntest-s1 m\n")
    (folder / "spk2age").write_text("test-s0 7\ntest-s1 31\n")
    (folder / "spk2utt").write_text("not read\n")
    result = decode(model, DecodeRequest(folder))
    found = decode_data.tables(result)
    by_speaker = found["speaker"]
    assert list(found) == ["speaker", "age", "gender", "length"]
    assert found["gender"] == {"f": by_speaker["test-s0"], "m": by_speaker["test-s1"]}
    assert all(errors.num_words == 9 for errors in found["age"].values()) and list(found["age"]) == ["7", "31"]
    assert decode_data.as_json(result)["by_gender"]["m"]["num_words"] == 9
    assert "\ngender\n" in command.as_text(result, quiet=False)


@pytest.mark.parametrize(("name", "text", "named"), [
    ("spk2gender", "test-s0 f\n", "speaker test-s1"),
    ("spk2gender", "test-s0 f\ntest-s1\n", "speaker test-s1"),
    ("spk2gender", "test-s0 f\ntest-s1 m\nother m\n", "spk2gender:3: other"),
    ("spk2length", "test-s0 1\ntest-s1 2\n", "rename")])
def test_incomplete_tables_of_speakers_are_an_error(
        name: str, text: str, named: str, model: Path, data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data / "test", tmp_path / "test"))
    (folder / name).write_text(text)
    with pytest.raises(DataError, match=named):
        decode(model, DecodeRequest(folder))


def test_many_ages_become_groups_of_ten(model: Path, data: Path) -> None:
    plain = decode(model, DecodeRequest(data / "test"))
    ages = [str(age) for age in (6, 9, 10, 15, 19, 20, 28, 31, 33, 47, 5, 104)]
    rows = tuple(itertools.islice(itertools.cycle(plain.rows), len(ages)))
    found = decode_data.tables(replace(plain, rows=rows, speakers=ages, attributes={"age": ages}))["age"]
    assert list(found) == ["0-9", "10-19", "20-29", "30-39", "40-49", "100-109"]
    assert sum(errors.num_words for errors in found.values()) == sum(row.errors.num_words for row in rows)


def test_rules_change_references_and_results(model: Path, data: Path, tmp_path: Path) -> None:
    folder, rules = Path(shutil.copytree(data / "test", tmp_path / "test")), tmp_path / "rules"
    texts = (folder / "text").read_text()
    assert " YES" in texts
    (folder / "text").write_text(texts.replace(" YES", " uh Yeah"))
    rules.write_text(";; a comment\nuh =>\nyeah => yes\n")
    plain = decode(model, DecodeRequest(folder))
    assert plain.total.num_errors > 0 and plain.num_changed is None
    changed = decode(model, DecodeRequest(folder, rules=Rules.read(rules, ignore_case=True), tune_on=folder))
    assert changed.total.num_errors == 0 and changed.total.num_words == 18
    assert changed.tuned is not None and changed.tuned.num_errors == 0
    num_with_yes = sum(" YES" in line for line in texts.splitlines())
    assert changed.num_changed == num_with_yes
    assert changed.characters.num_words == len("".join(word for line in texts.splitlines() for word in line.split()[1:]))
    assert "rules changed" in command.as_text(changed, quiet=False)
    with pytest.raises(ConfigError, match="scoring"):
        decode(model, DecodeRequest(folder, rules=Rules.read(rules), confidences=True))


@pytest.mark.entry("Sp7")
def test_utterances_without_words_are_a_group(model: Path, data: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(data / "test", tmp_path / "test"))
    texts = (folder / "text").read_text().splitlines()
    # no words of the second speaker
    (folder / "text").write_text("".join(f"{line.split()[0] if '-s1-' in line else line}\n" for line in texts))
    result = decode(model, DecodeRequest(folder, confidences=True))
    assert decode_data.tables(result)["length"]["0"] == WordErrors(0, 9, 0, 0)
    assert decode_data.tables(result)["speaker"]["test-s1"].num_words == 0
    assert "0" in json.dumps(decode_data.as_json(result), allow_nan=False)
    assert "(no words)" in command.as_text(result, quiet=False)
    decode_data.write(tmp_path / "out", result)
    (folder / "text").write_text("".join(f"{line.split()[0]}\n" for line in texts))
    with pytest.raises(DataError, match="no words"):
        decode(model, DecodeRequest(folder))


@pytest.mark.entry("Sp12")
def test_the_command_names_words_that_a_language_model_lacks(model: Path, data: Path, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    lacks = tmp_path / "lacks.arpa"
    lacks.write_text("\\data\\\nngram 1=3\n\\1-grams:\n-99 <s>\n-0.5 </s>\n-0.3 YES\n\\end\\\n")
    for option in ("--lm", "--rescore-lm"):
        assert main(["decode", str(model), "--data", str(data / "test"), option, str(lacks)]) == 0
        lines = capsys.readouterr().err.splitlines()
        assert len([line for line in lines if "1 of 2" in line and "lacks.arpa" in line and line.endswith("NO")]) == 1
        lacks.write_text(lacks.read_text().replace("YES", "yes"))
        assert main(["decode", str(model), "--data", str(data / "test"), option, str(lacks)]) == DataError.exit_code
        lacks.write_text(lacks.read_text().replace("yes", "YES"))
