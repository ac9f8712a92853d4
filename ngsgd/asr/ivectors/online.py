"""Online i-vectors of an utterance: OnlineIvectorFeature of Kaldi.

Number k is estimated from frames 0 to k * period and used for the frames from k * period, so the
look-ahead of every frame is at most that of splicing. The equations are solved exactly; Kaldi uses
15 steps of conjugate gradients.

Letters: T frames, D features, K projected ones, P periods, I Gaussians, S dimension of an i-vector.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.asr.features.cmvn import CmnState
from ngsgd.asr.ivectors import model as ivector_model
from ngsgd.asr.ivectors.model import IvectorModel, scaled_posteriors

# scaled frames kept from earlier utterances of a speaker (Kaldi: 1000)
MAX_REMEMBERED_FRAMES = 1000.0
# bounds memory: periods x Gaussians x features
_PERIODS_AT_ONCE = 64


@dataclass(frozen=True)
class SpeakerState:
    """Statistics of a speaker after an utterance, without the prior."""

    heard: CmnState
    count: float           # scaled number of frames
    linear_S: Tensor
    quadratic_SS: Tensor


class IvectorStream:
    """One utterance: call `accept` for each chunk of frames, then `finish`; `at` at any time."""

    def __init__(self, model: IvectorModel, before: SpeakerState | None = None) -> None:
        self._model, self._config = model, model.front.config
        dim, float64 = model.extractor.dim, torch.float64
        device = model.extractor.M_IDS.device
        self._count = torch.zeros((), dtype=float64, device=device)
        self._linear_S = torch.zeros(dim, dtype=float64, device=device)
        self._quadratic_SS = torch.zeros(dim, dim, dtype=float64, device=device)
        if before is not None:
            self._count += before.count
            self._linear_S += before.linear_S
            self._quadratic_SS += before.quadratic_SS
        self._mean = model.front.mean(before.heard if before else None)
        # frames that are still needed, from frame `_first`
        self._raw: list[npt.NDArray[np.floating]] = []
        self._normal: list[npt.NDArray[np.floating]] = []
        self._first = self._num_frames = self._num_done = 0
        self._rows: list[npt.NDArray[np.float32]] = []

    @property
    def right_context(self) -> int:
        """Number of following frames needed before the i-vector of a frame is known."""
        return ivector_model.CONTEXT

    def accept(self, raw_TD: npt.NDArray[np.floating]) -> None:
        """Accept the next frames, not normalized."""
        self._raw.append(raw_TD)
        self._normal.append(raw_TD - self._mean.accept(raw_TD))
        self._num_frames += len(raw_TD)
        known = self._num_frames - ivector_model.CONTEXT
        # up to the last frame at which an i-vector is estimated
        if known > self._num_done:
            self._advance((known - 1) // self._config.period * self._config.period + 1)

    def finish(self) -> SpeakerState:
        """End the utterance; return the state for the next utterance of its speaker."""
        self._advance((self._num_frames - 1) // self._config.period * self._config.period + 1)
        self._advance(self._num_frames)
        most = MAX_REMEMBERED_FRAMES * self._config.posterior_scale
        share = min(1.0, most / max(float(self._count), 1e-10))
        return SpeakerState(self._mean.heard(), share * float(self._count), share * self._linear_S,
                            share * self._quadratic_SS)

    def rows(self) -> npt.NDArray[np.float32]:
        """i-vectors so far, one per period."""
        return np.stack(self._rows)

    def at(self, time_T: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """T x S i-vectors of these frames."""
        return np.stack([self._rows[period] for period in time_T // self._config.period])

    def _advance(self, end: int) -> None:
        """Process frames up to `end`; those that begin a period get an i-vector."""
        period = self._config.period
        while self._num_done < end:
            # a period ends with the frame at which an i-vector is estimated, so the first one has a
            # single frame
            whole = (self._num_done + period - 1) // period * period + 1 if self._num_done else 1
            self._step(min(end, whole + (_PERIODS_AT_ONCE - 1) * period))

    def _step(self, end: int) -> None:
        """Process frames up to `end`, the last of a period or of the utterance, in one batch."""
        begin, self._num_done = self._num_done, end
        at_T = np.arange(begin, end) - self._first
        self._raw, self._normal = [np.concatenate(self._raw)], [np.concatenate(self._normal)]
        z_TK = [self._model.front.project(frames, at_T)
                for frames in (self._normal[0], self._raw[0])]
        # the first period is padded at its front
        period = self._config.period
        missing = -(end - begin) % period
        normal_PTK, raw_PTK = (torch.cat([one.new_zeros(missing, one.shape[1]), one]).view(-1, period, one.shape[1])
                               for one in z_TK)
        post_PTI = scaled_posteriors(self._model.ubm, normal_PTK.flatten(0, 1), self._config).unflatten(0, normal_PTK.shape[:2])
        # padding, not frames
        post_PTI[0, :missing] = 0.0
        count_PI, first_PIK = post_PTI.sum(dim=1), post_PTI.mT @ raw_PTK
        linear_PS, quadratic_PSS = self._model.extractor.terms(count_PI, first_PIK)
        count_P = self._count + count_PI.sum(dim=1).cumsum(dim=0)
        linear_PS, quadratic_PSS = self._linear_S + linear_PS.cumsum(dim=0), self._quadratic_SS + quadratic_PSS.cumsum(dim=0)
        self._count, self._linear_S, self._quadratic_SS = count_P[-1], linear_PS[-1], quadratic_PSS[-1]
        if (end - 1) % period == 0:
            self._rows += list(self._estimates(count_P, linear_PS, quadratic_PSS).float().cpu().numpy())
        # frames that no later projection needs
        gone = max(0, end - ivector_model.CONTEXT - self._first)
        self._raw, self._normal = [self._raw[0][gone:]], [self._normal[0][gone:]]
        self._first += gone

    def _estimates(self, count_P: Tensor, linear_PS: Tensor, quadratic_PSS: Tensor) -> Tensor:
        """Mean of x minus its prior mean; the prior keeps its share beyond `max_count` frames."""
        most = self._config.max_count
        scale_P = count_P.clamp(min=most) / most if most else torch.ones_like(count_P)
        prior_PS, prior_PSS = self._model.extractor.prior(scale_P)
        x_PS: Tensor = torch.linalg.solve(quadratic_PSS + prior_PSS, linear_PS + prior_PS)
        x_PS[:, 0] -= self._model.extractor.prior_offset
        return x_PS
