"""Shuffle quality of archives: each should resemble a random sample of the corpus.

If archives differ in their classes or speakers, the parameters of jobs diverge and their average is
worse. The figure of an archive is the divergence 2 n KL(archive || corpus) / ((K - 1) (1 - n/N)),
with K values in a corpus of N samples and an archive of n. It is 1 for a random sample (the
G-test), large if archives differ, and meaningless if n is less than a few times K.

Letters: A archives, K values, E examples, F frames per example.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.data.examples import is_row
from ngsgd.data.reader import EgsReader

Floats = npt.NDArray[np.float64]

# standard deviations; false alarms for well-mixed archives have probability 1e-6
_BOUND = 5.0


@dataclass(frozen=True)
class Mixing:
    """Distribution of one property of the data over the archives."""

    what: str              # "classes" or "groups"
    num_values: int        # K
    divergence_A: Floats   # 1 for a random order

    @property
    def divergence(self) -> float:
        """Mean over the archives."""
        return float(self.divergence_A.mean())

    @property
    def is_well_mixed(self) -> bool:
        """Whether the divergence is consistent with a random order."""
        spread = np.sqrt(2.0 / (max(self.num_values - 1, 1) * len(self.divergence_A)))
        return bool(self.divergence - 1.0 < _BOUND * spread)


def mixing(reader: EgsReader) -> list[Mixing]:
    """Measure classes, and groups if there are any; empty with fewer than two archives.

    Only labels are read. Raises DamagedArchiveError.
    """
    info = reader.info
    if info.num_archives < 2:
        return []
    groups = reader.groups()[1]
    names = sorted(set(groups))
    group_U = np.array([names.index(group) for group in groups], dtype=np.int64)
    class_AFK = np.zeros((info.num_archives, info.frames_per_eg, info.num_classes))
    group_AG = np.zeros((info.num_archives, len(names)))
    for archive in range(info.num_archives):
        file = reader.archive_arrays(archive)
        pdf_EF = file["pdf"]
        counted_EF = is_row(pdf_EF, file.get("weight"))
        for frame in range(info.frames_per_eg):
            class_AFK[archive, frame] = np.bincount(pdf_EF[counted_EF[:, frame], frame], minlength=info.num_classes)
        if names:
            group_AG[archive] = np.bincount(group_U[file["utterance"]], minlength=len(names))
    # one frame of an example is one sample; frames of the same example are not independent
    found = [_of("classes", class_AFK.transpose(1, 0, 2))]
    return found + ([_of("groups", group_AG[None])] if len(names) > 1 else [])


def _of(what: str, count_PAK: Floats) -> Mixing:
    parts = [divergences(count_AK[:, count_AK.any(axis=0)]) for count_AK in count_PAK if count_AK.any()]
    return Mixing(what, int(count_PAK.any(axis=(0, 1)).sum()), np.mean(parts, axis=0))


def divergences(count_AK: Floats) -> Floats:
    """Return the divergence of each archive from all together."""
    count_K, num_A = count_AK.sum(axis=0), np.maximum(count_AK.sum(axis=1), 1.0)
    p_K, num_free = count_K / count_K.sum(), max(count_AK.shape[1] - 1, 1)
    left_A = np.maximum(1.0 - num_A / num_A.sum(), 1e-12)   # without replacement
    share_AK = count_AK / num_A[:, None]
    logs_AK = np.log(np.where(share_AK > 0.0, share_AK / p_K, 1.0))
    return np.asarray(2.0 * num_A * (share_AK * logs_AK).sum(axis=1) / (num_free * left_A))
