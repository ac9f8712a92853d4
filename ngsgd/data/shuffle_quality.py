"""Shuffle quality of archives: each should resemble a random sample of the corpus.

A job reads one archive per pass (C.2 of arXiv 1410.7455). If archives differ in their classes or
speakers, the parameters of jobs diverge and their average is worse. There are two figures per
archive, for the classes of the frames of a pass and for the groups (speakers) of its examples.

entropy: of its distribution in nats, compared with a random sample of its size. With K values of
probabilities p in a corpus of N samples, a sample of n has to first order in 1/n:

    mean      H(p) - (K - 1) / (2 n) (1 - n/N)       (Miller 1955, Madow 1948; without replacement)
    variance  (sum p ln^2 p - H^2) / n (1 - n/N) + (K - 1) / (2 n^2) (1 - n/N)^2

divergence: 2 n KL(archive || corpus) / ((K - 1) (1 - n/N)). It is 1 for a random sample (the
G-test), and large if archives differ.

Both are meaningless if n is less than a few times K.

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
    entropy_A: Floats      # nats
    expected_A: Floats     # of a random order
    # standard deviation for a random order
    deviation_A: Floats
    divergence_A: Floats   # 1 for a random order

    @property
    def farthest(self) -> float:
        """Largest distance of an entropy from its expected value, in standard deviations."""
        return float(np.abs((self.entropy_A - self.expected_A) / self.deviation_A).max())

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
    """Average the figures over P partitions of the same archives."""
    parts = [measure_one(count_AK[:, count_AK.any(axis=0)]) for count_AK in count_PAK if count_AK.any()]
    entropy_A, expected_A, deviation_A, divergence_A = (np.mean(values, axis=0) for values in zip(*parts, strict=True))
    return Mixing(what, int(count_PAK.any(axis=(0, 1)).sum()), entropy_A, expected_A, deviation_A, divergence_A)


def measure_one(count_AK: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    count_K, num_A = count_AK.sum(axis=0), np.maximum(count_AK.sum(axis=1), 1.0)
    p_K, num_free = count_K / count_K.sum(), max(count_AK.shape[1] - 1, 1)
    left_A = np.maximum(1.0 - num_A / num_A.sum(), 1e-12)   # without replacement
    entropy = float(_entropy(p_K))
    share_AK = count_AK / num_A[:, None]
    variance_A = (float((p_K * np.log(p_K) ** 2).sum()) - entropy ** 2) / num_A * left_A \
        + num_free / (2.0 * num_A ** 2) * left_A ** 2
    logs_AK = np.log(np.where(share_AK > 0.0, share_AK / p_K, 1.0))
    divergence_A = 2.0 * num_A * (share_AK * logs_AK).sum(axis=1) / (num_free * left_A)
    return (_entropy(share_AK), entropy - num_free / (2.0 * num_A) * left_A, np.sqrt(np.maximum(variance_A, 1e-24)), divergence_A)


def _entropy(share_K: Floats) -> Floats:
    return np.asarray(-(share_K * np.log(np.where(share_K > 0.0, share_K, 1.0))).sum(axis=-1))
