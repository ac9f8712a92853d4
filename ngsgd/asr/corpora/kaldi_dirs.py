"""Custom corpora: Kaldi data directories or lhotse manifests, with a lexicon."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngsgd import files
from ngsgd.asr.corpora import alignments, copies, data_dir, manifests, shard_processes, sharding
from ngsgd.asr.corpora.data_dir import UtteranceEntry
from ngsgd.asr.corpora.sharding import Part, Shard, divided
from ngsgd.asr.features import augment, cmvn
from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import arpa, graphs, lexicon
from ngsgd.asr.lang.language import GivenGraph, Language
from ngsgd.asr.lang.topology import Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import Utterance
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.counting import counted
from ngsgd.errors import DataError
from ngsgd.phase import Phase

# maximum ratio of the largest number in words.txt to the number of words
_MAX_GAP = 100
VALID_NAMES = ("valid", "dev")


def make(data: DataConfig, feature_config: FeatureConfig, changes: AugmentConfig,
         work: Path | None = None, report: Callable[[str], None] = lambda _line: None, *,
         num_processes: int = 0) -> tuple[dict[str, SpeechSet], Language]:
    """Return train, valid and test without alignment, and the language.

    Tables and lexicon are checked before the first audio is read. Shards of features are kept in
    the folder `work`, mapped from it, and continued after a stop. Without `work` they are removed
    at the end; the sets can be read, but not stored.
    """
    source = locate(data)
    path = lexicon.locate(data.lexicon, source)
    topology = lexicon.read(path, data.num_silence_states, report)
    text = arpa.read(Path(data.lm).expanduser(), topology.words, report) if data.lm else ""
    graph = given_graph(Path(data.graph).expanduser()) if data.graph else None
    if graph:
        lexicon.require_shared(topology.words, set(graph.words), f"words.txt of {data.graph}", report)
    listed = {**read_sets(data, feature_config), "added": read_added(data)}
    if data.oov_word and data.oov_word not in topology.lexicon:
        raise DataError(f"data.oov_word is {data.oov_word}, which is not in the lexicon {path}; "
                        "add it there, with a noise phone.")
    for utterances in listed.values():
        data_dir.check_words(utterances, None if data.oov_word else topology.lexicon, f"the lexicon {path}",
                             "add it there, or set data.oov_word to the word that replaces unknown ones")
    copies.check_disjoint(listed)
    for name in ("train", "added"):
        copies.check_unchanged(listed[name], changes)
    folders = {"train": source / "train", "valid": source / (_valid_folder(source) or "train"), "test": source / "test"}
    if "valid" not in listed:
        every = listed["train"]
        listed["train"], listed["valid"] = copies.hold_out(every, share=data.valid_fraction)
        if num_omitted := len(every) - len(listed["train"]) - len(listed["valid"]):
            report(f"train: {counted(num_omitted, 'utterance is', 'utterances are')} omitted, "
                   "because their names are those of copies of held-out utterances")
    parts = {name: [Part(name, listed[name], folder=folder)] for name, folder in folders.items()}
    parts["train"] = [replace(parts["train"][0], changes=changes)]
    if listed["added"]:
        more = replace(changes, num_copies=changes.num_copies * data.added_copies)
        parts["train"].append(Part("train-added", listed["added"], more))
    if changes.changes_audio:
        augment.check(changes, feature_config.sample_rate_hz)
    sharded = {name: [(part, divided(part, feature_config)) for part in some] for name, some in parts.items()}
    every_shard = [one for of_set in sharded.values() for _, some in of_set for one in some]
    # maps of removed files remain readable
    with contextlib.nullcontext(work) if work else tempfile.TemporaryDirectory() as folder:
        shard_processes.compute(every_shard, feature_config, Path(folder), num_processes=num_processes, report=report)
        report(Phase("normalizing the features"))
        return dict(_assembled(sharded, feature_config, Path(folder))), Language(topology, arpa=text, given=graph)


def _assembled(sharded: Mapping[str, Sequence[tuple[Part, Sequence[Shard]]]], config: FeatureConfig,
               work: Path) -> Iterator[tuple[str, SpeechSet]]:
    # the shards stay; a normalization that was stopped starts again in another folder
    folder = Path(tempfile.mkdtemp(prefix="sets-", dir=work))
    all_speech = None
    for name, of_set in sharded.items():
        found, part = sharding.read(of_set, work), of_set[0][0]
        given = data_dir.given_cmvn(part.listed, part.folder, found.dim) if config.cmvn == "given" else None
        speech = sharding.assemble(name, found, config, folder, given=given, all_speech=all_speech)
        if config.cmvn == "online" and name == "train" and speech.cmvn:
            all_speech = speech.cmvn.stats[cmvn.GLOBAL]
        yield name, speech


def _valid_folder(source: Path) -> str | None:
    return next((name for name in VALID_NAMES if (source / name).is_dir()), None)


def locate(data: DataConfig) -> Path:
    """Return the folder given by data.source."""
    if not data.source:
        raise DataError("data.source is empty; set data.source=PATH to the folder with train and test.")
    source = Path(data.source).expanduser()
    if not source.is_dir():
        raise DataError(f"data.source is {data.source}, which is not a folder; set it to the folder with train and test.")
    return source


def read_sets(data: DataConfig, feature_config: FeatureConfig) -> dict[str, Sequence[UtteranceEntry]]:
    """Read the folders or manifests of train, test and, if it exists, valid."""
    source = locate(data)
    if data.corpus == "lhotse":
        return manifests.read_sets(source)
    if (source / "text").is_file() and not (source / "train").is_dir():
        raise DataError(f"data.source is {data.source}, which is one data directory; set it to "
                        "the folder with train, test and lexicon.txt.")
    valid = _valid_folder(source)
    names = {"train": "train", "test": "test"} | ({"valid": valid} if valid else {})
    return {name: data_dir.read(source / folder, given_features=feature_config.kind == "given")
            for name, folder in names.items()}


def fingerprint(data: DataConfig, feature_config: FeatureConfig) -> dict[str, Any]:
    """Identify the data: content of the tables; name, size and time of audio files and archives."""
    source = locate(data)
    seen = hashlib.sha256()
    for name, utterances in sorted(read_sets(data, feature_config).items()):
        for one in utterances:
            seen.update(f"{name} {data_dir.identity(one, source / name)}\n".encode())
    given = [lexicon.locate(data.lexicon, source), *([Path(data.lm).expanduser()] if data.lm else [])]
    if feature_config.cmvn == "given":
        given += sorted(source.glob("*/cmvn.scp"))
    if data.graph:
        folder = Path(data.graph).expanduser()
        given += [folder / "HCLG.fst", folder / "words.txt", alignments.transitions_file(folder)]
    return {"speech": seen.hexdigest(), **fingerprint_of_added(data),
            "files": [files.sha256(path) for path in given if path.is_file()]}


def given_graph(folder: Path) -> GivenGraph:
    """Read the graph of `data.graph`; raises DataError if a file is missing or damaged."""
    transitions = alignments.transitions_file(folder)
    missing = [path.name for path in (folder / "HCLG.fst", folder / "words.txt", transitions) if not path.is_file()]
    if missing:
        raise DataError(f"data.graph is {folder}, which lacks {', '.join(missing)}; set it to a "
                        "folder with HCLG.fst, words.txt and final.mdl or tid2pdf (lines \"transition-id pdf\").")
    numbers: dict[int, str] = {}
    for where, line in lines.read(folder / "words.txt"):
        try:
            word, number = line.split()
            if numbers.setdefault(lines.as_int(number), word) != word:
                raise ValueError
        except ValueError as error:
            raise DataError(f"{where}: {line[:40]!r} is not a word with a unique number; use words.txt of Kaldi.") from error
    if not numbers or min(numbers) < 0 or max(numbers) > _MAX_GAP * len(numbers):
        raise DataError(f"{folder / 'words.txt'} does not number {len(numbers)} words from 0; use words.txt of Kaldi.")
    words = tuple(numbers.get(number, f"#{number}") for number in range(1, max(numbers) + 1))
    given = GivenGraph((folder / "HCLG.fst").read_bytes(), words, alignments.read_tid2pdf(transitions))
    # before training instead of after it
    graphs.check(given)
    return given


def read_added(data: DataConfig) -> Sequence[UtteranceEntry]:
    """Read the tables of all directories, whose utterances must have unique names."""
    return data_dir.Listing(one for folder in data.added_dirs
                            for one in data_dir.read(Path(folder).expanduser(), given_features=False))


def fingerprint_of_added(data: DataConfig) -> dict[str, Any]:
    """Identify the added speech, for the name of the prepared data; empty without any."""
    if not data.added_dirs:
        return {}
    seen = hashlib.sha256()
    for one in read_added(data):
        seen.update(f"{data_dir.identity(one, Path())}\n".encode())
    return {"added": {"speech": seen.hexdigest(), "copies": data.added_copies}}


def added_utterances(listed: Sequence[UtteranceEntry], data: DataConfig, features: FeatureConfig,
                     changes: AugmentConfig, topology: Topology, *, labels: alignments.Alignment | None = None,
                     mix: augment.Mix | None = None) -> Iterable[Utterance]:
    """Yield `data.added_copies` copies of each utterance, augmented independently. Those without
    HMM states in `labels` are omitted (default: none has labels); DataError if most are. `mix` adds
    the noise of a generated corpus, except to the clean fraction.
    """
    said: Iterable[Utterance] = data_dir.spoken(listed, features)
    if labels:
        missing = [one.utt_id for one in listed if one.utt_id not in labels.pdf_T]
        if len(missing) > alignments.MOST_MISSING * len(listed):
            raise DataError(f"{labels.path} has no states for {len(missing)} of the {len(listed)} "
                            f"utterances of data.added_dirs, the first is {missing[0]}; use an "
                            "alignment of this data, or leave data.alignment empty.")
        said = (replace(one, pdf_T=alignments.checked(labels.pdf_T[one.utt_id], one.utt_id, len(one.pdf_T),
                                                      topology.num_pdfs, labels.path))
                for one in said if one.utt_id in labels.pdf_T)
    changes = replace(changes, num_copies=changes.num_copies * data.added_copies)
    if not mix and not changes.changes_audio:
        return said
    return augment.augmented(said, changes, sample_rate_hz=features.sample_rate_hz, silence_pdfs=topology.silence_pdfs, mix=mix)
