"""The embedded corpus: connected digits, synthesized in many voices and accents, with noise.

All random choices depend on the seed alone, not on the number of parallel shards.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path

import numpy as np

from ngsgd import imports
from ngsgd.asr.features import augment
from ngsgd.asr.lang.topology import SILENCE_PDF, STATES_PER_PHONE, Pronunciation, Topology
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, PdfIds, Samples, Utterance, frame_centers, spread_to_samples
from ngsgd.config import DataConfig
from ngsgd.errors import DataError

WORKER = Path(__file__).with_name("synth_worker.py")
# a shard takes less than a second; the library has hung in the past
SHARD_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sentence:
    """Text and voice of an utterance, in the units of espeak-ng."""

    text: str
    voice: str  # a voice file, + and a variant of its timbre: gmw/en-US+Alex
    rate: int  # words per minute, 80 to 450
    pitch: int  # 0 to 100; 50 is the default of the voice
    range: int  # range of the pitch, 0 (monotone) to 100
    word_gap: int  # pause between words, in units of 10 ms


@dataclass(frozen=True)
class Phoneme:
    name: str
    word: int  # index of its word in the sentence
    start: int  # first sample


@dataclass(frozen=True)
class SynthesizedUtterance:
    samples: Samples
    sample_rate: int
    phonemes: tuple[Phoneme, ...]


def require() -> None:
    """Raise if the synthesizer cannot be started here."""
    imports.load("espeakng_loader", extra="synth", purpose="The embedded corpus, data.corpus=digits,")
    imports.load("soxr", extra="asr", purpose="The embedded corpus, data.corpus=digits,")


def speak(sentences: Sequence[Sentence], *, seed: int) -> list[SynthesizedUtterance]:
    """Synthesize the sentences in a new process; bitwise reproducible."""
    plan = {"seed": seed, "utterances": [asdict(sentence) for sentence in sentences]}
    # -P excludes this folder from the import path of the worker, and the file name avoids importing
    # `ngsgd`
    command = [sys.executable, "-P", str(WORKER)]
    try:
        done = subprocess.run(command, input=json.dumps(plan).encode(), capture_output=True, check=False,
                              timeout=SHARD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise DataError(f"The speech synthesizer did not answer within {SHARD_TIMEOUT_S:g} s; run "
                        "the command again.") from error
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise DataError(f"The speech synthesizer failed ({reason}); reinstall it with: pip install "
                        f"--force-reinstall espeakng-loader=={metadata.version('espeakng-loader')}")
    first_line, _, pcm = done.stdout.partition(b"\n")
    header = json.loads(first_line)
    samples = np.frombuffer(pcm, dtype="<i2")
    ends = np.cumsum([utterance["num_samples"] for utterance in header["utterances"]])
    assert ends[-1] == len(samples)
    found = []
    for piece, utterance in zip(np.split(samples, ends[:-1]), header["utterances"], strict=True):
        word, phonemes = -1, []
        for kind, start, name in utterance["events"]:
            if kind == "word":
                word += 1
            else:
                phonemes.append(Phoneme(name, word, start))
        found.append(SynthesizedUtterance(piece, header["sample_rate"], tuple(phonemes)))
    return found


_PHONES = "z i@ r oU w V 0 n t u: T t[ i: f o@ O@ aI v s I k E @ eI"
_LEXICON = {"zero": "z i@ r oU", "one": "w V n|w 0 n", "two": "t u:", "three": "T r i:|t[ r i:",
            "four": "f o@|f o@ r|f O@|f O@ r", "five": "f aI v", "six": "s I k s",
            "seven": "s E v @ n", "eight": "eI t", "nine": "n aI n"}
TOPOLOGY = Topology(tuple(_PHONES.split()), {
    word: tuple(tuple(one.split()) for one in all_.split("|")) for word, all_ in _LEXICON.items()})

STRESS_MARKS = "',%="
# a shorter diphthong, and the r that links to a following vowel
SAME_PHONE = {"aI2": "aI", "r-": "r"}
# an offglide before a vowel; its time is added to the previous phone
GLIDE = ";"
PAUSE = "_"


def label(spoken: SynthesizedUtterance, words: Sequence[str], *, lead: int, num_samples: int) -> PdfIds:
    """Return the pdf of each frame of an utterance with `num_samples` samples at 8 kHz, of which
    the first `lead` are silent.
    """
    phonemes = [phoneme for phoneme in spoken.phonemes if phoneme.name != GLIDE]
    said: list[Pronunciation] = [()] * len(words)
    for phoneme in phonemes:
        if not phoneme.name.startswith(PAUSE):
            said[phoneme.word] = (*said[phoneme.word], phone(phoneme.name))
    for word, phones in zip(words, said, strict=True):
        if phones not in TOPOLOGY.lexicon[word]:
            raise DataError(f"The synthesizer pronounced the word {word} as "
                            f"{' '.join(phones) or 'nothing'}, which the digits lexicon does not "
                            "contain; install the supported version: pip install 'ngsgd[synth]'")
    starts, pdfs = [0.0], [SILENCE_PDF]
    ends = [phoneme.start for phoneme in phonemes[1:]] + [len(spoken.samples)]
    for phoneme, end in zip(phonemes, ends, strict=True):
        states = (SILENCE_PDF,) * STATES_PER_PHONE
        if not phoneme.name.startswith(PAUSE):
            states = TOPOLOGY.pdfs_of_phone(phone(phoneme.name))
        for third, pdf in enumerate(states):
            starts.append(phoneme.start + (end - phoneme.start) * third / STATES_PER_PHONE)
            pdfs.append(pdf)
    starts.append(len(spoken.samples))
    pdfs.append(SILENCE_PDF)
    centres = (frame_centers(num_samples) - lead) * (spoken.sample_rate / SAMPLE_RATE_HZ)
    state_T = np.searchsorted(starts, centres, side="right") - 1
    return np.array(pdfs, dtype=np.int32)[np.maximum(state_T, 0)]


def phone(name: str) -> str:
    """Phone of the topology for the name of an espeak-ng phoneme."""
    plain = name.strip(STRESS_MARKS)
    return SAME_PHONE.get(plain, plain)


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
_ACCENTS = ("gmw/en-US gmw/en gmw/en-GB-scotland gmw/en-GB-x-rp gmw/en-GB-x-gbclan "
            "gmw/en-GB-x-gbcwmd gmw/en-029 gmw/en-US-nyc")
_VARIANTS = {
    "train": (
        "Alex Alicia Andrea Andy Denis Gene Gene2 Henrique Jacky Lee Marco Mario Mike mike2 Nguyen",
        "Reed RicishayMax RicishayMax2 Storm antonio benjamin caleb david ed edward edward2 f1 f2",
        "f3 grandma gustave iven iven2 iven3 iven4 john kaukovalta klatt klatt2 klatt3 m1 m3 m6 m7",
        "marcelo max michel norbert paul pedro robert sandro shelby steph steph2 steph3 travis",
        "victor zac"),
    "valid": ("Hugo aunty boris f5 m5 m8 miguel quincy",),
    "test": ("Annie Diogo Michael adam announcer belinda f4 grandpa ian linda m2 m4 pablo rob",)}
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
    noise_color: str
    noise_seed: int
    snr_db: float


def utterances(set_name: str, data: DataConfig, *, minutes: float, num_at_once: int,
               is_clean: Callable[[str], bool] = lambda _utt_id: False) -> Iterator[Utterance]:
    """Yield about `minutes` of audio in the order of the plan, with `num_at_once` parallel shards,
    and without noise where `is_clean` is true.
    """
    planned = [replace(one, snr_db=np.inf) if is_clean(one.utt_id) else one for one in plan(set_name, data, minutes=minutes)]
    shards = [planned[i:i + SENTENCES_PER_SHARD] for i in range(0, len(planned), SENTENCES_PER_SHARD)]
    rng = np.random.default_rng([0, SETS.index(set_name), 1])
    seeds = rng.integers(2**31, size=len(shards)).tolist()
    pool = ThreadPoolExecutor(num_at_once)
    try:
        for made in pool.map(make_shard, shards, seeds):
            yield from made
    finally:
        # after Ctrl-C nothing waits for shards, and garbage collection may close this in the pool
        pool.shutdown(wait=False, cancel_futures=True)


def plan(set_name: str, data: DataConfig, *, minutes: float) -> Iterator[PlannedUtterance]:
    """Yield utterances up to an expected length; the plan is a prefix of longer ones."""
    rng = np.random.default_rng([0, SETS.index(set_name), 0])
    index, planned_s = 0, 0.0
    while planned_s < 60 * minutes:
        yield (one := _plan_one(rng, f"{set_name}-{index:06d}", VARIANTS[set_name], data))
        index += 1
        per_word_s = RELATIVE_LENGTH * 60 / one.sentence.rate + one.sentence.word_gap / 100
        planned_s += len(one.words) * per_word_s + (one.lead_ms + one.tail_ms) / 1000


def make_shard(shard: Sequence[PlannedUtterance], seed: int) -> list[Utterance]:
    """Synthesize the utterances of a shard in a new process."""
    spoken = speak([planned.sentence for planned in shard], seed=seed)
    return [_make_utterance(planned, speech) for planned, speech in zip(shard, spoken, strict=True)]


def _plan_one(rng: np.random.Generator, utt_id: str, variants: Sequence[str], data: DataConfig) -> PlannedUtterance:
    words = tuple(rng.choice(TOPOLOGY.words, size=_draw(rng, NUM_WORDS)).tolist())
    accent, variant = str(rng.choice(ACCENTS)), str(rng.choice(variants))
    sentence = Sentence(" ".join(words), f"{accent}+{variant}", _draw(rng, WORDS_PER_MINUTE),
                        _draw(rng, PITCH), _draw(rng, PITCH_RANGE), _draw(rng, WORD_GAP))
    return PlannedUtterance(
        utt_id, f"{accent.removeprefix('gmw/')}+{variant}", words, sentence,
        lead_ms=_draw(rng, EDGE_SILENCE_MS), tail_ms=_draw(rng, EDGE_SILENCE_MS),
        noise_color=str(rng.choice(tuple(augment.COLORS))), noise_seed=int(rng.integers(2**31)),
        snr_db=float(rng.uniform(data.snr_db_low, data.snr_db_high)))


def _make_utterance(planned: PlannedUtterance, spoken: SynthesizedUtterance) -> Utterance:
    soxr = imports.load("soxr", extra="asr", purpose="Resampling the synthesized audio")
    speech = soxr.resample(spoken.samples.astype(np.float64), spoken.sample_rate, SAMPLE_RATE_HZ)
    lead, tail = (ms * SAMPLE_RATE_HZ // 1000 for ms in (planned.lead_ms, planned.tail_ms))
    padded = np.concatenate([np.zeros(lead), speech, np.zeros(tail)])
    pdf_T = label(spoken, planned.words, lead=lead, num_samples=len(padded))
    is_speech = spread_to_samples(pdf_T != SILENCE_PDF, len(padded))
    background = augment.COLORS[planned.noise_color](len(padded), np.random.default_rng(planned.noise_seed))
    samples = augment.mix(padded, background, snr_db=planned.snr_db, is_speech=is_speech)
    return Utterance(planned.utt_id, planned.speaker, planned.words, samples, pdf_T)


def _draw(rng: np.random.Generator, bounds: tuple[int, int]) -> int:
    return int(rng.integers(*bounds, endpoint=True))
