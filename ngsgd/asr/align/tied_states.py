"""Tied triphone states as the labels of a corpus whose labels are states of phones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.align.gaussians import Axes
from ngsgd.asr.align.tree_building import (
    ContextStats,
    build_tree,
    contexts_of_frames,
    phones_and_states,
)
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.lang.context_tree import ContextTree
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import PdfIds
from ngsgd.counting import counted
from ngsgd.errors import DataError
from ngsgd.files import cache_name
from ngsgd.phase import Phase

# raise it when the same labels would give another tree
_VERSION = 2


def with_tied_states(corpus: Corpus, num_leaves: int, cache_root: Path,
                     report: Callable[[str], None], width: int = 3) -> Corpus:
    """Replace the labels of all aligned sets by tied states of triphones, or left biphones (2).

    The tree is built from the training set, or read from `cache_root` if it was built before from
    the same labels.

    Raises:
        DataError: the training set has no labels, or those of a graph that came with the data.
    """
    topology = corpus.language.topology
    language = replace(corpus.language, given=None)
    if not corpus.train.is_aligned or corpus.num_pdfs != topology.num_pdfs:
        raise DataError("data.num_leaves ties the states of the lexicon's phones, and the labels "
                        "of this corpus are states of another graph; remove data.num_leaves.")
    report(Phase("building the decision tree"))
    tree = _tree(corpus, num_leaves, width, cache_root)
    if tree.num_pdfs == topology.num_pdfs:
        report(f"decision tree: no split of the {counted(tree.num_pdfs, 'state')} of single phones, because "
               f"data.num_leaves={num_leaves} is not larger or the training set is too small (a "
               "leaf needs 100 frames)")
    else:
        report(f"decision tree: {counted(tree.num_pdfs, 'tied state')} of {counted(len(topology.phones), 'phone')}"
               f"{' with their left neighbors' if width == 2 else ''}")
    language = replace(language, tree=tree)
    sets: dict[str, Any] = {}
    for name in ("train", "valid", "test"):
        speech: SpeechSet = getattr(corpus, name)
        sets[name] = with_tied_labels(speech, language) if speech.is_aligned else speech
    labels = b"".join(speech.frames.pdf_T.tobytes() for speech in sets.values())
    content = hashlib.sha256(corpus.digest.encode() + labels).hexdigest()
    return replace(corpus, **sets, language=language, content=content)


def with_tied_labels(speech: SpeechSet, language: Language) -> SpeechSet:
    """The set with the tied states of its labels, which are states of phones."""
    tree, topology = language.tree, language.topology
    assert tree is not None
    labels = np.empty_like(speech.frames.pdf_T)
    offsets = speech.frames.offsets
    for start, end, pdf_T in zip(offsets[:-1], offsets[1:], speech.split_pdfs(), strict=True):
        context_N4, of_T = np.unique(_contexts(pdf_T, topology), axis=0, return_inverse=True)
        pdf_N = [tree.pdf(window, state) for *window, state in context_N4.tolist()]
        labels[start:end] = np.array(pdf_N, np.int32)[of_T]
    return replace(speech, frames=replace(speech.frames, pdf_T=labels))


def _contexts(pdf_T: PdfIds, topology: Topology) -> npt.NDArray[np.int64]:
    return contexts_of_frames(*phones_and_states(pdf_T, topology.num_silence_states))


def _tree(corpus: Corpus, num_leaves: int, width: int, cache_root: Path) -> ContextTree:
    """The tree of the training set, from the cache if it is there."""
    train, topology = corpus.train, corpus.language.topology
    name = cache_name("tree", version=_VERSION, corpus=corpus.digest, num_leaves=num_leaves, width=width)
    path = cache_root / f"{name}.txt"
    if path.exists():
        return ContextTree.from_text(files.read_regular_text(path))
    axes = Axes.of(train.frames.features_TD)
    x_TK = [axes.apply(features_TD) for features_TD in train.split_features()]
    deviation_K = np.concatenate(x_TK).std(axis=0)
    pairs = zip((_contexts(pdf_T, topology) for pdf_T in train.split_pdfs()),
                (x / deviation_K for x in x_TK), strict=True)
    tree = build_tree(ContextStats.accumulate(pairs), num_phones=1 + len(topology.phones),
                      num_silence_states=topology.num_silence_states, num_leaves=num_leaves, width=width)
    files.write_text(path, tree.to_text())
    return tree
