"""Reader of lhotse manifests without lhotse: recordings and supervisions as JSON lines.

The files of a set NAME (train, valid or dev, test), plain or .gz, are NAME/recordings.jsonl and
NAME/supervisions.jsonl, or have "recordings" or "supervisions" and NAME in their names.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngsgd.asr.corpora.data_dir import Listing, UtteranceEntry
from ngsgd.asr.features.audio import Piece
from ngsgd.asr.kaldi_io import lines
from ngsgd.errors import DataError
from ngsgd.files import named_in, parse_json

_NAMES = {"train": ("train",), "valid": ("valid", "dev"), "test": ("test",)}
_TEXTS = ("id", "recording_id", "speaker", "text")  # strings of an item that become words and names
_SUFFIXES = (".jsonl.gz", ".jsonl")


def read_sets(source: Path) -> dict[str, Sequence[UtteranceEntry]]:
    """Read the utterances of train, test and, if it exists, valid."""
    sets = {}
    for name, folders in _NAMES.items():
        found = {kind: _find(source, kind, folders) for kind in ("recordings", "supervisions")}
        if all(found.values()):
            sets[name] = _read_set(*found.values())  # type: ignore[arg-type]
        elif name != "valid":
            missing = next(kind for kind, path in found.items() if path is None)
            raise DataError(f"{source} contains no manifest of the {missing} of {name}; add {name}/{missing}.jsonl.gz.")
    return sets


def read_folder(folder: Path) -> Sequence[UtteranceEntry] | None:
    """Read `recordings` and `supervisions` in a folder; None without these files."""
    for suffix in _SUFFIXES:
        paths = [folder / f"{kind}{suffix}" for kind in ("recordings", "supervisions")]
        if all(path.is_file() for path in paths):
            return _read_set(*paths)
    return None


def _find(source: Path, kind: str, names: tuple[str, ...]) -> Path | None:
    for name in names:
        for suffix in _SUFFIXES:
            inside = source / name / f"{kind}{suffix}"
            adjacent = sorted(path for path in source.glob(f"*{kind}*{suffix}") if name in path.name)
            if inside.is_file():
                return inside
            if len(adjacent) > 1:
                raise DataError(f"{source} contains several manifests of the {kind} of {name}, "
                                f"{adjacent[0].name} and {adjacent[1].name}; copy the intended one to {name}/{kind}{suffix}.")
            if adjacent:
                return adjacent[0]
    return None


def _read_set(recordings: Path, supervisions: Path) -> Sequence[UtteranceEntry]:
    files = {str(item["id"]): _recording(item, where, recordings.parent) for where, item in _lines(recordings)}
    found = Listing(_utterance(item, where, files, recordings) for where, item in _lines(supervisions))
    if not found:
        raise DataError(f"{supervisions} is empty; add utterances, or remove it.")
    return found


class _Recording(NamedTuple):
    path: Path
    channels: tuple[int, ...]  # names, in their order
    rate_hz: int | None


def _recording(item: dict[str, Any], where: str, folder: Path) -> _Recording:
    if transforms := item.get("transforms"):
        names = [str(one.get("name", one) if isinstance(one, dict) else one)[:40] for one in
                 (transforms if isinstance(transforms, list) else [transforms])]
        raise DataError(f"{where}: the recording {item['id']} has the transform(s) "
                        f"{', '.join(names)}, which are not applied; write the changed audio with "
                        "lhotse (save_audios), or remove them and use augment.")
    try:
        (source,) = item["sources"]
        if source["type"] != "file":
            raise DataError(f"{where}: the recording {item['id']} comes from a {source['type']}; only files are supported.")
        if "\0" in source["source"]:
            raise ValueError("a zero byte in the name")
        channels = tuple(operator.index(channel) for channel in source.get("channels", [0]))
        if not channels or len(set(channels)) < len(channels) or min(channels) < 0:
            raise ValueError("channels that are not distinct numbers from 0")
        rate_hz = operator.index(item["sampling_rate"]) if "sampling_rate" in item else None
        return _Recording(named_in(folder, source["source"]), channels, rate_hz)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: this is not a recording of lhotse with one source, its channels "
                        "and a sampling rate; write the manifest again.") from error


def _utterance(item: dict[str, Any], where: str, recorded: dict[str, _Recording], recordings: Path) -> UtteranceEntry:
    try:
        utt_id, recording = str(item["id"]), str(item["recording_id"])
        start_s, end_s = float(item["start"]), float(item["start"]) + float(item["duration"])
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: this is not a supervision of lhotse (id, recording_id, start, "
                        "duration); correct it.") from error
    if not (math.isfinite(start_s) and math.isfinite(end_s) and 0 <= start_s < end_s):
        raise DataError(f"{where}: {utt_id} ranges from {start_s:g} to {end_s:g} s; write increasing times from 0.")
    if recording not in recorded:
        raise DataError(f"{where}: the recording {recording} of {utt_id} is not in {recordings}; add it there.")
    path, channels, rate_hz = recorded[recording]
    named = item.get("channel", list(channels))
    names = named if isinstance(named, list) else [named]
    if len(names) != 1 or isinstance(names[0], bool) or names[0] not in channels:
        raise DataError(f"{where}: {utt_id} has the channel {str(named)[:40]}, but its recording "
                        f"has {list(channels)}, of which one is needed; correct it, or write a supervision for each channel.")
    piece = Piece(path, where, start_s, end_s, channels.index(names[0]), rate_hz=rate_hz, num_channels=len(channels))
    words = tuple(str(item.get("text") or "").split())
    return UtteranceEntry(utt_id, str(item.get("speaker") or utt_id), words, piece, where)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in lines.numbered(path, is_checked=False):
        where = f"{path}:{number}"
        try:
            item = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: this is not JSON; write the manifest again.") from error
        if not isinstance(item, dict) or "id" not in item:
            raise DataError(f"{where}: this item of a lhotse manifest has no id; write the manifest again.")
        for name in _TEXTS:
            lines.check(str(item.get(name) or ""), where)
        yield where, item
