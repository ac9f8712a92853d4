"""Preparation of the data of a run: alignment, features, i-vectors and archives, with a cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd.asr.corpora import corpus as corpora
from ngsgd.config import DataConfig, RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.errors import DataError
from ngsgd.files import remove_abandoned
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.mirror import mirrored
from ngsgd.object_storage.urls import check_url, is_url
from ngsgd.pipeline.adaptation import extractor_of, network_input, with_ivectors
from ngsgd.pipeline.align import cache_folder, with_alignment
from ngsgd.runs import limits
from ngsgd.runs.run_folder import RunFolder
from ngsgd.runs.rungs import Rung

# settings, folder of prepared data, progress -> settings of the data with labels
Labels = Callable[[RunConfig, Path, Callable[[str], None]], DataConfig]


@dataclass(frozen=True)
class PreparedData:
    """A corpus and its archives of training examples."""

    corpus: corpora.Corpus
    # T x D of "valid" and "test" before LDA, MLLT and fMLLR
    unadapted: Mapping[str, npt.NDArray[np.float32]]
    egs_directory: Path
    cache_root: Path
    extractor: Path | None = None  # of i-vectors
    adaptation: Path | None = None  # LDA, MLLT and fMLLR
    alignment: str = ""  # file of the labels; empty for those of the corpus
    rungs: tuple[Rung, ...] = ()


def check_data(config: RunConfig) -> None:
    """Check the settings of data and model without reading data."""
    limits.require_memory(config.model)
    if is_url(config.data.source):
        check_url(config.data.source)
    else:
        corpora.check_use(config.data, config.decode)


def prepare(config: RunConfig, report: Callable[[str], None], folder: RunFolder | None = None,
            labels: Labels = with_alignment) -> PreparedData:
    """Prepare the data of a run; a started run uses the i-vector extractor in `folder`.

    `labels` returns the data settings with the file of labels, if there is one.
    """
    check_data(config)
    config = replace(config, data=with_local_source(config.data, report))
    corpora.check_use(config.data, config.decode)
    cache_root = cache_folder(config)
    remove_abandoned(cache_root)
    try:
        data = labels(config, cache_root, report)
        corpus = corpora.prepare(data, config.features, cache_root, report, augment_config=config.augment)
        unadapted = {"valid": corpus.valid.frames.features_TD, "test": corpus.test.frames.features_TD}
        corpus, adaptation = network_input(config, corpus, cache_root, report)
        extractor = None
        if config.ivectors.dim:
            extractor = extractor_of(config, corpus, cache_root, report, folder)
            corpus = with_ivectors(config, corpus, extractor, cache_root, report)
        limits.require_schedule(config, corpus.train.frames.num_frames)
        egs_directory = prepare_archives(corpus.train.frames, corpus.valid.frames, config.egs,
                                         num_classes=corpus.num_pdfs, digest=corpus.digest, cache_root=cache_root,
                                         groups=corpus.train.speakers, silence_classes=corpus.language.topology.silence_pdfs,
                                         report=report)
    except OSError as error:
        raise DataError(f"the prepared data could not be written under {cache_root} "
                        f"({error.strerror or error}); free disk space, or choose another folder "
                        "with data.cache_dir=PATH.") from error
    return PreparedData(corpus, unadapted, egs_directory, cache_root, extractor, adaptation, data.alignment)


def with_local_source(data: DataConfig, report: Callable[[str], object]) -> DataConfig:
    """Copy `data.source` if it is a URL, and return settings with paths of the copy.

    Other options whose values are below that URL name files of the copy, too. Raises DataError and
    ObjectStorageError if the files cannot be copied.
    """
    url = data.source.rstrip("/")
    if not is_url(url):
        return data
    folder = mirrored(ObjectStore(url), report)

    def local(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(local, value))
        if not isinstance(value, str) or not f"{value.rstrip('/')}/".startswith(f"{url}/"):
            return value
        return str(folder / value[len(url):].strip("/"))
    return replace(data, **{name: local(value) for name, value in asdict(data).items()})
