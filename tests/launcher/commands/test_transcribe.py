"""`ngsgd transcribe`: files, folders, patterns and streams to text, JSON, CTM and captions."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

from ngsgd.launcher.cli import main
from ngsgd.training.storage.lock import RunLock
from tests.asr import tiny_recognizer
from tests.asr.audio_forms import OTHERS as OTHERS_BY_NAME
from tests.asr.audio_forms import Pipe
from tests.launcher.records import Command

WORDS = ["NO", "YES", "YES", "NO"]
OTHERS = ["YES", "NO"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_recognizer.write(tmp_path_factory.mktemp("model") / "model.ngsgd"))


@pytest.fixture
def audio(tmp_path: Path) -> Path:
    """A folder with two recordings and a text."""
    folder = tmp_path / "audio"
    (folder / "deep").mkdir(parents=True)
    soundfile.write(folder / "a.wav", tiny_recognizer.say(WORDS), 8000)
    soundfile.write(folder / "deep" / "b.flac", tiny_recognizer.say(OTHERS, rate_hz=16000), 16000)
    (folder / "notes.txt").write_text("no audio")
    return folder


def test_a_run_in_training_is_waited_for_and_a_stopped_one_resumed(tmp_path: Path, audio: Path,
                                                                   command: Command) -> None:
    (tmp_path / "final").mkdir()
    for name in ("config.yaml", "final/model.json"):
        (tmp_path / name).write_text('{"model": {}}')
    transcribe = ["transcribe", str(tmp_path), str(audio)]
    with RunLock(tmp_path / "lock", "train"):
        assert "ngsgd status" in command(*transcribe, code=6).err
    assert "ngsgd resume" in command(*transcribe, code=6).err


def test_one_file_gives_its_words_alone(model: str, audio: Path, command: Command) -> None:
    out, err = command("transcribe", model, str(audio / "a.wav"))
    assert out.split() == WORDS
    assert "real-time factor" in err and "soxr" not in err


def test_a_folder_gives_its_recordings_and_resampling_is_reported(
    model: str, audio: Path, command: Command
) -> None:
    out, err = command("transcribe", model, str(audio))
    assert out.splitlines() == [f"{audio / 'a.wav'}: {' '.join(WORDS)}",
                                f"{audio / 'deep' / 'b.flac'}: {' '.join(OTHERS)}"]
    assert "16000" in err


def test_a_pattern_and_quiet(model: str, audio: Path, command: Command) -> None:
    out, err = command("transcribe", model, str(audio / "**" / "*.flac"), "-q")
    assert out.split() == OTHERS and not err


def test_a_damaged_file_is_a_line_and_the_others_stay(
    model: str, audio: Path, command: Command
) -> None:
    (audio / "bad.wav").write_bytes((audio / "a.wav").read_bytes()[:1000])
    out, err = command("transcribe", model, str(audio), str(audio / "missing.wav"), code=3)
    assert len(out.splitlines()) == 2
    messages = [line for line in err.splitlines() if line.startswith("ngsgd: ")]
    assert len(messages) == 2 and "bad.wav" in messages[0] and "missing.wav" in messages[1]


@pytest.mark.entry("Sp13", "you transcribe a folder in which some files are not audio that is read, such as m4a", "works",
                   "the others are recognized, and the summary names the files that were not read, with the command of ffmpeg; an "
                   "m4a that you name is a `DataError` with it.")
def test_files_of_a_folder_that_were_not_read_are_named(
    model: str, audio: Path, command: Command
) -> None:
    (audio / "deep" / "c.m4a").write_bytes(OTHERS_BY_NAME["m4a"])
    (audio / ".hidden").write_text("")
    out, err = command("transcribe", model, str(audio))
    assert len(out.splitlines()) == 2
    [line] = [line for line in err.splitlines() if "ffmpeg" in line]
    assert "c.m4a" in line and "notes.txt" in line and ".hidden" not in line
    assert "ffmpeg" in command("transcribe", model, str(audio / "deep" / "c.m4a"), code=3).err
    for path in (*audio.glob("*.wav"), *audio.glob("deep/*.flac")):
        path.unlink()
    assert "ffmpeg" in command("transcribe", model, str(audio), code=3).err


def test_forms(model: str, audio: Path, command: Command) -> None:
    one = ("transcribe", model, str(audio / "a.wav"), "--format")
    tree = json.loads(command(*one, "json", "--nbest", "2").out)
    assert tree["text"].split() == WORDS and len(tree["segments"][0]["hypotheses"]) <= 2
    found = [line.split() for line in command(*one, "ctm").out.splitlines()]
    assert [line[4] for line in found] == WORDS and {line[0] for line in found} == {"a"}
    assert command(*one, "srt").out.startswith("1\n")


def test_a_folder_of_results(model: str, audio: Path, tmp_path: Path, command: Command) -> None:
    words = ("transcribe", model, str(audio), "--format", "srt", "--output", str(tmp_path / "out"))
    assert command(*words).out == ""
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.srt", "b.srt"]


@pytest.mark.parametrize(
    "arguments",
    [["-", "a.wav"], ["a.wav", "--sample-rate", "8000"], ["a.wav", "--nbest", "0"],
     ["a.wav", "--processes", "-1"], ["a.wav", "deep/b.flac", "--format", "srt"],
     ["a.wav", "deep/a.wav", "--output", "out"], []],
)
def test_wrong_arguments_are_one_message(model: str, audio: Path, arguments: list[str],
                                         monkeypatch: pytest.MonkeyPatch,
                                         command: Command) -> None:
    monkeypatch.chdir(audio)
    assert len(command("transcribe", model, *arguments, code=2).err.splitlines()) == 1


def test_places_without_audio_and_invalid_models(model: str, audio: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    recording = str(audio / "a.wav")
    for words, code in (((model, str(tmp_path / "empty")), 3), ((model, str(tmp_path / "*.wav")), 3),
                        ((recording, recording), 6), ((str(tmp_path / "nothing"), recording), 2)):
        assert main(["transcribe", *words]) == code


class _Stdin:
    """Instead of sys.stdin."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BufferedReader(Pipe(content, 1000))


def wav_bytes(samples: np.ndarray, rate_hz: int, subtype: str = "PCM_16", container: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format=container, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(("content", "options"), [
     (tiny_recognizer.say(WORDS).tobytes(), []),
     (tiny_recognizer.say(WORDS, rate_hz=16000).tobytes(), ["--sample-rate", "16000"]),
     (wav_bytes(tiny_recognizer.say(WORDS, rate_hz=16000), 16000), []),
     (wav_bytes(tiny_recognizer.say(WORDS), 8000, "PCM_U8"), []),
     (wav_bytes(tiny_recognizer.say(WORDS), 8000, "PCM_24"), []),
     (wav_bytes(tiny_recognizer.say(WORDS, rate_hz=16000), 16000, "PCM_16", "FLAC"), []),
     (wav_bytes(tiny_recognizer.say(WORDS), 8000, "VORBIS", "OGG"), []),
     (wav_bytes(tiny_recognizer.say(WORDS), 8000, "ULAW", "AU"), [])],
    ids=["raw", "raw 16000", "wav", "8 bit", "24 bit", "flac", "ogg", "au"])
@pytest.mark.entry("Sp5")
def test_a_stream(model: str, content: bytes, options: list[str], monkeypatch: pytest.MonkeyPatch,
                  command: Command) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(content))
    assert command("transcribe", model, "-", *options).out.split() == WORDS


@pytest.mark.parametrize(
    "content", [b"", b"RIFF", wav_bytes(np.zeros(0, np.int16), 8000), b"RIFF" + bytes(range(100)), OTHERS_BY_NAME["m4a"],
                OTHERS_BY_NAME["html"], wav_bytes(tiny_recognizer.say(WORDS), 8000, "PCM_16", "FLAC")[:-2000]]
)
@pytest.mark.entry("Sp5")
def test_a_stream_that_is_no_audio_is_one_message(
    model: str, content: bytes, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setattr(sys, "stdin", _Stdin(content))
    assert len(command("transcribe", model, "-", code=3).err.splitlines()) == 1


@pytest.mark.end_to_end
def test_several_processes_give_the_same_in_the_same_order(
    model: str, audio: Path, command: Command
) -> None:
    (audio / "bad.wav").write_bytes(b"RIFF")
    arguments = ["transcribe", model, str(audio), "--format", "json", "-q"]
    alone = command(*arguments, code=3)
    assert command(*arguments, "--processes", "2", code=3) == alone
