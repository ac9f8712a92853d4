"""Archives of a resumed run that are used without reading the corpus again.

The time of `ngsgd resume` therefore does not depend on the size of the data. Archives are verified
one by one when a worker reads them. The corpus is verified before decoding, at the end of the run.
"""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from ngsgd.config import DataConfig, RunConfig
from ngsgd.data.archives import read_index
from ngsgd.data.storage import FormatError
from ngsgd.errors import CheckpointError
from ngsgd.files import digest_of_json
from ngsgd.pipeline.runs.run_folder import RunFolder

# sections that change no prepared data
_WITHOUT_EFFECT = ("cluster", "tracking", "failure", "checkpoint")
# a folder with more files holds audio, and not tables
_MAX_FILES = 200


def preparation_key(config: RunConfig) -> str:
    """Return a digest of the settings and of the states of the source files.

    It reads no file. Equal keys mean that the data would be prepared as before. The states are
    size and time of the tables, and not of the audio.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in _WITHOUT_EFFECT}
    return digest_of_json([settings, _states(config.data)])


def known_archives(config: RunConfig, folder: RunFolder) -> Path | None:
    """Return the archives of a run that has begun; None if its data must be prepared again.

    None also stands for a sequence objective, whose archives are made from the corpus.
    """
    if config.objective.kind != "ce" or not folder.data.exists():
        return None
    try:
        directory = folder.archives(preparation_key(config))
        if directory is not None:
            read_index(directory)
    except (CheckpointError, FormatError):
        # the preparation reports or repairs the damage
        return None
    return directory


def _states(data: DataConfig) -> list[list[object]]:
    named = [data.source, data.alignment, data.lexicon, data.lm, data.lm_text, data.graph, *data.added_dirs]
    paths = [Path(name).expanduser() for name in named if name and name != "flat"]
    return [_state(path) for path in itertools.chain.from_iterable(map(_with_tables, paths))]


def _with_tables(path: Path) -> Iterable[Path]:
    """Yield a path and, for a folder, its files and those of its folders."""
    yield path
    for inner in _children(path):
        yield inner
        yield from _children(inner)


def _children(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            found = [path / entry.name for entry in itertools.islice(entries, _MAX_FILES + 1)]
    except OSError:
        return []
    return sorted(found) if len(found) <= _MAX_FILES else []


def _state(path: Path) -> list[object]:
    try:
        status = path.stat()
    except OSError:
        return [str(path)]
    # a folder changes when a temporary file is written to it
    is_file = stat.S_ISREG(status.st_mode)
    return [str(path), *((status.st_size, status.st_mtime_ns) if is_file else ())]
