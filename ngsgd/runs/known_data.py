"""Archives of a resumed run that are used without reading the corpus again.

The time of `ngsgd resume` therefore does not depend on the size of the data. Archives are verified
one by one when a worker reads them. The corpus is verified before decoding, at the end of the run.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from ngsgd.asr.corpora.corpus import RECIPE_VERSION
from ngsgd.config import RunConfig
from ngsgd.data.archives import read_index
from ngsgd.data.storage import FormatError
from ngsgd.errors import CheckpointError
from ngsgd.files import digest_of_json, named_in
from ngsgd.runs.run_folder import RunFolder

# sections that change no prepared data
_WITHOUT_EFFECT = ("cluster", "tracking", "failure", "checkpoint")
_PACKAGES = ("numpy", "kaldi-native-fbank", "soxr")
# a folder with more files holds audio, and not tables
_MAX_FILES = 200
# tables of the places of audio and features, and lines of each whose files are compared
_PLACES = ("wav.scp", "feats.scp")
_NUM_PLACES = 200
_MAX_LINE_BYTES = 1 << 16


def preparation_key(config: RunConfig) -> str:
    """Return a digest of all that determines prepared data, in a time independent of its amount.

    Equal keys mean that the data would be prepared as before. The key covers settings, versions,
    this machine, and size, times and inode of the source tables. Of the audio and feature files in
    wav.scp and feats.scp it covers 200 lines at equal distances. Audio in other manifests is not
    covered; as all audio, it is compared before decoding.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in _WITHOUT_EFFECT}
    # they decide where archives are copied to
    settings["data"] = {name: value for name, value in settings["data"].items() if name not in ("store", "node_cache_gb")}
    # another machine may have other data under the same path
    made_with = [socket.gethostname(), RECIPE_VERSION]
    for package in _PACKAGES:
        try:
            made_with.append(metadata.version(package))
        except metadata.PackageNotFoundError:
            made_with.append("")
    data = config.data
    named = [data.source, data.alignment, data.lexicon, data.lm, data.lm_text, data.graph, *data.added_dirs]
    paths = [Path(name).expanduser() for name in named if name and name != "flat"]
    states = [_state(file) for path in paths for file in _with_tables(path)]
    return digest_of_json([settings, made_with, states])


def known_archives(config: RunConfig, folder: RunFolder) -> Path | None:
    """Return the archives of a run that has begun; None if its data must be prepared again."""
    is_begun = folder.data.exists() and (config.data.labels != "ladder" or folder.rungs.exists())
    # archives of a sequence objective are made from the corpus
    if config.objective.kind != "ce" or not is_begun:
        return None
    try:
        if (directory := folder.archives(preparation_key(config))) is not None:
            read_index(directory)
    except (CheckpointError, FormatError):
        # the preparation reports or repairs the damage
        return None
    return directory


def _with_tables(path: Path) -> Iterator[Path]:
    """Yield a path and, for a folder, the files of two levels, and files named in tables."""
    yield path
    for inner in _children(path):
        yield inner
        yield from _named_in(inner)
        for table in _children(inner):
            yield table
            yield from _named_in(table)


def _children(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            found = [path / entry.name for entry in itertools.islice(entries, _MAX_FILES + 1)]
    except OSError:
        return []
    return sorted(found) if len(found) <= _MAX_FILES else []


def _named_in(table: Path) -> Iterable[Path]:
    """Return files that lines at equal distances of a table name."""
    if table.name not in _PLACES or not table.is_file():
        return []
    lines: dict[bytes, None] = {}
    with table.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        for offset in (size * number // _NUM_PLACES for number in range(_NUM_PLACES)):
            # the first line that begins at or after the offset
            file.seek(max(0, offset - 1))
            if offset:
                file.readline(_MAX_LINE_BYTES)
            lines[file.readline(_MAX_LINE_BYTES)] = None
    words = [line.split() for line in lines]
    # the place of a matrix is `archive:offset`
    return [named_in(table.parent, os.fsdecode(re.sub(rb":\d+$", b"", pair[1]))) for pair in words if len(pair) == 2]


def _state(path: Path) -> list[object]:
    try:
        status = path.stat()
    except OSError:
        return [str(path)]
    # a folder changes when a temporary file is written to it
    is_file = stat.S_ISREG(status.st_mode)
    # an inode and a change time are new even where a copy keeps the other times
    return [str(path), *((status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino) if is_file else ())]
