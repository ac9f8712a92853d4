"""Options of the objective function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import Section, option

# discriminative criteria, which start from a trained model, and all criteria of sequences
DISCRIMINATIVE = ("mmi", "bmmi", "mpe", "smbr")
OF_SEQUENCES = (*DISCRIMINATIVE, "lfmmi")


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    """The objective function: cross-entropy of frames, or a criterion of sequences (C.8)."""

    kind: Literal["ce", "mmi", "bmmi", "mpe", "smbr", "lfmmi"] = option(
        "ce", "training objective; ce: cross-entropy of frames; mmi, bmmi, mpe, smbr: sequence criteria, "
        "from init_model; lfmmi: lattice-free MMI", choices={"ce": "Cross-entropy of single frames",
                 "mmi": "Maximum mutual information with the decoding graph of the recipe; starts from init_model=RUN",
                 "bmmi": "Boosted MMI, with a higher weight of paths with more errors; starts from init_model=RUN",
                 "mpe": "Minimum phone error by frame (Kaldi's mpfe); starts from init_model=RUN",
                 "smbr": "State-level minimum Bayes risk, Kaldi's default; starts from init_model=RUN",
                 "lfmmi": "Lattice-free MMI with an n-gram model of states, from random parameters or init_model=RUN"})
    acoustic_scale: float = option(
        0.1, "scale of the log likelihoods relative to the graph (Kaldi: 0.1)",
        above=0.0, high=10.0, used="kind=mmi|bmmi|mpe|smbr")
    ce_weight: float = option(
        0.0, "weight of cross-entropy (frame smoothing), added in lfmmi; 0: none",
        low=0.0, high=1.0, used="kind=mmi|bmmi|mpe|smbr|lfmmi", default_of_kind=dict.fromkeys(OF_SEQUENCES, 0.1))
    chunk_frames: int = option(0, "length of the chunks of utterances (Kaldi: 150); 0: complete "
                               "utterances", unit="frames", low=0, high=100000, used="kind=lfmmi")
    denominator: Literal["states", "phones"] = option(
        "states", "units of the denominator's n-gram model; states: classes of the network; "
        "phones: phones with their HMM states (Kaldi's chain recipes), for single phones or left biphones", used="kind=lfmmi")
    ngram_order: int = option(
        7, "order of the denominator's n-gram model; of states: 1 + 3 k has a history of k phones; "
        "of phones: at least 3 (Kaldi: 4)", low=2, high=100, used="kind=lfmmi")
    frame_subsampling: int = option(
        1, "frames per output in training (Kaldi: 3); each pass over the data has all offsets, and "
        "decoding uses every frame", unit="frames", low=1, high=10, used="kind=lfmmi")
    tolerance_frames: int = option(
        0, "frames by which the states of the numerator may move from their labels (Kaldi: 5)",
        unit="frames", low=0, high=1000, used="kind=lfmmi")
    use_priors: bool = option(
        False, "scores are outputs minus log priors, in training and decoding, as with "
        "cross-entropy; suits init_model and ce_weight", used="kind=lfmmi")
