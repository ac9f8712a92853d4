"""Labels must be a path through the graph of their transcript.

A name in a cache, or a file that a user gives, can be wrong; labels of another lexicon, of other
phones or of other transcripts are found here, before training.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ngsgd.asr.corpora.alignments import Alignment
from ngsgd.asr.decode import decoding
from ngsgd.asr.decode.decoding import Search
from ngsgd.asr.features import augment
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import GivenGraph
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import PdfIds
from ngsgd.errors import DataError

# instead of each state of silence: how many states silence has to pass is not compared
_SILENCE = -1
# approximate number of utterances that are compared with a decoding graph, a search for each
NUM_IN_GRAPH = 50
# score of a state that is not the label, and a beam that reaches it
_FORBIDDEN, _SEARCH = -1e6, Search(acoustic_scale=1.0, beam=1e5, max_active=1_000_000)
# maximum fraction of utterances without a path in a decoding graph: its lexicon may lack a
# pronunciation that the alignment was made with
_MOST_WITHOUT = 0.5
_ADVICE = ("it was made with another lexicon, other phones or other transcripts. Align this data again "
           "(leave data.alignment empty), or give the lexicon that it was made with")

# name, words and labels of an utterance
Labelled = tuple[str, Sequence[str], PdfIds]


def labelled(alignment: Alignment, sets: Iterable[SpeechSet], oov_word: str, known: Mapping[str, object]) -> Iterable[Labelled]:
    """Yield the utterances of the sets that the alignment labels, with words of the lexicon.

    Copies have the labels of their originals, so each original is one utterance.
    """
    for speech in sets:
        seen = ""
        for utt_id, words in zip(speech.frames.utt_ids, speech.texts, strict=True):
            source = utt_id if utt_id in alignment.pdf_T else augment.original(utt_id)[0]
            # copies follow each other
            if source != seen and source in alignment.pdf_T:
                yield source, [word if word in known else oov_word for word in words], alignment.pdf_T[source]
            seen = source


def check(utterances: Iterable[Labelled], topology: Topology, path: Path) -> None:
    """Raise DataError for labels that no pronunciation of the transcript gives."""
    spelled: dict[str, list[list[int]]] = {}
    num, without = 0, []
    for utt_id, words, pdf_T in utterances:
        num += 1
        runs = _runs(pdf_T, topology.num_silence_states)
        # where the words so far, with optional silence around each, can end
        at = _around_silence({0}, runs)
        for word in words:
            if word not in spelled:
                spelled[word] = [_runs(np.array(topology.pdfs_of(phones), np.int32), topology.num_silence_states)
                                 for phones in topology.lexicon.get(word, ())]
            at = _around_silence({begin + len(one) for begin in at for one in spelled[word]
                                  if runs[begin:begin + len(one)] == one}, runs)
        if len(runs) not in at:
            without.append(utt_id)
    if without:
        raise DataError(f"{path} has labels that are no path through the graph of the transcript, for "
                        f"{len(without)} of {num} "
                        f"utterances, the first is {without[0]}; {_ADVICE}.")


def check_in_graph(utterances: Iterable[Labelled], given: GivenGraph, path: Path, *, step: int = 1) -> None:
    """As `check`, for labels in the states of a decoding graph of the data.

    Every `step`th utterance is compared. Utterances whose words the graph lacks, or does not allow
    in this order, are skipped.
    """
    graph = graphs.read(given)
    num, without = 0, []
    for utt_id, words, pdf_T in itertools.islice(utterances, 0, None, step):
        within = graphs.within(graph, words) if set(words) <= set(graph.words) else None
        if within is not None and within.fst.num_states:
            num += 1
            only_TP = np.full((len(pdf_T), 1 + max(given.tid2pdf)), _FORBIDDEN, np.float32)
            only_TP[np.arange(len(pdf_T)), pdf_T] = 0.0
            found = decoding.best_path(within, only_TP, _SEARCH)
            if not (found.is_complete and np.array_equal(found.pdf_T, pdf_T)):
                without.append(utt_id)
    if len(without) > _MOST_WITHOUT * num:
        raise DataError(f"{path} has labels that are no path through data.graph with the words of the "
                        "transcript, for "
                        f"{len(without)} of {num} compared utterances, the first is {without[0]}; give the "
                        "alignment and the graph of one model.")


def _runs(pdf_T: npt.NDArray[np.integer], num_silence_states: int) -> list[int]:
    """States in their order, without repetitions; those of silence are one."""
    state_T = np.where(pdf_T < num_silence_states, _SILENCE, pdf_T)
    runs: list[int] = state_T[np.flatnonzero(np.diff(state_T, prepend=_SILENCE - 1))].tolist()
    return runs


def _around_silence(at: set[int], runs: list[int]) -> set[int]:
    """Add the positions before and after a silence, which may be shared by two words."""
    after = {place + 1 for place in at if place < len(runs) and runs[place] == _SILENCE}
    before = {place - 1 for place in at if place and runs[place - 1] == _SILENCE}
    return at | after | before
