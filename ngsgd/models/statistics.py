"""Statistics of the training examples that models need, computed once and stored with the archives.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from ngsgd.config import ModelConfig, RunConfig
from ngsgd.data.reader import BESIDE, EgsReader, Minibatch
from ngsgd.errors import ConfigError, DataError
from ngsgd.files import DIGEST, digest_of_arrays, new_file
from ngsgd.models.build import build_model
from ngsgd.models.layers import DataStatistics, Window
from ngsgd.schedules import Shard

_ROWS_AT_ONCE = 8192
# Increase it when equal settings would yield other numbers.
_FORMAT = 1


def model_for(config: RunConfig, reader: EgsReader) -> nn.Module:
    """Create the model of a run for these examples.

    Its initialization depends on the seed of the run.
    """
    info = reader.info
    model = build_model(config.model, info.num_inputs, info.num_classes, config.seed,
                        window=Window(info.left_context, info.right_context, info.feature_dim, info.side_dim),
                        statistics=statistics_for(config.model, reader))
    _scale_start(model, config.model)
    return model


@torch.no_grad()
def _scale_start(model: nn.Module, config: ModelConfig) -> None:
    modules = dict(model.named_modules())
    for name, scale in (config.init_scales or {}).items():
        if name not in modules:
            known = [key for key, module in modules.items() if next(module.parameters(recurse=False), None) is not None]
            raise ConfigError(f"model.init_scales has {name}, and the model has no such layer; it has {', '.join(known)}.")
        for parameter in modules[name].parameters(recurse=False):
            parameter.mul_(scale)


def needs_statistics(config: ModelConfig) -> bool:
    """Return whether the model needs statistics of the training examples."""
    return config.input_transform != "none" or config.num_subclasses > 0 or config.prior_scale_power != 0.0


def statistics_for(config: ModelConfig, reader: EgsReader) -> DataStatistics | None:
    """Return the statistics, or None if the model needs none.

    They are read from the file next to the archives, or computed and stored there. The coordinator
    does this before any worker starts, so that all use identical values.
    """
    if not needs_statistics(config):
        return None
    # all settings that affect the numbers; the examples belong to the directory
    wanted: list[object] = [_FORMAT, config.input_transform]
    if config.input_transform == "lda":
        wanted += _columns(config, reader).tolist()
    path = reader.files.root(BESIDE.replace("*", hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:12]))
    found = _read(path, reader.info.num_classes)
    if found is None:
        found = _compute(config, reader)
        _write(path, found)
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
        arrays = load_file(path)
        with safe_open(path, framework="np") as file:
            expected = (file.metadata() or {}).get(DIGEST)
    except (OSError, SafetensorError):
        # Missing or damaged; it is created again in both cases.
        return None
    if expected != _digest(arrays):
        return None
    counts, transform = arrays.get("class_counts"), arrays.get("input_transform")
    whole = counts is not None and len(counts) == num_classes and (transform is None or bool(transform.isfinite().all()))
    return DataStatistics(tuple(counts.tolist()), transform) if whole and counts is not None else None


def _digest(arrays: Mapping[str, torch.Tensor]) -> str:
    return digest_of_arrays({name: array.numpy() for name, array in arrays.items()})


def _write(path: Path, statistics: DataStatistics) -> None:
    arrays = {"class_counts": torch.tensor(statistics.class_counts, dtype=torch.float64)}
    if statistics.input_transform is not None:
        arrays["input_transform"] = statistics.input_transform.contiguous()
    try:
        with new_file(path) as temporary:
            save_file(arrays, temporary, {DIGEST: _digest(arrays)})
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} could not be written ({error}); free space, or fix the "
                        "permissions of that folder.") from error


# Input transform ----------------------------------------------------------------------------------


Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ClassStatistics:
    """Statistics of rows with classes; float64."""

    count_P: Array
    # covariance of all rows
    total_DD: Array
    # covariance of the class means, weighted by their counts
    between_DD: Array
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

    It decorrelates the input and down-weights non-discriminative dimensions: an LDA that keeps all
    dimensions by default, with a mild floor instead of full whitening; Kaldi's
    nnet2/get-feature-transform.cc. The sign of each row is arbitrary.

    W is T - B, the total covariance without the between-class one. With W = L L^T and the
    eigenvalues l of L^-1 B L^-T = U diag(l) U^T, descending, row i of U^T L^-1 is scaled by
    sqrt((f + l_i) / (1 + l_i)). f is `within_class_factor`. Singular values are limited (0: not), and `dim` rows are kept
    (0: all). Raises DataError if W is singular.
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
