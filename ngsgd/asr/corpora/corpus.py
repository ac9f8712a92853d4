"""Speech prepared for training: features, the HMM state of every frame, words and language.

Test speakers: digits, an4: of the test set alone. fsdd: two (split=speaker), data.held_out (loo),
or all (official). yesno: one in all sets. kaldi, lhotse: as in the data.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import shared_work
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import alignments, an4, cache, copies, data_dir, digits, fsdd, kaldi_dirs
from ngsgd.asr.corpora.fsdd import load_catalog, split
from ngsgd.asr.features import augment, cmvn, filterbank
from ngsgd.asr.features.voice import Waveform
from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import graphs, lexicon, ngram
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PDF, Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import Utterance, num_frames, unaligned
from ngsgd.config import AugmentConfig, DataConfig, DecodeConfig, FeatureConfig
from ngsgd.counting import counted
from ngsgd.data import mapped
from ngsgd.errors import DataError
from ngsgd.files import cache_name
from ngsgd.phase import Phase, Progress

# increase it if the same settings would give other data, so that old caches are not reused
RECIPE_VERSION = 4
# of a generated corpus, whose labels are known, to align added speech
_MINUTES_FOR_ALIGNMENT = 20.0

Report = Callable[[str], None]
Made = tuple[Mapping[str, SpeechSet], Language]

__all__ = ["Corpus", "SpeechSet", "check_source", "prepare"]

_FSDD = ("corpus", "split", "held_out", "style")
_AMOUNTS = ("train_minutes", "valid_minutes", "test_minutes", "snr_db_low", "snr_db_high", "seed")
_KALDI_DIRS = ("corpus", "valid_fraction", "num_silence_states", "oov_word")
_SHARDED = ("kaldi", "lhotse")  # corpora of any size, which are computed in shards
# settings of `data` that change the prepared data; file contents are compared separately
_DECIDES = {"digits": ("corpus", *_AMOUNTS), "fsdd": (*_FSDD, *_AMOUNTS),
            "an4": ("corpus", "valid_fraction"),
            "yesno": _KALDI_DIRS, "kaldi": _KALDI_DIRS, "lhotse": _KALDI_DIRS}
_YESNO_NAME = re.compile(r"[01](_[01]){7}\.wav")  # of each word: no or yes
_YESNO_ARCHIVES = ("waves_yesno.tar.gz", "waves_yesno.tar.xz")
_YESNO_WHERE = "get waves_yesno.tar.gz from openslr.org/1 and set data.source=PATH to it, or to the folder of its wav files"


@dataclass(frozen=True)
class Corpus:
    """The speech that training and decoding need."""

    name: str
    train: SpeechSet
    valid: SpeechSet
    test: SpeechSet
    language: Language
    # SHA-256 over the prepared files, or over all that features and labels are made from
    content: str

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 over features, labels and texts, and over the words and states of the language.

        It names files that depend on them. A later language model is not covered.
        """
        tree = hashlib.sha256(self.language.files().get("tree.txt", b"")).hexdigest()
        # in the order of the lexicon, which numbers the words
        about = json.dumps([self.content, self.language.to_json(), tree])
        return hashlib.sha256(about.encode()).hexdigest()

    @property
    def num_pdfs(self) -> int:
        return self.language.num_pdfs

    @property
    def sets(self) -> dict[str, SpeechSet]:
        return {"train": self.train, "valid": self.valid, "test": self.test}


def check_source(data: DataConfig) -> None:
    """Raise if the speech is not accessible; takes no longer than listing a folder."""
    filterbank.toolkit()
    for folder in data.added_dirs:
        if not Path(folder).expanduser().is_dir():
            raise DataError(f"data.added_dirs contains {folder}, which is not a folder; give Kaldi "
                            "data directories with text, utt2spk and wav.scp.")
    if data.lm_text and not Path(data.lm_text).expanduser().is_file():
        raise DataError(f"data.lm_text is {data.lm_text}, which is not a file; give a text file whose lines are sentences.")
    if data.corpus in ("an4", "yesno"):
        (an4.locate if data.corpus == "an4" else _locate_yesno)(data.source)
    elif data.corpus in _SHARDED:
        kaldi_dirs.locate(data)
    elif data.corpus == "fsdd" and data.source:
        fsdd.locate(data.source)
    if data.corpus == "digits" or (data.corpus == "fsdd" and data.synthetic_minutes):
        digits.require()


def check_use(data: DataConfig, decode: DecodeConfig) -> None:
    """Raise DataError if the source is not accessible, or lacks labels or a graph that are used."""
    check_source(data)
    if data.corpus == "an4":
        is_made = decode.graph == "made" or data.lm_order or data.num_leaves or data.labels == "ladder"
        an4.require_of_gmm(data.source, ([] if data.alignment else ["labels"]) + ([] if is_made else ["graph"]))


def needs_alignment(data: DataConfig) -> bool:
    """Whether labels must be made before training."""
    has_none = data.corpus == "yesno" or data.corpus in _SHARDED or bool(data.added_dirs)
    return data.alignment == "flat" or (not data.alignment and has_none)


def prepare(data: DataConfig, feature_config: FeatureConfig, cache_root: Path, report: Report, *,
            augment_config: AugmentConfig | None = None) -> Corpus:
    """Return the corpus, from the cache if possible; damaged files are prepared again.

    `augment_config` changes the training set. Raises DataError if the data are missing, damaged or
    inconsistent.
    """
    check_source(data)
    changes = augment_config or AugmentConfig()
    key = {**_what_decides(data, feature_config), **augment.what_decides(changes)}
    folder = cache_root / cache_name(data.corpus, **key)
    if folder.exists():
        report(Phase(f"reading the prepared {data.corpus} corpus"))
        try:
            return _complete(folder, data, report)
        except cache.DamagedError as damage:
            report(f"{damage}; preparing it again.")
            # `store` replaces a folder without a manifest
            with contextlib.suppress(OSError):
                (folder / cache.MANIFEST).unlink()
    report(Phase(f"preparing the {data.corpus} corpus: audio, features, labels"))
    work = folder.with_name(f"{folder.name}.shards")
    with shared_work.work_directory(work) if data.corpus in _SHARDED else contextlib.nullcontext():
        _make(folder, work, key, data, feature_config, changes, report)
    return _complete(folder, data, report)


def _make(folder: Path, work: Path, key: Mapping[str, Any], data: DataConfig,
          features: FeatureConfig, changes: AugmentConfig, report: Report) -> None:
    sets, language = _MAKERS[data.corpus](data, features, changes, work, report)
    train_TD, utt_ids = sets["train"].frames.features_TD, sets["train"].frames.utt_ids
    if data.added_dirs and len(set(utt_ids)) < len(utt_ids):
        twice = next(utt_id for utt_id, number in Counter(utt_ids).items() if number > 1)
        raise DataError(f"data.added_dirs has the utterance {twice}, and so has "
                        f"data.corpus={data.corpus}; rename it in text, utt2spk and wav.scp.")
    if not any((block_TD != train_TD[0]).any() for block_TD in mapped.blocks(train_TD)):
        raise DataError("all training audio is silent: no feature of its frames varies; check the "
                        "recordings, and that they have been converted with their sound.")
    if features.cmvn == "online" and data.corpus not in _SHARDED:
        all_speech = cmvn.statistics(train_TD)
        sets = {name: speech_set.normalized_online(speech, all_speech) for name, speech in sets.items()}
    for name, speech in sets.items():
        report(f"{name}: {speech.frames.num_frames / 6000:.1f} minutes, {counted(len(speech.texts), 'utterance')}, "
               f"{counted(sum(map(len, speech.texts)), 'word')}, {counted(len(set(speech.speakers)), 'voice')}")
    report(Phase("storing the prepared corpus"))
    cache.store(folder, sets, language, made_from=key)


def prepare_unaligned(data: DataConfig, feature_config: FeatureConfig, cache_root: Path, report: Report) -> Corpus:
    """Return the corpus for `ngsgd align`, or the recordings that it is spliced from: its labels
    are useful only with `data.added_dirs`, whose utterances have none.
    """
    is_flat = data.alignment == "flat" or not data.added_dirs
    data = replace(data, alignment="", lm_order=0, added_copies=1, synthetic_minutes=0.0)
    if data.corpus in ("digits", "fsdd") and not is_flat:
        # enough to align other speech; the same noise makes the two alike
        data = replace(data, style="connected", valid_minutes=1.0, test_minutes=1.0,
                       snr_db_low=10.0, snr_db_high=20.0, train_minutes=min(data.train_minutes, _MINUTES_FOR_ALIGNMENT))
    elif data.corpus == "fsdd":
        # a single word has too few frames for normalization
        data = replace(data, style="isolated")
        feature_config = replace(feature_config, cmvn="speaker")
    return prepare(data, feature_config, cache_root, report)


def _what_decides(data: DataConfig, feature_config: FeatureConfig) -> dict[str, Any]:
    decides = _FSDD if data.corpus == "fsdd" and data.style == "isolated" else _DECIDES[data.corpus]
    settings = {name: value for name, value in asdict(data).items() if name in decides}
    has_synthetic = data.corpus == "fsdd" and data.synthetic_minutes > 0
    if has_synthetic:
        settings["synthetic_minutes"] = data.synthetic_minutes
    made_with = ["numpy", "kaldi-native-fbank"]
    is_generated = data.corpus == "digits" or has_synthetic
    made_with += ["espeakng-loader"] if is_generated else []
    made_with += ["soxr"] if is_generated or feature_config.resample else []
    made_with += ["soundfile"] if data.corpus in _SHARDED or data.added_dirs else []
    if data.corpus in _SHARDED:
        content = kaldi_dirs.fingerprint(data, feature_config)
    elif data.corpus == "an4":
        content = an4.fingerprint(data)
    elif data.corpus == "yesno":
        place = _locate_yesno(data.source)
        found = sorted(place.glob("*.wav")) if place.is_dir() else [place]
        status = ((path.name, path.stat()) for path in found)
        content = {"files": [(name, one.st_size, one.st_mtime_ns) for name, one in status]}
    else:
        content = kaldi_dirs.fingerprint_of_added(data)
        # strings are spliced from labels: other labels give other data
        if (data.corpus == "fsdd" or data.added_dirs) and data.alignment not in ("", "flat"):
            pdf_T = alignments.read(Path(data.alignment)).pdf_T
            labels_of = (utt_id.encode() + pdf_T[utt_id].tobytes() for utt_id in sorted(pdf_T))
            content["alignment"] = hashlib.sha256(b"".join(labels_of)).hexdigest()
    return {"version": RECIPE_VERSION, "data": settings, "features": asdict(feature_config), "content": content,
            "packages": {package: metadata.version(package) for package in made_with}}


def _complete(folder: Path, data: DataConfig, report: Report) -> Corpus:
    sets, language, content = cache.load(folder)
    if language.given:
        # before training instead of at its end
        graphs.check(language.given)
    language = replace(language, word_counts=lexicon.count_words(sets["train"].texts))
    corpus = _labelled(Corpus(name=data.corpus, language=language, content=content, **sets), data, report)
    return with_language_model(corpus, data, report) if data.lm_order else corpus


def with_language_model(corpus: Corpus, data: DataConfig, report: Report) -> Corpus:
    """Return the corpus with the n-gram model of `data.lm_order`, not its grammar or graph."""
    language = corpus.language
    if language.num_pdfs != language.topology.num_pdfs:
        raise DataError("data.lm_order needs a graph made of the lexicon, and the states of this "
                        "corpus are those of a graph that came with it; remove data.lm_order.")
    model, texts = ngrams_of(corpus, data)
    known, spoken = set(itertools.chain(*texts)), list(itertools.chain(*corpus.valid.texts))
    report(f"language model: {data.lm_order}-gram (interpolated Witten-Bell) of {counted(len(texts), 'line')} of "
           f"{data.lm_text or 'training transcripts'}, {len(model.entries)} n-grams; valid: perplexity "
           f"{model.perplexity(corpus.valid.texts)[0]:.1f}, {sum(word not in known for word in spoken)} of "
           f"{counted(len(spoken), 'word')} not in this text")
    return replace(corpus, language=replace(language, arpa=model.to_arpa(), given=None))


def ngrams_of(corpus: Corpus, data: DataConfig) -> tuple[ngram.NgramModel, Sequence[tuple[str, ...]]]:
    """Return the n-gram model of these settings, and its texts."""
    texts: Sequence[tuple[str, ...]] = corpus.train.texts
    if data.lm_text:
        texts = [tuple(line.split()) for _, line in lines.read(Path(data.lm_text).expanduser())]
    return ngram.estimate(texts, order=data.lm_order, vocabulary=corpus.language.topology.words), texts


def _labelled(corpus: Corpus, data: DataConfig, report: Report) -> Corpus:
    if data.alignment in ("", "flat") or data.corpus in ("digits", "fsdd"):
        return corpus
    given = alignments.read(Path(data.alignment))
    alignment = given.numbered_as(corpus.language.pdf_names(of_graph=bool(data.graph)))
    if alignment is not given:
        report(f"{given.path}: states are numbered by its {alignments.PDF_TABLE} and have been renumbered for this lexicon")
    sets: dict[str, Any] = {}
    for name, speech in corpus.sets.items():
        sets[name], missing = alignments.attach(alignment, name, speech, corpus.num_pdfs)
        if missing:
            some = f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            report(f"{name}: {counted(len(missing), 'utterance is', 'utterances are')} skipped, "
                   f"because {alignment.path} has no states for them: {some}")
    language = corpus.language
    known = language.given.words if language.given else language.topology.lexicon
    said = alignments.labelled(alignment, sets.values(), data.oov_word, dict.fromkeys(known))
    if language.given:
        step = max(1, len(alignment.pdf_T) // alignments.NUM_IN_GRAPH)
        alignments.check_in_graph(said, language.given, alignment.path, step=step)
    else:
        alignments.check_paths(said, language.topology, alignment.path)
    digest = hashlib.sha256(corpus.digest.encode())
    for speech in sets.values():
        for block_T in mapped.blocks(speech.frames.pdf_T):
            digest.update(np.ascontiguousarray(block_T).data)
    return replace(corpus, **sets, content=digest.hexdigest())


def _make_digits(data: DataConfig, features: FeatureConfig, changes: AugmentConfig, _work: Path, report: Report) -> Made:
    mix = _noise_of(data)
    more = _added(data, features, changes, digits.TOPOLOGY)
    sets = {}
    for name in digits.SETS:
        # noise that is there before the voice changes would change with it
        is_late = changes.voice and name == "train"
        is_clean = (lambda _utt_id: True) if is_late else _is_clean(name, changes)
        made: Iterable[Utterance] = digits.utterances(
            name, data, minutes=getattr(data, f"{name}_minutes"), num_at_once=os.cpu_count() or 1, is_clean=is_clean)
        made = augment.for_set(name, made, changes, silence_pdfs=[SILENCE_PDF], mix=mix if is_late else None)
        every = itertools.chain(made, more if name == "train" else ())
        sets[name] = speech_set.build(Progress(report, f"preparing {name}").each(every), features)
    return sets, Language(digits.TOPOLOGY)


def _noise_of(data: DataConfig) -> augment.Mix:
    """Return a function that adds white or pink noise at the ratios of the settings."""
    def mix(samples: Waveform, is_speech: npt.NDArray[np.bool_], random: np.random.Generator) -> Waveform:
        snr_db = float(random.uniform(data.snr_db_low, data.snr_db_high))
        background = augment.COLORS[str(random.choice(list(augment.COLORS)))](len(samples), random)
        return augment.add_noise(samples, background, snr_db, is_speech)
    return mix


def _added(data: DataConfig, features: FeatureConfig, changes: AugmentConfig, topology: Topology) -> Iterable[Utterance]:
    """Return the added utterances of a generated corpus: aligned and noisy, or to be aligned."""
    listed = kaldi_dirs.read_added(data)
    data_dir.check_words(listed, topology.lexicon, f"the words of data.corpus={data.corpus} ({', '.join(topology.words)})",
                         "correct or remove the utterance, or train with recipe=kaldi and a lexicon")
    copies.check_unchanged(listed, changes)
    given = alignments.read(Path(data.alignment)) if data.alignment and listed else None
    if given:
        known = (one for one in listed if one.utt_id in given.pdf_T)
        said = ((one.utt_id, one.words, given.pdf_T[one.utt_id]) for one in known)
        alignments.check_paths(said, topology, given.path)
    return kaldi_dirs.added_utterances(listed, data, features, changes, topology, labels=given, mix=_noise_of(data))


def _make_fsdd(data: DataConfig, features: FeatureConfig, changes: AugmentConfig, work: Path, report: Report) -> Made:
    catalog = load_catalog()
    if data.alignment not in ("", "flat"):
        given = alignments.read(Path(data.alignment))
        if not data.added_dirs or any(one.utt_id in given.pdf_T for one in catalog.segments):
            catalog = catalog.realigned(given)
            labelled = ((one.utt_id, [one.word], given.pdf_T[one.utt_id]) for one in catalog.segments)
            alignments.check_paths(labelled, catalog.topology, given.path)
    pools = split(catalog.segments, data.split, data.held_out)
    place = fsdd.locate(data.source) if data.source else fsdd.download(work.parent / "downloads", report)
    samples = fsdd.read_recordings(place, catalog.segments)
    topology = catalog.topology
    if data.synthetic_minutes or data.added_dirs:
        topology = fsdd.with_pronunciations(topology)
    more = _added(data, features, changes, topology)
    sets = {}
    for name in digits.SETS:
        pool = fsdd.Pool(pools[name], pools["train"], samples, catalog.pdf_T)
        is_clean = _is_clean(name, changes)
        said: Iterable[Utterance] = fsdd.recordings(pool) if data.style == "isolated" else \
            fsdd.utterances(name, data, pool, minutes=getattr(data, f"{name}_minutes"), is_clean=is_clean)
        if name == "train" and data.synthetic_minutes:
            made = digits.utterances(name, data, minutes=data.synthetic_minutes,
                                     num_at_once=os.cpu_count() or 1, is_clean=is_clean)
            said = itertools.chain(said, fsdd.relabeled(made, topology))
        said = augment.for_set(name, said, changes, silence_pdfs=[SILENCE_PDF])
        every = itertools.chain(said, more if name == "train" else ())
        sets[name] = speech_set.build(Progress(report, f"preparing {name}").each(every), features)
    return sets, Language(topology, is_one_word=data.style == "isolated")


def _is_clean(set_name: str, changes: AugmentConfig) -> Callable[[str], bool]:
    """Return whether an utterance of a generated set has no noise; those of valid and test have."""
    return functools.partial(augment.is_clean, config=changes if set_name == "train" else AugmentConfig())


def _locate_yesno(source: str) -> Path:
    path = Path(source).expanduser()
    if not source or not path.exists():
        raise DataError(f"data.source is {source or 'empty'}, but recipe=yesno needs the recordings; {_YESNO_WHERE}.")
    inside = [path / "waves_yesno", path, *(path / name for name in _YESNO_ARCHIVES)]
    for candidate in [path] if path.is_file() else inside:
        if candidate.is_file() or next(candidate.glob("*.wav"), None):
            return candidate
    raise DataError(f"data.source is {source}, which contains neither wav files nor "
                    f"{' nor '.join(_YESNO_ARCHIVES)}; {_YESNO_WHERE}.")


def _make_yesno(data: DataConfig, features: FeatureConfig, changes: AugmentConfig, *_: object) -> Made:
    """60 recordings of eight words "yes" or "no" of one speaker, by their names; half are train."""
    place = _locate_yesno(data.source)
    content_of = {PurePosixPath(name): content for name, content in fsdd.wav_files(place)
                  if _YESNO_NAME.fullmatch(PurePosixPath(name).name)}
    if len(content_of) < 4:
        raise DataError(f"{data.source} contains only {len(content_of)} recordings with names such "
                        f"as 0_1_0_1_1_0_0_1.wav; {_YESNO_WHERE}.")
    utterances = []
    for name in sorted(content_of):
        samples = fsdd.decoded(f"{place}: {name}", content_of[name])
        words = tuple(("NO", "YES")[int(digit)] for digit in name.stem.split("_"))
        labels = unaligned(num_frames(len(samples)))
        utterances.append(Utterance(name.stem, "yesno", words, samples, labels))
    half = len(utterances) // 2
    train, valid = copies.hold_out(utterances[:half], share=data.valid_fraction)
    sets = {"train": train, "valid": valid, "test": utterances[half:]}
    topology = Topology(("N", "Y"), {"NO": (("N",),), "YES": (("Y",),)}, data.num_silence_states)
    return {name: speech_set.build(augment.for_set(name, said, changes), features)
            for name, said in sets.items()}, Language(topology)


_MAKERS: dict[str, Callable[[DataConfig, FeatureConfig, AugmentConfig, Path, Report], Made]] = {
    "digits": _make_digits, "fsdd": _make_fsdd, "kaldi": kaldi_dirs.make, "lhotse": kaldi_dirs.make,
    "an4": lambda data, feature_config, *_: an4.make(data, feature_config), "yesno": _make_yesno}
