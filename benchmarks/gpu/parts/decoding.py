"""Throughput of the acoustic model on the device, and of the search over its log-likelihoods on the
CPU."""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.measurement import Measurement
from benchmarks.nets import tdnn

_FRAMES_PER_S = 100.0
_ROUNDS = 5


def run(measurement: Measurement) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*list(tdnn())[:-2]).to(measurement.device).eval()
    for num_frames in (400,) if measurement.dry_run else (1_000, 10_000, 100_000):
        with measurement.case(f"acoustic model, {num_frames} frames") as figures:
            figures.update(_model(measurement, model, num_frames))
    with measurement.case("search of digits") as figures:
        measurement.need("kaldifst", "kaldi_decoder", "kaldilm")
        figures.update(_search(measurement))


def _model(measurement: Measurement, model: nn.Module, num_frames: int) -> dict[str, float]:
    """Forward passes, including the copies from and to the host."""
    x = torch.randn(1, 40, num_frames)
    x = x.pin_memory() if measurement.on_gpu else x

    def forward() -> None:
        with torch.inference_mode():
            model(x.to(measurement.device, non_blocking=True)).cpu()

    forward()
    seconds = min(
        measurement.seconds(forward, 1) for _ in range(1 if measurement.dry_run else _ROUNDS)
    )
    return {
        "frames_per_s": round(num_frames / seconds),
        "times_real_time": round(num_frames / seconds / _FRAMES_PER_S),
    }


def _search(measurement: Measurement) -> dict[str, float]:
    """Clearly spoken digits, with noise on the log-likelihoods."""
    from ngsgd.asr.corpora.digits import TOPOLOGY
    from ngsgd.asr.decode import decoding
    from ngsgd.asr.lang import graphs
    from ngsgd.asr.lang.language import Language

    random = np.random.default_rng(0)
    spellings = list(TOPOLOGY.spellings())
    pdfs = [
        pdf
        for index in random.integers(len(spellings), size=50 if measurement.dry_run else 1000)
        for pdf in spellings[int(index)][1]
        for _ in range(4)
    ]
    loglik_TP = random.normal(-5.0, 1.0, (len(pdfs), TOPOLOGY.num_pdfs)).astype(np.float32)
    loglik_TP[np.arange(len(pdfs)), pdfs] += 5.0
    graph = graphs.with_word_penalty(graphs.build(Language(TOPOLOGY), silence_prob=0.5), 0.0)
    start = time.perf_counter()
    path = decoding.best_path(graph, loglik_TP, decoding.Search(0.3, 12.0, 7000))
    seconds = time.perf_counter() - start
    return {
        "words": len(path.words),
        "frames_per_s": round(len(pdfs) / seconds),
        "times_real_time": round(len(pdfs) / seconds / _FRAMES_PER_S),
    }
