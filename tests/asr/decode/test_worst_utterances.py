"""The order of utterances by how hard they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ngsgd.asr.decode.evaluation import scores_as_text, utterance_scores
from tests.toy import NUM_CLASSES, frame_set


def test_scores_are_those_of_the_posteriors_and_the_worst_comes_first() -> None:
    frames = frame_set(200, 1)
    frames.pdf_T[60:70] = -1  # not known
    random = np.random.default_rng(0)
    posterior_TP = random.dirichlet(np.ones(NUM_CLASSES), 200)
    prior_P = random.dirichlet(np.ones(NUM_CLASSES))
    logliks = np.split((np.log(posterior_TP) - np.log(prior_P)).astype(np.float32), frames.offsets[1:-1])
    found = utterance_scores(frames, logliks, prior_P)
    assert [score.objf for score in found] == sorted(score.objf for score in found)
    assert {score.utt_id for score in found} == set(frames.utt_ids)
    for score in found:
        u = frames.utt_ids.index(score.utt_id)
        rows = [t for t in range(frames.offsets[u], frames.offsets[u + 1]) if frames.pdf_T[t] >= 0]
        assert score.num_frames == len(rows)
        assert score.objf == pytest.approx(np.mean([np.log(posterior_TP[t, frames.pdf_T[t]]) for t in rows]), rel=1e-5)
        assert score.accuracy == np.mean([posterior_TP[t].argmax() == frames.pdf_T[t] for t in rows])
    assert scores_as_text(found).splitlines()[1].split()[0] == found[0].utt_id


def test_an_unknown_utterance_is_skipped() -> None:
    frames = frame_set(100, 1)
    frames = dataclasses.replace(frames, pdf_T=np.where(np.arange(100) < 57, -1, frames.pdf_T))
    logliks = np.split(np.zeros((100, NUM_CLASSES), np.float32), [57])
    assert [score.utt_id for score in utterance_scores(frames, logliks, np.full(NUM_CLASSES, 1 / NUM_CLASSES))] == ["utt1"]
