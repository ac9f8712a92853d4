"""Options of the objective function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective function: cross-entropy of frames, or a criterion of sequences (C.8)."""

    kind: Literal["ce", "mmi", "bmmi", "mpe", "smbr", "lfmmi"] = option(
        "ce", "objective function")
    acoustic_scale: float = option(
        0.1, "factor on log likelihoods relative to the graph (Kaldi: 0.1)", above=0.0, high=10.0,
        used="kind=mmi|bmmi|mpe|smbr")
    boost: float = option(0.1, "bonus of each wrong frame in the denominator (Kaldi: 0.1)",
                          unit="nats", low=0.0, high=10.0, used="kind=bmmi")
    one_silence_class: bool = option(
        True, "all silence phones count as one class in the accuracy of a frame",
        used="kind=mpe|smbr|bmmi")
    ce_weight: float = option(
        0.0, "weight of cross-entropy (frame smoothing); with lfmmi it is added", low=0.0,
        high=1.0, used="kind=mmi|bmmi|mpe|smbr|lfmmi")
    chunk_frames: int = option(
        0, "length of chunks of utterances; 0: complete utterances (Kaldi: 150)", unit="frames",
        low=0, high=100000, used="kind=lfmmi")
    ngram_order: int = option(
        7, "order of the denominator's n-gram model of states; 1 + 3 k: a history of k phones",
        low=2, high=100, used="kind=lfmmi")
    leaky_hmm: float = option(
        0.1, "leaky HMM coefficient: weight of transitions to any state (Kaldi's recipes: 0.1)",
        low=0.0, high=1.0, used="kind=lfmmi")
    output_l2: float = option(
        0.00005, "L2 regularization of the outputs per frame (Kaldi's recipes: 5e-5)", low=0.0,
        used="kind=lfmmi")
