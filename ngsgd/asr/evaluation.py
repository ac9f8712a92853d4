"""Decoding settings tuned on the valid set, and the word errors they give on the test set.  Knows no model.

Letters: T frames, P pdfs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ngsgd.asr import decoding, scoring
from ngsgd.asr.scoring import Interval, UtteranceErrors, WordErrors
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.topology import Topology
from ngsgd.config import DecodeConfig
from ngsgd.errors import DataError

LogLikelihoods = Sequence[npt.NDArray[np.float32]]  # T x P of each utterance: log posterior minus log prior


@dataclass(frozen=True)
class Setting:
    """What is tuned."""

    acoustic_scale: float
    word_penalty: float


@dataclass(frozen=True)
class Evaluation:
    """The result of a test, with what it was tuned on."""

    setting: Setting
    valid: WordErrors                               # at the chosen setting
    sweep: tuple[tuple[Setting, WordErrors], ...]   # every setting that was tried on valid
    test: WordErrors
    test_interval: Interval
    hypotheses: tuple[tuple[str, ...], ...]         # of the test utterances
    per_utterance: tuple[UtteranceErrors, ...]      # of the test utterances


def tune_and_decode(
    topology: Topology, config: DecodeConfig, *, valid: SpeechSet, valid_logliks: LogLikelihoods, test: SpeechSet,
    test_logliks: LogLikelihoods,
) -> Evaluation:
    """Tries every acoustic scale and word penalty on `valid`, and decodes `test` once, with the best of them.

    Among equals the setting named first wins.
    """
    sweep = tuple((setting, _errors(topology, config, setting, valid, valid_logliks)) for setting in settings(config))
    setting, valid_errors = min(sweep, key=lambda tried: tried[1].num_errors)
    hypotheses = decode_set(topology, config, setting, test_logliks)
    total, rows = scoring.score(test.texts, hypotheses, test.frames.utt_ids)
    return Evaluation(
        setting=setting, valid=valid_errors, sweep=sweep, test=total,
        test_interval=scoring.confidence_interval(test.texts, hypotheses), hypotheses=hypotheses, per_utterance=tuple(rows),
    )


def settings(config: DecodeConfig) -> list[Setting]:
    """The grid that is swept."""
    return [Setting(acoustic_scale=scale, word_penalty=penalty)
            for scale in config.acoustic_scales for penalty in config.word_penalties]


def decode_set(
    topology: Topology, config: DecodeConfig, setting: Setting, logliks: LogLikelihoods,
) -> tuple[tuple[str, ...], ...]:
    """The recognised words of each utterance."""
    graph = decoding.build_graph(topology, setting.word_penalty)
    return tuple(_decode_one(graph, config, setting, loglik_TP, topology.num_pdfs) for loglik_TP in logliks)


def _errors(
    topology: Topology, config: DecodeConfig, setting: Setting, speech: SpeechSet, logliks: LogLikelihoods,
) -> WordErrors:
    hypotheses = decode_set(topology, config, setting, logliks)
    return scoring.score(speech.texts, hypotheses, speech.frames.utt_ids)[0]


def _decode_one(
    graph: decoding.Graph, config: DecodeConfig, setting: Setting, loglik_TP: npt.NDArray[np.float32], num_pdfs: int,
) -> tuple[str, ...]:
    if loglik_TP.shape[1] != num_pdfs:
        raise DataError(f"The model scores {loglik_TP.shape[1]} HMM states and the corpus has {num_pdfs}; "
                        "decode with the corpus that the model was trained on.")
    return decoding.decode(graph, loglik_TP, acoustic_scale=setting.acoustic_scale, beam=config.beam,
                           max_active=config.max_active)
