"""A complete i-vector model in one file, and online i-vectors (OnlineIvectorFeature of Kaldi).

Number k is estimated from frames 0 to k * period and used for the frames from k * period. The
equations are solved exactly; Kaldi uses 15 steps of conjugate gradients.
T frames, C spliced features, K retained ones, P periods, I Gaussians, S i-vector.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.asr.features.cmvn import CmnState, OnlineMean, Stats
from ngsgd.asr.ivectors.extractor import Extractor
from ngsgd.config import IvectorConfig
from ngsgd.data import arrays as arrays_file
from ngsgd.errors import DataError

# as in Kaldi: frames spliced on each side, Gaussians per frame, and the minimum posterior
CONTEXT, NUM_GSELECT, MIN_POST = 3, 5, 0.025
# below 1 because frames are correlated, as in Kaldi
POSTERIOR_SCALE = 0.1
# scaled frames of an utterance above which the prior is scaled with them (nnet3)
MAX_COUNT = 100.0
# scaled frames kept from earlier utterances of a speaker (Kaldi: 1000)
MAX_REMEMBERED_FRAMES = 1000.0
_PERIODS_AT_ONCE = 64  # bounds memory: periods x Gaussians x features


@dataclass(frozen=True)
class DiagonalMixture:
    """The background model: G diagonal Gaussians in float64; N frames, D features."""

    weight_G: Tensor
    mean_GD: Tensor
    variance_GD: Tensor

    def log_joint(self, x_ND: Tensor) -> Tensor:
        """N x G: log of weight times density of every frame under every Gaussian."""
        precision_GD = 1.0 / self.variance_GD
        square_GD = self.mean_GD.square() * precision_GD + self.variance_GD.log() + math.log(2.0 * math.pi)
        constant_G = self.weight_G.log() - 0.5 * square_GD.sum(dim=1)
        return constant_G + x_ND @ (self.mean_GD * precision_GD).T - 0.5 * x_ND.square() @ precision_GD.T

    def posteriors(self, x_ND: Tensor, *, num_gselect: int, min_post: float) -> Tensor:
        """N x G posteriors of the `num_gselect` most likely Gaussians, pruned below `min_post`."""
        best_NK, index_NK = self.log_joint(x_ND).topk(min(num_gselect, len(self.weight_G)), dim=1)
        post_NK = best_NK.softmax(dim=1)
        # the most likely one remains: its posterior is at least 1 / num_gselect
        post_NK = torch.where(post_NK < min_post, 0.0, post_NK)
        post_NK = post_NK / post_NK.sum(dim=1, keepdim=True)
        return torch.zeros(len(x_ND), len(self.weight_G), dtype=x_ND.dtype, device=x_ND.device).scatter_(1, index_NK, post_NK)


@dataclass(frozen=True)
class FrontEnd:
    """Preprocessing of frames: online mean subtraction, splicing, projection on principal axes."""

    config: IvectorConfig
    all_speech: Stats
    axes_CK: Tensor

    def mean(self, before: CmnState | None) -> OnlineMean:
        return OnlineMean(self.all_speech, before)

    def project(self, frames_TD: npt.NDArray[np.floating], at_N: npt.NDArray[np.int64]) -> Tensor:
        """N x K projections of these frames, see `spliced`."""
        return spliced(frames_TD, at_N, CONTEXT).to(self.axes_CK.device) @ self.axes_CK


def spliced(frames_TD: npt.NDArray[np.floating], at_N: npt.NDArray[np.int64], context: int) -> Tensor:
    """N x C frames spliced with `context` neighbors on each side; edge frames are repeated."""
    row_NW = np.clip(at_N[:, None] + np.arange(-context, context + 1), 0, len(frames_TD) - 1)
    return torch.from_numpy(np.asarray(frames_TD, dtype=np.float64)[row_NW]).flatten(1)


@dataclass(frozen=True)
class IvectorModel:
    """The i-vector model of a run."""

    front: FrontEnd
    ubm: DiagonalMixture
    extractor: Extractor


def scaled_posteriors(mixture: DiagonalMixture, z_TK: Tensor) -> Tensor:
    """T x I scaled posteriors of the Gaussians."""
    return POSTERIOR_SCALE * mixture.posteriors(z_TK, num_gselect=NUM_GSELECT, min_post=MIN_POST)


def write(model: IvectorModel, path: Path) -> None:
    arrays = {"all_speech": torch.from_numpy(model.front.all_speech), "axes": model.front.axes_CK, "weight": model.ubm.weight_G,
              "mean": model.ubm.mean_GD, "variance": model.ubm.variance_GD, "M": model.extractor.M_IDS,
              "covariance": model.extractor.covariance_IDD,
              "prior_offset": torch.tensor([model.extractor.prior_offset], dtype=torch.float64)}
    arrays_file.write(path, {name: array.cpu().numpy() for name, array in arrays.items()})


def read(path: Path, config: IvectorConfig) -> IvectorModel:
    """Read a file of `write`; the settings determine its use."""
    try:
        arrays = {name: torch.from_numpy(array) for name, array in arrays_file.read(path).items()}
        return of_arrays(arrays, config)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        raise DataError(f"{path} cannot be read as an i-vector extractor ({error}); restore it, or remove it "
                        "and train again.") from error


def of_arrays(a: Mapping[str, Tensor], config: IvectorConfig) -> IvectorModel:
    """Build the model from the arrays of `write`; raise ValueError for inconsistent shapes."""
    num_gaussians, num_kept, dim = a["M"].shape
    shapes = {"all_speech": (2, len(a["axes"]) // (2 * CONTEXT + 1) + 1), "axes": (len(a["axes"]), num_kept),
              "weight": (num_gaussians,), "mean": (num_gaussians, num_kept), "variance": (num_gaussians, num_kept),
              "covariance": (num_gaussians, num_kept, num_kept), "prior_offset": (1,)}
    wrong = [name for name, shape in shapes.items() if tuple(a[name].shape) != shape or not bool(a[name].isfinite().all())]
    if wrong:
        raise ValueError(f"{wrong[0]} is not finite or has the shape {tuple(a[wrong[0]].shape)}")
    if dim != config.dim:
        raise ValueError(f"it produces i-vectors of {dim} dimensions, but ivectors.dim is "
                         f"{config.dim}")
    return IvectorModel(FrontEnd(config, a["all_speech"].numpy(), a["axes"]),
                        DiagonalMixture(a["weight"], a["mean"], a["variance"]),
                        Extractor(a["M"], a["covariance"], float(a["prior_offset"])))


def is_sound(path: Path) -> bool:
    """Whether the file can be read and matches its digest."""
    try:
        return bool(arrays_file.read(path))
    except (OSError, ValueError):
        return False


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
        dim, like = model.extractor.dim, model.extractor.M_IDS
        self._count, self._linear_S, self._quadratic_SS = (
            torch.zeros(shape, dtype=torch.float64, device=like.device)
            for shape in ((), (dim,), (dim, dim)))
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
        return CONTEXT

    def accept(self, raw_TD: npt.NDArray[np.floating]) -> None:
        """Accept the next frames, not normalized."""
        self._raw.append(raw_TD)
        self._normal.append(raw_TD - self._mean.accept(raw_TD))
        self._num_frames += len(raw_TD)
        known = self._num_frames - CONTEXT
        # up to the last frame at which an i-vector is estimated
        if known > self._num_done:
            self._advance((known - 1) // self._config.period * self._config.period + 1)

    def finish(self) -> SpeakerState:
        """End the utterance; return the state for the next utterance of its speaker."""
        self._advance((self._num_frames - 1) // self._config.period * self._config.period + 1)
        self._advance(self._num_frames)
        most = MAX_REMEMBERED_FRAMES * POSTERIOR_SCALE
        share = min(1.0, most / max(float(self._count), 1e-10))
        return SpeakerState(self._mean.heard(), share * float(self._count), share * self._linear_S, share * self._quadratic_SS)

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
        z_TK = [self._model.front.project(frames, at_T) for frames in (self._normal[0], self._raw[0])]
        # the first period is padded at its front
        period = self._config.period
        missing = -(end - begin) % period
        normal_PTK, raw_PTK = (torch.cat([one.new_zeros(missing, one.shape[1]),
                                          one]).view(-1, period, one.shape[1]) for one in z_TK)
        post_PTI = scaled_posteriors(self._model.ubm, normal_PTK.flatten(0, 1)).unflatten(0, normal_PTK.shape[:2])
        # padding, not frames
        post_PTI[0, :missing] = 0.0
        count_PI, first_PIK = post_PTI.sum(dim=1), post_PTI.mT @ raw_PTK
        linear_PS, quadratic_PSS = self._model.extractor.terms(count_PI, first_PIK)
        count_P = self._count + count_PI.sum(dim=1).cumsum(dim=0)
        linear_PS = self._linear_S + linear_PS.cumsum(dim=0)
        quadratic_PSS = self._quadratic_SS + quadratic_PSS.cumsum(dim=0)
        self._count, self._linear_S = count_P[-1], linear_PS[-1]
        self._quadratic_SS = quadratic_PSS[-1]
        if (end - 1) % period == 0:
            # mean of x minus its prior mean; the prior keeps its share beyond `MAX_COUNT` frames
            scale_P = count_P.clamp(min=MAX_COUNT) / MAX_COUNT
            prior_PS, prior_PSS = self._model.extractor.prior(scale_P)
            x_PS: Tensor = torch.linalg.solve(quadratic_PSS + prior_PSS, linear_PS + prior_PS)
            x_PS[:, 0] -= self._model.extractor.prior_offset
            self._rows += list(x_PS.float().cpu().numpy())
        # frames that no later projection needs
        gone = max(0, end - CONTEXT - self._first)
        self._raw, self._normal = [self._raw[0][gone:]], [self._normal[0][gone:]]
        self._first += gone
