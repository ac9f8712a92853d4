"""Custom corpora: Kaldi data directories or lhotse manifests, and a lexicon.

A language model or a graph is optional.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ngsgd import files
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import added, alignments, data_dir, manifests
from ngsgd.asr.corpora.data_dir import UtteranceEntry
from ngsgd.asr.corpora.held_out import hold_out
from ngsgd.asr.features import augment
from ngsgd.asr.kaldi_io import tables
from ngsgd.asr.lang import graphs, lexicon
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import Utterance
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.errors import DataError

# maximum ratio of the largest number in words.txt to the number of words
_MAX_GAP = 100
VALID_NAMES = ("valid", "dev")


def make(data: DataConfig, feature_config: FeatureConfig,
         changes: AugmentConfig) -> tuple[dict[str, SpeechSet], Language]:
    """Return train, valid and test without alignment, and the language.

    Everything is checked before the first audio is read.
    """
    source = locate(data)
    topology = lexicon.read(lexicon.locate(data.lexicon, source), data.num_silence_states)
    arpa = ""
    if data.lm:
        arpa = "\n".join(line for _, line in tables.read_lines(Path(data.lm).expanduser())) + "\n"
    graph = _given_graph(Path(data.graph).expanduser()) if data.graph else None
    language = Language(topology, arpa=arpa, given=graph)
    listed = read_sets(data, feature_config)
    listed["added"] = added.read(data)
    listed = {name: _with_known_words(utterances, data, language.topology, source)
              for name, utterances in listed.items()}
    _check_disjoint(listed)
    more = added.utterances(listed.pop("added"), data, feature_config, changes)
    folders = {"train": source / "train", "valid": source / (_valid_folder(source) or "train"),
               "test": source / "test"}
    if "valid" not in listed:
        listed["train"], listed["valid"] = hold_out(listed["train"], share=data.valid_fraction)
    return {name: _build(name, listed[name], folder, feature_config, changes,
                         more if name == "train" else ())
            for name, folder in folders.items()}, language


def _valid_folder(source: Path) -> str | None:
    return next((name for name in VALID_NAMES if (source / name).is_dir()), None)


def _build(name: str, listed: Sequence[UtteranceEntry], folder: Path, config: FeatureConfig,
           changes: AugmentConfig, more: Iterable[Utterance]) -> SpeechSet:
    if config.kind == "given":
        framed = list(data_dir.given(listed, folder))
        units = data_dir.given_cmvn(listed, folder, framed[0].features_TD.shape[1]) if config.cmvn == "given" else None
        return speech_set.assemble(framed, config, units)
    said = augment.for_set(name, data_dir.spoken(listed, config), changes,
                           sample_rate_hz=config.sample_rate_hz)
    return speech_set.build(itertools.chain(said, more), config)


def locate(data: DataConfig) -> Path:
    """Return the folder given by data.source."""
    if not data.source:
        raise DataError("data.source is empty; set data.source=PATH to the folder with train and "
                        "test.")
    source = Path(data.source).expanduser()
    if not source.is_dir():
        raise DataError(f"data.source is {data.source}, which is not a folder; set it to the "
                        "folder with train and test.")
    return source


def read_sets(data: DataConfig, feature_config: FeatureConfig) -> dict[str, list[UtteranceEntry]]:
    """Read the folders or manifests of train, test and, if it exists, valid."""
    source = locate(data)
    if data.corpus == "lhotse":
        return manifests.read_sets(source)
    if (source / "text").is_file() and not (source / "train").is_dir():
        raise DataError(f"data.source is {data.source}, which is one data directory; set it to "
                        "the folder with train, test and lexicon.txt.")
    given = feature_config.kind == "given"
    valid = _valid_folder(source)
    names = {"train": "train", "test": "test"} | ({"valid": valid} if valid else {})
    return {name: data_dir.read(source / folder, given_features=given)
            for name, folder in names.items()}


def fingerprint(data: DataConfig, feature_config: FeatureConfig) -> dict[str, Any]:
    """Identify the data: content of the tables; name, size and time of audio files and archives."""
    source = locate(data)
    seen = hashlib.sha256()
    for name, utterances in sorted(read_sets(data, feature_config).items()):
        for one in utterances:
            seen.update(f"{name} {data_dir.identity(one, source / name)}\n".encode())
    given = [lexicon.locate(data.lexicon, source), *([Path(data.lm)] if data.lm else [])]
    if feature_config.cmvn == "given":
        given += sorted(source.glob("*/cmvn.scp"))
    if data.graph:
        folder = Path(data.graph)
        given += [folder / "HCLG.fst", folder / "words.txt", alignments.transitions_file(folder)]
    return {"speech": seen.hexdigest(),
            **added.fingerprint(data),
            "files": [files.sha256(path) for path in given if path.is_file()]}


def _with_known_words(utterances: Sequence[UtteranceEntry], data: DataConfig, topology: Topology,
                      source: Path) -> list[UtteranceEntry]:
    path = lexicon.locate(data.lexicon, source)
    if data.oov_word and data.oov_word not in topology.lexicon:
        raise DataError(f"data.oov_word is {data.oov_word}, which is not in the lexicon {path}; "
                        "add it there, with a noise phone.")
    if not data.oov_word:
        data_dir.check_words(utterances, topology.lexicon, path)
    else:
        data_dir.check_words(utterances,
                             dict.fromkeys(word for one in utterances for word in one.words), path)
    return list(utterances)


def _check_disjoint(listed: dict[str, list[UtteranceEntry]]) -> None:
    seen: dict[str, str] = {}
    for utterances in listed.values():
        for one in utterances:
            if one.utt_id in seen:
                raise DataError(f"{one.where}: {one.utt_id} is also in another set "
                                f"({seen[one.utt_id]}); give every utterance a unique name, or "
                                "remove it from one of them.")
            seen[one.utt_id] = one.where


def _given_graph(folder: Path) -> GivenGraph:
    transitions = alignments.transitions_file(folder)
    missing = [path.name for path in (folder / "HCLG.fst", folder / "words.txt", transitions)
               if not path.is_file()]
    if missing:
        raise DataError(f"data.graph is {folder}, which lacks {', '.join(missing)}; set it to a "
                        "folder with HCLG.fst, words.txt and final.mdl or tid2pdf (lines "
                        "\"transition-id pdf\").")
    numbers = {}
    for where, line in tables.read_lines(folder / "words.txt"):
        try:
            word, number = line.split()
            numbers[int(number)] = word
        except ValueError as error:
            raise DataError(f"{where}: {line[:40]!r} is not a word and a number; use words.txt of "
                            "Kaldi.") from error
    if not numbers or min(numbers) < 0 or max(numbers) > _MAX_GAP * len(numbers):
        raise DataError(f"{folder / 'words.txt'} does not number {len(numbers)} words from 0; use "
                        "words.txt of Kaldi.")
    words = tuple(numbers.get(number, f"#{number}") for number in range(1, max(numbers) + 1))
    given = GivenGraph((folder / "HCLG.fst").read_bytes(), words,
                       alignments.read_tid2pdf(transitions))
    # before training instead of after it
    graphs.check(given)
    return given
