"""Sequence objectives (C.8 of arXiv 1410.7455), which compare labels with all competing paths.

Z(s) is the log sum over all paths of the denominator graph for scores s, and n the path of the
labels. Scores are s_t(p) = k (log softmax(y_t)_p - log prior_p), with the acoustic scale k.
Objectives are summed over sequences and maximized:

    mmi     score(n) - Z(s)                                    (Bahl et al. 1986)
    bmmi    score(n) - Z(s + boost * [p is wrong])             (Povey et al. 2008)
    mpe     expected number of frames with the correct phone   (Povey and Woodland 2002)
    smbr    expected number of frames with the correct state   (Gibson and Hain 2006)
    lfmmi   score(n) - Z(s) with s = y                         (Povey et al. 2016)

mpe is Kaldi's mpfe. In lfmmi outputs are scores, without softmax or scale, and without prior unless
`objective.use_priors` is set: s_t(p) = y_t(p) - log prior_p. With `objective.tolerance_frames` the
score of the labels is the log sum over the paths of the numerator (`ngsgd.sequence.numerators`).

score(n) includes the log weight of the labels in the graph, so that score(n) - Z is a log
probability. Gradients are exact: they include k, which Kaldi omits.

Letters: N rows (frames of all sequences), P classes, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ngsgd.config import ObjectiveConfig
from ngsgd.ops.tensors import to_device
from ngsgd.sequence.forward_backward import Transitions, expected_accuracy, log_path_sum
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.numerators import Chains, chain_log_sum

# objf per frame of a sequence without a path of its length, as in Kaldi; its gradient is 0
_NO_PATH = -10.0
# bmmi: weight of a wrong silence frame (Kaldi's max-silence-error)
_SILENCE_ERROR = 0.1


@dataclass(frozen=True)
class Denominator:
    """Denominator graph of a sequence objective, and the definition of correct frames."""

    graph: StateGraph
    # priors of the initial model
    log_prior_P: npt.NDArray[np.float64]
    # classes of one phone have the same number
    phone_P: npt.NDArray[np.int64]
    is_silence_P: npt.NDArray[np.bool_]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return all fields as arrays, for storage."""
        graph = {f"graph.{name}": array for name, array in self.graph.arrays().items()}
        return {**graph, "log_prior": self.log_prior_P, "phone": self.phone_P,
                "is_silence": self.is_silence_P.astype(np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Denominator:
        """Create the denominator from the result of `arrays`."""
        graph = StateGraph.from_arrays({name.removeprefix("graph."): array
                                        for name, array in arrays.items()})
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
        self.is_right_PP = self._right(unit_P)

    def __call__(self, y_NP: Tensor, pdf_N: Tensor, lengths: Sequence[int],
                 log_weight_B: Tensor, chains: Chains | None = None) -> Tensor:
        """Return the loss, summed over frames.

        Args:
            y_NP: outputs of the network.
            pdf_N: labels.
            lengths: frames of each sequence, in the order of the rows.
            log_weight_B: float64 log weight of the labels of each sequence in the graph, or of the
                end of its chain.
            chains: numerators with tolerance (lfmmi).
        """
        c = self.config
        log_softmax_NP = y_NP.log_softmax(dim=1)
        if c.kind == "lfmmi":
            scores_NP = y_NP - self.log_prior_P if c.use_priors else y_NP
            said_B = None if chains is None else chain_log_sum(scores_NP, lengths, chains)
            objf = self._mutual_information(scores_NP, scores_NP, pdf_N, lengths, log_weight_B, said_B)
            objf = objf - 0.5 * c.output_l2 * y_NP.square().sum()
            weight = 1.0
        else:
            scores_NP = c.acoustic_scale * (log_softmax_NP - self.log_prior_P)
            objf = self._criterion(scores_NP, pdf_N, lengths, log_weight_B)
            weight = 1.0 - c.ce_weight
        smooth = nn.functional.nll_loss(log_softmax_NP, pdf_N, reduction="sum")
        return -weight * objf + c.ce_weight * smooth

    def _criterion(self, scores_NP: Tensor, pdf_N: Tensor, lengths: Sequence[int],
                   log_weight_B: Tensor) -> Tensor:
        kind = self.config.kind
        if kind in ("mpe", "smbr"):
            return expected_accuracy(scores_NP, self.is_right_PP[pdf_N], lengths,
                                     self.transitions).sum()
        against_NP = scores_NP
        if kind == "bmmi":
            cost_P = torch.where(self.is_silence_P, _SILENCE_ERROR, 1.0).to(self.log_prior_P.dtype)
            against_NP = scores_NP + self.config.boost * ((1.0 - self.is_right_PP[pdf_N]) * cost_P)
        return self._mutual_information(scores_NP, against_NP, pdf_N, lengths, log_weight_B)

    def _mutual_information(self, scores_NP: Tensor, against_NP: Tensor, pdf_N: Tensor,
                            lengths: Sequence[int], log_weight_B: Tensor,
                            said_B: Tensor | None = None) -> Tensor:
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

    def _right(self, unit_P: Tensor) -> Tensor:
        """Return the accuracy of class p for label q (row q), P x P."""
        is_right_PP = unit_P[:, None] == unit_P
        if self.config.one_silence_class:
            is_right_PP = is_right_PP | (self.is_silence_P[:, None] & self.is_silence_P)
        else:
            is_right_PP = is_right_PP & ~self.is_silence_P  # silence has accuracy 0
        return is_right_PP.to(self.log_prior_P.dtype)
