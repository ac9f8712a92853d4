"""Reads minibatches from archives of examples, in an order that (seed, outer iteration, job) decides.

Letters: E examples, F frames per example, W window of spliced frames, D feature dimension, N rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from ngsgd.egs.archives import NO_FRAME, EgsInfo, archive_name, diagnostic_name
from ngsgd.errors import DataError
from ngsgd.files import sha256
from ngsgd.schedules import Shard


class Minibatch(NamedTuple):
    """Spliced frames and the class of each."""

    x_ND: Tensor    # float32
    pdf_N: Tensor   # int64


class EgsReader:
    """The archives of one directory.  Each file's checksum is verified before its first use."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            self.info = EgsInfo(**json.loads((directory / "info.json").read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{directory} is not a directory of examples ({error}); remove it and run again.") from error
        self._verified: set[str] = set()

    def minibatches(self, shard: Shard, size: int, *, seed: int, outer_iter: int, job: int) -> Iterator[Minibatch]:
        """One frame of every example of an archive, shuffled, `size` at a time; the last minibatch may be smaller."""
        x_ED, pdf_E = self._read(shard)
        random = np.random.default_rng((seed, outer_iter, job))
        order = torch.from_numpy(random.permutation(len(pdf_E)))
        for chosen_N in order.split(size):
            yield Minibatch(x_ED[chosen_N], pdf_E[chosen_N])

    def diagnostic(self, subset: str) -> Minibatch:
        """The fixed subset "train" or "valid"."""
        path = self._checked(diagnostic_name(subset))
        arrays = load_file(path)
        return Minibatch(arrays["features"], arrays["pdf"].long())

    def num_frames(self, shard: Shard) -> int:
        """Rows that the minibatches of `shard` hold in all."""
        with safe_open(self._checked(archive_name(shard.archive)), framework="pt") as archive:
            return int((archive.get_slice("pdf")[:, shard.frame] != NO_FRAME).sum())

    def _read(self, shard: Shard) -> tuple[Tensor, Tensor]:
        width = self.info.left_context + 1 + self.info.right_context
        path = self._checked(archive_name(shard.archive))
        try:
            with safe_open(path, framework="pt") as archive:
                pdf_E = archive.get_slice("pdf")[:, shard.frame].long()
                x_EWD = archive.get_slice("features")[:, shard.frame:shard.frame + width]
        except SafetensorError as error:
            raise DataError(f"{path} cannot be read ({error}); remove {self.directory} and run again.") from error
        is_frame_E = pdf_E != NO_FRAME
        return x_EWD[is_frame_E].flatten(1), pdf_E[is_frame_E]

    def _checked(self, name: str) -> Path:
        path = self.directory / name
        if name not in self._verified:
            if not path.exists() or sha256(path) != self.info.sha256.get(name):
                raise DataError(f"{path} is missing or does not match its checksum; remove {self.directory} and run again.")
            self._verified.add(name)
        return path
