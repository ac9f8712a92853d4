"""The embedded corpus: connected digits, synthesized in many voices and accents, with noise.

All random choices are made first, from the seed alone, so the number of parallel shards does not
change the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from ngsgd.asr import extras
from ngsgd.asr.corpora.digits import labels, synthesis
from ngsgd.asr.corpora.digits.synthesis import Sentence, SynthesizedUtterance
from ngsgd.asr.corpora.digits.voices import ACCENTS, VARIANTS
from ngsgd.asr.features import noise
from ngsgd.asr.lang.topology import SILENCE_PDF
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, Utterance, spread_to_samples
from ngsgd.config import DataConfig

SENTENCES_PER_SHARD = 32
NUM_WORDS = (3, 7)
WORDS_PER_MINUTE = (110, 240)
PITCH, PITCH_RANGE = (25, 75), (30, 70)
WORD_GAP = (0, 15)           # units of 10 ms
EDGE_SILENCE_MS = (100, 300)
# ratio of the length of a digit to 60 / rate seconds: mean over these voices, accents and rates
RELATIVE_LENGTH = 0.97

SETS = ("train", "valid", "test")


@dataclass(frozen=True)
class PlannedUtterance:
    """All random choices for one utterance."""

    utt_id: str
    speaker: str
    words: tuple[str, ...]
    sentence: Sentence
    lead_ms: int
    tail_ms: int
    noise_colour: str
    noise_seed: int
    snr_db: float

    @property
    def expected_s(self) -> float:
        per_word_s = RELATIVE_LENGTH * 60 / self.sentence.rate + self.sentence.word_gap / 100
        return len(self.words) * per_word_s + (self.lead_ms + self.tail_ms) / 1000


def utterances(set_name: str, data: DataConfig, *, minutes: float, num_at_once: int,
               is_clean: Callable[[str], bool] = lambda _utt_id: False) -> Iterator[Utterance]:
    """Yield about `minutes` of audio in the order of the plan, with `num_at_once` parallel shards.

    Utterances for which `is_clean` is true have no noise.
    """
    planned = [replace(one, snr_db=np.inf) if is_clean(one.utt_id) else one
               for one in plan(set_name, data, minutes=minutes)]
    shards = [planned[i:i + SENTENCES_PER_SHARD] for i in range(0, len(planned), SENTENCES_PER_SHARD)]
    seeds = _rng(data, set_name, "synthesiser").integers(2**31, size=len(shards)).tolist()
    pool = ThreadPoolExecutor(num_at_once)
    try:
        for made in pool.map(make_shard, shards, seeds):
            yield from made
    finally:
        # after Ctrl-C the waiting shards must not be synthesized first
        pool.shutdown(cancel_futures=True)


def plan(set_name: str, data: DataConfig, *, minutes: float) -> Iterator[PlannedUtterance]:
    """Yield utterances until their expected length is `minutes`; plans are prefixes of longer
    ones.
    """
    rng = _rng(data, set_name, "plan")
    index, planned_s = 0, 0.0
    while planned_s < 60 * minutes:
        utterance = _plan_one(rng, f"{set_name}-{index:06d}", VARIANTS[set_name], data)
        yield utterance
        index, planned_s = index + 1, planned_s + utterance.expected_s


def make_shard(shard: Sequence[PlannedUtterance], seed: int) -> list[Utterance]:
    """Synthesize the utterances of a shard in a new process."""
    spoken = synthesis.speak([planned.sentence for planned in shard], seed=seed)
    return [_make_utterance(planned, speech) for planned, speech in zip(shard, spoken, strict=True)]


def _plan_one(rng: np.random.Generator, utt_id: str, variants: Sequence[str], data: DataConfig) -> PlannedUtterance:
    words = tuple(rng.choice(labels.TOPOLOGY.words, size=_draw(rng, NUM_WORDS)).tolist())
    accent, variant = str(rng.choice(ACCENTS)), str(rng.choice(variants))
    sentence = Sentence(
        text=" ".join(words), voice=f"{accent}+{variant}", rate=_draw(rng, WORDS_PER_MINUTE), pitch=_draw(rng, PITCH),
        range=_draw(rng, PITCH_RANGE), word_gap=_draw(rng, WORD_GAP),
    )
    return PlannedUtterance(
        utt_id=utt_id, speaker=f"{accent.removeprefix('gmw/')}+{variant}", words=words, sentence=sentence,
        lead_ms=_draw(rng, EDGE_SILENCE_MS), tail_ms=_draw(rng, EDGE_SILENCE_MS),
        noise_colour=str(rng.choice(tuple(noise.COLOURS))), noise_seed=int(rng.integers(2**31)),
        snr_db=float(rng.uniform(data.snr_db_low, data.snr_db_high)),
    )


def _make_utterance(planned: PlannedUtterance, spoken: SynthesizedUtterance) -> Utterance:
    soxr = extras.load("soxr", extra="asr", purpose="Resampling the synthesized audio")
    speech = soxr.resample(spoken.samples.astype(np.float64), spoken.sample_rate, SAMPLE_RATE_HZ)
    lead, tail = (ms * SAMPLE_RATE_HZ // 1000 for ms in (planned.lead_ms, planned.tail_ms))
    padded = np.concatenate([np.zeros(lead), speech, np.zeros(tail)])
    pdf_T = labels.label(spoken, planned.words, lead=lead, num_samples=len(padded))
    is_speech = spread_to_samples(pdf_T != SILENCE_PDF, len(padded))
    background = noise.COLOURS[planned.noise_colour](len(padded), np.random.default_rng(planned.noise_seed))
    samples = noise.mix(padded, background, snr_db=planned.snr_db, is_speech=is_speech)
    return Utterance(utt_id=planned.utt_id, speaker=planned.speaker, words=planned.words, samples=samples, pdf_T=pdf_T)


def _rng(data: DataConfig, set_name: str, purpose: str) -> np.random.Generator:
    return np.random.default_rng([0, SETS.index(set_name), ("plan", "synthesiser").index(purpose)])


def _draw(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return int(rng.integers(low, high, endpoint=True))
