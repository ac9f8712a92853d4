"""Decoding graphs as weighted transducers: HCLG at the level of pdfs, and graphs of transcripts.

Input labels are pdf ids + 1 (0 is epsilon), output labels are word numbers + 1; costs are negative
log probabilities. As in Kaldi, but phones have no context, and state transitions have no cost.
L lexicon (phones to words), G grammar (words), H states (pdfs to phones).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

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
    fst, disambig = _lexicon(topology, silence_prob)
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
    if language.hotwords:
        grammar = language.hotwords.apply(grammar, topology.word_labels)
    kaldifst = openfst.toolkit()
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
    in_context = graphs_in_context(language, disambig) if language.tree else None
    fst = _in_states(fst, topology, in_context, disambig)
    _determinize(fst)
    num_pdfs = language.num_pdfs
    fst = _rewritten(fst, lambda label, output, cost: (label if label <= num_pdfs else EPSILON, output, cost))
    kaldifst.minimize_encoded(fst, delta=_PRECISION)
    return Graph(_with_self_loops(fst), topology.words, topology, language.phone_states())


def graphs_in_context(language: Language, disambig: range = range(0), *,
                      has_garbage: bool = False) -> context_tree.ContextGraphs:
    """C and H of a language with tied states, and the symbol of garbage (see `of_text`)."""
    assert language.tree is not None
    topology = language.topology
    num_states = (topology.num_silence_states, *(STATES_PER_PHONE for _ in topology.phones))
    end = disambig.stop if disambig else len(num_states) + 1
    garbage = end + 1 if has_garbage else 0
    return context_tree.ContextGraphs(language.tree, num_states, disambig, end, garbage)


def read(given: GivenGraph) -> Graph:
    """Read the graph of the data, with transition ids replaced by pdfs; see `check`."""
    read = check(given)
    fst = openfst.toolkit().StdVectorFst()
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
    iterator = openfst.toolkit().ArcIterator
    return (Arc(state, arc.nextstate, arc.ilabel, arc.olabel, arc.weight.value)
            for state in range(graph.fst.num_states) for arc in iterator(graph.fst, state))


def log_finals(graph: Graph) -> dict[int, float]:
    """Final state -> log weight; other states are omitted."""
    costs = {state: float(graph.fst.final(state).value) for state in range(graph.fst.num_states)}
    return {state: -cost for state, cost in costs.items() if cost != math.inf}


def of_transcript(topology: Topology, words: Sequence[str]) -> Graph:
    """Build the graph of words, with all pronunciations and optional silence, without costs."""
    fst = _in_states(_phones_of(topology, words, _word_label(topology, words)), topology)
    return Graph(_with_self_loops(fst), topology.words, topology)


def of_transcript_in_context(language: Language, in_context: context_tree.ContextGraphs,
                             words: Sequence[str]) -> Graph:
    """As `of_transcript`, in tied states; `in_context` is `graphs_in_context(language)`."""
    topology = language.topology
    fst = _phones_of(topology, words, _word_label(topology, words))
    fst = _with_self_loops(_in_states(fst, topology, in_context))
    return Graph(fst, topology.words, topology, language.phone_states())


class TextUnit(NamedTuple):
    """A phone in the graph of a text, or garbage, which is speech without known phones."""

    phone: str
    word: int | None  # position of its word in the text; None between words
    is_first: bool = False  # of its word


# phones of units that are none: garbage, and the end of a phone sequence in context
GARBAGE, END = "", "#"


@dataclass(frozen=True)
class Deviations:
    """Costs of speech that deviates from a text, in the unit of the scaled costs."""

    skip: float     # of a word that is not spoken
    garbage: float  # of a stretch of speech that is not in the text


def of_text(language: Language, words: Sequence[str], costs: Deviations,
            in_context: context_tree.ContextGraphs | None = None) -> tuple[Graph, tuple[TextUnit, ...]]:
    """Build the graph of a text from which the speech may deviate, and the unit of each label.

    Between words there may be silence and garbage, and a word may be skipped. A word without a
    pronunciation is garbage. The pdf of garbage is `language.num_pdfs`. Every unit has a label,
    whose number is that of the unit + 1, where the unit starts. In context (`graphs_in_context`
    with garbage) a label is one unit earlier, and the last units before garbage and before the end
    are followed by `END`.
    """
    units: list[TextUnit] = []

    def label(unit: TextUnit) -> int:
        units.append(unit)
        return len(units)
    fst = _phones_of(language.topology, words, label, costs, in_context)
    fst = _in_states(fst, language.topology, in_context, has_garbage=True)
    return Graph(_with_self_loops(fst), tuple(map(str, range(len(units))))), tuple(units)


def _word_label(topology: Topology, words: Sequence[str]) -> Callable[[TextUnit], int]:
    return lambda unit: EPSILON if unit.word is None or not unit.is_first else \
        topology.word_labels[words[unit.word]]


def _phones_of(topology: Topology, words: Sequence[str], label: Callable[[TextUnit], int],
               costs: Deviations | None = None,
               in_context: context_tree.ContextGraphs | None = None) -> Any:
    """Build the transducer from phones to labels; without `costs` there are no deviations."""
    phones = (SILENCE_PHONE, *topology.phones)
    number_of = {phone: number for number, phone in enumerate(phones, 1)}
    fst = _new()

    def add_silence(source: int, target: int) -> None:
        silence = label(TextUnit(SILENCE_PHONE, None))
        _add(fst, Arc(source, target, number_of[SILENCE_PHONE], silence, 0.0))

    def add_garbage(source: int, target: int, word: int | None, cost: float) -> None:
        symbol = len(phones) + 1
        if in_context:
            ended, symbol = fst.add_state(), in_context.garbage
            _add(fst, Arc(source, ended, in_context.end, label(TextUnit(END, None)), 0.0))
            source = ended
        _add(fst, Arc(source, target, symbol, label(TextUnit(GARBAGE, word)), cost))

    def after_gap(source: int) -> int:
        after: int = fst.add_state()
        _add_epsilon(fst, source, after)
        add_silence(source, after)
        if costs is None:
            return after
        before, garbage, after = after, fst.add_state(), fst.add_state()
        add_garbage(before, garbage, None, costs.garbage)
        add_silence(garbage, before)
        for state in (before, garbage):
            _add_epsilon(fst, state, after)
        return after
    state = after_gap(fst.start)
    for at, word in enumerate(words):
        ended = fst.add_state()
        if costs is not None and word not in topology.lexicon:
            add_garbage(state, ended, at, 0.0)
        elif costs is not None:
            _add(fst, Arc(state, ended, EPSILON, EPSILON, costs.skip))
        for spelling in topology.lexicon.get(word, ()) if costs else topology.lexicon[word]:
            source = state
            for number, phone in enumerate(spelling, start=1):
                target = ended if number == len(spelling) else fst.add_state()
                unit = label(TextUnit(phone, at, number == 1))
                _add(fst, Arc(source, target, number_of[phone], unit, 0.0))
                source = target
        state = after_gap(ended)
    if in_context and costs:
        last = fst.add_state()
        # the decoder may move labels of arcs without input by a frame
        _add(fst, Arc(state, last, in_context.end, label(TextUnit(END, None)), 0.0))
        state = last
    fst.set_final(state, 0.0)
    return fst


def _in_states(fst: Any, topology: Topology, in_context: context_tree.ContextGraphs | None = None,
               disambig: Sequence[int] = (), *, has_garbage: bool = False) -> Any:
    """Replace the phones of a transducer by their pdfs + 1, without self-loops."""
    kaldifst = openfst.toolkit()
    if in_context:
        if has_garbage:
            kaldifst.arcsort(fst, "ilabel")
        else:
            fst = context_tree.closed(fst, in_context.end)
        fst, states = kaldifst.compose(in_context.context, fst), in_context.states
    else:
        phones = (SILENCE_PHONE, *topology.phones)
        labels = [(topology.pdfs_of_phone(phone), number) for number, phone in enumerate(phones, start=1)]
        symbols = (len(phones) + 1,) if has_garbage else disambig
        states = context_tree.pdfs_to_labels(labels, enumerate(symbols, start=topology.num_pdfs + 1))
    kaldifst.arcsort(fst, "ilabel")
    return kaldifst.compose(states, fst)


def within(graph: Graph, words: Sequence[str]) -> Graph:
    """Return the paths of `graph` with these words, perhaps none; DataError if it lacks a word."""
    labels = {word: label for label, word in enumerate(graph.words, start=1)}
    if missing := [word for word in words if word not in labels]:
        raise DataError(f"The decoding graph HCLG.fst has no word {missing[0]} in its words.txt, "
                        "which a transcript contains; set data.oov_word to a word of the graph, or correct the transcript.")
    kaldifst = openfst.toolkit()
    transcript = kaldifst.make_linear_acceptor([labels[word] for word in words])
    kaldifst.arcsort(transcript, "ilabel")
    # on the side of the transcript, so that the arcs of a large graph need no sorting
    return replace(graph, fst=kaldifst.compose(graph.fst, transcript, match_side="right"))


def _lexicon(topology: Topology, silence_prob: float) -> tuple[Any, range]:
    """L, closed under repetition, with phones numbered from 1, and the symbols after them."""
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
    return fst, disambig


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
    looped, kaldifst = _new(), openfst.toolkit()
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
    kaldifst = openfst.toolkit()
    copy, iterator, new_arc = kaldifst.StdVectorFst(), kaldifst.ArcIterator, kaldifst.StdArc
    for _ in range(fst.num_states):
        copy.add_state()
    copy.start = fst.start
    for state in range(fst.num_states):
        copy.set_final(state, fst.final(state))
        for arc in iterator(fst, state):
            copy.add_arc(state, new_arc(*change(arc.ilabel, arc.olabel, arc.weight.value), arc.nextstate))
    return copy


def _determinize(fst: Any) -> None:
    if openfst.toolkit().determinize_star(fst, delta=_PRECISION):
        raise DataError("The decoding graph cannot be determinized; check the lexicon for a word "
                        "with two equal pronunciations.")


def _new() -> Any:
    fst = openfst.toolkit().StdVectorFst()
    fst.start = fst.add_state()
    return fst


def _add(fst: Any, arc: Arc) -> None:
    fst.add_arc(arc.source, openfst.toolkit().StdArc(arc.input, arc.output, arc.cost, arc.target))


def _add_epsilon(fst: Any, source: int, target: int) -> None:
    _add(fst, Arc(source, target, EPSILON, EPSILON, 0.0))
