"""Denominators of sequence objectives: the decoding graph, or an n-gram model of HMM states."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import evaluation
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.topology import STATES_PER_PHONE, Topology
from ngsgd.config import DecodeConfig, ObjectiveConfig
from ngsgd.errors import ConfigError
from ngsgd.sequence.graph import NOTHING, StateArc, StateGraph, from_arcs
from ngsgd.sequence.ngram import state_ngram
from ngsgd.sequence.objectives import Denominator


def of_corpus(corpus: Corpus, objective: ObjectiveConfig, decode: DecodeConfig,
              prior_P: npt.NDArray[np.float64]) -> Denominator:
    """Build the denominator of a run.

    Args:
        corpus: the speech.
        objective: the section `objective`.
        decode: the section `decode`.
        prior_P: priors of the initial model; lfmmi does not use them.

    Raises:
        ConfigError: the objective needs phones, and the states are tied.
    """
    language = corpus.language
    if objective.kind == "lfmmi":
        graph = state_ngram(corpus.train.split_pdfs(), objective.ngram_order).with_leak(objective.leaky_hmm)
        graph = graph.anywhere() if objective.chunk_frames else graph
    else:
        graph = of_decoding_graph(evaluation.build_graph(language, decode))
    state_P = np.array(language.phone_states() or range(language.num_pdfs))
    is_tied_by_graph = not language.tree and language.num_pdfs != language.topology.num_pdfs
    if objective.kind in ("mpe", "bmmi") and is_tied_by_graph:
        raise ConfigError(f"objective.kind is {objective.kind}, which needs the phone of every HMM "
                          "state, but the graph of the data ties states; choose mmi, smbr or "
                          "lfmmi.")
    is_silence_P = np.zeros(language.num_pdfs, np.bool_)
    is_silence_P[list(language.topology.silence_pdfs)] = True
    return Denominator(graph, np.log(prior_P), phones(language.topology, language.num_pdfs)[state_P], is_silence_P)


def phones(topology: Topology, num_pdfs: int) -> npt.NDArray[np.int64]:
    """Number of the phone of each HMM state; silence is 0."""
    return np.maximum(0, np.arange(num_pdfs) - topology.num_silence_states + STATES_PER_PHONE) // STATES_PER_PHONE


def of_decoding_graph(graph: graphs.Graph) -> StateGraph:
    """Convert a decoding graph to a sum over words; costs become log weights, unscaled."""
    arcs = (StateArc(arc.source, arc.target, arc.input - 1 if arc.input else NOTHING,
                     -arc.cost) for arc in graphs.arcs(graph))
    return from_arcs(arcs, start=graph.fst.start, log_final=graphs.log_finals(graph))
