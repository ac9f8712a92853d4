"""Ranking of utterances by objf, to find wrong labels, wrong transcripts and bad audio.

Letters: T frames, P classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.data.frames import FrameSet


@dataclass(frozen=True)
class UtteranceScore:
    """Score of the model on one utterance."""

    utt_id: str
    num_frames: int    # labeled frames
    objf: float        # nats per frame
    # frame accuracy, 0 to 1
    accuracy: float


def utterance_scores(frames: FrameSet, logliks: Sequence[npt.NDArray[np.float32]],
                     prior_P: npt.NDArray[np.float64]) -> list[UtteranceScore]:
    """Return all utterances sorted by objf, worst first, then by name.

    `logliks` are T x P log posteriors minus log priors. Frames of unknown class (negative) are
    ignored, and an utterance without labeled frames is omitted.
    """
    scores = []
    for utt_id, first, end, loglik_TP in zip(frames.utt_ids, frames.offsets[:-1], frames.offsets[1:], logliks, strict=True):
        pdf_T = frames.pdf_T[first:end]
        known = np.flatnonzero(pdf_T >= 0)
        if len(known):
            log_posterior_TP = loglik_TP[known] + np.log(prior_P)
            of_class_T = log_posterior_TP[np.arange(len(known)), pdf_T[known]]
            is_right_T = log_posterior_TP.argmax(axis=1) == pdf_T[known]
            scores.append(UtteranceScore(utt_id, len(known), float(of_class_T.mean()), float(is_right_T.mean())))
    return sorted(scores, key=lambda score: (score.objf, score.utt_id))


def as_text(scores: Sequence[UtteranceScore]) -> str:
    """Format a table with one line per utterance."""
    width = max([len("utterance"), *(len(score.utt_id) for score in scores)])
    lines = [f"{'utterance':{width}} {'objf':>9} {'accuracy':>9} {'frames':>7}"]
    lines += [f"{s.utt_id:{width}} {s.objf:9.3f} {100 * s.accuracy:8.1f}% {s.num_frames:7}" for s in scores]
    return "\n".join(lines) + "\n"
