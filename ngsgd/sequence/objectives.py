"""Sequence objectives (C.8 of arXiv 1410.7455), which compare labels with all competing paths.

Z(s) is the log sum over all paths of the denominator graph for scores s, and n the path of the
labels. Scores are s_t(p) = k (log softmax(y_t)_p - log prior_p); k is the acoustic scale. Sums over
sequences are maximized:

    mmi     score(n) - Z(s)                                    (Bahl et al. 1986)
    bmmi    score(n) - Z(s + boost * [p is wrong])             (Povey et al. 2008)
    mpe     expected number of frames with the correct phone   (Povey and Woodland 2002; mpfe)
    smbr    expected number of frames with the correct state   (Gibson and Hain 2006)
    lfmmi   score(n) - Z(s) with s_t(p) = y_t(p)               (Povey et al. 2016)

`objective.use_priors` subtracts log prior_p in lfmmi. With `objective.tolerance_frames` the score
of the labels is the log sum over paths through their chain of states, their best path through the
graph. No state is more than so many frames off (Kaldi's chain-egs). score(n) includes the log
weight in the graph. Gradients are exact: they include k, which Kaldi omits.

Letters: N rows (frames of all sequences), P classes, B sequences, T frames of the longest, K states
of the longest chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.config import ObjectiveConfig
from ngsgd.ops.tensors import to_device
from ngsgd.sequence.forward_backward import Transitions, expected_accuracy, log_path_sum
from ngsgd.sequence.graph import StateGraph

# log weight of paths that do not exist; infinities would have undefined gradients
_NEVER = -1e30


class Chain(NamedTuple):
    """The states of one sequence, in order."""

    pdf_K: npt.NDArray[np.int32]
    enter_K: npt.NDArray[np.float64]  # log weight from the state before
    loop_K: npt.NDArray[np.float64]  # log weight of staying
    first_K: npt.NDArray[np.int32]  # first and last allowed frame
    last_K: npt.NDArray[np.int32]


def chain_of(graph: StateGraph, pdf_T: npt.NDArray[np.int32], tolerance: int) -> tuple[Chain, float]:
    """Return the chain of labels, whose states may begin `tolerance` frames earlier and end as many
    later, and the log weight of its end: minus infinity for labels without a path.
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
    enter_BK: Tensor  # float64
    loop_BK: Tensor
    first_BK: Tensor
    last_BK: Tensor
    end_B: Tensor  # last state of each sequence

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
    """Return the log sum over the paths through the chain of each sequence, B (float64), without
    the weights of their ends; `lengths` are the frames of each sequence, in the order of the rows.
    """
    length_B = torch.tensor(lengths)
    time_T = torch.arange(int(length_B.max()))
    row_TB = torch.cumsum(length_B, 0) - length_B + torch.minimum(time_T[:, None], length_B - 1)
    row_TB = to_device(row_TB, scores_NP.device)
    time_T11 = to_device(time_T, scores_NP.device)[:, None, None]
    # the score of each state in each frame; `_NEVER` outside its window
    pdf_TBK = chains.pdf_BK.expand(len(time_T), -1, -1)
    is_allowed_TBK = (chains.first_BK <= time_T11) & (time_T11 <= chains.last_BK)
    score_TBK = torch.where(is_allowed_TBK, scores_NP[row_TB].gather(2, pdf_TBK).double(), _NEVER)
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
    last_B = to_device(length_B, scores_NP.device) - 1
    at_B = torch.arange(len(lengths), device=scores_NP.device)
    return torch.stack(a_TBK)[last_B, at_B, chains.end_B]


# objf per frame of a sequence without a path of its length, as in Kaldi; its gradient is 0
_NO_PATH = -10.0
# L2 regularization of the outputs per frame in lfmmi, as in Kaldi's recipes
OUTPUT_L2 = 0.00005
# bmmi: bonus of each wrong frame in the denominator, in nats, as in Kaldi's recipes
BOOST = 0.1
# bmmi: weight of a wrong silence frame (Kaldi's max-silence-error)
_SILENCE_ERROR = 0.1


@dataclass(frozen=True)
class Denominator:
    """Denominator graph of a sequence objective, and the definition of correct frames."""

    graph: StateGraph
    log_prior_P: npt.NDArray[np.float64]  # of the initial model
    phone_P: npt.NDArray[np.int64]  # classes of one phone have the same number
    is_silence_P: npt.NDArray[np.bool_]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return all fields as arrays, for storage."""
        graph = {f"graph.{name}": array for name, array in self.graph.arrays().items()}
        return {**graph, "log_prior": self.log_prior_P, "phone": self.phone_P, "is_silence": self.is_silence_P.astype(np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Denominator:
        """Create the denominator from the result of `arrays`."""
        graph = StateGraph.from_arrays({name.removeprefix("graph."): array for name, array in arrays.items()})
        return cls(graph, np.asarray(arrays["log_prior"], np.float64),
                   np.asarray(arrays["phone"], np.int64), np.asarray(arrays["is_silence"]) != 0)


class SequenceObjective:
    """Loss (negative objective) of a batch of sequences."""

    def __init__(self, config: ObjectiveConfig, denominator: Denominator, *,
                 device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.config = config
        self.transitions = Transitions(denominator.graph, device=device, dtype=dtype)
        self.log_prior_P = torch.from_numpy(denominator.log_prior_P).to(device, dtype)
        self.is_silence_P = torch.from_numpy(denominator.is_silence_P).to(device)
        classes = denominator.phone_P if config.kind in ("mpe", "bmmi") else np.arange(len(denominator.phone_P))
        unit_P = torch.from_numpy(classes).to(device)
        # the accuracy of class p for label q (row q); all silence phones are one class, as in
        # Kaldi's recipes
        is_right_PP = (unit_P[:, None] == unit_P) | (self.is_silence_P[:, None] & self.is_silence_P)
        self.is_right_PP = is_right_PP.to(self.log_prior_P.dtype)

    def __call__(self, y_NP: Tensor, pdf_N: Tensor, lengths: Sequence[int],
                 log_weight_B: Tensor, chains: Chains | None = None) -> Tensor:
        """Return the loss, summed over frames.

        `lengths` are the frames of each sequence, `log_weight_B` the float64 log weight of its
        labels in the graph or of the end of its chain, and `chains` numerators with tolerance
        (lfmmi).
        """
        c = self.config
        log_softmax_NP = y_NP.log_softmax(dim=1)
        if c.kind == "lfmmi":
            scores_NP = y_NP - self.log_prior_P if c.use_priors else y_NP
            said_B = None if chains is None else chain_log_sum(scores_NP, lengths, chains)
            objf = self._mutual_information(scores_NP, scores_NP, pdf_N, lengths, log_weight_B, said_B)
            objf = objf - 0.5 * OUTPUT_L2 * y_NP.square().sum()
            weight = 1.0
        else:
            scores_NP = c.acoustic_scale * (log_softmax_NP - self.log_prior_P)
            weight = 1.0 - c.ce_weight
            if c.kind in ("mpe", "smbr"):
                objf = expected_accuracy(scores_NP, self.is_right_PP[pdf_N], lengths, self.transitions).sum()
            else:
                against_NP = scores_NP
                if c.kind == "bmmi":
                    cost_P = torch.where(self.is_silence_P, _SILENCE_ERROR, 1.0).to(self.log_prior_P.dtype)
                    against_NP = scores_NP + BOOST * ((1.0 - self.is_right_PP[pdf_N]) * cost_P)
                objf = self._mutual_information(scores_NP, against_NP, pdf_N, lengths, log_weight_B)
        smooth = nn.functional.nll_loss(log_softmax_NP, pdf_N, reduction="sum")
        return -weight * objf + c.ce_weight * smooth

    def _mutual_information(self, scores_NP: Tensor, against_NP: Tensor, pdf_N: Tensor,
                            lengths: Sequence[int], log_weight_B: Tensor, said_B: Tensor | None = None) -> Tensor:
        if said_B is None:
            said_N = scores_NP.gather(1, pdf_N[:, None]).squeeze(1).double()
            said_B = torch.stack([part.sum() for part in said_N.split(list(lengths))])
        said_B = said_B + log_weight_B
        z_B = log_path_sum(against_NP, lengths, self.transitions)
        nothing_B = _NO_PATH * to_device(torch.tensor(lengths, dtype=z_B.dtype), z_B.device)
        # `where` alone would propagate minus infinity into the gradient.
        has_path_B = z_B.isfinite() & log_weight_B.isfinite()
        return torch.where(has_path_B,
                           said_B.masked_fill(~has_path_B, 0.0) - z_B.masked_fill(~has_path_B, 0.0), nothing_B).sum()
