"""A trained model with everything needed to recognize speech.

It is read from the folder `final/` of a run, or from one file, an uncompressed zip archive. Its
content is never executed or unpickled. The index lists every other file with its SHA-256:

    recognizer.json                    language, feature and decoding settings, provenance, digests
    model.json, model.safetensors      the network, its input and the priors of its classes
    input_transform.safetensors, ivectors.safetensors, adaptation.safetensors, lm.arpa, HCLG.fst,
    tree.txt, grammar.jsgf,
    hotwords.txt                       optional

Letters: T frames, D features, P pdfs.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from ngsgd import files, interface
from ngsgd.asr.adapt.speakers import FindPath, SpeakerAdaptation
from ngsgd.asr.decode import evaluation
from ngsgd.asr.decode.decoding import Search
from ngsgd.asr.decode.tuning import Calibration, DecodingWeights
from ngsgd.asr.features import cmvn
from ngsgd.asr.ivectors import model as ivector_model
from ngsgd.asr.lang import graphs, vocabulary
from ngsgd.asr.lang import topology as topologies
from ngsgd.asr.lang.hotwords import HOTWORDS
from ngsgd.asr.lang.language import GRAMMAR, Language
from ngsgd.config import DecodeConfig, FeatureConfig, RunConfig, build, check_values
from ngsgd.config.build import with_defaults
from ngsgd.data.archives import spliced_utterances
from ngsgd.data.frames import FrameSet, Side
from ngsgd.errors import ArgumentError, CheckpointError, ConfigError, DataError, warn
from ngsgd.models import Window
from ngsgd.models.build import least_parameters, rebuild, window_of
from ngsgd.models.growing import utterance_logits

INDEX = "recognizer.json"
TRANSFORM, IVECTORS = "input_transform.safetensors", "ivectors.safetensors"
ADAPTATION = "adaptation.safetensors"
# files that a model may consist of
MODEL_FILES = ("model.json", "model.safetensors", TRANSFORM, IVECTORS, ADAPTATION)
LANGUAGE_FILES = ("lm.arpa", "HCLG.fst", "tree.txt", GRAMMAR, HOTWORDS)
AGAIN = "copy it again, or recreate it with: ngsgd export --format bundle RUN FILE"
_MAX_BYTES = 1 << 34
_UNCALIBRATED = Calibration()


def index_of(model_files: Mapping[str, bytes], *, language: Language, features: FeatureConfig,
             decode: DecodeConfig, weights: DecodingWeights, calibration: Calibration = _UNCALIBRATED,
             all_speech: cmvn.Stats | None, provenance: Mapping[str, Any]) -> str:
    """Return the text of `recognizer.json`; `model_files` are the existing `MODEL_FILES`."""
    content = {**model_files, **language.files()}
    index = {"sha256": {name: sha256(data).hexdigest() for name, data in sorted(content.items())},
             "language": language.to_json(), "features": asdict(features), "decode": asdict(decode),
             "weights": asdict(weights), "calibration": asdict(calibration),
             "all_speech": None if all_speech is None else all_speech.tolist(),
             "provenance": dict(provenance)}
    return json.dumps(files.sealed("bundle", index), indent=1)


def write_file(path: Path, content: Mapping[str, bytes]) -> None:
    """Write a bundle to one file: the index, then the files that it lists."""
    with files.new_file(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(content, key=lambda name: (name != INDEX, name)):
            # the default time of ZipInfo: equal content gives an equal file
            archive.writestr(zipfile.ZipInfo(name), content[name])


def read_files(path: Path) -> dict[str, bytes]:
    """Read name -> content of every file of a model, with verified digests and the index last.
    Raises CheckpointError if it is missing, damaged, modified, or of another format.
    """
    return {**read_index(path)["files"], INDEX: _reader(path)(INDEX)}


def read_index(path: Path) -> dict[str, Any]:
    """Return the index, with the content of the listed files under "files", all verified."""
    try:
        read = _reader(path)
        index = files.unsealed("bundle", files.parse_json(read(INDEX).decode("utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a model ({_reason(error)}); {AGAIN}.") from error
    listed = index.get("sha256")
    if not isinstance(listed, dict) or not set(listed) <= {*MODEL_FILES, *LANGUAGE_FILES}:
        raise CheckpointError(f"{path} lists files that are not part of a model; {AGAIN}.")
    found: dict[str, bytes] = {}
    for name, digest in listed.items():
        try:
            found[name] = read(name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({_reason(error)}); {AGAIN}.") from error
        if sha256(found[name]).hexdigest() != digest:
            raise CheckpointError(f"{path}: {name} was modified (its SHA-256 differs from {INDEX}); {AGAIN}.")
    return {**index, "files": found}


def _reader(path: Path) -> Callable[[str], bytes]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; use a run folder, or a file of: ngsgd export "
                              "--format bundle RUN FILE.")
    if path.is_dir():
        is_run = (path / "config.yaml").is_file() or (path / "final").is_dir()
        folder = path / "final" if is_run else path
        if not (folder / "model.json").is_file():
            raise CheckpointError(f"{path} has no final model; finish the run with: {interface.resume(path)}")
        if not (folder / INDEX).is_file():
            raise CheckpointError(f"{path} was not decoded to its end, so final/ has no {INDEX}; finish the "
                                  f"run with: {interface.resume(path)}")
        return lambda name: files.read_regular_bytes(folder / name, _MAX_BYTES)
    # an uncompressed archive; its files together are not larger than it
    content = files.read_regular_bytes(path, _MAX_BYTES)
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _require_plain(archive.infolist(), len(content))
            for name in (INDEX, *MODEL_FILES, *LANGUAGE_FILES):
                with contextlib.suppress(KeyError):
                    members[name] = archive.read(name)
    except (zipfile.BadZipFile, RuntimeError, EOFError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error

    def read(name: str) -> bytes:
        if name not in members:
            raise ValueError(f"it has no {name}")
        return members[name]
    return read


def _require_plain(members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Raise ValueError unless all members have their own bytes of the file, uncompressed."""
    names: set[str] = set()
    end = size
    for info in sorted(members, key=lambda one: -one.header_offset):
        is_plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if info.filename in names or not is_plain or info.flag_bits & 1:
            raise ValueError(f"its member {info.filename[:40]!r} is compressed, encrypted or duplicated")
        # the header of a member in the file has at least 30 bytes and the name
        if info.header_offset + 30 + len(info.filename) + info.file_size > end:
            raise ValueError(f"its member {info.filename[:40]!r} overlaps another one, or is cut")
        names.add(info.filename)
        end = info.header_offset


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]


# larger than that of any archive of examples
_MAX_CONTEXT, _MAX_FEATURES, _MAX_SILENCE_STATES = 1000, 10_000, 10
_MAX_CALIBRATION = 1e6  # maximum of the slope and the offset of a calibration
# exceptions of readers for damaged or hostile content
_DAMAGE = (SafetensorError, ValueError, LookupError, TypeError, RuntimeError, AttributeError, DataError,
           OverflowError, MemoryError)


@dataclass(frozen=True)
class Bundle:
    """A trained model and everything needed to recognize speech with it.

    Attributes:
        path: the folder or file.
        model: the network, in evaluation mode.
        prior_P: probability of each class, the divisor in decoding.
        window: frames and values of an input row of the network.
        features: settings of the features, with the sampling rate.
        all_speech: sums over all training frames (2 x (D + 1), see `ngsgd.asr.features.cmvn`); None
            if the training set was not normalized.
        ivectors: the i-vector model; None for a network without i-vectors.
        adaptation: projection and speaker adaptation of the normalized features; None for a model
            without them.
        language: words, pronunciations, phones and language model, or a graph of words.
        decode: beam and graph settings.
        weights: acoustic scale and word penalty tuned on the validation set.
        calibration: map from posteriors of words to confidences, fitted on the validation set.
        provenance: run, corpus and WER, as strings and numbers.
    """

    path: Path
    model: nn.Module
    prior_P: npt.NDArray[np.float64]
    window: Window
    features: FeatureConfig
    all_speech: cmvn.Stats | None
    ivectors: ivector_model.IvectorModel | None
    adaptation: SpeakerAdaptation | None
    language: Language
    decode: DecodeConfig
    weights: DecodingWeights
    calibration: Calibration
    provenance: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> Bundle:
        """Read a run folder, its folder `final/`, or a file of `ngsgd export --format bundle`.

        With `trust` the module of a custom network (`model._target_`) is imported, which runs its
        code; without it such a network is a ConfigError. Raises CheckpointError if the model is
        missing, damaged, modified, or of another format.
        """
        path = Path(path)
        content = read_index(path)
        try:
            return _bundle(path, content, trust=trust)
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            raise CheckpointError(f"{path} cannot be used as a model ({reason}); {AGAIN}.") from error

    @property
    def statistics(self) -> cmvn.Stats:
        """`all_speech`; raises DataError if the model lacks it."""
        if self.all_speech is None:
            raise DataError(f"{self.path} has no statistics of its training speech, which "
                            "features.cmvn=online needs; export it again.")
        return self.all_speech

    @cached_property
    def graph(self) -> graphs.Graph:
        """Decoding graph of the words, with the word penalty."""
        return graphs.with_word_penalty(self.unpenalized_graph, self.weights.word_penalty)

    @cached_property
    def unpenalized_graph(self) -> graphs.Graph:
        """Decoding graph without the word penalty."""
        return evaluation.build_graph(self.language, self.decode)

    @cached_property
    def find_path(self) -> FindPath:
        """First pass of speaker adaptation."""
        return evaluation.first_pass(self.unpenalized_graph)

    def with_words(self, words: vocabulary.Vocabulary, *, scale: float | None = None, penalty: float | None = None,
                   report: Callable[[str], None] = warn) -> Bundle:
        """Return the model with other words over the same phones, or other decoding weights.

        Args:
            words: lexicon, word list, language model, grammar or hotwords that replace those of the
                model.
            scale: acoustic scale; None keeps that of the model.
            penalty: cost per word; None keeps that of the model.
            report: receives lines about words that the language model lacks, and about numbers in a
                lexicon. Default: a warning.

        The calibration is that of the same weights, else none, and the provenance has no WER, which
        was measured with the former words and weights.

        Raises:
            ArgumentError: the scale or the penalty is out of range.
            ConfigError: a grammar and a language model.
            DataError: a file cannot be read, or does not match the model.
        """
        if problems := [f"{name} {text}" for name, text in vocabulary.weight_problems(scale, penalty)]:
            raise ArgumentError(problems)
        language = vocabulary.of_model(self.language, words, report)
        weights = DecodingWeights(self.weights.acoustic_scale if scale is None else scale,
                                  self.weights.word_penalty if penalty is None else penalty)
        if language is self.language and weights == self.weights:
            return self
        return replace(
            self, language=language, weights=weights,
            decode=self.decode if language is self.language else replace(self.decode, graph="made"),
            calibration=self.calibration if weights == self.weights else Calibration(),
            provenance={name: value for name, value in self.provenance.items() if name != "wer"})

    def files(self) -> dict[str, bytes]:
        """Return the name and the content of each file of this model, the index last."""
        found = read_files(self.path)
        model_files = {name: found[name] for name in MODEL_FILES if name in found}
        index = index_of(model_files, language=self.language, features=self.features, decode=self.decode,
                         weights=self.weights, calibration=self.calibration, all_speech=self.all_speech,
                         provenance=self.provenance)
        return {**model_files, **self.language.files(), INDEX: index.encode()}

    @property
    def search(self) -> Search:
        """Settings of the beam search."""
        return Search(self.weights.acoustic_scale, self.decode.beam, self.decode.max_active)

    @torch.no_grad()
    def scores(self, x_TI: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """T x P: log posterior minus log prior of spliced frames in any order."""
        return self._log_likelihoods(self.model(torch.from_numpy(np.ascontiguousarray(x_TI))))

    @torch.no_grad()
    def log_likelihoods(self, features_TD: npt.NDArray[np.float32], side: Side | None = None) -> npt.NDArray[np.float32]:
        """T x P: log posterior minus log prior of the normalized features of one utterance."""
        frames = FrameSet.of_utterance(features_TD, side)
        [x_TI] = spliced_utterances(frames, self.window.left_context, self.window.right_context)
        return self._log_likelihoods(utterance_logits(self.model, torch.from_numpy(x_TI)))

    def _log_likelihoods(self, logits_TP: Tensor) -> npt.NDArray[np.float32]:
        log_prior_P = torch.from_numpy(np.log(self.prior_P)).float()
        return np.asarray((logits_TP.log_softmax(dim=1) - log_prior_P).numpy())


def _bundle(path: Path, index: Mapping[str, Any], *, trust: bool) -> Bundle:
    found: dict[str, bytes] = index["files"]
    about = files.parse_json(found["model.json"].decode("utf-8"))
    # values are checked for range; other sections have defaults
    config, problems = build(with_defaults({
        "model": about["model"], "features": index["features"], "decode": index["decode"],
        "ivectors": about.get("ivectors", {})}))
    if wrong := [one.message for one in problems] or check_values(config):
        raise ValueError(wrong[0])
    language = _language(index["language"], found)
    if config.model._target_ and not trust:
        raise ConfigError(f"{path} requires importing {config.model._target_}, which runs that code "
                          "with your permissions. Inspect that module; if you trust it, allow it with "
                          f"{interface.option('trust')}.")
    state, transform = load_tensors(found["model.safetensors"]), None
    if TRANSFORM in found:
        transform = load_tensors(found[TRANSFORM])["input_transform"]
    adaptation = ivectors = all_speech = None
    if ADAPTATION in found:
        adaptation = SpeakerAdaptation.of_arrays(load_arrays(found[ADAPTATION]), language.num_pdfs)
    window = _window(about, config, language, adaptation)
    # before the described network is allocated
    size = sum(values.numel() for values in (*state.values(), *([] if transform is None else [transform])))
    least = max(least_parameters(config.model, 1, about["num_classes"]), config.model.num_subclasses,
                len(about["class_counts"])) if not config.model._target_ else 0
    if least > size:
        raise ValueError(f"its description is of a larger network than its {size} parameters")
    model, prior_P = rebuild(about, about["model"], state, transform)
    if not (prior_P > 0.0).all():
        raise ValueError("a prior is not above 0")
    if index["all_speech"] is not None:
        dim = adaptation.input_dim if adaptation else window.feature_dim
        all_speech = cmvn.check(np.asarray(index["all_speech"], np.float64), "all_speech", dim)
    if config.ivectors.dim:
        ivectors = ivector_model.of_arrays(load_tensors(found[IVECTORS]), config.ivectors)
    scales = DecodingWeights(float(index["weights"]["acoustic_scale"]), float(index["weights"]["word_penalty"]))
    if any(vocabulary.weight_problems(scales.acoustic_scale, scales.word_penalty)):
        raise ValueError(f"its decoding weights are {scales}")
    calibration = Calibration(float(index["calibration"]["slope"]), float(index["calibration"]["offset"]))
    if not (0.0 <= calibration.slope <= _MAX_CALIBRATION and abs(calibration.offset) <= _MAX_CALIBRATION):
        raise ValueError(f"its calibration is {calibration}")
    return Bundle(path, model, prior_P, window, config.features, all_speech, ivectors, adaptation, language,
                  config.decode, scales, calibration, dict(index["provenance"]))


def _window(about: Mapping[str, Any], config: RunConfig, language: Language, adaptation: SpeakerAdaptation | None) -> Window:
    """Return the window if features, i-vectors and words of the bundle match the network."""
    window, features = window_of(about), config.features
    own = window.feature_dim if adaptation is None else adaptation.input_dim
    dim = {"fbank": features.num_mel_bins, "mfcc": features.num_ceps}.get(features.kind, own)
    if adaptation is not None:
        if adaptation.input_dim != dim:
            raise ValueError(f"its adaptation takes {adaptation.input_dim} features of {dim}")
        dim = adaptation.dim
    sizes, side_dim = (*window, about["num_inputs"], about["num_classes"]), config.ivectors.dim
    if not (all(type(size) is int for size in sizes) and 0 < window.feature_dim <= _MAX_FEATURES
            and all(0 <= size <= _MAX_CONTEXT for size in window[:2])):
        raise ValueError(f"its network has an input of {window}")
    if (window.feature_dim, window.side_dim, window.num_inputs) != (dim, side_dim, about["num_inputs"]):
        raise ValueError(f"its network has an input of {window}, but its features have {dim} dimensions "
                         f"and {side_dim} side values")
    if about["num_classes"] != language.num_pdfs:
        raise ValueError(f"its network has {about['num_classes']} classes, but its words "
                         f"{language.num_pdfs} HMM states")
    return window


def _language(tree: Mapping[str, Any], found: Mapping[str, bytes]) -> Language:
    language = Language.from_json(dict(tree), {name: found[name] for name in LANGUAGE_FILES if name in found})
    topology, given = language.topology, language.given
    phones = {*topology.phones, topologies.SILENCE_PHONE}
    texts = [*topology.phones, *topology.lexicon, *(given.words if given else ())]
    are_words = all(isinstance(text, str) and text.split() == [text] for text in texts)
    if not are_words or len(set(topology.phones)) != len(topology.phones):
        raise ValueError("its words and phones are not strings without spaces, or a phone is duplicated")
    num_states = topology.num_silence_states
    if type(num_states) is not int or not 1 <= num_states <= _MAX_SILENCE_STATES:
        raise ValueError(f"silence has {num_states} states")
    spoken = [phones_ for all_ in topology.lexicon.values() for phones_ in all_]
    if not all(topology.lexicon.values()) or not all(one and set(one) <= phones for one in spoken):
        raise ValueError("a word has a pronunciation with phones that the model lacks")
    if given and not all(type(pdf) is int and 0 <= pdf < 1 << 24 for pdf in given.tid2pdf):
        raise ValueError("a transition of its graph has no HMM state")
    for name, part in (("grammar has", language.grammar), ("hotwords have", language.hotwords)):
        if part and not set(part.words()) <= set(topology.lexicon):
            raise ValueError(f"its {name} words without a pronunciation")
    counts = language.word_counts
    if not isinstance(counts, dict) or not all(type(count) is int and count >= 0 for count in counts.values()):
        raise ValueError("its word counts are not a table of numbers from 0")
    return language
