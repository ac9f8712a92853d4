"""Numerators with tolerance: the states of the labels in order, with boundaries that may move.

The labels' best path through the denominator graph is a chain of states. The numerator is the sum
over all paths through this chain in which no state is more than `tolerance` frames before or after
the place that the labels give it (Kaldi's chain-egs: --left-tolerance, --right-tolerance). Its
weights are those of the denominator graph, so the numerator is a part of the denominator.

Letters: N rows (frames of all sequences), P classes, B sequences, T frames of the longest, K states
of the longest chain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.ops.tensors import to_device
from ngsgd.sequence.graph import StateGraph

# log weight of paths that do not exist; infinities would have undefined gradients
_NEVER = -1e30


class Chain(NamedTuple):
    """The states of one sequence, in order."""

    pdf_K: npt.NDArray[np.int32]
    # log weight from the state before
    enter_K: npt.NDArray[np.float64]
    # log weight of staying
    loop_K: npt.NDArray[np.float64]
    # first and last allowed frame
    first_K: npt.NDArray[np.int32]
    last_K: npt.NDArray[np.int32]


def chain_of(graph: StateGraph, pdf_T: npt.NDArray[np.int32], tolerance: int) -> tuple[Chain, float]:
    """Return the chain of labels, and the log weight of its end.

    Args:
        graph: the denominator.
        pdf_T: label of each frame.
        tolerance: frames by which states may begin earlier and end later.

    Returns:
        The chain, and the final log weight of its last state; minus infinity if the labels have no
        path through the graph, in which case the chain is empty.
    """
    state_T = graph.best_path(pdf_T)
    if state_T is None:
        none, nowhere = np.zeros(0, np.float64), np.zeros(0, np.int32)
        return Chain(nowhere, none, none, nowhere, nowhere), -math.inf
    begin_K = np.flatnonzero(np.diff(state_T, prepend=-1))
    end_K = np.append(begin_K[1:], len(state_T))
    state_K = state_T[begin_K]
    enter_K = [graph.log_weight_into(int(state_K[0])),
               *(graph.log_weight_between(*ends) for ends in zip(state_K[:-1].tolist(), state_K[1:].tolist(), strict=True))]
    loop_K = [graph.log_weight_between(state, state) for state in state_K.tolist()]
    chain = Chain(graph.pdf_S[state_K].astype(np.int32), np.array(enter_K), np.array(loop_K),
                  np.maximum(begin_K - tolerance, 0).astype(np.int32),
                  np.minimum(end_K - 1 + tolerance, len(state_T) - 1).astype(np.int32))
    return chain, float(graph.log_final_S[state_K[-1]])


class Chains(NamedTuple):
    """The chains of a minibatch, padded."""

    pdf_BK: Tensor
    # float64
    enter_BK: Tensor
    loop_BK: Tensor
    first_BK: Tensor
    last_BK: Tensor
    # last state of each sequence
    end_B: Tensor

    @classmethod
    def of(cls, chains: Sequence[Chain]) -> Chains:
        """Pad the chains of some sequences."""
        sizes = [len(chain.pdf_K) for chain in chains]

        def padded(columns: Sequence[npt.NDArray[np.generic]], fill: float) -> Tensor:
            rows_BK = np.full((len(sizes), max(sizes)), fill, type(fill))
            for row_K, values_K in zip(rows_BK, columns, strict=True):
                row_K[:len(values_K)] = values_K
            return torch.from_numpy(rows_BK)

        pdfs, enter, loop, first, last = zip(*chains, strict=True)
        # states beyond the end are never entered
        return cls(padded(pdfs, 0), padded(enter, _NEVER), padded(loop, _NEVER).clamp(min=_NEVER),
                   padded(first, 0), padded(last, -1), torch.tensor(sizes) - 1)


def chain_log_sum(scores_NP: Tensor, lengths: Sequence[int], chains: Chains) -> Tensor:
    """Return the log sum over the paths through the chain of each sequence, B (float64).

    Args:
        scores_NP: frame scores.
        lengths: frames of each sequence, in the order of the rows.
        chains: the chains, without the weights of their ends.
    """
    score_TBK = _scores_of_states(scores_NP, lengths, chains)
    a_BK = torch.full_like(chains.enter_BK, _NEVER)
    a_BK[:, 0] = chains.enter_BK[:, 0]
    a_BK = a_BK + score_TBK[0]
    a_TBK = [a_BK]
    # weight from the state before; the first state has none
    enter_BK = chains.enter_BK[:, 1:]
    for score_BK in score_TBK[1:]:
        entered_BK = torch.nn.functional.pad(a_BK[:, :-1] + enter_BK, (1, 0), value=_NEVER)
        a_BK = torch.logaddexp(a_BK + chains.loop_BK, entered_BK) + score_BK
        a_TBK.append(a_BK)
    last_B = to_device(torch.tensor(lengths), scores_NP.device) - 1
    at_B = torch.arange(len(lengths), device=scores_NP.device)
    return torch.stack(a_TBK)[last_B, at_B, chains.end_B]


def _scores_of_states(scores_NP: Tensor, lengths: Sequence[int], chains: Chains) -> Tensor:
    """Return the score of each state in each frame, T x B x K; `_NEVER` outside its window."""
    length_B = torch.tensor(lengths)
    time_T = torch.arange(int(length_B.max()))
    row_TB = torch.cumsum(length_B, 0) - length_B + torch.minimum(time_T[:, None], length_B - 1)
    row_TB = to_device(row_TB, scores_NP.device)
    time_T11 = to_device(time_T, scores_NP.device)[:, None, None]
    pdf_TBK = chains.pdf_BK.expand(len(time_T), -1, -1)
    score_TBK = scores_NP[row_TB].gather(2, pdf_TBK).double()
    is_allowed_TBK = (chains.first_BK <= time_T11) & (time_T11 <= chains.last_BK)
    return torch.where(is_allowed_TBK, score_TBK, _NEVER)
