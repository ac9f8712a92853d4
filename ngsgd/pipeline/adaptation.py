"""Speaker-adapted features and i-vectors of a run, prepared or read from the cache."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ngsgd import files
from ngsgd.asr.adapt import projections, speakers
from ngsgd.asr.adapt.speakers import Features, Matrix, NetworkScores, Pdfs, SpeakerAdaptation
from ngsgd.asr.align.tree_building import with_tied_states
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode import evaluation
from ngsgd.asr.features.gaussians import FRAMES_AT_ONCE
from ngsgd.asr.ivectors import model as extractor_file
from ngsgd.asr.ivectors.training import TRAIN_UTTERANCES, extract
from ngsgd.asr.ivectors.training import train as train_extractor
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import AdaptationConfig, RunConfig
from ngsgd.counting import counted
from ngsgd.data import arrays, mapped
from ngsgd.data.archives import prepared
from ngsgd.data.frames import Side
from ngsgd.data.storage import FormatError
from ngsgd.files import cache_name
from ngsgd.phase import Phase, Progress
from ngsgd.pipeline.services import Report
from ngsgd.runs.run_folder import RunFolder, folder_of_model

# raise it when the same settings would give other features
_VERSION = 3
# frames on each side that are spliced before the projection, as in Kaldi
CONTEXT = 3
# fewest training frames per spliced feature for LDA, whose covariance is singular with too few
_FRAMES_PER_FEATURE = 10
# fewest frames of a training speaker, on average, and fewest speakers for fMLLR
_FRAMES_PER_SPEAKER, _FEWEST_SPEAKERS = 500, 2


def with_adaptation(config: RunConfig, corpus: Corpus, cache_root: Path, report: Report) -> tuple[Corpus, Path]:
    """Return the corpus with adapted features, and the file of the adaptation.

    Training speakers are adapted with their labels, all others with a first pass of recognition.
    """
    # the first pass of recognition depends on the grammar, too
    grammar = {of: hashlib.sha256(content).hexdigest() for of, content in corpus.language.files().items()}
    name = cache_name("adaptation", version=_VERSION, corpus=corpus.digest, grammar=grammar,
                      adaptation=asdict(config.adaptation), graph=config.decode.graph,
                      silence_prob=config.decode.silence_prob)
    path = cache_root / f"{name}.safetensors"
    try:
        adaptation, transforms = read(path, corpus.num_pdfs), arrays.read(_of_speakers(path))
    except (OSError, ValueError):
        what = "LDA, MLLT and fMLLR" if config.adaptation.fmllr else "LDA and MLLT"
        report(Phase(f"training {what} on {counted(len(set(corpus.train.speakers)), 'speaker')}"))
        adaptation, transforms = _trained(config, corpus, report)
        arrays.write(path, adaptation.arrays())
        arrays.write(_of_speakers(path), transforms)
    sets: dict[str, Any] = {of: _applied(adaptation, speech, transforms, of) for of, speech in corpus.sets.items()}
    content = hashlib.sha256((corpus.digest + name).encode()).hexdigest()
    return replace(corpus, **sets, content=content), path


def _of_speakers(path: Path) -> Path:
    return path.with_name(f"{path.stem}-speakers{path.suffix}")


def refined_by_network(config: RunConfig, corpus: Corpus, unadapted: Mapping[str, Features], path: Path,
                       scores: NetworkScores, report: Report) -> Corpus:
    """Return the corpus with other transforms for the speakers of valid and test: the network finds
    the states that they are estimated from.

    `unadapted` has the T x D features of "valid" and "test" before the adaptation, `path` is the
    file of the adaptation, and `scores` are those of the network.
    """
    adaptation = read(path, corpus.num_pdfs)
    if adaptation.prior is None:
        return corpus
    searches = Progress(report, "adapting valid and test to their speakers with the network", unit="searches")
    find_path = _first_pass(config, corpus, searches)
    transforms = arrays.read(_of_speakers(path))
    refined: dict[str, Any] = {}
    for name, features_TD in unadapted.items():
        speech = corpus.sets[name]
        speech = replace(speech, frames=replace(speech.frames, features_TD=features_TD))
        for speaker, projected in _Projected(adaptation, speech).items():
            key = f"{name}/{speaker}"
            transforms[key] = adaptation.refined(transforms[key], projected, find_path, scores)
        refined[name] = _applied(adaptation, speech, transforms, name)
    return replace(corpus, **refined)


def _first_pass(config: RunConfig, corpus: Corpus, searches: Progress) -> speakers.FindPath:
    first_pass = evaluation.first_pass(evaluation.build_graph(corpus.language, config.decode))

    def find_path(loglik_TP: Features) -> Pdfs:
        searches.add(1)
        return first_pass(loglik_TP)
    return find_path


def read(path: Path, num_pdfs: int) -> SpeakerAdaptation:
    """Read the file of an adaptation; raises OSError, and ValueError if it is damaged."""
    return SpeakerAdaptation.of_arrays(arrays.read(path), num_pdfs)


def _trained(config: RunConfig, corpus: Corpus, report: Report) -> tuple[SpeakerAdaptation, dict[str, npt.NDArray[Any]]]:
    """The adaptation, and the transforms of all speakers as "set/speaker"."""
    settings, train = config.adaptation, corpus.train
    num_silence = corpus.language.topology.num_silence_states
    found = speakers.train_projection(train.split_features(), train.frames.pdf_T, context=CONTEXT,
                                      dim=settings.lda_dim, num_silence=num_silence)
    if not settings.fmllr:
        return found, {}
    projected: Mapping[str, Sequence[Matrix]] = _Projected(found, train)
    if train.frames.num_frames <= FRAMES_AT_ONCE:
        projected = dict(projected)
    pdfs = train.split_pdfs()
    of_speakers = {speaker: [pdfs[number] for number in numbers] for speaker, numbers in train.utterances_by_speaker().items()}
    training = Progress(report, "fMLLR: training, passes over speakers", unit="speakers")
    found, of_train = speakers.train_fmllr(found, projected, of_speakers, corpus.num_pdfs, training.each)
    transforms = {f"train/{speaker}": w_DE for speaker, w_DE in of_train.items()}
    find_path = _first_pass(config, corpus, Progress(report, "fMLLR: first pass over held-out speech", unit="searches"))
    for name in ("valid", "test"):
        for speaker, utterances in _Projected(found, corpus.sets[name]).items():
            transforms[f"{name}/{speaker}"] = found.transform_of(utterances, find_path)
    return found, transforms


class _Projected(Mapping[str, Sequence[Matrix]]):
    """Projected features of the utterances of each speaker, computed when they are read."""

    def __init__(self, adaptation: SpeakerAdaptation, speech: SpeechSet) -> None:
        self._adaptation, self._numbers = adaptation, speech.utterances_by_speaker()
        self._features = speech.split_features()

    def __getitem__(self, speaker: str) -> Sequence[Matrix]:
        return [self._adaptation.project(mapped.copied(self._features[number])) for number in self._numbers[speaker]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


def _applied(adaptation: SpeakerAdaptation, speech: SpeechSet, transforms: Mapping[str, Matrix], name: str) -> SpeechSet:
    def adapted() -> Iterator[Features]:
        for speaker, x_TD in zip(speech.speakers, speech.split_features(), strict=True):
            z_TD = adaptation.project(mapped.copied(x_TD))
            w_DE = transforms.get(f"{name}/{speaker}")
            yield (z_TD if w_DE is None else projections.apply(w_DE, z_TD)).astype(np.float32)

    source_TD = speech.frames.features_TD
    features_TD = mapped.concatenated(adapted(), (len(source_TD), adaptation.dim), source_TD)
    return replace(speech, frames=replace(speech.frames, features_TD=features_TD))


def network_input(config: RunConfig, corpus: Corpus, cache_root: Path, report: Report) -> tuple[Corpus, Path | None]:
    """Return the corpus with the tied states and the adapted features of the settings.

    The second value is the file of the adaptation, None without one. What the corpus is too small
    for is omitted, and `report` receives a line.
    """
    if config.data.num_leaves:
        corpus = with_tied_states(corpus, num_leaves_of(config, corpus), cache_root, report,
                                  width=2 if config.data.context == "left_biphone" else 3)
    settings = possible(config.adaptation, corpus, report)
    if not settings.lda_dim:
        return corpus, None
    return with_adaptation(replace(config, adaptation=settings), corpus, cache_root, report)


def num_leaves_of(config: RunConfig, corpus: Corpus) -> int:
    """The number of tied states; -1 is the square root of the number of speech frames."""
    if config.data.num_leaves > 0:
        return config.data.num_leaves
    num_silence = corpus.language.topology.num_silence_states
    return round(math.sqrt(np.count_nonzero(corpus.train.frames.pdf_T >= num_silence)))


def possible(wanted: AdaptationConfig, corpus: Corpus, report: Report) -> AdaptationConfig:
    """The adaptation for which the training set has enough frames and speakers."""
    if not wanted.lda_dim:
        return wanted
    frames, num_speakers = corpus.train.frames, len(set(corpus.train.speakers))
    num_spliced = frames.features_TD.shape[1] * (2 * CONTEXT + 1)
    if frames.num_frames < _FRAMES_PER_FEATURE * num_spliced:
        report(f"LDA and fMLLR are omitted: {counted(frames.num_frames, 'training frame is', 'training frames are')} too few for "
               f"{num_spliced} spliced features")
        return replace(wanted, lda_dim=0, fmllr=False)
    if wanted.lda_dim > num_spliced:
        report(f"LDA keeps all {num_spliced} spliced features, fewer than adaptation.lda_dim")
        wanted = replace(wanted, lda_dim=num_spliced)
    mean = frames.num_frames // num_speakers
    if wanted.fmllr and (num_speakers < _FEWEST_SPEAKERS or mean < _FRAMES_PER_SPEAKER):
        report(f"fMLLR is omitted: it needs {_FEWEST_SPEAKERS} training speakers with "
               f"{_FRAMES_PER_SPEAKER // 100} s of speech each, and utt2spk gives {num_speakers} "
               f"with {mean / 100:.1f} s on average")
        wanted = replace(wanted, fmllr=False)
    return wanted


# increase it if the same settings would give other i-vectors
IVECTORS_VERSION = 3
_INDEX = "index.json"
# consecutive utterances that share the state of a speaker, as in nnet3 recipes; 0: all
_UTTERANCES = {"train": TRAIN_UTTERANCES, "valid": 0, "test": 0}


def extractor_of(config: RunConfig, corpus: Corpus, cache_root: Path, report: Report, folder: RunFolder | None) -> Path:
    """Return the extractor of the run or of its initial model, or train one on the training set."""
    if folder is not None and folder.ivectors.exists():
        return folder.ivectors
    if config.init_model and (given := folder_of_model(config.init_model) / "final" / RunFolder.IVECTORS).exists():
        return given
    # the period of the estimates does not change the extractor
    settings = {name: value for name, value in asdict(config.ivectors).items() if name != "period"}
    path = cache_root / f"{cache_name('ivectors', version=IVECTORS_VERSION, corpus=corpus.digest, settings=settings)}.safetensors"
    if path.exists() and not extractor_file.is_sound(path):
        report(f"{path} is damaged; training it again.")
        path.unlink()
    if not path.exists():
        report(Phase("training the i-vector extractor"))
        extractor_file.write(train_extractor(corpus.train, config.ivectors, report), path)
    return path


def with_ivectors(config: RunConfig, corpus: Corpus, extractor: Path, cache_root: Path, report: Report = print) -> Corpus:
    """Add an i-vector to every frame of the corpus; its digest identifies the extractor."""
    folder = cache_root / cache_name("ivectors", version=IVECTORS_VERSION, corpus=corpus.digest,
                                     extractor=files.sha256(extractor), settings=asdict(config.ivectors))

    def write(new: Path) -> None:
        model = extractor_file.read(extractor, config.ivectors)
        for name, speech in corpus.sets.items():
            mapped.write_rows(new / f"{name}.npy", _shape(speech, config),
                              extract(speech, model, most_utterances=_UTTERANCES[name]))
        index = files.sealed("i-vectors", {"sha256": {name: files.sha256(new / f"{name}.npy") for name in corpus.sets}})
        (new / _INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    prepared(folder / _INDEX, "i-vectors", lambda _: _check(folder, corpus, config), write, report)
    sets: dict[str, Any] = {}
    for name, speech in corpus.sets.items():
        lengths = np.diff(speech.frames.offsets)
        num_rows_U = -(-lengths // config.ivectors.period)
        first_U = np.cumsum(num_rows_U) - num_rows_U
        row_T = np.concatenate([first + np.arange(length) // config.ivectors.period
                                for first, length in zip(first_U, lengths, strict=True)])
        side = Side(np.load(folder / f"{name}.npy", mmap_mode="r"), row_T.astype(np.int32))
        sets[name] = replace(speech, frames=replace(speech.frames, side=side))
    return replace(corpus, **sets, content=hashlib.sha256((corpus.digest + folder.name).encode()).hexdigest())


def _check(folder: Path, corpus: Corpus, config: RunConfig) -> None:
    """Raise FormatError for files that do not match their digests or the corpus."""
    try:
        digests = files.unsealed("i-vectors", files.read_json(folder / _INDEX))["sha256"]
        for name, speech in corpus.sets.items():
            if files.sha256(folder / f"{name}.npy") != digests[name]:
                raise ValueError(f"{name}.npy does not match its checksum")
            rows_RS = np.load(folder / f"{name}.npy", mmap_mode="r")
            if rows_RS.shape != _shape(speech, config):
                raise ValueError(f"{name}.npy has the shape {rows_RS.shape}")
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(str(error)) from error


def _shape(speech: SpeechSet, config: RunConfig) -> tuple[int, int]:
    num_rows_U = -(-np.diff(speech.frames.offsets) // config.ivectors.period)
    return int(num_rows_U.sum()), config.ivectors.dim
