"""Adaptation of features to speakers: a projection for all, and one fMLLR transform for each.

A first pass without transcripts finds the states of a speaker's frames; the network may find those
of further passes. A prior of training frames keeps the transform of little speech near the average.
Letters: T frames, D features, P pdfs, G Gaussians of all pdfs together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.asr.adapt import projections
from ngsgd.asr.adapt.projections import FmllrStats
from ngsgd.asr.features import gaussians
from ngsgd.asr.features.gaussians import StateMixtures
from ngsgd.data import mapped
from ngsgd.data.columns import Spool
from ngsgd.errors import DataError
from ngsgd.phase import Each

Matrix = npt.NDArray[np.float64]
Features = npt.NDArray[np.float32]
Pdfs = npt.NDArray[np.integer]
# T x P log-likelihoods to the pdf of each frame
FindPath = Callable[[npt.NDArray[np.float32]], Pdfs]
# adapted features to the T x P scores of a network
NetworkScores = Callable[[Features], npt.NDArray[np.float32]]

# rounds of transforms and mixtures over the training set, and passes of EM in each
TRAINING_ROUNDS, _PASSES_PER_ROUND = 3, 4
_NETWORK_ROUNDS = 2  # rounds in which a network finds the states
_PRIOR_FRAMES = 40.0  # frames of the prior
# frames of speech that change an estimate little more; bounds the time of long recordings
_MAX_FRAMES = 60_000
# of training speech; Kaldi has 15,000 Gaussians for five hours
FRAMES_PER_GAUSSIAN = 100


@dataclass(frozen=True)
class SpeakerAdaptation:
    """The projection, and the mixtures that transforms are estimated with (None without fMLLR)."""

    context: int  # frames spliced on each side before the projection
    projection_DE: Matrix  # matrix and offset of the projection of spliced features
    num_silence: int  # pdfs below are silence, which has no information about a speaker
    first: StateMixtures | None = None  # of projected features
    adapted: StateMixtures | None = None  # of transformed features
    prior: FmllrStats | None = None  # sums of all training speakers

    @property
    def dim(self) -> int:
        """Number of projected features."""
        return len(self.projection_DE)

    @property
    def input_dim(self) -> int:
        """Number of features of a frame before it is spliced."""
        return int(self.projection_DE.shape[1] - 1) // (2 * self.context + 1)

    def project(self, x_TD: npt.NDArray[np.floating]) -> Matrix:
        """Return spliced and projected features of one utterance."""
        return projections.apply(self.projection_DE, projections.splice(x_TD, self.context))

    def adapt(self, x_TD: npt.NDArray[np.floating], before: FmllrStats | None,
              find_path: FindPath) -> tuple[Features, FmllrStats | None]:
        """Return the adapted features of the next utterance, and the sums `before` with its own."""
        z_TD = self.project(x_TD)
        if self.prior is None:
            return z_TD.astype(np.float32), None
        stats = self.accumulated([z_TD], before, find_path)
        return projections.apply(self.transform(stats), z_TD).astype(np.float32), stats

    def adapt_speaker(self, utterances: Sequence[npt.NDArray[np.floating]], find_path: FindPath,
                      scores: NetworkScores) -> list[Features]:
        """Return the adapted features of all utterances of a speaker; `find_path` also searches the
        scores of the network, which was trained on adapted features.
        """
        z = [self.project(x_TD) for x_TD in utterances]
        if self.prior is None:
            return [z_TD.astype(np.float32) for z_TD in z]
        w_DE = self.refined(self.transform_of(z, find_path), z, find_path, scores)
        return [projections.apply(w_DE, z_TD).astype(np.float32) for z_TD in z]

    def transform_of(self, projected: Sequence[Matrix], find_path: FindPath) -> Matrix:
        """Return the transform of a speaker from all projected utterances, by two rounds."""
        stats = self.accumulated(projected, None, find_path)
        return self.transform(self.accumulated(projected, None, find_path, self.transform(stats)))

    def refined(self, transform: Matrix, projected: Sequence[Matrix], find_path: FindPath, scores: NetworkScores) -> Matrix:
        """Return the transform of a speaker from states that a network finds."""
        for _ in range(_NETWORK_ROUNDS):
            transform = self.transform(self.accumulated(projected, None, find_path, transform, scores))
        return transform

    def transform(self, stats: FmllrStats) -> Matrix:
        """Return a speaker's transform [A b]."""
        assert self.prior is not None
        return stats.plus(self.prior).estimate()

    def accumulated(self, utterances: Sequence[Matrix], before: FmllrStats | None,
                    find_path: FindPath, transform: Matrix | None = None,
                    scores: NetworkScores | None = None) -> FmllrStats:
        """Return the sums of projected utterances, added to those of earlier ones, `before`, which
        replace the transform so far. Without `scores` the mixtures score.
        """
        assert self.first is not None and self.adapted is not None
        stats = FmllrStats.zero(self.dim) if before is None else before
        if before is not None:
            transform = self.transform(before)
        for z_TD in utterances:
            if stats.count > _MAX_FRAMES:
                break
            y_TD, mixtures = z_TD, self.first
            if transform is not None:
                y_TD, mixtures = projections.apply(transform, z_TD), self.adapted
            pdf_T = find_path(scores(y_TD.astype(np.float32)) if scores else mixtures.log_likelihood(y_TD))
            stats = stats.plus(_sums(self.adapted, z_TD, y_TD, pdf_T, self.num_silence))
        return stats

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that `of_arrays` reads."""
        found: dict[str, npt.NDArray[Any]] = {
            "context": np.array([self.context, self.num_silence]), "projection": self.projection_DE}
        if self.first and self.adapted and self.prior:
            for name, mixtures in (("first", self.first), ("adapted", self.adapted)):
                found |= {f"{name}.pdf": mixtures.pdf_G, f"{name}.weight": mixtures.log_weight_G,
                          f"{name}.mean": mixtures.mean_GD, f"{name}.variance": mixtures.variance_GD}
            found |= {"prior.count": np.array([self.prior.count]), "prior.linear": self.prior.linear_DE,
                      "prior.square": self.prior.square_DEE}
        return found

    @staticmethod
    def of_arrays(arrays: Mapping[str, npt.NDArray[Any]], num_pdfs: int) -> SpeakerAdaptation:
        """Read the result of `arrays`; ValueError for arrays that do not fit or are not finite."""
        context, num_silence = (int(value) for value in arrays["context"])
        projection_DE = _array(arrays["projection"], 2)
        dim = len(projection_DE)
        if not 0 <= context <= 20 or (projection_DE.shape[1] - 1) % (2 * context + 1):
            raise ValueError("the projection does not fit the context")
        if "first.pdf" not in arrays:
            return SpeakerAdaptation(context, projection_DE, num_silence)
        first, adapted = (_mixtures(arrays, name, dim, num_pdfs) for name in ("first", "adapted"))
        prior = FmllrStats(float(_array(arrays["prior.count"], 1)[0]),
                           _array(arrays["prior.linear"], 2), _array(arrays["prior.square"], 3))
        if prior.linear_DE.shape != (dim, dim + 1) or prior.square_DEE.shape != (dim, dim + 1, dim + 1):
            raise ValueError("the prior has other dimensions")
        return SpeakerAdaptation(context, projection_DE, num_silence, first, adapted, prior)


def train_projection(utterances: Sequence[npt.NDArray[np.floating]], pdf_T: Pdfs, *, context: int,
                     dim: int, num_silence: int) -> SpeakerAdaptation:
    """Estimate LDA and MLLT of spliced features, scaled to unit variance.

    `utterances` are T x D normalized features, and `pdf_T` the pdfs of all their frames, those of
    silence first. Raises DataError if there are fewer spliced than projected features.
    """
    num_spliced = (2 * context + 1) * utterances[0].shape[1]
    if dim > num_spliced:
        raise DataError(f"adaptation.lda_dim is {dim}, and {2 * context + 1} frames have "
                        f"{num_spliced} features; give a smaller adaptation.lda_dim.")
    ends = np.cumsum([len(x_TD) for x_TD in utterances])

    def pieces() -> Iterator[projections.Piece]:
        for x_TD, end in zip(utterances, ends, strict=True):
            yield projections.splice(mapped.copied(x_TD), context), pdf_T[end - len(x_TD):end]
    matrix_DS, mean_S = projections.projection(pieces, int(pdf_T.max()) + 1, dim)
    # the constant subtracts the mean first
    affine = np.concatenate([matrix_DS, -(matrix_DS @ mean_S)[:, None]], axis=1)
    return SpeakerAdaptation(context, affine, num_silence)


def train_fmllr(plain: SpeakerAdaptation, by_speaker: Mapping[str, Sequence[Matrix]],
                pdfs: Mapping[str, Sequence[Pdfs]], num_pdfs: int,
                each: Each = iter) -> tuple[SpeakerAdaptation, dict[str, Matrix]]:
    """Train mixtures and the transforms of training speakers by turns (SAT); return both.

    `by_speaker` are the projected features of each speaker, read several times; `pdfs` their pdfs.
    `each` yields the speakers of every pass.
    """
    names, num_frames = list(by_speaker), sum(len(pdf_T) for of_speaker in pdfs.values() for pdf_T in of_speaker)
    transforms: dict[str, Matrix] = {}

    def frames_of(speaker: str) -> tuple[Matrix, Matrix, Pdfs]:
        """Projected and adapted frames, and their pdfs."""
        z_TD = np.concatenate(by_speaker[speaker])
        y_TD = projections.apply(transforms[speaker], z_TD) if transforms else z_TD
        return z_TD, y_TD, np.concatenate(pdfs[speaker])

    def pieces() -> Iterator[gaussians.Piece]:
        return gaussians.joined(frames_of(speaker)[1:] for speaker in each(names))
    first = mixtures = gaussians.train(pieces, num_pdfs, num_gaussians=num_frames // FRAMES_PER_GAUSSIAN)
    for _ in range(TRAINING_ROUNDS):
        stats = _spooled(plain.dim, (_sums(mixtures, *frames_of(speaker), plain.num_silence) for speaker in each(names)))
        every = functools.reduce(FmllrStats.plus, stats, FmllrStats.zero(plain.dim))
        prior = FmllrStats.zero(plain.dim).plus(every, _PRIOR_FRAMES / max(every.count, 1.0))
        transforms = {speaker: one.plus(prior).estimate() for speaker, one in zip(names, stats, strict=True)}
        for _ in range(_PASSES_PER_ROUND):
            # projected features have unit variance
            mixtures, _count = mixtures.reestimated(pieces(), np.full(plain.dim, gaussians.VARIANCE_FLOOR))
    return SpeakerAdaptation(plain.context, plain.projection_DE, plain.num_silence, first, mixtures, prior), transforms


def _spooled(dim: int, stats: Iterable[FmllrStats]) -> Spool[FmllrStats]:
    """Sums of each speaker in a temporary file; those of 40 features are half a megabyte."""
    def decoded(record: bytes) -> FmllrStats:
        count, linear, square = np.split(np.frombuffer(record), [1, 1 + dim * (dim + 1)])
        return FmllrStats(float(count[0]), linear.reshape(dim, -1), square.reshape(dim, dim + 1, -1))
    return Spool((np.concatenate([[one.count], one.linear_DE.ravel(), one.square_DEE.ravel()]).tobytes() for one in stats), decoded)


def _sums(mixtures: StateMixtures, z_TD: Matrix, y_TD: Matrix, pdf_T: Pdfs, num_silence: int) -> FmllrStats:
    """Sums of the frames of speech; `y_TD` are the features after the transform so far."""
    stats = FmllrStats.zero(z_TD.shape[1])
    is_speech_T = pdf_T >= num_silence
    if is_speech_T.any():
        precision_TD, linear_TD = mixtures.precisions(y_TD[is_speech_T], pdf_T[is_speech_T])
        stats.add(z_TD[is_speech_T], precision_TD, linear_TD)
    return stats


def _mixtures(arrays: Mapping[str, npt.NDArray[Any]], name: str, dim: int, num_pdfs: int) -> StateMixtures:
    pdf_G = arrays[f"{name}.pdf"]
    if pdf_G.ndim != 1 or pdf_G.dtype != np.int64 or len(pdf_G) > 100 * num_pdfs \
            or not np.array_equal(np.unique(pdf_G), np.arange(num_pdfs)) or (np.diff(pdf_G) < 0).any():
        raise ValueError("the Gaussians are not those of its HMM states")
    found = StateMixtures(pdf_G, _array(arrays[f"{name}.weight"], 1), _array(arrays[f"{name}.mean"], 2),
                          _array(arrays[f"{name}.variance"], 2))
    if found.log_weight_G.shape != pdf_G.shape or found.mean_GD.shape != (len(pdf_G), dim) \
            or found.variance_GD.shape != found.mean_GD.shape or not (found.variance_GD > 0).all():
        raise ValueError("the Gaussians have other dimensions, or a variance that is not positive")
    return found


def _array(array: npt.NDArray[Any], ndim: int) -> Matrix:
    if array.ndim != ndim or array.dtype != np.float64 or not np.isfinite(array).all():
        raise ValueError("an array is not finite, or has another type or shape")
    return array
