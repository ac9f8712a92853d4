"""A model that recognizes made-up speech, trained in a second; and its bundle."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save
from torch import nn

from ngsgd.asr import bundle
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode.tuning import Calibration, DecodingWeights
from ngsgd.asr.features import cmvn, filterbank
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.config import DecodeConfig, FeatureConfig, ModelConfig
from ngsgd.models import Window, build_model
from tests.asr import made_up_speech

RATE_HZ = 8000
LANGUAGE = Language(Topology(("N", "Y"), {"NO": (("N",),), "YES": (("Y",),)}))
FEATURES = FeatureConfig(sample_rate_hz=RATE_HZ, num_mel_bins=20, cmvn="utterance")
MODEL = ModelConfig(num_layers=1, hidden_dim=32)
WINDOW = Window(2, 2, 20)
_SILENCE = 0


def say(words: Sequence[str], seed: int = 0, rate_hz: int = RATE_HZ) -> npt.NDArray[np.int16]:
    """Samples of these words with pauses of 0.1 to 0.4 s, and 0.4 to 0.9 s at the ends."""
    return made_up_speech.say(words, np.random.default_rng(seed), rate_hz)


def write(path: Path, features: FeatureConfig = FEATURES, **changes: Any) -> Path:
    """A bundle in one file."""
    bundle.write_file(path, content(features, **changes))
    return path


def content(features: FeatureConfig = FEATURES, **about_changes: Any) -> dict[str, bytes]:
    """Name -> content of a bundle's files."""
    model_files, all_speech = _trained(features)
    about = json.loads(model_files["model.json"]) | about_changes
    model_files = {**model_files, "model.json": json.dumps(about).encode()}
    return with_index(model_files, features, all_speech)


def with_index(model_files: Mapping[str, bytes], features: FeatureConfig,
               all_speech: cmvn.Stats) -> dict[str, bytes]:
    """The files with an index that lists them."""
    index = bundle.index_of(model_files, language=LANGUAGE, features=features, decode=DecodeConfig(),
                            weights=DecodingWeights(0.3, 1.0), all_speech=all_speech,
                            provenance={"corpus": "made-up speech"})
    return {**model_files, bundle.INDEX: index.encode()}


@functools.cache
def _trained(features: FeatureConfig) -> tuple[dict[str, bytes], cmvn.Stats]:
    """(files of the model, statistics of the training frames)."""
    rng = np.random.default_rng(1)
    raw, states = zip(*(_utterance(rng, features) for _ in range(12)), strict=True)
    all_speech = cmvn.statistics(np.concatenate(raw))
    normal = [_normalized(raw_TD, features, all_speech) for raw_TD in raw]
    x_NI = torch.from_numpy(np.concatenate([_spliced(one) for one in normal]))
    y_N = torch.from_numpy(np.concatenate(states))
    model = build_model(MODEL, WINDOW.num_inputs, LANGUAGE.num_pdfs, seed=0, window=WINDOW)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_NI), y_N).backward()
        optimizer.step()
    prior_P = np.bincount(y_N.numpy(), minlength=LANGUAGE.num_pdfs) / len(y_N)
    about = {"model": asdict(MODEL), "num_inputs": WINDOW.num_inputs, **WINDOW._asdict(),
             "num_classes": LANGUAGE.num_pdfs, "priors": prior_P.tolist(), "stage": None, "class_counts": []}
    files = {"model.json": json.dumps(about).encode(), "model.safetensors": save(model.state_dict())}
    return files, all_speech


def trained_on(labelled: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]], topology: Topology) -> Bundle:
    """A small network of the HMM states of these recordings (samples at 8 kHz, state of each
    frame), trained in seconds.
    """
    features, window = FeatureConfig(sample_rate_hz=RATE_HZ, num_mel_bins=20, cmvn="utterance"), Window(8, 8, 20)
    raw = [filterbank.extract(samples.astype(np.float32), features) for samples, _ in labelled]
    all_speech = cmvn.statistics(np.concatenate(raw))
    x_NI = torch.from_numpy(np.concatenate([_spliced(_normalized(one, features, all_speech), 8) for one in raw]))
    y_N = torch.from_numpy(np.concatenate([state_T for _, state_T in labelled]).astype(np.int64))
    config = ModelConfig(num_layers=2, hidden_dim=128)
    model = build_model(config, window.num_inputs, topology.num_pdfs, seed=0, window=window)
    optimizer, generator = torch.optim.Adam(model.parameters(), lr=0.003), torch.Generator().manual_seed(0)
    for _ in range(4):
        for rows in torch.randperm(len(y_N), generator=generator).split(512):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x_NI[rows]), y_N[rows]).backward()
            optimizer.step()
    prior_P = np.maximum(np.bincount(y_N.numpy(), minlength=topology.num_pdfs), 1) / len(y_N)
    return Bundle(Path("model"), model.eval(), prior_P, window, features, all_speech, None, None, Language(topology),
                  DecodeConfig(), DecodingWeights(0.3, 1.0), Calibration(), {})


def _utterance(rng: np.random.Generator,
               features: FeatureConfig) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """(features, HMM state of each frame): loud frames are a word's, a third for each state."""
    words = made_up_speech.draw_words(rng, 6)
    raw_TD = filterbank.extract(made_up_speech.say(words, rng), features)
    is_loud_T = raw_TD.max(axis=1) > raw_TD.max() - 6.0
    edge_E = np.flatnonzero(np.diff(np.concatenate([[0], is_loud_T.astype(int), [0]])))
    state_T = np.full(len(raw_TD), _SILENCE)
    for word, (start, end) in zip(words, edge_E.reshape(-1, 2), strict=True):
        first = LANGUAGE.topology.pdfs_of(LANGUAGE.topology.lexicon[word][0])[0]
        state_T[start:end] = first + np.arange(end - start) * 3 // (end - start)
    return raw_TD, state_T


def _normalized(raw_TD: npt.NDArray[np.float32], features: FeatureConfig,
                all_speech: cmvn.Stats) -> npt.NDArray[np.float32]:
    if features.cmvn != "online":
        return cmvn.normalized(raw_TD, cmvn.statistics(raw_TD))
    mean_TD = cmvn.OnlineMean(all_speech).accept(raw_TD)
    return np.asarray((raw_TD - mean_TD) / cmvn.mean_and_deviation(all_speech)[1], np.float32)


def _spliced(normal_TD: npt.NDArray[np.float32], context: int = 2) -> npt.NDArray[np.float32]:
    at_TW = (np.arange(len(normal_TD))[:, None] + np.arange(-context, context + 1)).clip(0, len(normal_TD) - 1)
    return np.asarray(normal_TD[at_TW].reshape(len(normal_TD), -1), np.float32)
