"""Kaldi data directories: words, speakers, and audio or features of utterances.

    text        utt word word ...         required
    utt2spk     utt speaker               required
    wav.scp     recording file            required, or feats.scp with features.kind=given
    segments    utt recording start end   optional, seconds; a fifth column is the channel, from 0
    reco2file_and_channel   recording file A    optional; channel of recordings with several
    feats.scp   utt archive:offset
    cmvn.scp    speaker archive:offset, or utt archive:offset; for features.cmvn=given
    spk2gender, spk2age, ...   speaker value; for tables of errors

The checks are those of validate_data_dir.sh. Each error message names the file and the line.
"""

from __future__ import annotations

import functools
import json
import math
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.asr.features import audio
from ngsgd.asr.features.audio import Piece
from ngsgd.asr.features.cmvn import CmvnStats
from ngsgd.asr.kaldi_io import lines, tables
from ngsgd.asr.kaldi_io.tables import Entry
from ngsgd.asr.lang import lexicon
from ngsgd.asr.utterance import FramedUtterance, Utterance, num_frames, unaligned
from ngsgd.config import FeatureConfig
from ngsgd.data.columns import Index, Spool
from ngsgd.errors import DataError
from ngsgd.files import named_in

Table = Mapping[str, Entry]


@dataclass(frozen=True)
class UtteranceEntry:
    """An utterance before its audio or its features are read."""

    utt_id: str
    speaker: str
    words: tuple[str, ...]
    content: Piece | Entry  # audio, or an entry of a feats.scp
    where: str  # file:line of the transcript


class Listing(Spool[UtteranceEntry]):
    """Utterances in a temporary file, made when they are read; DataError if two have one name."""

    def __init__(self, entries: Iterable[UtteranceEntry]) -> None:
        hashes = array("q")

        def records() -> Iterator[bytes]:
            for one in entries:
                hashes.append(hash(one.utt_id))
                yield json.dumps(to_json(one)).encode()
        super().__init__(records(), lambda record: of_json(json.loads(record)))
        if twice := Index(hashes, lambda at: self[at].utt_id).duplicate():
            first, second = (self[at] for at in twice)
            raise DataError(f"{second.where}: {second.utt_id} is also in {first.where}; give every "
                            "utterance a unique name, or remove one of them.")


def to_json(one: UtteranceEntry) -> dict[str, Any]:
    """Return the utterance for a file or another process."""
    content = one.content
    kind = {"path": str(content.path)} if isinstance(content, Piece) else {}
    return {"utt_id": one.utt_id, "speaker": one.speaker, "words": one.words, "where": one.where,
            "content": {**vars(content), **kind}}


def of_json(tree: Mapping[str, Any]) -> UtteranceEntry:
    """Return the utterance of `to_json`."""
    content = tree["content"]
    found = Entry(**content) if "value" in content else Piece(**{**content, "path": Path(content["path"])})
    return UtteranceEntry(tree["utt_id"], tree["speaker"], tuple(tree["words"]), found, tree["where"])


def read(folder: Path, *, given_features: bool) -> Sequence[UtteranceEntry]:
    """Read the tables of a data directory; the utterances are in the order of `text`."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; create it, or set data.source to another folder.")
    texts, speakers = tables.Table(folder / "text"), tables.Table(folder / "utt2spk")
    source = folder / ("feats.scp" if given_features else "segments" if (folder / "segments").exists() else "wav.scp")
    contents = tables.Table(source)
    content_of = _contents(folder, source.name, contents)
    for others, path in ((speakers, folder / "utt2spk"), (contents, source)):
        for utt_id, text in texts.items():
            if utt_id not in others:
                raise DataError(f"{text.where}: {utt_id} has a transcript but no line in {path}; "
                                "add it, or remove the transcript.")
        for utt_id, other in others.items():
            if utt_id not in texts:
                raise DataError(f"{other.where}: {utt_id} has no transcript in text; add it, or remove the line.")
    for utt_id, speaker in speakers.items():
        if len(speaker.value.split()) != 1:
            raise DataError(f"{speaker.where}: {utt_id} has no speaker, or a name with spaces; write one word.")
    return Listing(UtteranceEntry(utt_id, speakers[utt_id].value, tuple(text.value.split()),
                                  content_of(utt_id, contents[utt_id]), text.where) for utt_id, text in texts.items())


def attributes(folder: Path, speakers: Sequence[str]) -> dict[str, list[str]]:
    """Read the files spk2NAME; return NAME -> value for each of `speakers` in their order. Raises
    DataError if a speaker has no value, or a value is of none of them.
    """
    found, known = {}, dict.fromkeys(speakers)
    for path in sorted(folder.glob("spk2*")):
        name = path.name.removeprefix("spk2")
        # the list of a speaker's utterances, which utt2spk has too
        if name == "utt":
            continue
        if name in ("speaker", "length"):
            raise DataError(f"{path} has the name of another table of errors; rename the file.")
        values = tables.Table(path)
        for speaker in known:
            if speaker not in values or not values[speaker].value:
                raise DataError(f"{path} has no value for the speaker {speaker} of utt2spk; add one, or remove the file.")
        for speaker, entry in values.items():
            if speaker not in known:
                raise DataError(f"{entry.where}: {speaker} is not a speaker of utt2spk; remove the line.")
        found[name] = [values[speaker].value for speaker in speakers]
    return found


def check_words(utterances: Sequence[UtteranceEntry], known: Mapping[str, object] | None, source: str, advice: str) -> None:
    """Raise DataError for an empty transcript, or a word not in the lexicon `known` (`source`)."""
    for one in utterances:
        if not one.words:
            raise DataError(f"{one.where}: the transcript of {one.utt_id} is empty; write its "
                            "words, or remove the utterance.")
        if known is not None and (unknown := next((word for word in one.words if word not in known), None)):
            raise DataError(f"{one.where}: the word {unknown} of {one.utt_id} is not in {source}"
                            f"{lexicon.alike(unknown, known)}; {advice}.")


def identity(one: UtteranceEntry, folder: Path) -> str:
    """Name, speaker, words and part of an utterance; path, size, time of its file (in `folder`)."""
    if isinstance(one.content, Piece):
        path = one.content.path
        part = f"{one.content.start_s} {one.content.end_s} {one.content.channel} {one.content.side}"
    else:
        place = tables.place_of(one.content)
        path, part = place.resolve(folder), one.content.value.removeprefix(place.file).removeprefix(":")
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{one.content.where}: {path} cannot be read ({error.strerror}); correct the path.") from error
    return f"{one.utt_id} {one.speaker} {' '.join(one.words)} {path} {status.st_size} {status.st_mtime_ns} {part}"


def given(utterances: Sequence[UtteranceEntry], folder: Path) -> Iterator[FramedUtterance]:
    """Read the features of the utterances, without alignment."""
    dim = None
    for one in utterances:
        assert isinstance(one.content, Entry)
        where, features_TD = one.content.where, tables.read_matrix(one.content, folder)
        dim = dim or features_TD.shape[1]
        if features_TD.shape[1] != dim:
            raise DataError(f"{where}: {one.utt_id} has {features_TD.shape[1]} features per frame, "
                            f"but the others have {dim}; use features of one kind.")
        if not np.isfinite(features_TD).all():
            frame_number = int(np.argwhere(~np.isfinite(features_TD))[0, 0])
            raise DataError(f"{where}: {one.utt_id} has a feature that is not finite in frame "
                            f"{frame_number}; compute its features again, or remove the utterance.")
        yield FramedUtterance(one.utt_id, one.speaker, one.words, features_TD, unaligned(len(features_TD)))


def given_cmvn(utterances: Sequence[UtteranceEntry], folder: Path, dim: int) -> CmvnStats:
    """Read the statistics in cmvn.scp of the folder, by utterance or by speaker."""
    table = tables.Table(folder / "cmvn.scp")
    unit_of = []
    for one in utterances:
        unit = one.utt_id if one.utt_id in table else one.speaker
        if unit not in table:
            raise DataError(f"{one.where}: {one.utt_id} has no statistics in "
                            f"{folder / 'cmvn.scp'}, neither by its name nor by its speaker "
                            f"{one.speaker}; add them, or choose another features.cmvn.")
        unit_of.append(unit)
    return CmvnStats({unit: tables.read_stats(table[unit], folder, dim) for unit in dict.fromkeys(unit_of)}, tuple(unit_of))


def spoken(utterances: Sequence[UtteranceEntry], config: FeatureConfig,
           reader: audio.Reader | None = None) -> Iterator[Utterance]:
    """Read the audio of the utterances, without alignment; `reader` keeps its last one open."""
    own = audio.Reader(config.sample_rate_hz, resample=config.resample)
    for one in utterances:
        assert isinstance(one.content, Piece)
        samples = (reader or own).read(one.content)
        if len(samples) < config.sample_rate_hz // 100:
            raise DataError(f"{one.content.where}: {one.utt_id} has {len(samples)} samples, less "
                            "than a frame of 10 ms; remove it.")
        pdf_T = unaligned(num_frames(len(samples), config.sample_rate_hz))
        yield Utterance(one.utt_id, one.speaker, one.words, samples, pdf_T)
    own.close()


def _contents(folder: Path, source: str, contents: Table) -> Callable[[str, Entry], Piece | Entry]:
    """Return a function of the name and the entry of an utterance in the file `source`."""
    if source == "feats.scp":
        return lambda _utt_id, entry: entry
    recordings = contents if source == "wav.scp" else tables.Table(folder / "wav.scp")
    for entry in recordings.values():
        if entry.value.endswith("|") or entry.value.startswith("|"):
            raise DataError(f"{entry.where}: {entry.value[:40]!r} is a command, which ngsgd never "
                            "runs from data files; convert the audio to wav or flac and write the name of the file.")
        if "\0" in entry.value:
            raise DataError(f"{entry.where}: the file name has a zero byte; write the name of the audio file.")
    # channels of lines "recording file A" (or 1), from 0; other lines are ignored
    path = folder / "reco2file_and_channel"
    rows = [line.split() for _, line in lines.read(path)] if path.is_file() else []
    sides = {row[0]: int(row[2]) - 1 if row[2].isdigit() else ord(row[2].upper()) - ord("A")
             for row in rows if len(row) == 3 and re.fullmatch("[A-Za-z]|[1-9][0-9]?", row[2])}
    if source == "wav.scp":
        return lambda utt_id, entry: Piece(named_in(folder, entry.value), entry.where, side=sides.get(utt_id))
    # segments of a recording follow each other
    find = functools.lru_cache(1)(lambda recording: named_in(folder, recordings[recording].value))

    def segment(utt_id: str, entry: Entry) -> Piece:
        try:
            recording, start, end, *channels = entry.value.split()
            start_s, end_s = lines.as_float(start), lines.as_float(end)
            if len(channels) > 1 or any(lines.as_int(one) < 0 for one in channels):
                raise ValueError("several channels, or one below 0")
        except ValueError as error:
            raise DataError(f"{entry.where}: {utt_id} {entry.value!r} is not a recording, two "
                            "times and at most a channel from 0; write \"utterance recording start "
                            "end\", or \"utterance recording start end channel\".") from error
        if recording not in recordings:
            raise DataError(f"{entry.where}: the recording {recording} of {utt_id} is not in "
                            f"{folder / 'wav.scp'}; add it there.")
        if not (math.isfinite(start_s) and math.isfinite(end_s) and 0 <= start_s < end_s):
            raise DataError(f"{entry.where}: {utt_id} ranges from {start_s:g} to {end_s:g} s; write increasing times from 0.")
        channel = int(channels[0]) if channels else None
        return Piece(find(recording), entry.where, start_s, end_s, channel, sides.get(recording))
    return segment
