"""A complete i-vector model in one file.

It consists of statistics of all speech, principal axes, background model and extractor.

Letters: T frames, C spliced features, K retained features, I Gaussians.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.asr import arrays as arrays_file
from ngsgd.asr.features.cmvn import CmnState, OnlineMean, Stats
from ngsgd.asr.ivectors.extractor import Extractor
from ngsgd.asr.ivectors.ubm import DiagonalMixture
from ngsgd.config import IvectorConfig
from ngsgd.errors import DataError

# as in Kaldi: frames spliced on each side, Gaussians per frame, and the minimum posterior
CONTEXT, NUM_GSELECT, MIN_POST = 3, 5, 0.025


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


def spliced(frames_TD: npt.NDArray[np.floating], at_N: npt.NDArray[np.int64],
            context: int) -> Tensor:
    """N x C frames spliced with `context` neighbors on each side; edge frames are repeated."""
    row_NW = np.clip(at_N[:, None] + np.arange(-context, context + 1), 0, len(frames_TD) - 1)
    return torch.from_numpy(np.asarray(frames_TD, dtype=np.float64)[row_NW]).flatten(1)


@dataclass(frozen=True)
class IvectorModel:
    """The i-vector model of a run."""

    front: FrontEnd
    ubm: DiagonalMixture
    extractor: Extractor


def scaled_posteriors(mixture: DiagonalMixture, z_TK: Tensor, config: IvectorConfig) -> Tensor:
    """T x I scaled posteriors of the Gaussians."""
    return config.posterior_scale * mixture.posteriors(z_TK, num_gselect=NUM_GSELECT, min_post=MIN_POST)


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
