"""Training of background model and extractor, and i-vectors for all sets as in online use.

Letters: T frames, D features, C spliced ones, K retained ones, I Gaussians, U utterances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ngsgd.asr.features import cmvn, gaussians
from ngsgd.asr.ivectors import extractor as extractors
from ngsgd.asr.ivectors import model
from ngsgd.asr.ivectors.model import DiagonalMixture, FrontEnd, IvectorModel, IvectorStream, SpeakerState, spliced
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import IvectorConfig
from ngsgd.data import mapped
from ngsgd.errors import DataError

# maximum: retained dimensions of the spliced frames, frames for the background model (Kaldi:
# 500,000), utterances for the extractor
PCA_DIM, UBM_FRAMES, MAX_UTTERANCES = 40, 200_000, 5000
# consecutive training utterances that share the state of a speaker (nnet3 recipes of Kaldi: 2)
TRAIN_UTTERANCES = 2
NUM_ITERS = 10  # EM passes of the extractor, as in Kaldi
_FRAMES_AT_ONCE = 16384  # frames per batch of second moments

State = TypeVar("State")


class SpeakerMemory(Generic[State]):
    """State of each speaker over `most` consecutive utterances; 0: over all utterances."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[str, tuple[State, int]] = {}

    def before(self, speaker: str) -> State | None:
        state, number = self._known.get(speaker, (None, 0))
        return None if self._most and number % self._most == 0 else state

    def after(self, speaker: str, state: State) -> None:
        self._known[speaker] = state, self._known.get(speaker, (None, 0))[1] + 1


def train(speech: SpeechSet, config: IvectorConfig, report: Callable[[str], None]) -> IvectorModel:
    """Train the model on a training set; deterministic in its arguments."""
    all_speech = np.sum([cmvn.statistics(mapped.copied(speech.raw(u))) for u in range(len(speech.texts))], axis=0)
    num_frames = speech.frames.num_frames
    spread_T = np.linspace(0, num_frames - 1, min(UBM_FRAMES, num_frames))
    chosen_T = np.unique(spread_T.round().astype(np.int64))
    front = FrontEnd(config, all_speech, _axes(speech, config, all_speech, chosen_T))
    z_NK = torch.cat([front.project(frames_TD, at_N) for frames_TD, at_N in _chosen(speech, front, chosen_T)])
    mixture = train_mixture(z_NK, config.num_gaussians)
    report(f"i-vectors: background model of {len(mixture.weight_G)} Gaussians from {len(z_NK):,} "
           "frames")
    statistics = collect(speech, front, mixture)
    if (statistics.total_count < extractors.FEWEST_FRAMES).all():
        fewest = extractors.FEWEST_FRAMES / model.POSTERIOR_SCALE
        raise DataError(f"ivectors.num_gaussians is {config.num_gaussians}, but none of them has "
                        f"{fewest:.0f} frames of the training set; reduce it.")
    extractor = extractors.start(statistics, config.dim)
    for number in range(1, NUM_ITERS + 1):
        extractor, log_likelihood = extractors.em_pass(extractor, statistics)
        report(f"i-vectors: pass {number}/{NUM_ITERS} of the extractor: "
               f"{log_likelihood:.4f} per frame before it")
    return IvectorModel(front, mixture, extractor)


def _axes(speech: SpeechSet, config: IvectorConfig, all_speech: cmvn.Stats, chosen_T: npt.NDArray[np.int64]) -> Tensor:
    dim = (2 * model.CONTEXT + 1) * speech.frames.dim
    plain = FrontEnd(config, all_speech, torch.eye(dim, dtype=torch.float64))
    sum_C, square_CC = torch.zeros(dim, dtype=torch.float64), torch.zeros(dim, dim, dtype=torch.float64)
    for frames_TD, at_N in _chosen(speech, plain, chosen_T):
        x_NC = spliced(frames_TD, at_N, model.CONTEXT)
        sum_C += x_NC.sum(dim=0)
        square_CC += x_NC.T @ x_NC
    mean_C = sum_C / len(chosen_T)
    covariance_CC = square_CC / len(chosen_T) - mean_C[:, None] * mean_C
    # directions of largest variance, not scaled (est-pca in Kaldi)
    axes_CK: Tensor = torch.linalg.eigh(covariance_CC)[1].flip(1)[:, :PCA_DIM]
    # the sign of an axis is arbitrary; it must not depend on the machine
    largest_K = axes_CK.abs().argmax(dim=0)
    return (axes_CK * axes_CK[largest_K, torch.arange(axes_CK.shape[1])].sign()).contiguous()


def _chosen(speech: SpeechSet, front: FrontEnd, chosen_T: npt.NDArray[np.int64],
            ) -> Iterator[tuple[npt.NDArray[np.floating], npt.NDArray[np.int64]]]:
    """Yield (frames after online mean subtraction, chosen indices) of each utterance with any."""
    for u, (normal_TD, _) in _heard(speech, front):
        begin, end = speech.frames.offsets[u:u + 2]
        low, high = np.searchsorted(chosen_T, [begin, end])
        if high > low:
            yield normal_TD, chosen_T[low:high] - begin


def _heard(speech: SpeechSet, front: FrontEnd) -> Iterator[tuple[int, tuple[npt.NDArray[np.floating], cmvn.Features]]]:
    """Yield (utterance, (frames after online mean subtraction, raw frames)), as in training."""
    turns: SpeakerMemory[cmvn.CmnState] = SpeakerMemory(TRAIN_UTTERANCES)
    for u, speaker in enumerate(speech.speakers):
        raw_TD, mean = mapped.copied(speech.raw(u)), front.mean(turns.before(speaker))
        yield u, (raw_TD - mean.accept(raw_TD), raw_TD)
        turns.after(speaker, mean.heard())


def collect(speech: SpeechSet, front: FrontEnd, mixture: DiagonalMixture) -> extractors.Statistics:
    """Collect statistics of up to `MAX_UTTERANCES` utterances: Gaussians are selected by frames
    after online mean subtraction, and the sums are of raw frames.
    """
    num_utterances = len(speech.texts)
    is_chosen_U = np.zeros(num_utterances, bool)
    is_chosen_U[np.random.default_rng(0).permutation(num_utterances)[:MAX_UTTERANCES]] = True
    counts, firsts, pieces = [], [], []
    dim = front.axes_CK.shape[1]
    second_IDD = torch.zeros(len(mixture.weight_G), dim, dim, dtype=torch.float64)
    for u, frames in _heard(speech, front):
        if is_chosen_U[u]:
            normal_TK, raw_TK = (front.project(one, np.arange(len(one))) for one in frames)
            post_TI = model.scaled_posteriors(mixture, normal_TK)
            counts.append(post_TI.sum(dim=0).float())
            firsts.append((post_TI.T @ raw_TK).float())
            pieces.append((post_TI, raw_TK))
        if pieces and (u == num_utterances - 1 or sum(len(raw) for _, raw in pieces) >= _FRAMES_AT_ONCE):
            all_TI, all_TK = (torch.cat(column) for column in zip(*pieces, strict=True))
            pieces = []
            for i, post_T in enumerate(all_TI.T):
                # few: a frame has only some Gaussians
                mine = post_T.nonzero().squeeze(1)
                second_IDD[i] += (post_T[mine, None] * all_TK[mine]).T @ all_TK[mine]
    return extractors.Statistics(torch.stack(counts), torch.stack(firsts), second_IDD)


def extract(speech: SpeechSet, model: IvectorModel, *, most_utterances: int) -> Iterator[npt.NDArray[np.float32]]:
    """Yield one row per period for each utterance; speakers are kept over `most_utterances`."""
    turns: SpeakerMemory[SpeakerState] = SpeakerMemory(most_utterances)
    for u, speaker in enumerate(speech.speakers):
        stream = IvectorStream(model, turns.before(speaker))
        stream.accept(mapped.copied(speech.raw(u)))
        turns.after(speaker, stream.finish())
        yield stream.rows()


def train_mixture(x_ND: Tensor, num_gaussians: int) -> DiagonalMixture:
    """Train at most `num_gaussians`, as those of an HMM state, from one to enough frames each."""
    x_NK, pdf_N = x_ND.double().cpu().numpy(), np.zeros(len(x_ND), np.int32)
    found = gaussians.train(lambda: [(x_NK, pdf_N)], 1, num_gaussians=num_gaussians)
    arrays = np.exp(found.log_weight_G), found.mean_GD, found.variance_GD
    return DiagonalMixture(*(torch.from_numpy(array).to(x_ND.device) for array in arrays))
