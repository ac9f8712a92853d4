"""Decision trees from aligned speech: statistics of phones in context, questions, and splits.

As Kaldi's `acc-tree-stats`, `cluster-phones` and `build-tree`. Every phone and state has its own
root; silence is not split. N contexts, D features, Q questions, V phones with the edge.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.features.gaussians import Axes, sums_by_state
from ngsgd.asr.lang.context_tree import EDGE, STATE, ContextTree, Leaf, Node, Split, Table
from ngsgd.asr.lang.topology import STATES_PER_PHONE
from ngsgd.counting import counted
from ngsgd.errors import DataError
from ngsgd.phase import Phase, Progress

Matrix = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SILENCE = 1
LEFT, CENTER, RIGHT = 0, 1, 2
VARIANCE_FLOOR = 0.01  # of features with unit variance, as Kaldi's --variance-floor
_VERSION = 3  # raise it when the same labels would give another tree


@dataclass(frozen=True)
class ContextStats:
    """Sums over the frames of each context: left, center and right phone, state of the center."""

    context_N4: Ints  # left, center, right (numbers from 1, `EDGE` at the edge), state
    count_N: Matrix
    sum_ND: Matrix
    square_ND: Matrix

    @staticmethod
    def accumulate(utterances: Iterable[tuple[Ints, Matrix]]) -> ContextStats:
        """Sum the (T x 4 contexts, T x D features) of utterances."""
        pairs = list(utterances)
        if not pairs:
            raise DataError("No utterance is aligned, so that no decision tree can be made; align "
                            "the training set first.")
        context_N4, of_T = np.unique(np.concatenate([c for c, _ in pairs]), axis=0, return_inverse=True)
        x_TD = np.concatenate([x for _, x in pairs])
        sum_ND, square_ND = (sums_by_state(y_TD, of_T, len(context_N4)) for y_TD in (x_TD, x_TD**2))
        count_N = np.bincount(of_T, minlength=len(context_N4)).astype(np.float64)
        return ContextStats(context_N4, count_N, sum_ND, square_ND)

    def table(self) -> Matrix:
        """Return count, sums and squares in one row per context (N x (1 + 2 D))."""
        return np.concatenate([self.count_N[:, None], self.sum_ND, self.square_ND], axis=1)


def contexts_of_frames(phone_T: Ints, state_T: Ints) -> Ints:
    """Left, center, right phone and state (T x 4); neighboring frames of silence are one phone."""
    begins_T = begins_of_phones(phone_T, state_T)
    instance_T = begins_T.cumsum() - 1
    phone_I = np.concatenate([[EDGE], phone_T[begins_T], [EDGE]])
    return np.stack([phone_I[instance_T], phone_T, phone_I[instance_T + 2], state_T], axis=1)


def begins_of_phones(phone_T: Ints, state_T: Ints) -> npt.NDArray[np.bool_]:
    """Return whether a phone begins with a frame, as in `contexts_of_frames`."""
    begins_T = np.ones(len(phone_T), np.bool_)
    begins_T[1:] = (phone_T[1:] != phone_T[:-1]) | ((state_T[1:] < state_T[:-1]) & (phone_T[1:] != SILENCE))
    return begins_T


def build_tree(stats: ContextStats, *, num_phones: int, num_silence_states: int, num_leaves: int,
               width: int = 3, min_count: float = 100.0) -> ContextTree:
    """Build a tree over triphones (width 3) or left biphones (2).

    `stats` are sums of the training frames. The tree has at most `num_leaves` pdfs, or one per
    phone and state if that is more, each of at least `min_count` frames after a split. Phone 1 is
    silence, whose states are the first pdfs; phones without frames keep one pdf per state.
    """
    questions_QV, table_NK = phone_questions(stats, num_phones), stats.table()
    keys = (LEFT, RIGHT)[: width - 1]
    roots = {}
    for phone, state in itertools.product(range(2, num_phones + 1), range(STATES_PER_PHONE)):
        is_here_N = (stats.context_N4[:, [CENTER, 3]] == (phone, state)).all(axis=1)
        roots[phone, state] = _Growing(stats.context_N4[is_here_N], table_NK[is_here_N])
    queue: list[tuple[float, int, _Growing]] = []
    for number, root in enumerate(roots.values()):
        root.find_split(questions_QV, keys, min_count)
        heapq.heappush(queue, (-root.gain, number, root))
    num_pdfs, number = num_silence_states + len(roots), len(roots)
    while queue and num_pdfs < num_leaves:
        negative_gain, _, node = heapq.heappop(queue)
        if negative_gain >= 0:
            break
        for child in node.split():
            child.find_split(questions_QV, keys, min_count)
            number += 1
            heapq.heappush(queue, (-child.gain, number, child))
        num_pdfs += 1
    return _numbered(roots, num_phones, num_silence_states, width)


def phone_questions(stats: ContextStats, num_phones: int) -> npt.NDArray[np.bool_]:
    """Return sets of phones (Q x V) by bottom-up clustering of the middle states; the edge of an
    utterance belongs to the sets that hold silence.
    """
    is_middle_N = stats.context_N4[:, 3] == STATES_PER_PHONE // 2
    is_middle_N |= (stats.context_N4[:, CENTER] == SILENCE)
    table_NK = stats.table()
    table_VK = np.zeros((num_phones + 1, table_NK.shape[1]))
    np.add.at(table_VK, stats.context_N4[is_middle_N, CENTER], table_NK[is_middle_N])
    clusters = [(frozenset({phone}), table_VK[phone]) for phone in range(1, num_phones + 1) if table_VK[phone, 0] > 0]
    found = [members for members, _ in clusters]
    while len(clusters) > 2:
        _, one, other = min(
            (_log_likelihood(a[1]) + _log_likelihood(b[1]) - _log_likelihood(a[1] + b[1]), i, j)
            for i, a in enumerate(clusters) for j, b in enumerate(clusters[:i]))
        merged = (clusters[one][0] | clusters[other][0], clusters[one][1] + clusters[other][1])
        clusters = [c for at, c in enumerate(clusters) if at not in (one, other)] + [merged]
        found.append(merged[0])
    questions_QV = np.zeros((len(found), num_phones + 1), np.bool_)
    for row, members in zip(questions_QV, found, strict=True):
        row[list(members)] = True
        row[EDGE] = SILENCE in members
    return questions_QV


@dataclass
class _Growing:
    """A node while the tree grows: the contexts that reach it, and its best split."""

    context_N4: Ints
    table_NK: Matrix
    gain: float = 0.0
    key: int = LEFT
    asked_V: npt.NDArray[np.bool_] | None = None
    children: tuple[_Growing, _Growing] | None = None  # yes, no

    def find_split(self, questions_QV: npt.NDArray[np.bool_], keys: Sequence[int], min_count: float) -> None:
        """Find the question about one of `keys` with the most gain in log-likelihood; 0: none."""
        total_K = self.table_NK.sum(axis=0)
        for key in keys:
            by_phone_VK = np.zeros((questions_QV.shape[1], len(total_K)))
            np.add.at(by_phone_VK, self.context_N4[:, key], self.table_NK)
            yes_QK = questions_QV.astype(np.float64) @ by_phone_VK
            no_QK = total_K - yes_QK
            gain_Q = _log_likelihood(yes_QK) + _log_likelihood(no_QK) - _log_likelihood(total_K)
            gain_Q[np.minimum(yes_QK[:, 0], no_QK[:, 0]) < min_count] = 0.0
            best = int(gain_Q.argmax())
            if gain_Q[best] > self.gain:
                self.gain, self.key, self.asked_V = float(gain_Q[best]), key, questions_QV[best]

    def split(self) -> tuple[_Growing, _Growing]:
        """Divide the contexts by the question that `find_split` found."""
        assert self.asked_V is not None
        is_yes_N = self.asked_V[self.context_N4[:, self.key]]
        yes, no = (_Growing(self.context_N4[part_N], self.table_NK[part_N]) for part_N in (is_yes_N, ~is_yes_N))
        self.children = yes, no
        return self.children


def _numbered(roots: dict[tuple[int, int], _Growing], num_phones: int, num_silence_states: int, width: int) -> ContextTree:
    """The finished tree; pdfs of silence come first, then those of the phones in their order."""
    numbers = itertools.count(num_silence_states)

    def finished(node: _Growing) -> Node:
        if node.children is None or node.asked_V is None:
            return Leaf(next(numbers))
        yes, no = map(finished, node.children)
        return Split(node.key, frozenset(np.flatnonzero(node.asked_V).tolist()), yes, no)
    silence = Table(STATE, tuple(map(Leaf, range(num_silence_states))))
    phones = [Table(STATE, tuple(finished(roots[phone, state]) for state in range(STATES_PER_PHONE)))
              for phone in range(2, num_phones + 1)]
    return ContextTree(width, CENTER, Table(CENTER, (None, silence, *phones)))


def _log_likelihood(table: Matrix) -> Matrix:
    """The log-likelihood of frames (rows of count, sums, squares) under their own Gaussian."""
    num_features = (table.shape[-1] - 1) // 2
    count = table[..., 0]
    safe = np.maximum(count, 1e-30)[..., None]
    mean = table[..., 1 : num_features + 1] / safe
    variance = np.maximum(table[..., num_features + 1 :] / safe - mean**2, VARIANCE_FLOOR)
    constant = num_features * (1.0 + math.log(2 * math.pi))
    return np.asarray(-0.5 * count * (np.log(variance).sum(axis=-1) + constant))


def phones_and_states(pdf_T: Sequence[int] | npt.NDArray[np.int32], num_silence_states: int) -> tuple[Ints, Ints]:
    """Return phone numbers (1 is silence) and states of pdfs that are not tied."""
    after_T = np.asarray(pdf_T, np.int64) - num_silence_states
    is_speech_T = after_T >= 0
    phone_T = np.where(is_speech_T, 2 + after_T // STATES_PER_PHONE, SILENCE)
    state_T = np.where(is_speech_T, after_T % STATES_PER_PHONE, np.asarray(pdf_T, np.int64))
    return phone_T, state_T


def with_tied_states(corpus: Corpus, num_leaves: int, cache_root: Path,
                     report: Callable[[str], None], width: int = 3) -> Corpus:
    """Replace the labels of all aligned sets by tied states of triphones, or left biphones (2).

    The tree is built from the training set, or read from `cache_root`. Raises DataError if the
    training set has no labels, or those of a graph that came with the data.
    """
    topology = corpus.language.topology
    if not corpus.train.is_aligned or corpus.num_pdfs != topology.num_pdfs:
        raise DataError("data.num_leaves ties the states of the lexicon's phones, and the labels "
                        "of this corpus are states of another graph; remove data.num_leaves.")
    tree = _tree(corpus, num_leaves, width, cache_root, report)
    if tree.num_pdfs == topology.num_pdfs:
        report(f"decision tree: no split of the {counted(tree.num_pdfs, 'state')} of single "
               f"phones, because data.num_leaves={num_leaves} is not larger or the training set is "
               "too small (a leaf needs 100 frames)")
    else:
        report(f"decision tree: {counted(tree.num_pdfs, 'tied state')} of "
               f"{counted(len(topology.phones), 'phone')}"
               f"{' with their left neighbors' if width == 2 else ''}")
    sets: dict[str, Any] = corpus.sets
    for name, speech in corpus.sets.items():
        frames = speech.frames
        if speech.is_aligned:
            labels, bounds = np.empty_like(frames.pdf_T), itertools.pairwise(frames.offsets)
            for (start, end), pdf_T in zip(bounds, speech.split_pdfs(), strict=True):
                context_T4 = contexts_of_frames(*phones_and_states(pdf_T, topology.num_silence_states))
                context_N4, of_T = np.unique(context_T4, axis=0, return_inverse=True)
                pdf_N = [tree.pdf(window, state) for *window, state in context_N4.tolist()]
                labels[start:end] = np.array(pdf_N, np.int32)[of_T]
            sets[name] = replace(speech, frames=replace(frames, pdf_T=labels))
    content = hashlib.sha256(corpus.digest.encode())
    for speech in sets.values():
        content.update(speech.frames.pdf_T.tobytes())
    return replace(corpus, **sets, language=replace(corpus.language, given=None, tree=tree), content=content.hexdigest())


def _tree(corpus: Corpus, num_leaves: int, width: int, cache_root: Path, report: Callable[[str], None]) -> ContextTree:
    train, topology = corpus.train, corpus.language.topology
    name = files.cache_name("tree", version=_VERSION, corpus=corpus.digest, num_leaves=num_leaves, width=width)
    path = cache_root / f"{name}.txt"
    if path.exists():
        return ContextTree.from_text(files.read_regular_text(path))
    counting = Progress(report, "decision tree: statistics", len(train.texts))
    axes = Axes.of(train.frames.features_TD)
    x_TK = [axes.apply(features_TD) for features_TD in train.split_features()]
    deviation_K = np.concatenate(x_TK).std(axis=0)
    num_silence_states = topology.num_silence_states
    contexts = (contexts_of_frames(*phones_and_states(pdf_T, num_silence_states)) for pdf_T in train.split_pdfs())
    pairs = zip(contexts, (x / deviation_K for x in x_TK), strict=True)
    stats = ContextStats.accumulate(counting.each(pairs))
    report(Phase("decision tree: splits"))
    tree = build_tree(stats, num_phones=1 + len(topology.phones),
                      num_silence_states=num_silence_states, num_leaves=num_leaves, width=width)
    files.write_text(path, tree.to_text())
    return tree
