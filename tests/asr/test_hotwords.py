"""Hotwords: costs of all word sequences, recognition, new words for a language model, and files."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.asr.corpora.digits import TOPOLOGY
from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import arpa, grammar, graphs, openfst, vocabulary
from ngsgd.asr.lang.hotwords import BONUS_PER_WORD, Hotwords
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import DataError
from tests.asr import test_context
from tests.asr.decode.test_decoding import spell, words_of
from tests.asr.test_vocabulary import ARPA, DIGITS, PAIRS, write

pytest.importorskip("kaldi_decoder")
LABELS = {"one": 1, "two": 2, "three": 3}
MODEL = ("\\data\\\nngram 1=5\nngram 2=2\n\n\\1-grams:\n-99 <s> -0.3\n-0.6 </s>\n-0.7 one -0.2\n-0.9 two\n-0.8 three -0.1\n\n"
         "\\2-grams:\n-0.2 <s> one\n-0.3 one three\n\n\\end\\\n")


def cost(acceptor: Any, labels: tuple[int, ...]) -> float:
    """Of the best path of a sequence of words; the last label is that of back-off."""
    kaldifst, backoff = openfst.toolkit(), len(LABELS) + 1
    states = {(acceptor.start, 0): 0.0}
    todo = [*states]
    while todo:
        state, at = todo.pop(0)
        for arc in kaldifst.ArcIterator(acceptor, state):
            moves = arc.ilabel not in (0, backoff)
            if moves and (at == len(labels) or arc.ilabel != labels[at]):
                continue
            target, total = (arc.nextstate, at + moves), states[state, at] + arc.weight.value
            if total < states.get(target, math.inf) - 1e-9:
                states[target] = total
                todo.append(target)
    ends = ((state, total) for (state, at), total in states.items() if at == len(labels))
    return min((total + acceptor.final(state).value for state, total in ends), default=math.inf)


def acceptors(tmp_path: Path) -> dict[str, Any]:
    rules = grammar.read(write(tmp_path / "rules", "<a> = one [two] (three | one)*;"))
    return {"language model": arpa.acceptor(MODEL, LABELS), "grammar": rules.acceptor(LABELS)}


@pytest.mark.parametrize("seed", range(6))
def test_a_path_costs_less_by_the_bonus_of_each_occurrence(seed: int, tmp_path: Path) -> None:
    """Of overlapping, nested and repeated phrases; the reference counts the occurrences."""
    rng = random.Random(seed)
    bonuses = {tuple(rng.choices([*LABELS], k=rng.randint(1, 4))): rng.uniform(0.5, 9.0) for _ in range(rng.randint(1, 5))}
    hot = Hotwords(bonuses)
    changed = 0
    for name, acceptor in acceptors(tmp_path).items():
        boosted = hot.apply(acceptor, LABELS)
        for length in range(5):
            for words in itertools.product(LABELS, repeat=length):
                labels = tuple(LABELS[word] for word in words)
                counts = {phrase: sum(words[at:at + len(phrase)] == phrase for at in range(length)) for phrase in bonuses}
                before, bonus = cost(acceptor, labels), sum(bonuses[phrase] * count for phrase, count in counts.items())
                # weights of the tools are float32
                assert cost(boosted, labels) == pytest.approx(before - bonus, abs=1e-4), (name, words)
                changed += bonus > 0.0 and before < math.inf
    assert changed


def recognized(language: Language, spoken: list[str], noise: float) -> list[str]:
    """The words for weak evidence of the spoken words."""
    graph = graphs.build(language, silence_prob=0.0)
    return list(words_of(graph, noise * spell(TOPOLOGY, spoken, frames_per_state=3), beam=1000.0))


def test_a_hotword_is_recognized_where_the_evidence_is_weak(tmp_path: Path) -> None:
    text = MODEL.replace("-0.9 two", "-6.0 two")
    lm, phrases = write(tmp_path / "lm", text), write(tmp_path / "hot", "two :14\n")
    plain, hot = (vocabulary.of_model(DIGITS, Vocabulary(arpa=lm, hotwords=one), lambda _: None) for one in (None, phrases))
    found = [(recognized(plain, ["two"], noise), recognized(hot, ["two"], noise)) for noise in (0.02, 0.05, 0.1, 0.2, 1.0)]
    assert all(hotter == ["two"] for one, hotter in found if one == ["two"])
    assert any(one != hotter == ["two"] for one, hotter in found)


@pytest.mark.parametrize(("width", "silence_prob"), [(0, 0.0), (0, 0.5), (2, 0.5), (3, 0.5)])
def test_a_decoding_graph_costs_less_by_the_bonus(width: int, silence_prob: float) -> None:
    """With untied and tied states; the phrase also begins where it does not end."""
    plain = test_context.language(width) if width else Language(replace(test_context.language().topology))
    pdf_T = np.random.default_rng(width).integers(0, plain.num_pdfs, 60)
    loglik_TP = np.full((60, plain.num_pdfs), -8.0, np.float32)
    loglik_TP[np.arange(60), pdf_T] = 0.0
    search = decoding.Search(1.0, 1000.0, 100_000)
    before = decoding.best_path(graphs.build(plain, silence_prob=silence_prob), loglik_TP, search)
    assert len(before.words) > 3
    phrase = before.words[1:3]
    bonuses = {phrase: 2.5, (*phrase, "c", "c"): 1.0, before.words[:1]: 0.5}
    hot = replace(plain, hotwords=Hotwords(bonuses))
    after = decoding.best_path(graphs.build(hot, silence_prob=silence_prob), loglik_TP, search)

    def bonus(words: tuple[str, ...]) -> float:
        return sum(bonuses[one] for at in range(len(words)) for one in bonuses if words[at:at + len(one)] == one)
    # the plain best path is one of those that the other graph has chosen from
    assert after.cost <= before.cost - bonus(before.words) + 1e-2
    assert after.cost >= before.cost - bonus(after.words) - 1e-2
    assert bonus(before.words) >= 3.0


def test_a_language_model_gets_the_hotwords_that_it_lacks(tmp_path: Path) -> None:
    reports: list[str] = []
    words = Vocabulary(arpa=write(tmp_path / "lm", ARPA), hotwords=write(tmp_path / "hot", "nine four :5\none\n"))
    language = vocabulary.of_model(DIGITS, words, reports.append)
    assert arpa.words(language.arpa) == {"one", "two", "nine", "four"}
    assert language.hotwords == Hotwords({("nine", "four"): 5.0, ("one",): BONUS_PER_WORD})
    assert not any("nine" in line or "four" in line for line in reports)
    graph = graphs.build(language, silence_prob=0.0)
    assert list(words_of(graph, spell(TOPOLOGY, ["nine", "four"], frames_per_state=3), beam=1000.0)) == ["nine", "four"]


def test_hotwords_are_part_of_a_model_and_stay_with_other_words(tmp_path: Path) -> None:
    language = vocabulary.of_model(DIGITS, Vocabulary(hotwords=write(tmp_path / "hot", "one two :0.25\nnine\n")))
    again = Language.from_json(language.to_json(), language.files())
    assert again == language
    assert again.hotwords
    kept = vocabulary.of_model(again, Vocabulary(words=write(tmp_path / "words", "one\ntwo\nnine\nsix\n")))
    assert kept.hotwords == again.hotwords
    assert set(kept.topology.words) == {"one", "two", "nine", "six"}


@pytest.mark.parametrize("text", ["", "one :", "one :x", "one :0", "one :-1", "one :101", "one :nan", ":3", "one two\none two :5",
                                  "eleven", "one : 3"])
def test_damaged_hotwords_are_one_error_with_their_place(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="hot"):
        vocabulary.of_model(DIGITS, Vocabulary(hotwords=write(tmp_path / "hot", text)))


def test_hotwords_outside_a_grammar_are_an_error(tmp_path: Path) -> None:
    words = Vocabulary(grammar=write(tmp_path / "rules", PAIRS), hotwords=write(tmp_path / "hot", "one seven\n"))
    with pytest.raises(DataError, match="seven"):
        vocabulary.of_model(DIGITS, words)
