"""Statistics of training examples that models need, computed once, stored with the archives."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ngsgd.config import ModelConfig, RunConfig
from ngsgd.data import arrays
from ngsgd.data.reader import BESIDE, EgsReader, Minibatch
from ngsgd.errors import ConfigError, DataError
from ngsgd.models.build import build_model
from ngsgd.models.layers import DataStatistics, Window
from ngsgd.schedules import Shard

_ROWS_AT_ONCE = 8192
_FORMAT = 1  # Increase it when equal settings would yield other numbers.


def model_for(config: RunConfig, reader: EgsReader) -> nn.Module:
    """Create the model of a run for these examples, initialized from the seed of the run."""
    info = reader.info
    model = build_model(config.model, info.num_inputs, info.num_classes, config.seed,
                        window=Window(info.left_context, info.right_context, info.feature_dim, info.side_dim),
                        statistics=statistics_for(config.model, reader))
    modules = dict(model.named_modules())
    for name, scale in (config.model.init_scales or {}).items():
        if name not in modules:
            known = [key for key, module in modules.items() if next(module.parameters(recurse=False), None) is not None]
            raise ConfigError(f"model.init_scales has {name}, and the model has no such layer; it has {', '.join(known)}.")
        for parameter in modules[name].parameters(recurse=False):
            with torch.no_grad():
                parameter.mul_(scale)
    return model


def needs_statistics(config: ModelConfig) -> bool:
    """Return whether the model needs statistics of the training examples."""
    return config.input_transform != "none" or config.num_subclasses > 0 or config.prior_scale_power != 0.0


def statistics_for(config: ModelConfig, reader: EgsReader) -> DataStatistics | None:
    """Return the statistics, or None if the model needs none. The coordinator reads them from the
    file next to the archives, or stores them there, before any worker starts.
    """
    if not needs_statistics(config):
        return None
    # all settings that affect the numbers; the examples belong to the directory
    wanted: list[object] = [_FORMAT, config.input_transform]
    if config.input_transform == "lda":
        wanted += _columns(config, reader).tolist()
    path = reader.files.root(BESIDE.replace("*", hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:12]))
    if (stored := _read(path, reader.info.num_classes)) is not None:
        return stored
    found = _compute(config, reader)
    counts = np.array(found.class_counts, np.float64)
    written: dict[str, npt.NDArray[Any]] = {"class_counts": counts}
    if found.input_transform is not None:
        written["input_transform"] = found.input_transform.numpy()
    try:
        arrays.write(path, written)
    except OSError as error:
        raise DataError(f"{path} could not be written ({error}); free space, or fix the "
                        "permissions of that folder.") from error
    return found


def _columns(config: ModelConfig, reader: EgsReader) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the transformed inputs: complete rows, or the input of the first layer of a TDNN."""
    info = reader.info
    columns = np.arange(info.num_spliced).reshape(-1, info.feature_dim)
    if config.kind in ("tdnn", "tdnnf"):
        columns = columns[np.asarray(config.layer_offsets()[0]) + info.left_context]
    return np.concatenate([columns.reshape(-1), np.arange(info.num_spliced, info.num_inputs)])


def _compute(config: ModelConfig, reader: EgsReader) -> DataStatistics:
    columns = _columns(config, reader) if config.input_transform == "lda" else np.empty(0, np.int64)
    shards = itertools.product(range(reader.info.num_archives), range(reader.info.frames_per_eg))
    # every frame of the examples once
    rows = (minibatch for shard in shards
            for minibatch in reader.minibatches(Shard(*shard), _ROWS_AT_ONCE, seed=0, outer_iter=0, job=0))
    found = class_statistics(rows, reader.info.num_classes, columns)
    transform = None
    if config.input_transform == "lda":
        transform_KD = lda_transform(found.total_DD, found.between_DD, found.mean_D)
        transform = torch.from_numpy(transform_KD).float()
    return DataStatistics(tuple(found.count_P.tolist()), transform)


def _read(path: Path, num_classes: int) -> DataStatistics | None:
    try:
        found = arrays.read(path)
    except (OSError, ValueError):
        # Missing or damaged; it is created again in both cases.
        return None
    counts, transform = found.get("class_counts"), found.get("input_transform")
    if counts is None or len(counts) != num_classes or (transform is not None and not np.isfinite(transform).all()):
        return None
    return DataStatistics(tuple(counts.tolist()), None if transform is None else torch.from_numpy(transform))


Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of rows with classes; float64."""

    count_P: Array
    total_DD: Array  # covariance of all rows
    between_DD: Array  # covariance of the class means, weighted by their counts
    mean_D: Array


def class_statistics(minibatches: Iterable[Minibatch], num_classes: int, columns: npt.NDArray[np.int64]) -> ClassStatistics:
    """Compute statistics over all rows for these columns, weighted by the weight of each row."""
    dim = len(columns)
    count_P, sum_PD, square_DD = np.zeros(num_classes), np.zeros((num_classes, dim)), np.zeros((dim, dim))
    for x_ND, pdf_N, weight_N in minibatches:
        rows_ND = x_ND.numpy()[:, columns].astype(np.float64)
        weights_N = np.ones(len(rows_ND)) if weight_N is None else weight_N.numpy().astype(np.float64)
        member_NP = np.eye(num_classes)[pdf_N.numpy()] * weights_N[:, None]
        count_P += member_NP.sum(axis=0)
        sum_PD += member_NP.T @ rows_ND
        square_DD += rows_ND.T @ (rows_ND * weights_N[:, None])
    total = count_P.sum()
    mean_D = sum_PD.sum(axis=0) / total
    seen = count_P > 0.0
    class_mean = sum_PD[seen] / count_P[seen, None] - mean_D
    between_DD = (class_mean * (count_P[seen, None] / total)).T @ class_mean
    return ClassStatistics(count_P, square_DD / total - np.outer(mean_D, mean_D), between_DD, mean_D)


def lda_transform(total_DD: Array, between_DD: Array, mean_D: Array, *, within_class_factor: float = 0.001,
                  max_singular_value: float = 5.0, dim: int = 0) -> Array:
    """Compute the input transform (C.6 of arXiv 1410.7455), K x (D + 1) with the offset last.

    As Kaldi's nnet2/get-feature-transform.cc. T is the total covariance, B the between-class one, W
    = T - B = L L^T. The eigenvalues l of L^-1 B L^-T = U diag(l) U^T descend. Row i of U^T L^-1 is
    scaled by sqrt((f + l_i) / (1 + l_i)). f is `within_class_factor`. Singular values are limited
    (0: not), and `dim` rows are kept (0: all). Raises DataError if W is singular.
    """
    try:
        L_DD = np.linalg.cholesky(total_DD - between_DD)
    except np.linalg.LinAlgError:
        raise DataError("the input transform cannot be computed, because some combination of features never varies within a "
                        "class; use more data, or set model.input_transform=none.") from None
    half_DD = np.linalg.solve(L_DD, between_DD)
    l_D, U_DD = np.linalg.eigh(np.linalg.solve(L_DD, half_DD.T))
    # eigh returns ascending eigenvalues.
    kept = slice(None, None, -1) if dim == 0 else slice(None, -dim - 1, -1)
    l_K, M_KD = np.maximum(l_D[kept], 0.0), np.linalg.solve(L_DD.T, U_DD[:, kept]).T  # U^T L^-1
    M_KD *= np.sqrt((within_class_factor + l_K) / (1.0 + l_K))[:, None]
    if max_singular_value > 0.0:
        left, singular, right = np.linalg.svd(M_KD, full_matrices=False)
        M_KD = (left * np.minimum(singular, max_singular_value)) @ right
    return np.hstack([M_KD, -(M_KD @ mean_D)[:, None]])
