"""Streaming decoding of the test set, compared with decoding of complete utterances."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from ngsgd import interface
from ngsgd.asr.decode import decoding, evaluation, scoring
from ngsgd.asr.features.cmvn import GLOBAL, CmnState, OnlineMean
from ngsgd.asr.ivectors.model import IvectorStream, SpeakerState, read
from ngsgd.asr.ivectors.training import SpeakerMemory
from ngsgd.asr.lang import graphs
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError
from ngsgd.files import read_json, write_text
from ngsgd.pipeline.run import Run, refined_corpus
from ngsgd.pipeline.score import log_likelihoods
from ngsgd.runs.final_model import load_final
from ngsgd.runs.run_folder import RunFolder

FRAME_S = 0.01
# half of the window of a frame: audio after its center that it needs
WINDOW_S = 0.0125


@dataclass(frozen=True)
class Streamed:
    """Result of streaming the test set on one thread."""

    wer: str
    num_utterances: int
    num_same: int  # utterances with the same words as in offline decoding
    # computing seconds per second of speech, excluding features; including online means and
    # i-vectors
    real_time_factor: float
    latency_ms: float  # maximum waiting time from a frame to its search
    compute_ms: float  # additional computing time, 99 % quantile over chunks
    what: str  # stages included in the computing time

    def __str__(self) -> str:
        return (f"streaming  {self.wer}\nsame words as offline decoding: {self.num_same} of "
                f"{self.num_utterances}\nreal-time factor {self.real_time_factor:.3f} on one "
                f"thread ({self.what}, excluding features)\nlatency at most {self.latency_ms:.0f} "
                f"ms of waiting and {self.compute_ms:.1f} ms of computing (99 % of chunks)")


def measure(run: Run, *, chunk_frames: int, trust: bool = False) -> Streamed:
    """Decode the test set both ways with the weights of the run; write decode/streaming.json."""
    config, folder = run.config, run.folder
    try:
        setting = read_json(folder.decode / "wer.json")
        if not isinstance(setting, dict) or not setting.keys() >= {"word_penalty", "acoustic_scale"}:
            raise ValueError("wer.json has no decoding weights")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder.path} has not been decoded yet ({error}); finish it with: "
                              f"{interface.resume(folder.path)}") from error
    model, prior_P = load_final(folder, trust=trust)
    corpus = refined_corpus(run, model, prior_P)
    torch.set_num_threads(1)
    graph = graphs.with_word_penalty(evaluation.build_graph(corpus.language, config.decode), setting["word_penalty"])
    search = decoding.Search(setting["acoustic_scale"], config.decode.beam, config.decode.max_active)
    whole = [decoding.best_path(graph, loglik_TP, search).words
             for loglik_TP in log_likelihoods(corpus.test.frames, config.egs, model, prior_P)]
    log_prior_P = torch.from_numpy(np.log(prior_P)).float()

    @torch.no_grad()
    def score(x_TI: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return np.asarray(model(torch.from_numpy(x_TI)).log_softmax(dim=1) - log_prior_P)

    words, seconds = [], []
    for front in _fronts(config, folder, corpus.test):
        decoder = decoding.StreamingDecoder(graph, score, search, left_context=config.egs.left_context,
                                            right_context=config.egs.right_context, chunk_frames=chunk_frames, side=front.ivectors)
        found, times = _streamed(decoder, front)
        words.append(found)
        seconds += times
    errors, _ = scoring.score(corpus.test.texts, words, corpus.test.frames.utt_ids)
    stages = [*(["means"] if config.features.cmvn == "online" else []),
              *(["i-vectors"] if config.ivectors.dim else []), "network"]
    streamed = Streamed(
        wer=str(errors), num_utterances=len(words), num_same=sum(a == b for a, b in zip(words, whole, strict=True)),
        real_time_factor=sum(seconds) / (FRAME_S * corpus.test.frames.num_frames),
        latency_ms=1e3 * (FRAME_S * decoder.max_delay_frames + WINDOW_S),
        compute_ms=1e3 * float(np.quantile(seconds, 0.99)), what=f"{', '.join(stages)} and search")
    write_text(folder.decode / "streaming.json", json.dumps({**asdict(streamed), "chunk_frames": chunk_frames}, indent=1))
    return streamed


@dataclass(frozen=True)
class _Front:
    """The frames of an utterance in order, and their processing before the network."""

    raw_TD: npt.NDArray[np.float32]
    normal_TD: npt.NDArray[np.float32] | None  # if features were normalized beforehand
    mean: OnlineMean | None  # otherwise the mean is subtracted online
    ivectors: IvectorStream | None

    def frame(self, t: int) -> npt.NDArray[np.float32]:
        """1 x D: the frame as input of the network."""
        raw_1D = self.raw_TD[t:t + 1]
        if self.ivectors is not None:
            self.ivectors.accept(raw_1D)
        if self.normal_TD is not None:
            return self.normal_TD[t:t + 1]
        assert self.mean is not None
        return self.mean.normalized(raw_1D)


def _fronts(config: RunConfig, folder: RunFolder, speech: SpeechSet) -> Iterator[_Front]:
    """Yield every utterance; the state of a speaker is passed to the next utterance."""
    extractor = read(folder.ivectors, config.ivectors) if config.ivectors.dim else None
    means: SpeakerMemory[CmnState] = SpeakerMemory(0)
    known: SpeakerMemory[SpeakerState] = SpeakerMemory(0)
    normal = speech.split_features()
    is_online = config.features.cmvn == "online"
    for u, speaker in enumerate(speech.speakers):
        stream = IvectorStream(extractor, known.before(speaker)) if extractor else None
        raw_TD = speech.raw(u) if extractor or is_online else normal[u]
        if is_online:
            assert speech.cmvn is not None
            mean = OnlineMean(speech.cmvn.stats[GLOBAL], means.before(speaker))
            yield _Front(raw_TD, None, mean, stream)
            means.after(speaker, mean.heard())
        else:
            yield _Front(raw_TD, normal[u], None, stream)
        if stream is not None:
            known.after(speaker, stream.finish())


def _streamed(decoder: decoding.StreamingDecoder, front: _Front) -> tuple[tuple[str, ...], list[float]]:
    """Return (words, seconds of each call) for frame-by-frame input."""
    seconds: list[float] = []
    for t in range(len(front.raw_TD)):
        began, before = time.perf_counter(), decoder.num_decoded
        decoder.accept(front.frame(t))
        elapsed = time.perf_counter() - began
        if decoder.num_decoded > before or not seconds:
            seconds.append(elapsed)
        else:
            # a frame that only waits
            seconds[-1] += elapsed
    began = time.perf_counter()
    if front.ivectors is not None:
        front.ivectors.finish()
    path = decoder.finish()
    return path.words, [*seconds, time.perf_counter() - began]
