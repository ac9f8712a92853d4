"""Catalog of the Free Spoken Digit Dataset, from the list and the alignment in the package.

Every recording is checked against the list, so the audio may come from any source.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

import numpy as np

from ngsgd.asr.corpora.alignments import Alignment
from ngsgd.asr.lang.topology import SILENCE_PDF, STATES_PER_PHONE, Topology
from ngsgd.asr.utterance import PdfIds, num_frames
from ngsgd.errors import DataError

SHIPPED = "corpora/fsdd"
# recordings 0 to 4 of each speaker and digit are never in the training set, by the rule of the data
# set
NUM_HELD_OUT = 5
# the two speakers with the highest error rate of a model of the others
TEST_SPEAKERS = ("george", "nicolas")


@dataclass(frozen=True)
class Segment:
    """One recording of one digit."""

    utt_id: str
    # its name in the data set
    file: str
    word: str
    speaker: str
    # 0 to 49, counted per speaker and digit
    index: int
    num_samples: int
    # first 16 hex digits of the SHA-256 of the samples as little-endian int16
    sha256_pcm: str


@dataclass(frozen=True)
class Catalogue:
    """All recordings, and the HMM state of each of their frames."""

    segments: tuple[Segment, ...]
    pdf_T: Mapping[str, PdfIds]  # by utt_id
    topology: Topology

    def realigned(self, alignment: Alignment) -> Catalogue:
        """Return the catalog with other labels, without unaligned recordings."""
        segments = tuple(segment for segment in self.segments if segment.utt_id in alignment.pdf_T)
        if not segments:
            raise DataError(f"{alignment.path} has no states for any recording of FSDD; use a file "
                            "of ngsgd align recipe=fsdd data.source=PATH --output FILE.")
        largest = max(int(pdf_T.max()) for pdf_T in alignment.pdf_T.values())
        if largest >= self.topology.num_pdfs:
            raise DataError(f"{alignment.path} has the state {largest}, but the phones of FSDD "
                            f"have {self.topology.num_pdfs} states, from 0; use a file of ngsgd "
                            "align recipe=fsdd data.source=PATH --output FILE.")
        pdf_T = {segment.utt_id: alignment.pdf_T[segment.utt_id] for segment in segments}
        _check_alignment(segments, pdf_T)
        return Catalogue(segments, pdf_T, self.topology)


def load_catalogue(folder: Traversable | None = None) -> Catalogue:
    """Load the catalog in `folder`; without one, the catalog of the 3000 public recordings."""
    folder = folder or resources.files("ngsgd.asr").joinpath(SHIPPED)
    with folder.joinpath("segments.csv").open(encoding="utf-8") as file:
        segments = tuple(Segment(row["utt_id"], row["file"], row["word"], row["speaker"],
                                 int(row["index"]), int(row["num_samples"]), row["sha256_pcm"])
                         for row in csv.DictReader(file))
    description = json.loads(folder.joinpath("ali.json").read_text(encoding="utf-8"))
    lexicon = {word: tuple(tuple(phones) for phones in all_)
               for word, all_ in description["lexicon"].items()}
    with folder.joinpath("ali.npz").open("rb") as packed, np.load(packed) as arrays:
        # the silence of the GMM has three states in a row; spliced strings cut silence anywhere, so
        # it has one state here
        state_N = arrays["pdf"].astype(np.int32)
        pdf_N = np.where(state_N < STATES_PER_PHONE, SILENCE_PDF,
                         state_N - STATES_PER_PHONE + 1).astype(np.int32)
        pieces = np.split(pdf_N, arrays["offsets"][1:-1])
        pdf_T = dict(zip(arrays["utt_ids"].tolist(), pieces, strict=True))
    _check_alignment(segments, pdf_T)
    return Catalogue(segments=segments, pdf_T=pdf_T,
                     topology=Topology(tuple(description["phones"][1:]), lexicon))


def split(segments: Sequence[Segment], kind: str, held_out: str = "") -> dict[str, tuple[Segment, ...]]:
    """Return the recordings of train, valid and test.

    Args:
        segments: all recordings.
        kind: "speaker": test is two speakers that are never trained on, valid the held-out
            recordings of the others. "official": test is the held-out recordings of all speakers,
            valid is index 5 to 9 of the official training part. "loo": test is the speaker
            `held_out`, valid the held-out recordings of the others.
        held_out: the test speaker of "loo".

    Raises:
        DataError: a set is empty, or `held_out` is not a speaker.
    """
    speakers = sorted({segment.speaker for segment in segments})
    if kind == "loo" and held_out not in speakers:
        raise DataError(f"data.held_out is {held_out!r}, which is not a speaker of FSDD; choose "
                        f"one of {', '.join(speakers)}.")
    test_speakers = (held_out,) if kind == "loo" else TEST_SPEAKERS
    sets: dict[str, list[Segment]] = {"train": [], "valid": [], "test": []}
    for segment in segments:
        by_index = ("test", "valid") if kind == "official" else ("valid",)
        block = segment.index // NUM_HELD_OUT
        name = by_index[block] if block < len(by_index) else "train"
        is_test = kind != "official" and segment.speaker in test_speakers
        sets["test" if is_test else name].append(segment)
    for name, members in sets.items():
        if not members:
            raise DataError(f"The {name} set of data.split={kind} is empty: none of the "
                            f"{len(segments)} recordings belongs to it; use the complete data set, "
                            "or another data.split.")
    return {name: tuple(members) for name, members in sets.items()}


def _check_alignment(segments: Sequence[Segment], pdf_T: Mapping[str, PdfIds]) -> None:
    for segment in segments:
        expected = num_frames(segment.num_samples)
        found = len(pdf_T.get(segment.utt_id, ()))
        if found != expected:
            raise DataError(f"The alignment has {found} frames for {segment.utt_id} "
                            f"({segment.file}), but its audio has {expected}; create it again with "
                            "ngsgd align recipe=fsdd data.source=PATH --output FILE.")
