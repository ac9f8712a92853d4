"""Decision trees over phones in context, graphs of tied states, and denominators from labels."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ngsgd.asr import denominators
from ngsgd.asr.align import tree_building
from ngsgd.asr.align.tree_building import ContextStats, build_tree, phone_questions
from ngsgd.asr.decode import decoding
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.context_tree import ContextTree
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Pronunciation, Topology
from ngsgd.config import ObjectiveConfig
from ngsgd.errors import ConfigError, DataError
from ngsgd.sequence.ngram import state_ngram
from tests.reference import context_tree as reference

NUM_PHONES, NUM_SILENCE_STATES = 5, 2
# a tree as Kaldi writes it: silence is phone 1, and phone 2 asks for its right and left neighbors
KALDI_TEXT = """ContextDependency 3 1 ToPdf TE 1 4 ( NULL TE -1 3 ( CE 0 CE 1 CE 2 ) SE -1 [ 0 ]
{ SE 2 [ 1 3 ]
{ CE 3 CE 4 } 
SE -1 [ 1 ]
{ SE 0 [ 0 2 ]
{ CE 5 SE 2 [ 2 ]
{ CE 6 CE 7 } 
} 
CE 8 } 
} 
TE -1 3 ( CE 9 CE 10 CE 9 ) ) EndContextDependency 
"""


def stats(seed: int, num_frames: int = 3000) -> ContextStats:
    """Random labels; features depend on the neighbors, so that questions gain."""
    rng = np.random.default_rng(seed)
    phones = rng.integers(1, NUM_PHONES + 1, num_frames // 3)
    phone_T, state_T = np.repeat(phones, 3), np.tile([0, 1, 2], num_frames // 3)
    state_T = np.where(phone_T == 1, np.minimum(state_T, 1), state_T)
    context_T4 = tree_building.contexts_of_frames(phone_T, state_T)
    means = rng.normal(size=(NUM_PHONES + 1, 3, 4))
    x_TD = sum(means[context_T4[:, key], key] for key in range(3)) + rng.normal(size=(len(phone_T), 4))
    return ContextStats.accumulate([(context_T4, x_TD)])


def tree(width: int = 3) -> ContextTree:
    return build_tree(stats(0), num_phones=NUM_PHONES, num_silence_states=NUM_SILENCE_STATES,
                      num_leaves=40, width=width, min_count=20.0)


@pytest.mark.parametrize(("seed", "width"), [(0, 3), (1, 3), (0, 2)])
def test_the_tree_is_that_of_a_search_over_all_splits(seed: int, width: int) -> None:
    given = stats(seed)
    questions = [frozenset(np.flatnonzero(row).tolist())
                 for row in phone_questions(given, NUM_PHONES)]
    expected = reference.grow(given, questions, num_phones=NUM_PHONES, num_leaves=30, min_count=20.0,
                              keys=(0, 2)[: width - 1])
    found = build_tree(given, num_phones=NUM_PHONES, num_silence_states=NUM_SILENCE_STATES,
                       num_leaves=30, width=width, min_count=20.0)
    # equal contexts share a pdf in one tree if and only if they do in the other
    pairs = {(found.pdf(window, state), expected(window, state))
             for *window, state in given.context_N4.tolist() if window[1] != 1}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}) == 28
    assert found.num_pdfs == 30


def test_every_question_is_a_cluster_of_the_two_that_are_closest() -> None:
    given = stats(2)
    found = [frozenset(np.flatnonzero(row[1:]) + 1) for row in phone_questions(given, NUM_PHONES)]
    assert found == reference.clusters(given, NUM_PHONES)


def test_trees_are_written_in_kaldis_text_form_and_read_back() -> None:
    made = tree()
    assert ContextTree.from_text(made.to_text()) == made
    kaldi = ContextTree.from_text(KALDI_TEXT)
    assert "".join(kaldi.to_text().split()) == "".join(KALDI_TEXT.split())


# Tree and transition model of one Kaldi system, as copy-tree and gmm-copy write them with
# --binary=false.  Phones 3 and 4 are one phone at two positions of a word, with shared roots.
# Phone 5 has one root for its three states.
KALDI_TREE = """ContextDependency 3 1 ToPdf SE 1 [ 1 2 ]
{ TE -1 3 ( CE 0 CE 1 CE 2 )
SE 1 [ 3 4 ]
{ TE -1 3 ( SE 0 [ 0 1 2 ]
{ CE 3 SE 1 [ 4 ]
{ CE 4 CE 5 }
}
SE 2 [ 3 4 ]
{ SE 0 [ 5 ]
{ CE 6 CE 7 }
CE 8 }
CE 9 )
SE -1 [ 0 ]
{ CE 10 SE 2 [ 0 1 2 5 ]
{ CE 11 CE 12 }
}
}
}
EndContextDependency
"""
KALDI_TRIPLES = """
1 0 0 1 1 1 1 2 2 2 0 0 2 1 1 2 2 2
3 0 3 3 0 5 3 1 6 3 1 7 3 1 8 3 2 9
4 0 3 4 0 4 4 1 6 4 1 7 4 1 8 4 2 9
5 0 10 5 1 11 5 1 12 5 2 11 5 2 12"""


def kaldis_pdf(left: int, center: int, right: int, state: int) -> int:
    """The questions of `KALDI_TREE`, from its text by hand."""
    if center in (1, 2):
        return state
    if center == 5:
        return 10 if state == 0 else 11 if right in (0, 1, 2, 5) else 12
    if state == 0:
        return 3 if left in (0, 1, 2) else 4 if center == 4 else 5
    if state == 2:
        return 9
    return 8 if right not in (3, 4) else 6 if left == 5 else 7


def test_a_kaldi_system_gives_its_pdfs_for_a_thousand_random_triphones() -> None:
    kaldi, rng = ContextTree.from_text(KALDI_TREE), np.random.default_rng(0)
    # phone, HMM state and pdf of every state of the model
    triples = {tuple(row) for row in np.array(KALDI_TRIPLES.split(), int).reshape(-1, 3).tolist()}
    for _ in range(1000):
        left, right = rng.integers(0, 6, 2).tolist()
        center, state = int(rng.integers(1, 6)), int(rng.integers(0, 3))
        found = kaldi.pdf((left, center, right), state)
        assert found == kaldis_pdf(left, center, right, state)
        assert (center, state, found) in triples
    assert {(phone, state, pdf) for phone in range(1, 6) for state in range(3)
            for pdf in kaldi.pdfs(phone, state)} == triples


def test_a_phone_that_the_tree_lacks_is_an_error() -> None:
    with pytest.raises(DataError):
        ContextTree.from_text(KALDI_TEXT).pdf((1, 4, 1), 0)


@pytest.mark.parametrize("at", range(0, len(KALDI_TEXT.split()), 3))
def test_damaged_texts_are_errors(at: int) -> None:
    tokens = KALDI_TEXT.split()
    for damaged in (tokens[:at], [*tokens[:at], "x", *tokens[at + 1 :]]):
        with pytest.raises(DataError):
            ContextTree.from_text(" ".join(damaged))


def test_contexts_of_frames_join_silence_and_part_repeated_phones() -> None:
    # two silence states, then phone 2 twice
    path_T = [0, 1, 0, 2, 3, 4, 2, 3, 4]
    phone_T, state_T = tree_building.phones_and_states(path_T, NUM_SILENCE_STATES)
    windows = [[0, 1, 2]] * 3 + [[1, 2, 2]] * 3 + [[2, 2, 0]] * 3
    states = [0, 1, 0, 0, 1, 2, 0, 1, 2]
    expected = [[*window, state] for window, state in zip(windows, states, strict=True)]
    assert tree_building.contexts_of_frames(phone_T, state_T).tolist() == expected


LEXICON: dict[str, tuple[Pronunciation, ...]] = {
    "ab": (("a", "b"),), "ba": (("b", "a"), ("b",)), "b": (("b",),), "c": (("c", "d", "a"),)}


def language(width: int = 3) -> Language:
    return Language(Topology(("a", "b", "c", "d"), LEXICON, NUM_SILENCE_STATES), tree=tree(width))


def path_of(spoken: list[str], language: Language) -> list[int]:
    """The pdfs of phones with silence around them, each twice."""
    phones = [0, *(1 + ("SIL", "a", "b", "c", "d").index(phone) for phone in spoken), 0]
    assert language.tree is not None
    return [language.tree.pdf(phones[at - 1 : at + 2], state) for at in range(1, len(phones) - 1)
            for state in range(NUM_SILENCE_STATES if phones[at] == 1 else 3) for _ in range(2)]


@pytest.mark.parametrize("width", [2, 3])
@pytest.mark.parametrize(("words", "spoken"), [
    (["ab", "c"], ["SIL", "a", "b", "c", "d", "a", "SIL"]),
    (["c", "ba", "ab"], ["c", "d", "a", "SIL", "b", "a", "a", "b"]), (["b"], ["b"])])
def test_graphs_of_tied_states_accept_the_states_of_words_in_context(
        words: list[str], spoken: list[str], width: int) -> None:
    lang = language(width)
    pdf_T = path_of(spoken, lang)
    loglik_TP = np.full((len(pdf_T), lang.num_pdfs), -50.0, np.float32)
    loglik_TP[np.arange(len(pdf_T)), pdf_T] = 0.0
    of_words = graphs.of_transcript_in_context(lang, graphs.graphs_in_context(lang), words)
    for graph in (graphs.build(lang, silence_prob=0.5), of_words):
        path = decoding.best_path(graph, loglik_TP, decoding.Search(1.0, 1000.0, 10_000))
        assert path.is_complete
        assert path.pdf_T.tolist() == pdf_T
    assert list(path.words) == words
    assert (np.array(lang.phone_states())[path.pdf_T] < lang.topology.num_pdfs).all()


def test_a_tree_of_one_leaf_for_each_state_decodes_as_without_context() -> None:
    lang = language()
    roots = build_tree(stats(0), num_phones=NUM_PHONES, num_silence_states=NUM_SILENCE_STATES,
                       num_leaves=1)
    in_context = graphs.build(replace(lang, tree=roots), silence_prob=0.5)
    plain = graphs.build(replace(lang, tree=None), silence_prob=0.5)
    assert roots.num_pdfs == lang.topology.num_pdfs
    rng = np.random.default_rng(4)
    for _ in range(5):
        loglik_TP = rng.normal(scale=3.0, size=(40, roots.num_pdfs)).astype(np.float32)
        paths = [decoding.best_path(graph, loglik_TP, decoding.Search(1.0, 1000.0, 10_000)) for graph in (in_context, plain)]
        assert paths[0].words == paths[1].words
        # sums of 40 float32 numbers
        assert paths[0].cost == pytest.approx(paths[1].cost, rel=1e-5)


SPOKEN = [["SIL", "a", "b", "c", "d", "a", "SIL"], ["c", "d", "a", "SIL", "b", "a", "a", "b"],
          ["b"]]
PHONES = ObjectiveConfig(kind="lfmmi", denominator="phones", ngram_order=3, frame_subsampling=3)


@pytest.mark.parametrize("is_tied", [True, False])
def test_phones_have_the_paths_of_all_offsets_of_the_labels(is_tied: bool) -> None:
    lang = language(2) if is_tied else replace(language(2), tree=None)
    assert lang.tree or not is_tied
    labels = [np.array(path_of(spoken, language(2)), np.int32) for spoken in SPOKEN]
    if not is_tied:
        state_P = np.array(language(2).phone_states(), np.int32)
        labels = [state_P[pdf_T] for pdf_T in labels]
    graph = denominators.of_labels(labels, lang, PHONES)
    for pdf_T in labels:
        assert all(graph.log_weight_of(pdf_T[first::3]) > -math.inf for first in range(3))
    # the pair c b is in no label
    assert graph.log_weight_of([*labels[1][:6:3], *labels[2][::3]]) == -math.inf
    out = np.exp(graph.log_final_S)
    np.add.at(out, graph.source_A, np.exp(graph.log_weight_A))
    np.testing.assert_allclose(out, 1.0, rtol=1e-12)


def test_states_are_those_of_all_offsets() -> None:
    labels = [np.array(path_of(spoken, language(2)), np.int32) for spoken in SPOKEN]
    config = replace(PHONES, denominator="states", ngram_order=2)
    found = denominators.of_labels(labels, language(2), config)
    wanted = state_ngram([pdf_T[first::3] for first in range(3) for pdf_T in labels], 2)
    arrays = wanted.arrays()
    assert all(np.array_equal(found.arrays()[name], arrays[name]) for name in arrays)


def test_triphones_are_refused_for_phones() -> None:
    labels = [np.array(path_of(SPOKEN[0], language(3)), np.int32)]
    with pytest.raises(ConfigError, match="left_biphone"):
        denominators.of_labels(labels, language(3), PHONES)
