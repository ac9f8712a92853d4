"""Denominators of sequence objectives: the decoding graph, or an n-gram model of HMM states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ngsgd.asr.align.tree_building import begins_of_phones, phones_and_states
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import evaluation
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PHONE, STATES_PER_PHONE, Topology
from ngsgd.asr.utterance import PdfIds
from ngsgd.config import DecodeConfig, ObjectiveConfig
from ngsgd.errors import ConfigError
from ngsgd.sequence.graph import NOTHING, StateArc, StateGraph, from_arcs
from ngsgd.sequence.ngram import ClassOf, UnitFrames, state_ngram, unit_ngram
from ngsgd.sequence.objectives import Denominator

# leaky-HMM coefficient of lfmmi: probability of a transition to any state, as in Kaldi's recipes
_LEAK = 0.1


def of_corpus(corpus: Corpus, objective: ObjectiveConfig, decode: DecodeConfig,
              prior_P: npt.NDArray[np.float64]) -> Denominator:
    """Build the denominator of a run, with priors of the initial model, or uniform ones. Raises
    ConfigError if the objective needs phones, and the states are tied.
    """
    language = corpus.language
    if objective.kind == "lfmmi":
        graph = of_labels(corpus.train.split_pdfs(), language, objective).with_leak(_LEAK)
        if objective.chunk_frames:
            graph = graph.anywhere(with_start=objective.denominator == "phones")
    else:
        # a sum over words; costs become log weights, unscaled
        words = evaluation.build_graph(language, decode)
        arcs = (StateArc(arc.source, arc.target, arc.input - 1 if arc.input else NOTHING, -arc.cost)
                for arc in graphs.arcs(words))
        graph = from_arcs(arcs, start=words.fst.start, log_final=graphs.log_finals(words))
    state_P = np.array(language.phone_states() or range(language.num_pdfs))
    is_tied_by_graph = not language.tree and language.num_pdfs != language.topology.num_pdfs
    if objective.kind in ("mpe", "bmmi") and is_tied_by_graph:
        raise ConfigError(f"objective.kind is {objective.kind}, which needs the phone of every HMM state, "
                          "but the graph of the data ties states; choose mmi, smbr or lfmmi.")
    is_silence_P = np.zeros(language.num_pdfs, np.bool_)
    is_silence_P[list(language.topology.silence_pdfs)] = True
    return Denominator(graph, np.log(prior_P), phones(language.topology, language.num_pdfs)[state_P], is_silence_P)


def of_labels(labels: Sequence[PdfIds], language: Language, objective: ObjectiveConfig) -> StateGraph:
    """Estimate the n-gram model of states or phones from the labels of frames that have outputs.
    Raises ConfigError if the objective needs single phones or left biphones, and has others.
    """
    step = objective.frame_subsampling
    if objective.denominator == "states":
        return state_ngram((pdf_T[first::step] for first in range(step) for pdf_T in labels), objective.ngram_order)
    class_of = _class_of(language)
    state_P = np.array(language.phone_states() or range(language.num_pdfs), np.int32)
    frames = []
    for pdf_T in labels:
        phone_T, state_T = phones_and_states(state_P[pdf_T], language.topology.num_silence_states)
        frames.append(UnitFrames(begins_of_phones(phone_T, state_T).cumsum(), phone_T, state_T))
    return unit_ngram((one.every(step, first) for first in range(step) for one in frames), objective.ngram_order, class_of)


def _class_of(language: Language) -> ClassOf:
    tree, topology = language.tree, language.topology
    if tree and tree.width > 2:
        raise ConfigError("objective.denominator is phones, which supports single phones and left "
                          "biphones; set data.context=left_biphone.")
    if not tree and language.num_pdfs != topology.num_pdfs:
        raise ConfigError("objective.denominator is phones, but the graph of the data ties states; "
                          "set objective.denominator=states.")
    if tree:
        # windows of left biphones end with the phone, those of single phones are the phone
        width = tree.width
        return lambda left, phone, state: tree.pdf((left, phone)[2 - width:], state)
    pdfs = [topology.pdfs_of_phone(phone) for phone in (SILENCE_PHONE, *topology.phones)]
    return lambda _left, phone, state: pdfs[phone - 1][state]


def phones(topology: Topology, num_pdfs: int) -> npt.NDArray[np.int64]:
    """Number of the phone of each HMM state; silence is 0."""
    return np.maximum(0, np.arange(num_pdfs) - topology.num_silence_states + STATES_PER_PHONE) // STATES_PER_PHONE
