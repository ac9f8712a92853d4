"""Options of the objective function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class ObjectiveConfig:
    """The objective function: cross-entropy of frames, or a criterion of sequences (C.8)."""

    kind: Literal["ce", "mmi", "bmmi", "mpe", "smbr", "lfmmi"] = option(
        "ce",
        "training objective; ce: cross-entropy of frames; mmi, bmmi, mpe, smbr: sequence criteria, "
        "from init_model; lfmmi: lattice-free MMI")
    acoustic_scale: float = option(
        0.1, "scale of the log likelihoods relative to the graph (Kaldi: 0.1)",
        above=0.0, high=10.0, used="kind=mmi|bmmi|mpe|smbr")
    boost: float = option(
        0.1, "boosting factor: bonus of each wrong frame in the denominator (Kaldi: 0.1)",
        unit="nats", low=0.0, high=10.0, used="kind=bmmi")
    one_silence_class: bool = option(
        True, "all silence phones as one class in the frame accuracy",
        used="kind=mpe|smbr|bmmi")
    ce_weight: float = option(
        0.0, "weight of cross-entropy (frame smoothing), added in lfmmi; 0: none",
        low=0.0, high=1.0, used="kind=mmi|bmmi|mpe|smbr|lfmmi")
    chunk_frames: int = option(
        0, "length of the chunks of utterances (Kaldi: 150); 0: complete utterances",
        unit="frames", low=0, high=100000, used="kind=lfmmi")
    ngram_order: int = option(
        7, "order of the denominator's n-gram model of states; 1 + 3 k: history of k phones",
        low=2, high=100, used="kind=lfmmi")
    leaky_hmm: float = option(
        0.1,
        "leaky-HMM coefficient: probability of a transition to any state (Kaldi's recipes: 0.1)",
        low=0.0, high=1.0, used="kind=lfmmi")
    output_l2: float = option(
        0.00005, "L2 regularization of the network outputs per frame (Kaldi's recipes: 5e-5)",
        low=0.0, used="kind=lfmmi")
