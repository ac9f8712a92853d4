"""Synthetic digits mixed with FSDD: phones and states, words, and the training set alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import groupby

import numpy as np

from ngsgd.asr.corpora import digits
from ngsgd.asr.corpora.fsdd import PHONES, load_catalog, relabeled, with_pronunciations
from ngsgd.asr.features import augment
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.utterance import Utterance
from ngsgd.config import AugmentConfig, DataConfig


def spoken(clean_fraction: float = 0.0) -> list[Utterance]:
    is_clean = partial(augment.is_clean, config=AugmentConfig(clean_fraction=clean_fraction))
    return list(digits.utterances("train", DataConfig(), minutes=0.5, num_at_once=1, is_clean=is_clean))


def phone_and_state(topology: Topology, pdf: int) -> tuple[str, int]:
    """The slow way: search all phones."""
    if pdf in topology.silence_pdfs:
        return "SIL", 0
    return next((phone, topology.pdfs_of_phone(phone).index(pdf)) for phone in topology.phones
                if pdf in topology.pdfs_of_phone(phone))


def words_of(topology: Topology, pdf_T: Sequence[int]) -> list[str]:
    """The words whose states a sequence of labels walks through, without silence."""
    states = [pdf for pdf, _ in groupby(int(pdf) for pdf in pdf_T) if pdf not in topology.silence_pdfs]
    found: list[str] = []
    while states:
        # the longest first: four is four with r
        word, pdfs = next((word, pdfs) for word, pdfs in sorted(topology.spellings(), key=lambda one: -len(one[1]))
                          if tuple(states[:len(pdfs)]) == pdfs)
        found.append(word)
        states = states[len(pdfs):]
    return found


def test_every_synthetic_phone_has_a_phone_of_fsdd() -> None:
    assert set(PHONES) == set(digits.TOPOLOGY.phones)
    assert set(PHONES.values()) == set(load_catalog().topology.phones)


def test_the_lexicon_gains_four_without_r_and_keeps_its_phones() -> None:
    before = load_catalog().topology
    after = with_pronunciations(before)
    assert after.phones == before.phones and after.words == before.words
    gained = {word: set(after.lexicon[word]) - set(before.lexicon[word]) for word in before.words}
    assert {word: phones for word, phones in gained.items() if phones} == {"four": {("F", "AO")}}
    assert all(after.lexicon[word][0] == before.lexicon[word][0] for word in before.words)


def test_labels_are_those_of_the_mapped_phones() -> None:
    topology = with_pronunciations(load_catalog().topology)
    made = spoken()
    for before, after in zip(made, relabeled(made, topology), strict=True):
        for old, new in zip(before.pdf_T, after.pdf_T, strict=True):
            phone, state = phone_and_state(digits.TOPOLOGY, int(old))
            assert phone_and_state(topology, int(new)) == (PHONES.get(phone, "SIL"), state)
        assert words_of(topology, after.pdf_T.tolist()) == list(after.words)
        assert np.array_equal(before.samples, after.samples)


def test_the_clean_fraction_of_synthetic_digits_has_no_noise_and_the_rest_is_unchanged() -> None:
    noisy, mixed, clean = spoken(0.0), spoken(0.5), spoken(1.0)
    assert [one.words for one in noisy] == [one.words for one in clean]
    kinds = []
    for a, b, c in zip(noisy, mixed, clean, strict=True):
        # silence at the start: without noise all zero
        assert not c.samples[:400].any() and a.samples[:400].any()
        kinds.append(np.array_equal(b.samples, c.samples))
        assert kinds[-1] or np.array_equal(b.samples, a.samples)
    assert True in kinds and False in kinds
