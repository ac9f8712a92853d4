from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from ngsgd.asr.corpora import digits
from ngsgd.asr.corpora.digits import Phoneme, Sentence, SynthesizedUtterance
from ngsgd.asr.features import filterbank
from ngsgd.asr.lang.topology import SILENCE_PDF
from ngsgd.asr.utterance import Utterance
from ngsgd.config import DataConfig, FeatureConfig
from ngsgd.errors import DataError

pytest.importorskip("espeakng_loader")
pytest.importorskip("soxr")

SENTENCE = Sentence(text="one two three", voice="gmw/en-US+f2", rate=170, pitch=50, range=50, word_gap=5)


def same(left: Sequence[Utterance], right: Sequence[Utterance]) -> bool:
    return len(left) == len(right) and all(
        a.utt_id == b.utt_id and a.words == b.words and np.array_equal(a.samples, b.samples) and np.array_equal(a.pdf_T, b.pdf_T)
        for a, b in zip(left, right, strict=True))


def test_corpus_is_bit_identical_however_many_shards_are_spoken_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "SENTENCES_PER_SHARD", 4)
    made = [list(digits.utterances("train", DataConfig(), minutes=0.5, num_at_once=n)) for n in (1, 3)]
    assert len(made[0]) > 8
    assert same(*made)


def test_a_longer_plan_starts_with_the_shorter_one() -> None:
    short, long = (list(digits.plan("train", DataConfig(), minutes=minutes)) for minutes in (1, 3))
    assert long[:len(short)] == short


def test_minutes_are_as_requested_within_a_tenth() -> None:
    # 40 utterances whose length is expected with an error of 13 %: 3 standard errors are 7 %
    made = digits.utterances("train", DataConfig(), minutes=2.0, num_at_once=1)
    assert sum(len(utterance.samples) for utterance in made) / 8000 / 60 == pytest.approx(2.0, rel=0.1)


def test_plans_of_the_three_sets_differ_and_use_their_own_voices() -> None:
    names = [{name.rstrip("0123456789") if len(name.rstrip("0123456789")) > 1 else name
              for name in digits.VARIANTS[part]} for part in digits.SETS]
    assert len(set().union(*names)) == sum(map(len, names))
    for part in digits.SETS:
        voices = {planned.sentence.voice.split("+")[1] for planned in digits.plan(part, DataConfig(), minutes=5)}
        assert voices <= set(digits.VARIANTS[part])
    assert len({next(digits.plan(part, DataConfig(), minutes=1)).noise_seed for part in digits.SETS}) == 3


def test_every_voice_speaks_and_is_labelled() -> None:
    voices = [f"gmw/en-029+{variant}" for part in digits.SETS for variant in digits.VARIANTS[part]]
    words = ("two", "zero", "one", "four", "eight", "five", "three", "six", "seven", "nine")
    spoken = digits.speak([replace(SENTENCE, voice=voice, text=" ".join(words)) for voice in voices], seed=0)
    for voice, speech in zip(voices, spoken, strict=True):
        assert np.abs(speech.samples.astype(int)).max() > 1000, voice
        pdf_T = digits.label(speech, words, lead=0, num_samples=len(speech.samples) * 8000 // speech.sample_rate)
        assert len(np.unique(pdf_T)) > 40, voice


def test_labels_walk_through_one_pronunciation_of_each_word() -> None:
    (speech,) = digits.speak([SENTENCE], seed=0)
    pdf_T = digits.label(speech, ("one", "two", "three"), lead=1600, num_samples=20000)
    path = [int(pdf) for pdf in pdf_T[np.flatnonzero(np.diff(pdf_T, prepend=-1))] if pdf != SILENCE_PDF]
    spelt = [pdf for word, phones in (("one", "w V n"), ("two", "t u:"), ("three", "T r i:"))
             for phone in phones.split() for pdf in digits.TOPOLOGY.pdfs_of_phone(phone)]
    assert path == spelt
    assert (pdf_T[:20] == SILENCE_PDF).all()  # the lead


def test_thirds_of_a_phone_fall_on_the_frames_in_them() -> None:
    # at 8 kHz already: "two" with t from 800 to 1280 (6 frames) and u: from 1280 to 2000 (9
    # frames), 400 samples of lead
    phonemes = (Phoneme("_", 0, 0), Phoneme("t", 0, 800), Phoneme("'u:", 0, 1280), Phoneme("_:", 0, 2000))
    spoken = SynthesizedUtterance(samples=np.zeros(2400, np.int16), sample_rate=8000, phonemes=phonemes)
    pdf_T = digits.label(spoken, ["two"], lead=400, num_samples=3200)
    t, u = digits.TOPOLOGY.pdfs_of_phone("t"), digits.TOPOLOGY.pdfs_of_phone("u:")
    expected = [0] * 15 + [pdf for pdf in t for _ in range(2)] + [pdf for pdf in u for _ in range(3)] + [0] * 10
    assert pdf_T.tolist() == expected


@pytest.mark.slow
def test_labels_fit_the_audio_best_where_they_are() -> None:
    """Frames of one state are most alike in place; spec: one frame off is clearly worse."""
    config = FeatureConfig()
    data = DataConfig(snr_db_low=30.0, snr_db_high=30.0)
    made = list(digits.utterances("train", data, minutes=3.0, num_at_once=1))
    speech = [(filterbank.normalize([filterbank.extract(u.samples, config)], ["s"], config)[0], u.pdf_T) for u in made]
    cost = {shift: spread_within_states(speech, shift) for shift in (-2, -1, 0, 1, 2)}
    assert min(cost[-1], cost[1]) > cost[0] + 0.5
    assert min(cost[-2], cost[2]) > cost[0] + 2.0


def spread_within_states(speech: list[tuple[np.ndarray, np.ndarray]], shift: int) -> float:
    """Log variance of a state's features, over all frames; labels `shift` frames late."""
    inside = 3
    features_TD = np.concatenate([x_TD[inside + shift:len(x_TD) - inside + shift] for x_TD, _ in speech])
    pdf_T = np.concatenate([pdf_T[inside:-inside] for _, pdf_T in speech])
    cost = 0.0
    for pdf in np.unique(pdf_T):
        of_state = features_TD[pdf_T == pdf]
        if len(of_state) > 20:
            cost += len(of_state) * float(np.log(of_state.var(axis=0) + 1e-3).sum())
    return cost / len(pdf_T)


def test_a_shard_sounds_the_same_in_every_process() -> None:
    pairs = zip(*(digits.speak([SENTENCE, SENTENCE], seed=7) for _ in range(2)), strict=True)
    assert all(np.array_equal(one.samples, other.samples) and one.phonemes == other.phonemes
               for one, other in pairs)


def test_an_unknown_voice_and_speech_outside_the_lexicon_are_refused() -> None:
    with pytest.raises(DataError, match="'gmw/xx'"):
        digits.speak([replace(SENTENCE, voice="gmw/xx")], seed=0)
    (speech,) = digits.speak([replace(SENTENCE, text="oh")], seed=0)
    with pytest.raises(DataError, match="lexicon"):
        digits.label(speech, ["zero"], lead=0, num_samples=8000)


def test_every_spelling_is_reachable_and_lasts_as_long_as_its_states() -> None:
    topology = digits.TOPOLOGY
    used = {pdf for _, pdfs in topology.spellings() for pdf in pdfs}
    assert used == set(range(1, topology.num_pdfs))
    assert all(b != a for _, pdfs in topology.spellings() for a, b in pairwise(pdfs))
