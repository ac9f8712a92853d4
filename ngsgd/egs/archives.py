"""Archives of training examples: what `EgsReader` reads, written once per corpus.

An example holds `frames_per_eg` consecutive frames with their context; it gives one frame per pass, so all of them
after `frames_per_eg` passes (C.2 of arXiv 1410.7455, Kaldi's nnet3 egs).  Examples are shuffled over all archives.

Letters: E examples, F frames per example, L and R left and right context, D feature dimension, T frames, N rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from ngsgd.config import EgsConfig
from ngsgd.egs.frames import FrameSet
from ngsgd.errors import DataError
from ngsgd.files import new_directory, sha256, write_text

NO_FRAME = -1  # class of the places of an example that lie beyond the end of its utterance


@dataclass(frozen=True)
class EgsInfo:
    """What the archives of one directory hold; kept in its info.json."""

    num_archives: int
    frames_per_eg: int
    left_context: int
    right_context: int
    feature_dim: int
    num_classes: int
    num_frames: int              # all frames with a class, each once
    sha256: dict[str, str]       # of every file in the directory

    @property
    def num_inputs(self) -> int:
        """Size of a spliced frame."""
        return (self.left_context + 1 + self.right_context) * self.feature_dim


def prepare_archives(train: FrameSet, valid: FrameSet, config: EgsConfig, *, num_classes: int, digest: str,
                     cache_root: Path) -> Path:
    """The directory of the archives for this data and these settings, written if it is not there yet."""
    key = hashlib.sha256(json.dumps([asdict(config), num_classes, digest]).encode()).hexdigest()[:12]
    directory = cache_root / f"egs-{key}"
    if not (directory / "info.json").exists():
        with new_directory(directory) as temporary:
            write_archives(train, valid, config, num_classes=num_classes, directory=temporary)
    return directory


def write_archives(train: FrameSet, valid: FrameSet, config: EgsConfig, *, num_classes: int, directory: Path) -> None:
    """Fills `directory` with archives, the two fixed diagnostic subsets and info.json; a function of its inputs alone."""
    _check_classes(train, num_classes)
    _check_classes(valid, num_classes)
    random = np.random.default_rng(0)  # the order on disk; every reading shuffles again with the run's seed
    first_E, utterance_E = _examples(train, config.frames_per_eg)
    order_E = random.permutation(len(first_E))
    num_archives = max(1, round(len(order_E) / config.samples_per_iter))
    for index, members in enumerate(np.array_split(order_E, num_archives)):
        arrays = _example_arrays(train, first_E[members], utterance_E[members], config)
        save_file(arrays, directory / archive_name(index))
    for name, frames in (("train", train), ("valid", valid)):
        save_file(_diagnostic_arrays(frames, config, random), directory / diagnostic_name(name))
    files = {path.name: sha256(path) for path in sorted(directory.glob("*.safetensors"))}
    info = EgsInfo(num_archives, config.frames_per_eg, config.left_context, config.right_context, train.dim,
                   num_classes, train.num_frames, files)
    write_text(directory / "info.json", json.dumps(asdict(info), indent=1))


def archive_name(index: int) -> str:
    return f"egs.{index:04d}.safetensors"


def diagnostic_name(subset: str) -> str:
    return f"{subset}_diagnostic.safetensors"


def spliced_utterances(frames: FrameSet, left_context: int, right_context: int) -> Iterator[npt.NDArray[np.float32]]:
    """Each utterance as a matrix of spliced frames, for decoding; edges repeat the first and the last frame."""
    for first, end in zip(frames.offsets[:-1], frames.offsets[1:], strict=True):
        row_TW = np.arange(first, end)[:, None] + np.arange(-left_context, right_context + 1)
        yield frames.features_TD[np.clip(row_TW, first, end - 1)].reshape(end - first, -1)


def _check_classes(frames: FrameSet, num_classes: int) -> None:
    if frames.num_frames == 0:
        raise DataError("there is not a single frame to learn from; check the split and data.train_minutes.")
    if frames.pdf_T.min() < 0 or frames.pdf_T.max() >= num_classes:
        raise DataError(f"frame classes run from {frames.pdf_T.min()} to {frames.pdf_T.max()}, but the alignment has "
                        f"{num_classes} classes; prepare the data again.")
    if not np.isfinite(frames.features_TD).all():
        utterance = int(np.searchsorted(frames.offsets, np.argwhere(~np.isfinite(frames.features_TD))[0, 0], "right")) - 1
        raise DataError(f"utterance {frames.utt_ids[utterance]} has a feature that is not finite; check its audio.")


def _examples(frames: FrameSet, frames_per_eg: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(first frame, utterance) of each example."""
    firsts, utterances = [], []
    for utterance, (first, end) in enumerate(zip(frames.offsets[:-1], frames.offsets[1:], strict=True)):
        starts = np.arange(first, end, frames_per_eg)
        firsts.append(starts)
        utterances.append(np.full(len(starts), utterance))
    return np.concatenate(firsts), np.concatenate(utterances)


def _example_arrays(frames: FrameSet, first_E: npt.NDArray[np.int64], utterance_E: npt.NDArray[np.int64],
                    config: EgsConfig) -> dict[str, npt.NDArray[np.generic]]:
    begin_E1, end_E1 = frames.offsets[utterance_E][:, None], frames.offsets[utterance_E + 1][:, None]
    window = np.arange(-config.left_context, config.frames_per_eg + config.right_context)
    row_EW = np.clip(first_E[:, None] + window, begin_E1, end_E1 - 1)
    frame_EF = first_E[:, None] + np.arange(config.frames_per_eg)
    pdf_EF = np.where(frame_EF < end_E1, frames.pdf_T[np.minimum(frame_EF, end_E1 - 1)], NO_FRAME)
    return {"features": frames.features_TD[row_EW], "pdf": pdf_EF.astype(np.int32)}


def _diagnostic_arrays(frames: FrameSet, config: EgsConfig, random: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    """A fixed sample of spliced frames."""
    chosen_N = np.sort(random.choice(frames.num_frames, min(config.num_diagnostic_frames, frames.num_frames), replace=False))
    utterance_N = np.searchsorted(frames.offsets, chosen_N, "right") - 1
    begin_N1, end_N1 = frames.offsets[utterance_N][:, None], frames.offsets[utterance_N + 1][:, None]
    row_NW = np.clip(chosen_N[:, None] + np.arange(-config.left_context, config.right_context + 1), begin_N1, end_N1 - 1)
    return {"features": frames.features_TD[row_NW].reshape(len(chosen_N), -1), "pdf": frames.pdf_T[chosen_N]}
