"""`ngsgd align MODEL AUDIO TEXT` and `ngsgd align MODEL --data DIR`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soundfile

from tests.asr import tiny_recognizer
from tests.launcher.records import Command

pytest.importorskip("kaldi_decoder")

WORDS = ["NO", "YES", "YES", "NO"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_recognizer.write(tmp_path / "model.ngsgd")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    soundfile.write(tmp_path / "a.wav", tiny_recognizer.say(WORDS), tiny_recognizer.RATE_HZ)
    (tmp_path / "a.txt").write_text(" ".join(WORDS) + "\n", encoding="utf-8")
    return tmp_path / "a.wav"


def test_a_recording_is_aligned_with_its_text(model: Path, recording: Path, command: Command) -> None:
    text = str(recording.with_suffix(".txt"))
    found = command("align", str(model), str(recording), text)
    fields = [line.split() for line in found.out.splitlines()]
    assert [one[4] for one in fields] == WORDS and {one[0] for one in fields} == {"a"} and not found.err
    Path(text).write_text("NO YES MAYBE\n")
    found = command("align", str(model), str(recording), text, "--format", "json")
    tree = json.loads(found.out)
    assert [one["word"] for one in tree["unknown"]] == ["MAYBE"] and "MAYBE" in found.err
    output = recording.parent / "out"
    for name, ending in (("textgrid", "TextGrid"), ("srt", "srt"), ("phone-ctm", "phones.ctm")):
        command("align", str(model), str(recording), text, "--format", name, "--output", str(output))
        assert (output / f"a.{ending}").stat().st_size > 0


def test_a_data_directory_is_aligned_and_failures_are_counted(
        model: Path, recording: Path, tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "wav.scp").write_text("".join(f"{name} {recording}\n" for name in ("u1", "u2")))
    (folder / "utt2spk").write_text("u1 s\nu2 s\n")
    (folder / "text").write_text(f"u1 {' '.join(WORDS)}\nu2 MAYBE\n")
    found = command("align", str(model), "--data", str(folder), code=3)
    assert [line.split()[4] for line in found.out.splitlines()] == WORDS
    assert "u2" in found.err and "1 failed" in found.err
    command("align", str(model), "--data", str(folder), "--format", "textgrid", "--output", str(tmp_path / "grids"), code=3)
    assert [one.name for one in (tmp_path / "grids").iterdir()] == ["u1.TextGrid"]


def test_wrong_arguments_are_one_error_before_anything_is_computed(
        model: Path, recording: Path, tmp_path: Path, command: Command) -> None:
    text = str(recording.with_suffix(".txt"))
    for words, code, part in (
            ([str(model), str(recording)], 2, "MODEL AUDIO TEXT"),
            ([str(model), "--data", str(tmp_path), "--format", "srt"], 2, "--output"),
            ([str(model), str(recording), text, "--model", "run"], 2, "--model"),
            (["recipe=yesno", "--output", "ali.npz", "--format", "ctm"], 2, "--format"),
            ([str(model), str(recording), str(tmp_path / "absent.txt")], 3, "absent.txt"),
            ([str(model), str(tmp_path / "absent.wav"), text], 3, "absent.wav"),
            ([str(model), str(recording), text, "--lexicon", str(tmp_path / "absent.dict")], 3, "absent.dict")):
        found = command("align", *words, code=code)
        assert part in found.err and not found.out
    Path(text).write_bytes(b"\xff\xfe\xff")
    assert "UTF-8" in command("align", str(model), str(recording), text, code=3).err
    Path(text).write_text("")
    assert "empty" in command("align", str(model), str(recording), text, code=3).err
