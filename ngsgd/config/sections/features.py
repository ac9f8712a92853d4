"""Options of acoustic features and i-vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class FeatureConfig:
    """Acoustic features: 25 ms windows every 10 ms, no dither."""

    kind: Literal["fbank", "mfcc", "given"] = option(
        "fbank", "type of features; fbank: log mel filterbank; mfcc: cepstra; given: precomputed "
        "features of the corpus (feats.scp)")
    sample_rate_hz: int = option(8000, "sampling rate of the audio; other rates are rejected "
                                 "unless resample is true", unit="Hz", low=4000, high=192000)
    resample: bool = option(False, "resampling of audio with another rate by soxr, as in ngsgd "
                            "transcribe", used="kind=fbank|mfcc")
    num_mel_bins: int = option(40, "number of mel filters", low=3, high=256, used="kind=fbank|mfcc")
    num_ceps: int = option(13, "number of cepstral coefficients, at most num_mel_bins", low=1, high=80, used="kind=mfcc")
    cmvn: Literal["none", "utterance", "speaker", "online", "given"] = option(
        "utterance", "scope of mean and variance normalization; online: running mean of the past "
        "frames; given: precomputed statistics of the corpus (cmvn.scp)")


@dataclass(frozen=True)
class IvectorConfig:
    """Online i-vectors (C.9): a vector of speaker and channel next to the features."""

    dim: int = option(0, "dimension of the i-vector; 0: no i-vectors (paper: 100)", low=0, high=1000)
    num_gaussians: int = option(128, "number of Gaussians of the universal background model, UBM "
                                "(paper: 512)", low=1, high=8192, used="dim")
    period: int = option(10, "interval between two i-vector estimates (Kaldi: 10)", unit="frames", low=1, high=1000, used="dim")


@dataclass(frozen=True)
class AdaptationConfig:
    """Projection of spliced features (LDA, MLLT), and one transform per speaker (fMLLR)."""

    lda_dim: int = option(0, "dimension of the projection by LDA and MLLT; 0: features as they are "
                          "(Kaldi: 40)", low=0, high=1000)
    fmllr: bool = option(False, "one affine transform of the features per speaker, by fMLLR from a "
                         "first pass", used="lda_dim")
