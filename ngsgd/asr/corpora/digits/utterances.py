"""The embedded corpus: connected digits, spoken by a synthesiser in many voices and accents, with noise.

Everything is drawn first, from the seed alone; how many shards are spoken at once changes nothing.
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
# of a digit to the nominal 60 / rate seconds: mean over the voices, accents and rates here
RELATIVE_LENGTH = 0.97

SETS = ("train", "valid", "test")


@dataclass(frozen=True)
class PlannedUtterance:
    """All that is drawn for one utterance."""

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
    """About `minutes` of audio, in the order of the plan; `num_at_once` shards are spoken at a time.

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
        # after Ctrl-C the shards still waiting must not be spoken first
        pool.shutdown(cancel_futures=True)


def plan(set_name: str, data: DataConfig, *, minutes: float) -> Iterator[PlannedUtterance]:
    """Utterances until their expected length reaches `minutes`; a longer plan starts with the shorter one."""
    rng = _rng(data, set_name, "plan")
    index, planned_s = 0, 0.0
    while planned_s < 60 * minutes:
        utterance = _plan_one(rng, f"{set_name}-{index:06d}", VARIANTS[set_name], data)
        yield utterance
        index, planned_s = index + 1, planned_s + utterance.expected_s


def make_shard(shard: Sequence[PlannedUtterance], seed: int) -> list[Utterance]:
    """The shard's utterances, spoken by one new process."""
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
    soxr = extras.load("soxr", extra="asr", purpose="Resampling the synthesiser's audio")
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
