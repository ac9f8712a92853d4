"""Strings of connected digits spliced from the Free Spoken Digit Dataset, with noise.

A string is 3 to 7 recordings of one speaker with pauses between them. Its labels are those of the
alignment of the recordings; pauses are silence. Synthetic digits may be mixed with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ngsgd.asr.corpora.digits import labels
from ngsgd.asr.corpora.fsdd.segments import Segment
from ngsgd.asr.features import noise
from ngsgd.asr.features.noise import FisherSample
from ngsgd.asr.lang.topology import SILENCE_PDF, Topology
from ngsgd.asr.utterance import (
    FRAME_SHIFT,
    SAMPLE_RATE_HZ,
    PdfIds,
    Samples,
    Utterance,
    frame_centers,
    spread_to_samples,
)
from ngsgd.config import DataConfig

NUM_WORDS = (3, 7)
PAUSE_MS = (0, 150)
EDGE_SILENCE_MS = (50, 250)
# maximum random change of the level of each recording, dB
LEVEL_DB = 3.0
BABBLE_VOICES = 5
NOISES = (*noise.COLOURS, "babble")
SETS = ("train", "valid", "test")
# phones of the synthesizer -> phones of FSDD; accents differ in the vowels of one and four and in
# the first sound of three
_PHONES = """
z=Z i@=IH r=R oU=OW w=W V=AH 0=AH n=N t=T u:=UW T=TH t[=TH i:=IY f=F o@=AO O@=AO aI=AY v=V s=S
I=IH k=K E=EH @=AH eI=EY
"""
PHONES = dict(pair.split("=") for pair in _PHONES.split())


@dataclass(frozen=True)
class Pool:
    """Recordings of one set."""

    segments: tuple[Segment, ...]
    # background voices from the training set; never the speaker of the string
    babble: tuple[Segment, ...]
    samples: Mapping[str, Samples]  # by utt_id
    pdf_T: Mapping[str, PdfIds]     # by utt_id


def utterances(set_name: str, data: DataConfig, pool: Pool, *, minutes: float,
               is_clean: Callable[[str], bool] = lambda _utt_id: False) -> Iterator[Utterance]:
    """Yield strings up to a total of `minutes`; those with `is_clean` have no noise."""
    rng = np.random.default_rng([0, SETS.index(set_name)])
    speakers = sorted({segment.speaker for segment in pool.segments})
    decks = {speaker: draw_recordings(pool, speaker, rng) for speaker in speakers}
    index, made_s = 0, 0.0
    while made_s < 60 * minutes:
        speaker = str(rng.choice(list(decks)))
        segments = [next(decks[speaker]) for _ in range(int(rng.integers(*NUM_WORDS, endpoint=True)))]
        utt_id = f"{speaker}-{set_name}-{index:06d}"
        utterance = splice_string(utt_id, segments, pool, data, rng, is_clean=is_clean(utt_id))
        yield utterance
        index, made_s = index + 1, made_s + len(utterance.samples) / SAMPLE_RATE_HZ


def recordings(pool: Pool) -> Iterator[Utterance]:
    """Yield the unmodified recordings, one word each."""
    for segment in pool.segments:
        yield Utterance(segment.utt_id, segment.speaker, (segment.word,), pool.samples[segment.utt_id], pool.pdf_T[segment.utt_id])


def draw_recordings(pool: Pool, speaker: str, rng: np.random.Generator) -> Iterator[Segment]:
    """Yield recordings of the speaker forever, in random order; each is used once per round."""
    own = [segment for segment in pool.segments if segment.speaker == speaker]
    while True:
        yield from (own[i] for i in rng.permutation(len(own)))


def splice_string(utt_id: str, segments: Sequence[Segment], pool: Pool, data: DataConfig, rng: np.random.Generator,
                  *, is_clean: bool = False) -> Utterance:
    starts, num_samples = lay_out_segments(segments, rng)
    speech = np.zeros(num_samples)
    pdf_T = np.full(len(frame_centers(num_samples)), SILENCE_PDF, dtype=np.int32)
    for start, segment in zip(starts, segments, strict=True):
        gain = 10 ** (rng.uniform(-LEVEL_DB, LEVEL_DB) / 20)
        speech[start:start + segment.num_samples] = gain * pool.samples[segment.utt_id]
        # frames are off by at most 5 ms
        own_T = pool.pdf_T[segment.utt_id]
        own_frame_T = (frame_centers(num_samples) - start) // FRAME_SHIFT
        inside_T = (own_frame_T >= 0) & (own_frame_T < len(own_T))
        pdf_T[inside_T] = own_T[own_frame_T[inside_T]]
    background = background_noise(str(rng.choice(NOISES)), num_samples, pool, segments[0].speaker, rng)
    snr_db = float(rng.uniform(data.snr_db_low, data.snr_db_high))
    samples = noise.mix(speech, background, snr_db=np.inf if is_clean else snr_db,
                        is_speech=spread_to_samples(pdf_T != SILENCE_PDF, num_samples))
    return Utterance(utt_id=utt_id, speaker=segments[0].speaker, words=tuple(segment.word for segment in segments),
                     samples=samples, pdf_T=pdf_T)


def lay_out_segments(segments: Sequence[Segment], rng: np.random.Generator) -> tuple[list[int], int]:
    """Return the first sample of each recording, and the length of the string."""
    position = _draw_samples(rng, EDGE_SILENCE_MS)
    starts = []
    for segment in segments:
        starts.append(position)
        position += segment.num_samples + _draw_samples(rng, PAUSE_MS)
    return starts, position + _draw_samples(rng, EDGE_SILENCE_MS)


def background_noise(colour: str, num_samples: int, pool: Pool, speaker: str,
                     rng: np.random.Generator) -> FisherSample:
    if colour != "babble":
        return noise.COLOURS[colour](num_samples, rng)
    others = [segment for segment in pool.babble if segment.speaker != speaker]
    total = np.zeros(num_samples)
    for _ in range(BABBLE_VOICES):
        # concatenated recordings of equal loudness
        pieces: list[FisherSample] = []
        while sum(map(len, pieces)) < num_samples:
            utt_id = others[int(rng.integers(len(others)))].utt_id
            samples = pool.samples[utt_id].astype(np.float64)
            pieces.append(samples / np.sqrt(np.mean(samples ** 2)))
        total = np.concatenate(pieces)[:num_samples] + total
    return total


def _draw_samples(rng: np.random.Generator, bounds_ms: tuple[int, int]) -> int:
    return int(rng.integers(*bounds_ms, endpoint=True)) * SAMPLE_RATE_HZ // 1000


# Synthetic digits ---------------------------------------------------------------------------------


def with_pronunciations(topology: Topology) -> Topology:
    """Return the topology of FSDD with those pronunciations that it lacks: four without r."""
    lexicon = dict(topology.lexicon)
    for word, pronunciations in lexicon.items():
        spoken = (tuple(PHONES[phone] for phone in one) for one in labels.TOPOLOGY.lexicon[word])
        lexicon[word] = tuple(dict.fromkeys((*pronunciations, *spoken)))
    return replace(topology, lexicon=lexicon)


def relabeled(utterances: Iterable[Utterance], topology: Topology) -> Iterator[Utterance]:
    """Yield synthetic digits with the HMM states of `topology`."""
    synthetic = labels.TOPOLOGY
    pdf_of = np.zeros(synthetic.num_pdfs, dtype=np.int32)
    pdf_of[list(synthetic.silence_pdfs)] = topology.silence_pdfs
    for phone, name in PHONES.items():
        pdf_of[list(synthetic.pdfs_of_phone(phone))] = topology.pdfs_of_phone(name)
    for utterance in utterances:
        yield replace(utterance, pdf_T=pdf_of[utterance.pdf_T])
