"""Speech prepared for training: features, the HMM state of every frame, words and language.

    corpus = prepare(config.data, config.features, cache_root, print)
    corpus.train.frames      # features (normalized, not spliced) and pdf ids
    corpus.test.texts[0]     # the words of the first test utterance

Speakers of the sets:

- digits: train, valid and test have different voices.
- fsdd, data.split=speaker: test is two speakers that are not in train; valid is held-out recordings
  of the training speakers.
- fsdd, data.split=official: all sets have all speakers, with different recordings.
- fsdd, data.split=loo: test is data.held_out.
- an4: separate test speakers; valid is complete speakers of the training set.
- yesno: one speaker.
- kaldi, lhotse: as in the data.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import shared_work
from ngsgd.asr import speech_set
from ngsgd.asr.corpora import added, alignments, an4, cache, copies, kaldi_dirs, label_paths, yesno
from ngsgd.asr.corpora.digits import labels, synthesis, utterances
from ngsgd.asr.corpora.fsdd import recordings, source
from ngsgd.asr.corpora.fsdd.segments import load_catalogue, split
from ngsgd.asr.features import augment, cmvn, filterbank, noise
from ngsgd.asr.features.noise import FisherSample
from ngsgd.asr.kaldi_io import lines
from ngsgd.asr.lang import graphs, lexicon, ngram
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.topology import SILENCE_PDF, Topology
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.asr.utterance import Utterance
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
# corpora of any size, which are computed in shards
_SHARDED = ("kaldi", "lhotse")
# settings of `data` that change the prepared data; file contents are compared separately
_DECIDES = {
    "digits": ("corpus", *_AMOUNTS), "fsdd": (*_FSDD, *_AMOUNTS),
    "an4": ("corpus", "valid_fraction"),
    "yesno": _KALDI_DIRS, "kaldi": _KALDI_DIRS, "lhotse": _KALDI_DIRS,
}


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

        It is a part of the name of all that is made from the corpus. A language model that is
        estimated after the preparation is not covered: only decoding depends on it.
        """
        tree = hashlib.sha256(self.language.files().get("tree.txt", b"")).hexdigest()
        # in the order of the lexicon, which numbers the words
        about = json.dumps([self.content, self.language.to_json(), tree])
        return hashlib.sha256(about.encode()).hexdigest()

    @property
    def num_pdfs(self) -> int:
        return self.language.num_pdfs


def check_source(data: DataConfig) -> None:
    """Raise if the speech is not accessible; takes no longer than listing a folder."""
    filterbank.toolkit()
    for folder in data.added_dirs:
        if not Path(folder).expanduser().is_dir():
            raise DataError(f"data.added_dirs contains {folder}, which is not a folder; give Kaldi "
                            "data directories with text, utt2spk and wav.scp.")
    if data.lm_text and not Path(data.lm_text).expanduser().is_file():
        raise DataError(f"data.lm_text is {data.lm_text}, which is not a file; give a text file "
                        "whose lines are sentences.")
    if data.corpus == "digits":
        synthesis.require()
    elif data.corpus == "an4":
        an4.locate(data.source)
    elif data.corpus == "yesno":
        yesno.locate(data.source)
    elif data.corpus in ("kaldi", "lhotse"):
        kaldi_dirs.locate(data)
    else:
        if data.source:
            source.locate(data.source)
        if data.synthetic_minutes:
            synthesis.require()


def check_use(data: DataConfig, decode: DecodeConfig) -> None:
    """Raise DataError if the source is not accessible, or lacks labels or a graph that are used."""
    check_source(data)
    if data.corpus == "an4":
        is_made = decode.graph == "made" or data.lm_order or data.num_leaves or data.labels == "ladder"
        an4.require_of_gmm(data.source, ([] if data.alignment else ["labels"]) + ([] if is_made else ["graph"]))


def needs_alignment(data: DataConfig) -> bool:
    """Whether labels must be made before training."""
    has_none = data.corpus in ("yesno", "kaldi", "lhotse") or bool(data.added_dirs)
    return data.alignment == "flat" or (not data.alignment and has_none)


def prepare(data: DataConfig, feature_config: FeatureConfig, cache_root: Path, report: Report, *,
            augment_config: AugmentConfig | None = None) -> Corpus:
    """Return the corpus, from the cache if possible; damaged files are prepared again.

    `augment_config` changes the training set.

    Raises:
        DataError: the data are missing, damaged or inconsistent.
    """
    check_source(data)
    changes = augment_config or AugmentConfig()
    key = {**_what_decides(data, feature_config), **augment.what_decides(changes)}
    folder = cache_root / cache_name(data.corpus, **key)
    if folder.exists():
        report(Phase(f"reading the prepared {data.corpus} corpus"))
        try:
            return _complete(_load(data.corpus, folder), data, report)
        except cache.DamagedError as damage:
            report(f"{damage}; preparing it again.")
            # `store` replaces a folder without a manifest
            with contextlib.suppress(OSError):
                (folder / cache.MANIFEST).unlink()
    report(Phase(f"preparing the {data.corpus} corpus: audio, features, labels"))
    work = folder.with_name(f"{folder.name}.shards")
    with shared_work.work_directory(work) if data.corpus in _SHARDED else contextlib.nullcontext():
        _make(folder, work, key, data, feature_config, changes, report)
    return _complete(_load(data.corpus, folder), data, report)


def _make(folder: Path, work: Path, key: Mapping[str, Any], data: DataConfig,
          features: FeatureConfig, changes: AugmentConfig, report: Report) -> None:
    """Prepare the corpus in the folder, with intermediate results in the folder `work`."""
    sets, language = _MAKERS[data.corpus](data, features, changes, work, report)
    train_TD, utt_ids = sets["train"].frames.features_TD, sets["train"].frames.utt_ids
    if data.added_dirs and len(set(utt_ids)) < len(utt_ids):
        twice = next(utt_id for utt_id, number in Counter(utt_ids).items() if number > 1)
        raise DataError(f"data.added_dirs has the utterance {twice}, and so has data.corpus={data.corpus}; "
                        "rename it in text, utt2spk and wav.scp.")
    if not any((block_TD != train_TD[0]).any() for block_TD in mapped.blocks(train_TD)):
        raise DataError("all training audio is silent: no feature of its frames varies; check the "
                        "recordings, and that they have been converted with their sound.")
    if features.cmvn == "online" and data.corpus not in _SHARDED:
        all_speech = cmvn.statistics(train_TD)
        sets = {name: speech_set.normalized_online(speech, all_speech)
                for name, speech in sets.items()}
    for name, speech in sets.items():
        report(f"{name}: {speech.frames.num_frames / 6000:.1f} minutes, "
               f"{counted(len(speech.texts), 'utterance')}, "
               f"{counted(sum(map(len, speech.texts)), 'word')}, "
               f"{counted(len(set(speech.speakers)), 'voice')}")
    report(Phase("storing the prepared corpus"))
    cache.store(folder, sets, language, made_from=key)


def prepare_unaligned(data: DataConfig, feature_config: FeatureConfig, cache_root: Path,
                      report: Report) -> Corpus:
    """Return the corpus for `ngsgd align`, or the recordings that it is spliced from.

    Labels of a corpus are useful only with `data.added_dirs`, whose utterances have none.
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
    """Return everything that determines the content of the prepared files."""
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
    elif data.corpus in ("an4", "yesno"):
        content = (an4 if data.corpus == "an4" else yesno).fingerprint(data)
    else:
        content = added.fingerprint(data)
        # strings are spliced from labels: other labels give other data
        if (data.corpus == "fsdd" or data.added_dirs) and data.alignment not in ("", "flat"):
            pdf_T = alignments.read(Path(data.alignment)).pdf_T
            labels_of = (utt_id.encode() + pdf_T[utt_id].tobytes() for utt_id in sorted(pdf_T))
            content["alignment"] = hashlib.sha256(b"".join(labels_of)).hexdigest()
    return {"version": RECIPE_VERSION, "data": settings, "features": asdict(feature_config),
            "content": content,
            "packages": {package: metadata.version(package) for package in made_with}}


def _load(name: str, folder: Path) -> Corpus:
    sets, language, content = cache.load(folder)
    if language.given:
        # before training instead of at its end
        graphs.check(language.given)
    return Corpus(name=name, language=language, content=content, **sets)


def _complete(corpus: Corpus, data: DataConfig, report: Report) -> Corpus:
    """The corpus with the labels, word counts and language model of the settings."""
    counts = lexicon.count_words(corpus.train.texts)
    corpus = replace(corpus, language=replace(corpus.language, word_counts=counts))
    return _with_ngrams(_labelled(corpus, data, report), data, report)


def _with_ngrams(corpus: Corpus, data: DataConfig, report: Report) -> Corpus:
    """The corpus with the n-gram model of data.lm_order instead of its language model or graph."""
    if not data.lm_order:
        return corpus
    language = corpus.language
    if language.num_pdfs != language.topology.num_pdfs:
        raise DataError("data.lm_order needs a graph made of the lexicon, and the states of this "
                        "corpus are those of a graph that came with it; remove data.lm_order.")
    model, about = ngrams_of(corpus, data)
    report(f"language model: {data.lm_order}-gram of {about}, {len(model.entries)} n-grams")
    return replace(corpus, language=replace(language, arpa=model.to_arpa(), given=None))


def ngrams_of(corpus: Corpus, data: DataConfig) -> tuple[ngram.NgramModel, str]:
    """Return the n-gram model of these settings, and a name of the texts behind it."""
    estimate = functools.partial(ngram.estimate, order=data.lm_order, vocabulary=corpus.language.topology.words)
    of_transcripts = f"{counted(len(corpus.train.texts), 'training transcript')}"
    if not data.lm_text:
        return estimate(corpus.train.texts), of_transcripts
    texts = [tuple(line.split()) for _, line in lines.read(Path(data.lm_text).expanduser())]
    model, of_text = estimate(texts), f"{counted(len(texts), 'line')} of {data.lm_text}"
    if not data.lm_mix:
        return model, of_text
    transcripts = estimate(corpus.train.texts)
    weight = ngram.best_weight(transcripts, model, corpus.valid.texts)
    return (ngram.interpolate(transcripts, model, weight),
            f"{of_transcripts} (weight {weight:.3f}) and {of_text}")


def _labelled(corpus: Corpus, data: DataConfig, report: Report) -> Corpus:
    """Return the corpus with the labels of data.alignment, if it is a file."""
    if data.alignment in ("", "flat") or data.corpus in ("digits", "fsdd"):
        return corpus
    given = alignments.read(Path(data.alignment))
    alignment = given.numbered_as(corpus.language.pdf_names(of_graph=bool(data.graph)))
    if alignment is not given:
        report(f"{given.path}: states are numbered by its {alignments.PDF_TABLE} and have been "
               "renumbered for this lexicon")
    sets: dict[str, Any] = {}
    for name in ("train", "valid", "test"):
        sets[name], missing = alignments.attach(alignment, name, getattr(corpus, name),
                                                corpus.num_pdfs)
        if missing:
            some = f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            report(f"{name}: {counted(len(missing), 'utterance is', 'utterances are')} skipped, "
                   f"because {alignment.path} has no states for them: {some}")
    language = corpus.language
    known = language.given.words if language.given else language.topology.lexicon
    said = label_paths.labelled(alignment, sets.values(), data.oov_word, dict.fromkeys(known))
    if language.given:
        step = max(1, len(alignment.pdf_T) // label_paths.NUM_IN_GRAPH)
        label_paths.check_in_graph(said, language.given, alignment.path, step=step)
    else:
        label_paths.check(said, language.topology, alignment.path)
    digest = hashlib.sha256(corpus.digest.encode())
    for speech in sets.values():
        for block_T in mapped.blocks(speech.frames.pdf_T):
            digest.update(np.ascontiguousarray(block_T).data)
    return replace(corpus, **sets, content=digest.hexdigest())


def _make_digits(data: DataConfig, features: FeatureConfig, changes: AugmentConfig,
                 _work: Path, report: Report) -> Made:
    mix = _noise_of(data)
    more = _added(data, features, changes, labels.TOPOLOGY)
    sets = {}
    for name, minutes in _minutes_of_sets(data).items():
        # noise that is there before the voice changes would change with it
        is_late = changes.voice and name == "train"
        is_clean = (lambda _utt_id: True) if is_late else _is_clean(name, changes)
        made: Iterable[Utterance] = utterances.utterances(
            name, data, minutes=minutes, num_at_once=os.cpu_count() or 1, is_clean=is_clean)
        made = augment.for_set(name, made, changes, silence_pdfs=[SILENCE_PDF],
                               mix=mix if is_late else None)
        every = itertools.chain(made, more if name == "train" else ())
        sets[name] = speech_set.build(Progress(report, f"preparing {name}").each(every), features)
    return sets, Language(labels.TOPOLOGY)


def _noise_of(data: DataConfig) -> augment.Mix:
    """Return a function that adds white or pink noise at the ratios of the settings."""
    def mix(samples: FisherSample, is_speech: npt.NDArray[np.bool_],
            random: np.random.Generator) -> FisherSample:
        snr_db = float(random.uniform(data.snr_db_low, data.snr_db_high))
        background = noise.COLOURS[str(random.choice(list(noise.COLOURS)))](len(samples), random)
        return augment.add_noise(samples, background, snr_db, is_speech)

    return mix


def _added(data: DataConfig, features: FeatureConfig, changes: AugmentConfig,
           topology: Topology) -> Iterable[Utterance]:
    """Return the added utterances of a generated corpus: aligned and noisy, or to be aligned."""
    listed = added.read(data)
    added.check_words(listed, topology, data.corpus)
    copies.check_unchanged(listed, changes)
    given = alignments.read(Path(data.alignment)) if data.alignment and listed else None
    if given:
        known = (one for one in listed if one.utt_id in given.pdf_T)
        said = ((one.utt_id, one.words, given.pdf_T[one.utt_id]) for one in known)
        label_paths.check(said, topology, given.path)
    return added.utterances(listed, data, features, changes, topology, labels=given, mix=_noise_of(data))


def _make_fsdd(data: DataConfig, features: FeatureConfig, changes: AugmentConfig,
               work: Path, report: Report) -> Made:
    catalogue = load_catalogue()
    if data.alignment not in ("", "flat"):
        given = alignments.read(Path(data.alignment))
        if not data.added_dirs or any(one.utt_id in given.pdf_T for one in catalogue.segments):
            catalogue = catalogue.realigned(given)
            labelled = ((one.utt_id, [one.word], given.pdf_T[one.utt_id]) for one in catalogue.segments)
            label_paths.check(labelled, catalogue.topology, given.path)
    pools = split(catalogue.segments, data.split, data.held_out)
    place = source.locate(data.source) if data.source else source.download(work.parent / "downloads", report)
    samples = source.read_recordings(place, catalogue.segments)
    topology = catalogue.topology
    if data.synthetic_minutes or data.added_dirs:
        topology = recordings.with_pronunciations(topology)
    more = _added(data, features, changes, topology)
    sets = {}
    for name, minutes in _minutes_of_sets(data).items():
        pool = recordings.Pool(pools[name], pools["train"], samples, catalogue.pdf_T)
        said: Iterable[Utterance] = (recordings.recordings(pool) if data.style == "isolated" else
                                     recordings.utterances(name, data, pool, minutes=minutes,
                                                           is_clean=_is_clean(name, changes)))
        if name == "train" and data.synthetic_minutes:
            made = utterances.utterances(name, data, minutes=data.synthetic_minutes, num_at_once=os.cpu_count() or 1,
                                         is_clean=_is_clean(name, changes))
            said = itertools.chain(said, recordings.relabeled(made, topology))
        said = augment.for_set(name, said, changes, silence_pdfs=[SILENCE_PDF])
        every = itertools.chain(said, more if name == "train" else ())
        sets[name] = speech_set.build(Progress(report, f"preparing {name}").each(every), features)
    return sets, Language(topology, is_one_word=data.style == "isolated")


def _is_clean(set_name: str, changes: AugmentConfig) -> Callable[[str], bool]:
    """Return whether an utterance of a generated set has no noise; those of valid and test have."""
    return functools.partial(augment.is_clean, config=changes if set_name == "train" else AugmentConfig())


_MAKERS: dict[str, Callable[[DataConfig, FeatureConfig, AugmentConfig, Path, Report], Made]] = {
    "digits": _make_digits, "fsdd": _make_fsdd, "kaldi": kaldi_dirs.make, "lhotse": kaldi_dirs.make,
    "an4": lambda data, feature_config, *_: an4.make(data, feature_config),
    "yesno": lambda data, feature_config, changes, *_: yesno.make(data, feature_config, changes),
}


def _minutes_of_sets(data: DataConfig) -> dict[str, float]:
    return {name: getattr(data, f"{name}_minutes") for name in utterances.SETS}
