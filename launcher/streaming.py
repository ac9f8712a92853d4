"""`ngsgd decode --streaming`: the test set frame by frame, and how that compares with whole utterances."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher import compose
from launcher import train as service
from launcher.final_model import load_final, log_likelihoods
from launcher.run_folder import RunFolder
from ngsgd.asr import decoding, evaluation, graphs, scoring
from ngsgd.asr.streaming import Score, Search, StreamingDecoder
from ngsgd.errors import CheckpointError
from ngsgd.files import write_text

FRAME_S = 0.01
WINDOW_S = 0.0125  # half a frame's window: audio after its centre that a frame waits for


@dataclass(frozen=True)
class Streamed:
    """The test set, streamed on one thread."""

    wer: str
    num_utterances: int
    num_same: int            # utterances with the words that decoding them whole gives
    real_time_factor: float  # seconds of computing, features apart, per second of speech
    latency_ms: float        # from a frame to the search having passed it, at most: what is waited for
    compute_ms: float        # and beside it what the slowest of a hundred chunks takes

    def __str__(self) -> str:
        return (f"streaming  {self.wer}\n"
                f"the same words as whole utterances: {self.num_same} of {self.num_utterances}\n"
                f"real-time factor {self.real_time_factor:.3f} on one thread (network and search, features apart)\n"
                f"latency at most {self.latency_ms:.0f} ms of waiting and {self.compute_ms:.1f} ms of computing (99 % of chunks)")


def measure(run: Path, *, chunk_frames: int) -> Streamed:
    """Decodes the test set both ways with the setting that the run was tested with; leaves decode/streaming.json."""
    folder = RunFolder.open(run)
    config = compose.from_yaml(folder.config)
    try:
        setting = json.loads((folder.decode / "wer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{run} has not been decoded yet ({error}); finish it with: ngsgd resume {run}") from error
    corpus = service.prepared_corpus(config)
    model, prior_P = load_final(folder)
    torch.set_num_threads(1)
    graph = graphs.with_word_penalty(evaluation.build_graph(corpus.language, config.decode), setting["word_penalty"])
    search = Search(setting["acoustic_scale"], config.decode.beam, config.decode.max_active)
    whole = [decoding.best_path(graph, loglik_TP, **asdict(search)).words
             for loglik_TP in log_likelihoods(corpus.test, config.egs, model, prior_P)]
    words, seconds = [], []
    for features_TD in corpus.test.split_features():
        decoder = StreamingDecoder(graph, _score(model, prior_P), search, left_context=config.egs.left_context,
                                   right_context=config.egs.right_context, chunk_frames=chunk_frames)
        found, times = _streamed(decoder, features_TD)
        words.append(found)
        seconds += times
    errors, _ = scoring.score(corpus.test.texts, words, corpus.test.frames.utt_ids)
    streamed = Streamed(
        wer=str(errors), num_utterances=len(words), num_same=sum(a == b for a, b in zip(words, whole, strict=True)),
        real_time_factor=sum(seconds) / (FRAME_S * corpus.test.frames.num_frames),
        latency_ms=1e3 * (FRAME_S * decoder.max_delay_frames + WINDOW_S), compute_ms=1e3 * float(np.quantile(seconds, 0.99)))
    write_text(folder.decode / "streaming.json", json.dumps({**asdict(streamed), "chunk_frames": chunk_frames}, indent=1))
    return streamed


def _streamed(decoder: StreamingDecoder, features_TD: npt.NDArray[np.float32]) -> tuple[tuple[str, ...], list[float]]:
    """(words, seconds of each call), the frames coming one by one."""
    seconds: list[float] = []
    for frame_1D in np.split(features_TD, len(features_TD)):
        began, before = time.perf_counter(), decoder.num_decoded
        decoder.accept(frame_1D)
        elapsed = time.perf_counter() - began
        if decoder.num_decoded > before or not seconds:
            seconds.append(elapsed)
        else:
            seconds[-1] += elapsed  # a frame that only waits
    began = time.perf_counter()
    path = decoder.finish()
    return path.words, [*seconds, time.perf_counter() - began]


def _score(model: nn.Module, prior_P: npt.NDArray[np.float64]) -> Score:
    log_prior_P = torch.from_numpy(np.log(prior_P)).float()

    @torch.no_grad()
    def score(x_TI: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        loglik_TP: npt.NDArray[np.float32] = (model(torch.from_numpy(x_TI)).log_softmax(dim=1) - log_prior_P).numpy()
        return loglik_TP
    return score
