"""A stand-in for the Free Spoken Digit Dataset: recordings, their list and their alignment."""

from __future__ import annotations

import csv
import hashlib
import json
import tarfile
import wave
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd.asr.corpora.fsdd import Segment
from ngsgd.asr.utterance import num_frames

SPEAKERS = ("george", "jackson", "nicolas", "theo")
WORDS = ("zero", "one")
NUM_INDICES = 12
PHONES = ("SIL", "Z", "W")


class FakeFsdd:
    """A folder with recordings/, and a folder with what ships in the package."""

    def __init__(self, root: Path) -> None:
        self.source = root / "fsdd"
        self.shipped = root / "shipped"
        self.recordings = self.source / "recordings"
        self.recordings.mkdir(parents=True)
        self.shipped.mkdir()
        rng = np.random.default_rng(0)
        self.segments = [self._record(speaker, digit, index, rng)
                         for speaker in SPEAKERS for digit in range(len(WORDS)) for index in range(NUM_INDICES)]
        self.write_list(self.segments)
        self.write_alignment(0)

    def write_list(self, segments: list[Segment]) -> None:
        with (self.shipped / "segments.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([field.name for field in fields(Segment)])
            writer.writerows(map(astuple, segments))

    def write_alignment(self, num_surplus_frames: int) -> None:
        """Silence, the three states of the digit's one phone, silence; in the GMM's numbering."""
        pieces = []
        for segment in self.segments:
            first = 3 + 3 * WORDS.index(segment.word)
            states = np.array([0, 1, first, first + 1, first + 2, 2], dtype=np.uint8)
            length = num_frames(segment.num_samples) + num_surplus_frames
            pieces.append(states[np.arange(length) * len(states) // length])
        np.savez(self.shipped / "ali.npz", pdf=np.concatenate(pieces), utt_ids=[s.utt_id for s in self.segments],
                 offsets=np.cumsum([0, *map(len, pieces)]))
        lexicon = {word: [[phone]] for word, phone in zip(WORDS, PHONES[1:], strict=True)}
        (self.shipped / "ali.json").write_text(json.dumps({"phones": PHONES, "lexicon": lexicon}))

    def pack(self, archive: Path) -> Path:
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(self.recordings, arcname="free-spoken-digit-dataset/recordings")
        return archive

    def _record(self, speaker: str, digit: int, index: int, rng: np.random.Generator) -> Segment:
        num_samples = int(rng.integers(1200, 4000))
        samples = rng.integers(-3000, 3000, num_samples).astype("<i2")
        name = f"{digit}_{speaker}_{index}.wav"
        write_wav(self.recordings / name, samples)
        return Segment(utt_id=f"{speaker}-{digit}-{index:02d}", file=name, word=WORDS[digit], speaker=speaker, index=index,
                       num_samples=num_samples, sha256_pcm=hashlib.sha256(samples.tobytes()).hexdigest()[:16])


def write_wav(path: Path, samples: npt.ArrayLike, *, channels: int = 1, rate_hz: int = 8000, width: int = 2) -> Path:
    content = np.asarray(samples, "<i2" if width == 2 else "u1")
    path.parent.mkdir(exist_ok=True)
    with wave.open(str(path), "wb") as wav:
        wav.setparams((channels, width, rate_hz, len(content), "NONE", "not compressed"))
        wav.writeframes(content.tobytes())
    return path
