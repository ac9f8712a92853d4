"""Sequence objectives (C.8 of arXiv 1410.7455): what a network's outputs are worth beside
everything else that could be said.

With Z(s) the log sum over all paths of the denominator graph for scores s, n the path of the
labels, k the acoustic scale, and s_t(p) = k (log softmax(y_t)_p - log prior_p), an objective is
summed over sequences and goes up:

    mmi     score(n) - Z(s)                            maximum mutual information (Bahl et al. 1986)
    bmmi    score(n) - Z(s + boost * [p is wrong])     boosted MMI (Povey et al. 2008)
    mpe     expected number of frames whose phone is right    (Povey and Woodland 2002; Kaldi's
    mpfe) smbr    expected number of frames whose state is right    (Gibson and Hain 2006)
    lfmmi   score(n) - Z(s), s = y: outputs are scores, without softmax, prior or scale (Povey et
    al. 2016)

score(n) has the log weight that the graph gives to the labels, so that score(n) - Z is a log
probability.  Derivatives are the objective's own: k is in them, where Kaldi leaves it out.

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
from ngsgd.ops.devices import to_device
from ngsgd.sequence.forward_backward import expected_accuracy, log_path_sum
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.transitions import Transitions

# objf per frame of a sequence that no path has the length of, as in Kaldi; it has no derivative
_NO_PATH = -10.0
# bmmi: a wrong frame of silence counts as so much of one (Kaldi's max-silence-error)
_SILENCE_ERROR = 0.1


@dataclass(frozen=True)
class Denominator:
    """What labels are told apart from, and what counts as right."""

    graph: StateGraph
    # of the model that training starts from
    log_prior_P: npt.NDArray[np.float64]
    # classes of one phone have the same number
    phone_P: npt.NDArray[np.int64]
    is_silence_P: npt.NDArray[np.bool_]

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """All of it, to be written to a file."""
        graph = {f"graph.{name}": array for name, array in self.graph.arrays().items()}
        return {**graph, "log_prior": self.log_prior_P, "phone": self.phone_P,
                "is_silence": self.is_silence_P.astype(np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[np.generic]]) -> Denominator:
        """What `arrays` gave."""
        graph = StateGraph.from_arrays({name.removeprefix("graph."): array
                                        for name, array in arrays.items()})
        return cls(graph, np.asarray(arrays["log_prior"], np.float64),
                   np.asarray(arrays["phone"], np.int64), np.asarray(arrays["is_silence"]) != 0)


class SequenceObjective:
    """Minus the objective of a batch of sequences, ready for `backward`."""

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
                 log_weight_B: Tensor) -> Tensor:
        """The loss, summed over frames.

        `pdf_N` are the labels, `lengths` the frames of each sequence in the order of the rows, and
        `log_weight_B` (float64) what the graph gives to the labels of each.
        """
        c = self.config
        log_softmax_NP = y_NP.log_softmax(dim=1)
        if c.kind == "lfmmi":
            objf = self._mutual_information(y_NP, y_NP, pdf_N, lengths, log_weight_B) - 0.5 * c.output_l2 * y_NP.square().sum()
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
                            lengths: Sequence[int], log_weight_B: Tensor) -> Tensor:
        said_N = scores_NP.gather(1, pdf_N[:, None]).squeeze(1).double()
        said_B = torch.stack([part.sum() for part in said_N.split(list(lengths))]) + log_weight_B
        z_B = log_path_sum(against_NP, lengths, self.transitions)
        nothing_B = _NO_PATH * to_device(torch.tensor(lengths, dtype=z_B.dtype), z_B.device)
        # not by `where` alone: minus infinity would leave its mark on the derivative
        has_path_B = z_B.isfinite() & log_weight_B.isfinite()
        return torch.where(has_path_B,
                           said_B.masked_fill(~has_path_B, 0.0) - z_B.masked_fill(~has_path_B, 0.0), nothing_B).sum()

    def _right(self, unit_P: Tensor) -> Tensor:
        """P x P: what class p counts for where the label is q (row q)."""
        is_right_PP = unit_P[:, None] == unit_P
        if self.config.one_silence_class:
            is_right_PP = is_right_PP | (self.is_silence_P[:, None] & self.is_silence_P)
        else:
            is_right_PP = is_right_PP & ~self.is_silence_P  # silence earns nothing
        return is_right_PP.to(self.log_prior_P.dtype)
