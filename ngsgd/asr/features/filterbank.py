"""Filterbank and MFCC features as in Kaldi, and their normalization; T frames, D dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import imports
from ngsgd.asr.features import cmvn
from ngsgd.asr.utterance import Audio
from ngsgd.config import FeatureConfig

Features = npt.NDArray[np.float32]


def toolkit() -> Any:
    return imports.load("kaldi_native_fbank", extra="asr", purpose="Feature extraction")


def extract(samples: Audio, config: FeatureConfig) -> Features:
    """Return features of one utterance, not normalized: T = `utterance.num_frames(...)` x D."""
    online = stream(config)
    online.accept_waveform(config.sample_rate_hz, samples.astype(np.float32))
    online.input_finished()
    return np.stack([online.get_frame(t) for t in range(online.num_frames_ready)])


def stream(config: FeatureConfig) -> Any:
    """Create an OnlineFbank or OnlineMfcc of Kaldi, for streaming."""
    knf = toolkit()
    options = knf.MfccOptions() if config.kind == "mfcc" else knf.FbankOptions()
    options.frame_opts.samp_freq = config.sample_rate_hz
    # dither uses unseeded random numbers: two runs would differ
    options.frame_opts.dither = 0.0
    options.frame_opts.snip_edges = False
    options.mel_opts.num_bins = config.num_mel_bins
    if config.kind == "mfcc":
        options.num_ceps = config.num_ceps
        options.use_energy = False
    return knf.OnlineMfcc(options) if config.kind == "mfcc" else knf.OnlineFbank(options)


def normalize(features: Sequence[Features], speakers: Sequence[str], config: FeatureConfig) -> list[Features]:
    """Normalize per utterance or speaker; with other `cmvn` settings, features stay unchanged."""
    if config.cmvn not in ("utterance", "speaker"):
        return list(features)
    units = speakers if config.cmvn == "speaker" else range(len(features))
    return list(cmvn.by_unit(lambda: features, units, features[0].shape[1]))
