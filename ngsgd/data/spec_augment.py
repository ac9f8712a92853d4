"""SpecAugment masks (arXiv 1904.08779, section 2) on the spliced windows of a minibatch.

Each row of a minibatch is a separate small spectrogram of W frames by D features. Some ranges of
frames and some ranges of features are replaced by its mean, which carries no information under any
normalization. Time warping is omitted: a window of about 10 frames is too short for it.

Letters: N rows, W frames of a window, D feature dimension.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.config import AugmentConfig


def mask_windows(x_ND: Tensor, window: int, config: AugmentConfig, random: np.random.Generator,
                 out: Tensor | None = None, probability: float = 0.5) -> Tensor:
    """Mask each row independently with the given probability.

    A mask is 0 to `spec_time_frames` frames (or `spec_freq_bins` features) wide, with a uniform
    random start.

    Args:
        x_ND: rows of spliced frames.
        window: frames of a window, W.
        config: maximum widths of the masks.
        random: random number generator.
        out: memory of the result; it may be `x_ND`. Default: new memory.
        probability: of a mask per row. Default: 0.5.

    Returns:
        N x D, the masked rows.
    """
    num_rows = len(x_ND)
    dim = x_ND.shape[1] // window
    is_chosen_N = random.random(num_rows) < probability
    time_NW = _covered(random, num_rows, window, config.spec_time_frames)
    freq_ND = _covered(random, num_rows, dim, config.spec_freq_bins)
    hidden_NWD = is_chosen_N[:, None, None] & (time_NW[:, :, None] | freq_ND[:, None, :])
    return torch.where(torch.from_numpy(hidden_NWD).flatten(1), x_ND.mean(dim=1, keepdim=True), x_ND, out=out)


def _covered(random: np.random.Generator, num_rows: int, size: int, max_width: int) -> npt.NDArray[np.bool_]:
    """Rows x size: positions covered by the mask of each row."""
    width_N = random.integers(0, min(max_width, size), size=num_rows, endpoint=True)
    begin_N = np.floor(random.random(num_rows) * (size - width_N + 1)).astype(np.int64)
    place_S = np.arange(size)
    return np.asarray((place_S >= begin_N[:, None]) & (place_S < (begin_N + width_N)[:, None]))
