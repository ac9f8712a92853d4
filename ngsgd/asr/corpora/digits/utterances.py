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

# A voice is an accent with a variant of espeak-ng, which changes the timbre. The sets share accents
# but no variant, and variants of one name (steph, steph2) stay in one set. Whispering, robotic and
# joke variants are excluded. Variants with the first or second formant outside 80-140 % of the
# default, a larger difference than between human speakers, are in the training set only.
_ACCENTS = ("gmw/en-US gmw/en gmw/en-GB-scotland gmw/en-GB-x-rp gmw/en-GB-x-gbclan gmw/en-GB-x-gbcwmd "
            "gmw/en-029 gmw/en-US-nyc")
_VARIANTS = {
    "train": ("Alex Alicia Andrea Andy Denis Gene Gene2 Henrique Jacky Lee Marco Mario Mike mike2 "
              "Nguyen Reed",
              "RicishayMax RicishayMax2 Storm antonio benjamin caleb david ed edward edward2 f1 f2 f3 "
              "grandma",
              "gustave iven iven2 iven3 iven4 john kaukovalta klatt klatt2 klatt3 m1 m3 m6 m7 marcelo "
              "max",
              "michel norbert paul pedro robert sandro shelby steph steph2 steph3 travis victor zac"),
    "valid": ("Hugo aunty boris f5 m5 m8 miguel quincy",),
    "test": ("Annie Diogo Michael adam announcer belinda f4 grandpa ian linda m2 m4 pablo rob",),
}
ACCENTS = tuple(_ACCENTS.split())
VARIANTS = {name: tuple(" ".join(listed).split()) for name, listed in _VARIANTS.items()}


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


def utterances(set_name: str, data: DataConfig, *, minutes: float, num_at_once: int,
               is_clean: Callable[[str], bool] = lambda _utt_id: False) -> Iterator[Utterance]:
    """Yield about `minutes` of audio in the order of the plan, with `num_at_once` parallel shards.

    Utterances for which `is_clean` is true have no noise.
    """
    planned = [replace(one, snr_db=np.inf) if is_clean(one.utt_id) else one
               for one in plan(set_name, data, minutes=minutes)]
    shards = [planned[i:i + SENTENCES_PER_SHARD] for i in range(0, len(planned), SENTENCES_PER_SHARD)]
    rng = np.random.default_rng([0, SETS.index(set_name), 1])
    seeds = rng.integers(2**31, size=len(shards)).tolist()
    pool = ThreadPoolExecutor(num_at_once)
    try:
        for made in pool.map(make_shard, shards, seeds):
            yield from made
    finally:
        # after Ctrl-C the waiting shards must not be synthesized first
        pool.shutdown(cancel_futures=True)


def plan(set_name: str, data: DataConfig, *, minutes: float) -> Iterator[PlannedUtterance]:
    """Yield utterances up to an expected length; the plan is a prefix of longer ones."""
    rng = np.random.default_rng([0, SETS.index(set_name), 0])
    index, planned_s = 0, 0.0
    while planned_s < 60 * minutes:
        one = _plan_one(rng, f"{set_name}-{index:06d}", VARIANTS[set_name], data)
        yield one
        index += 1
        per_word_s = RELATIVE_LENGTH * 60 / one.sentence.rate + one.sentence.word_gap / 100
        expected_s = len(one.words) * per_word_s + (one.lead_ms + one.tail_ms) / 1000
        planned_s += expected_s


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


def _draw(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    low, high = bounds
    return int(rng.integers(low, high, endpoint=True))
