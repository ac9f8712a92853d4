"""Transcription of recordings in this process or in several."""

from __future__ import annotations

import glob
import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ngsgd.asr.bundle import Bundle
from ngsgd.asr.recognizer import Recognizer
from ngsgd.asr.recording import SUFFIXES
from ngsgd.asr.transcript import Transcript
from ngsgd.errors import DataError, NgsgdError
from ngsgd.interface import option


@dataclass(frozen=True)
class Outcome:
    """The transcript of a recording, or the message of its failure."""

    audio: Path
    transcript: Transcript | None
    error: str = ""


def find_audio(names: Sequence[str]) -> tuple[list[Path], list[Path]]:
    """Return the audio files of names, folders and patterns, and other files of the folders.

    A folder is searched recursively, in order of the names; hidden other files are omitted.
    """
    found: list[Path] = []
    others: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(one for one in path.rglob("*") if one.is_file())
            audio = [one for one in inside if one.suffix.lower() in SUFFIXES]
            if not audio:
                raise DataError(f"{path} contains no audio file ({' '.join(SUFFIXES)}); choose "
                                "another folder, name the files, or convert them: ffmpeg -i INPUT -ac 1 OUTPUT.wav")
            found += audio
            is_audio = set(audio)
            others += [one for one in inside if one not in is_audio
                       and not any(part.startswith(".") for part in one.relative_to(path).parts)]
        elif not path.exists() and glob.has_magic(name):
            matching = sorted(Path(one) for one in glob.glob(name, recursive=True) if Path(one).is_file())
            if not matching:
                raise DataError(f"no file matches {name}; correct the pattern.")
            found += matching
        else:
            found.append(path)
    return found, others


def transcribe_all(recognizer: Recognizer, audio: Sequence[Path], *, num_best: int = 1,
                   num_processes: int = 1, trust: bool = False) -> Iterator[Outcome]:
    """Recognize recordings, in order; a failed one has a message instead of a transcript.

    Each of `num_processes` processes loads the model, with `trust` also the module of a custom
    network, and computes with one thread.
    """
    if min(num_processes, len(audio)) <= 1:
        for path in audio:
            yield _outcome(recognizer, path, num_best)
        return
    words = {name: getattr(recognizer.bundle, name) for name in _OF_WORDS}
    pool = ProcessPoolExecutor(min(num_processes, len(audio)), multiprocessing.get_context("spawn"),
                               _begin, (recognizer.bundle.path, trust, num_best, words))
    try:
        yield from pool.map(_in_worker, audio)
    except BrokenProcessPool as error:
        raise DataError("a process that recognized recordings died, from lack of memory or on a "
                        f"damaged file; find the file with {option('processes', '1', 'num_processes')}.") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # an interrupted command does not wait for long recordings
        for process in multiprocessing.active_children():
            process.terminate()


def _outcome(recognizer: Recognizer, path: Path, num_best: int) -> Outcome:
    try:
        return Outcome(path, recognizer.transcribe(path, num_best=num_best))
    except NgsgdError as error:
        return Outcome(path, None, str(error))


_worker: tuple[Recognizer, int]
# attributes of a model that `Bundle.with_words` replaces
_OF_WORDS = ("language", "decode", "weights", "calibration")


def _begin(model: Path, trust: bool, num_best: int, words: Mapping[str, Any]) -> None:
    global _worker  # noqa: PLW0603 - the state of a worker process
    # Ctrl-C ends the workers without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    _worker = Recognizer(replace(Bundle.load(model, trust=trust), **words)), num_best


def _in_worker(path: Path) -> Outcome:
    recognizer, num_best = _worker
    return _outcome(recognizer, path, num_best)
