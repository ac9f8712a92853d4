"""Decoding graphs as weighted transducers: HCLG at the level of pdfs, and graphs of transcripts.

Input labels are pdf ids + 1 (0 is epsilon), output labels are word numbers + 1; costs are negative
log probabilities. As in Kaldi, but phones have no context, and state transitions have no cost.
L lexicon (phones to words), G grammar (words), H states (pdfs to phones).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ngsgd import imports
from ngsgd.asr.lang import arpa, context_tree, openfst
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import SILENCE_PHONE, STATES_PER_PHONE, Pronunciation, Topology
from ngsgd.errors import DataError

EPSILON = 0
# tolerance of equal costs; the tools' default, 1/1024, accumulates over the words of an utterance
_PRECISION = 1e-5


@dataclass(frozen=True)
class Graph:
    """A decoding graph."""

    fst: Any                    # kaldifst.StdVectorFst
    words: tuple[str, ...]      # output label - 1 -> word
    # spelling of words in pdfs; None if it is unknown, as with tied states
    topology: Topology | None = None
    # with tied states: the state of `topology` that each belongs to
    phone_states: tuple[int, ...] | None = None


class Arc(NamedTuple):
    source: int
    target: int
    input: int
    output: int
    cost: float


def build(language: Language, *, silence_prob: float) -> Graph:
    """Build HCLG; `silence_prob` is of silence before, between and after words (0: both cost 0)."""
    topology = language.topology
    fst, phones, disambig = _lexicon(topology, silence_prob)
    if language.grammar:
        grammar = language.grammar.acceptor(topology.word_labels)
    elif language.arpa:
        grammar = arpa.acceptor(language.arpa, topology.word_labels)
    else:
        # any number of words, or exactly one, all with equal probability
        grammar = _new()
        end = grammar.add_state() if language.is_one_word else grammar.start
        for label in range(1, len(topology.words) + 1):
            _add(grammar, Arc(grammar.start, end, label, label, math.log(len(topology.words))))
        grammar.set_final(end, 0.0)
    kaldifst = _kaldifst()
    # the tools crash without any path
    kept = grammar.copy()
    kaldifst.connect(kept)
    if not any(1 <= arc.olabel <= len(topology.words) for state in range(kept.num_states)
               for arc in kaldifst.ArcIterator(kept, state)):
        raise DataError("The language model or grammar has no path from its start to an end with a word of "
                        "the lexicon; use the model and the lexicon of one task.")
    kaldifst.arcsort(fst, "olabel")
    kaldifst.arcsort(grammar, "ilabel")
    fst = kaldifst.compose(fst, grammar)
    _determinize(fst)
    kaldifst.minimize_encoded(fst, delta=_PRECISION)
    kaldifst.arcsort(fst, "ilabel")
    if language.tree:
        in_context = graphs_in_context(language, disambig=disambig)
        fst = kaldifst.compose(in_context.context, context_tree.closed(fst, in_context.end))
        states = in_context.states
        kaldifst.arcsort(fst, "ilabel")
    else:
        labels = [(topology.pdfs_of_phone(phone), number) for number, phone in enumerate(phones, start=1)]
        symbols = enumerate(disambig, start=topology.num_pdfs + 1)
        states = context_tree.pdfs_to_labels(labels, symbols)
    fst = kaldifst.compose(states, fst)
    _determinize(fst)
    num_pdfs = language.num_pdfs
    fst = _rewritten(fst, lambda label, output, cost: (label if label <= num_pdfs else EPSILON, output, cost))
    kaldifst.minimize_encoded(fst, delta=_PRECISION)
    return Graph(_with_self_loops(fst), topology.words, topology, language.phone_states())


def graphs_in_context(language: Language, disambig: range = range(0)) -> context_tree.ContextGraphs:
    """C and H of a language with tied states."""
    assert language.tree is not None
    topology = language.topology
    num_states = (topology.num_silence_states, *(STATES_PER_PHONE for _ in topology.phones))
    end = disambig.stop if disambig else len(num_states) + 1
    return context_tree.ContextGraphs(language.tree, num_states, disambig, end)


def read(given: GivenGraph) -> Graph:
    """Read the graph of the data, with transition ids replaced by pdfs; see `check`."""
    read = check(given)
    fst = _kaldifst().StdVectorFst()
    for _ in range(read.num_states):
        fst.add_state()
    fst.start = read.start
    arcs, firsts = read.arc_A.tolist(), read.first_S.tolist()
    for state, (final, first) in enumerate(zip(read.final_S.tolist(), firsts, strict=True)):
        fst.set_final(state, final)
        for ilabel, olabel, weight, target in arcs[first:first + int(read.num_arcs_S[state])]:
            _add(fst, Arc(state, target, ilabel, olabel, weight))
    return Graph(fst, given.words)


def check(given: GivenGraph) -> openfst.Fst:
    """Parse the graph of the data, with transition ids replaced by pdfs + 1. Raises DataError if
    the file is damaged, or its labels exceed the transitions or the words.
    """
    fst = openfst.parse(given.hclg, "The decoding graph HCLG.fst")
    ilabel_A, olabel_A = fst.arc_A["ilabel"], fst.arc_A["olabel"]
    is_beyond_A = (ilabel_A > len(given.tid2pdf)) | (olabel_A > len(given.words))
    if is_beyond_A.any():
        at = int(is_beyond_A.argmax())
        raise DataError("The decoding graph HCLG.fst has the labels "
                        f"{ilabel_A[at]}:{olabel_A[at]}, which exceed its {len(given.tid2pdf)} "
                        f"transitions or {len(given.words)} words; use the files of one release.")
    _require_path(fst)
    arc_A = fst.arc_A.copy()
    arc_A["ilabel"] = np.array([EPSILON - 1, *given.tid2pdf], np.int32)[ilabel_A] + 1
    return replace(fst, arc_A=arc_A)


def _require_path(fst: openfst.Fst) -> None:
    """Raise DataError unless the start leads to a final state, and to an arc with a word."""
    is_reached_S = np.zeros(fst.num_states, bool)
    is_reached_S[fst.start] = True
    has_word, states = False, np.array([fst.start])
    while len(states):
        num_arcs = fst.num_arcs_S[states]
        # numbers of all arcs that leave these states
        begins = np.repeat(fst.first_S[states] - np.cumsum(num_arcs) + num_arcs, num_arcs)
        leaving = fst.arc_A[begins + np.arange(len(begins))]
        has_word = has_word or bool((leaving["olabel"] > 0).any())
        targets = np.unique(leaving["target"])
        states = targets[~is_reached_S[targets]]
        is_reached_S[states] = True
    if not has_word or not np.isfinite(fst.final_S[is_reached_S]).any():
        raise DataError("The decoding graph HCLG.fst has no path from its start to a final state with a word; make it again.")


def with_word_penalty(graph: Graph, word_penalty: float) -> Graph:
    """Add `word_penalty` to the cost of every word."""
    return with_word_costs(graph, dict.fromkeys(graph.words, word_penalty))


def with_word_costs(graph: Graph, cost_of: Mapping[str, float]) -> Graph:
    """Add the costs of some words to the cost of their arcs."""
    costs = (0.0, *(cost_of.get(word, 0.0) for word in graph.words))
    return replace(graph, fst=_rewritten(graph.fst, lambda label, output, cost: (label, output, cost + costs[output])))


def arcs(graph: Graph) -> Iterator[Arc]:
    """All arcs."""
    iterator = _kaldifst().ArcIterator
    return (Arc(state, arc.nextstate, arc.ilabel, arc.olabel, arc.weight.value)
            for state in range(graph.fst.num_states) for arc in iterator(graph.fst, state))


def log_finals(graph: Graph) -> dict[int, float]:
    """Final state -> log weight; other states are omitted."""
    costs = {state: float(graph.fst.final(state).value) for state in range(graph.fst.num_states)}
    return {state: -cost for state, cost in costs.items() if cost != math.inf}


def of_transcript(topology: Topology, words: Sequence[str]) -> Graph:
    """Build the graph of words, with all pronunciations and optional silence, without costs."""
    fst = _new()
    state = fst.start
    for word in words:
        label = topology.word_labels[word]
        before = _after_optional_silence(fst, state, topology)
        state = fst.add_state()
        for phones in topology.lexicon[word]:
            _add_epsilon(fst, _chain(fst, before, topology.pdfs_of(phones), label=label), state)
    fst.set_final(_after_optional_silence(fst, state, topology), 0.0)
    return Graph(fst, topology.words, topology)


def of_transcript_in_context(language: Language, in_context: context_tree.ContextGraphs, words: Sequence[str]) -> Graph:
    """As `of_transcript`, in tied states; `in_context` is `graphs_in_context(language)`."""
    topology = language.topology
    number_of = {phone: number for number, phone in enumerate((SILENCE_PHONE, *topology.phones), 1)}
    fst = _new()

    def after_optional_silence(source: int) -> int:
        after: int = fst.add_state()
        _add_epsilon(fst, source, after)
        _add(fst, Arc(source, after, number_of[SILENCE_PHONE], EPSILON, 0.0))
        return after
    state = after_optional_silence(fst.start)
    for word in words:
        ended = fst.add_state()
        for phones in topology.lexicon[word]:
            source, output = state, topology.word_labels[word]
            for at, phone in enumerate(phones, start=1):
                target = ended if at == len(phones) else fst.add_state()
                _add(fst, Arc(source, target, number_of[phone], output, 0.0))
                source, output = target, EPSILON
        state = after_optional_silence(ended)
    fst.set_final(state, 0.0)
    kaldifst = _kaldifst()
    fst = kaldifst.compose(in_context.context, context_tree.closed(fst, in_context.end))
    kaldifst.arcsort(fst, "ilabel")
    fst = kaldifst.compose(in_context.states, fst)
    return Graph(_with_self_loops(fst), topology.words, topology, language.phone_states())


def within(graph: Graph, words: Sequence[str]) -> Graph:
    """Return the paths of `graph` with these words, perhaps none; DataError if it lacks a word."""
    labels = {word: label for label, word in enumerate(graph.words, start=1)}
    if missing := [word for word in words if word not in labels]:
        raise DataError(f"The decoding graph HCLG.fst has no word {missing[0]} in its words.txt, "
                        "which a transcript contains; set data.oov_word to a word of the graph, or correct the transcript.")
    kaldifst = _kaldifst()
    transcript = kaldifst.make_linear_acceptor([labels[word] for word in words])
    kaldifst.arcsort(transcript, "ilabel")
    # on the side of the transcript, so that the arcs of a large graph need no sorting
    return replace(graph, fst=kaldifst.compose(graph.fst, transcript, match_side="right"))


def _lexicon(topology: Topology, silence_prob: float) -> tuple[Any, tuple[str, ...], range]:
    """L, closed under repetition, its phones (numbered from 1), and the symbols after them."""
    phones = (SILENCE_PHONE, *topology.phones)
    number_of = {phone: number for number, phone in enumerate(phones, start=1)}
    entries = _disambiguated(topology)
    num_disambig = 1 + max((number for _, _, number in entries), default=0)
    # #0 is first, and the last symbol ends an optional silence
    backoff = len(phones) + 1
    disambig = range(backoff, backoff + num_disambig + 1)
    silence_cost = no_silence_cost = 0.0
    if silence_prob:
        silence_cost, no_silence_cost = -math.log(silence_prob), -math.log(1 - silence_prob)
    fst = _new()
    loop, silence, ended = (fst.add_state() for _ in range(3))
    _add(fst, Arc(fst.start, loop, EPSILON, EPSILON, no_silence_cost))
    _add(fst, Arc(fst.start, silence, EPSILON, EPSILON, silence_cost))
    _add(fst, Arc(silence, ended, number_of[SILENCE_PHONE], EPSILON, 0.0))
    _add(fst, Arc(ended, loop, disambig[-1], EPSILON, 0.0))
    for word, spelling, number in entries:
        symbols = [*(number_of[phone] for phone in spelling), *([backoff + number] if number else [])]
        state, output = loop, topology.word_labels[word]
        for symbol in symbols[:-1]:
            following = fst.add_state()
            _add(fst, Arc(state, following, symbol, output, 0.0))
            state, output = following, EPSILON
        _add(fst, Arc(state, loop, symbols[-1], output, no_silence_cost))
        _add(fst, Arc(state, silence, symbols[-1], output, silence_cost))
    # the label of #0 in `arpa.acceptor`
    _add(fst, Arc(loop, loop, backoff, len(topology.words) + 1, 0.0))
    fst.set_final(loop, 0.0)
    return fst, phones, disambig


def _disambiguated(topology: Topology) -> list[tuple[str, Pronunciation, int]]:
    """Return (word, pronunciation, symbol or 0) as Kaldi's add_lex_disambig: shared or prefixes."""
    every = [(word, phones) for word, spellings in topology.lexicon.items() for phones in spellings]
    count = Counter(phones for _, phones in every)
    prefixes = {phones[:length] for _, phones in every for length in range(1, len(phones))}
    used: Counter[Pronunciation] = Counter()
    entries = []
    for word, phones in every:
        used[phones] += count[phones] > 1 or phones in prefixes
        entries.append((word, phones, used[phones]))
    return entries


def _with_self_loops(fst: Any) -> Any:
    """Split states by the pdf that leads into them, each with a loop on that pdf."""
    looped, kaldifst = _new(), _kaldifst()
    # these loops run for every arc of a graph, up to millions of times
    iterator, new_arc, add = kaldifst.ArcIterator, kaldifst.StdArc, looped.add_arc
    numbers = {(fst.start, EPSILON): looped.start}
    todo = [(fst.start, EPSILON)]
    while todo:
        state, pdf_label = todo.pop()
        source = numbers[state, pdf_label]
        if pdf_label:
            add(source, new_arc(pdf_label, EPSILON, 0.0, source))
        looped.set_final(source, fst.final(state))
        for arc in iterator(fst, state):
            target = (arc.nextstate, arc.ilabel)
            if target not in numbers:
                numbers[target] = looped.add_state()
                todo.append(target)
            add(source, new_arc(arc.ilabel, arc.olabel, arc.weight, numbers[target]))
    return looped


def _rewritten(fst: Any, change: Callable[[int, int, float], tuple[int, int, float]]) -> Any:
    kaldifst = _kaldifst()
    copy, iterator, new_arc = kaldifst.StdVectorFst(), kaldifst.ArcIterator, kaldifst.StdArc
    for _ in range(fst.num_states):
        copy.add_state()
    copy.start = fst.start
    for state in range(fst.num_states):
        copy.set_final(state, fst.final(state))
        for arc in iterator(fst, state):
            copy.add_arc(state, new_arc(*change(arc.ilabel, arc.olabel, arc.weight.value), arc.nextstate))
    return copy


def _chain(fst: Any, source: int, pdfs: Sequence[int], *, label: int = EPSILON) -> int:
    """Add states for these pdfs after `source`, each with a self-loop; return the last one."""
    for pdf in pdfs:
        following = fst.add_state()
        _add(fst, Arc(source, following, pdf + 1, label, 0.0))
        _add(fst, Arc(following, following, pdf + 1, EPSILON, 0.0))
        source, label = following, EPSILON
    return source


def _after_optional_silence(fst: Any, source: int, topology: Topology) -> int:
    after: int = fst.add_state()
    _add_epsilon(fst, source, after)
    _add_epsilon(fst, _chain(fst, source, topology.silence_pdfs), after)
    return after


def _determinize(fst: Any) -> None:
    if _kaldifst().determinize_star(fst, delta=_PRECISION):
        raise DataError("The decoding graph cannot be determinized; check the lexicon for a word "
                        "with two equal pronunciations.")


def _new() -> Any:
    fst = _kaldifst().StdVectorFst()
    fst.start = fst.add_state()
    return fst


def _add(fst: Any, arc: Arc) -> None:
    fst.add_arc(arc.source, _kaldifst().StdArc(arc.input, arc.output, arc.cost, arc.target))


def _add_epsilon(fst: Any, source: int, target: int) -> None:
    _add(fst, Arc(source, target, EPSILON, EPSILON, 0.0))


@functools.cache
def _kaldifst() -> Any:
    return imports.load("kaldifst", extra="asr", purpose="Decoding")
