"""A model with all that recognizing speech takes, read from the folder `final/` of a run or from
one file.

The index `recognizer.json` lists every other file with its SHA-256:

    recognizer.json                    language, feature and decoding settings, provenance, digests
    model.json, model.safetensors      the network, its input and the priors of its classes
    input_transform.safetensors, ivectors.safetensors, lm.arpa, HCLG.fst    where the model has them

A bundle in one file is a zip archive of these, not compressed. Nothing in it is executed or
unpickled.

Letters: T frames, D features, S values next to the features, P pdfs.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from ngsgd import files
from ngsgd.asr.decode import evaluation
from ngsgd.asr.decode.calibration import Calibration
from ngsgd.asr.decode.evaluation import DecodingWeights
from ngsgd.asr.decode.streaming import Search
from ngsgd.asr.features import cmvn
from ngsgd.asr.features.cmvn import Stats
from ngsgd.asr.ivectors import model as ivector_model
from ngsgd.asr.ivectors.model import IvectorModel
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang import topology as topologies
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.language import Language
from ngsgd.config import (
    DecodeConfig,
    FeatureConfig,
    ModelConfig,
    RunConfig,
    build,
    check_values,
    without_removed,
)
from ngsgd.config.build import with_defaults
from ngsgd.data.archives import spliced_utterances
from ngsgd.data.frames import FrameSet, Side
from ngsgd.errors import CheckpointError, ConfigError, DataError
from ngsgd.models import Window
from ngsgd.models.growing import utterance_logits
from ngsgd.models.saved import least_parameters, rebuild, window_of

INDEX = "recognizer.json"
# raise it when a reader of before would misread the files
VERSION = 1
_KIND = "ngsgd recognizer"
_TRANSFORM, _IVECTORS = "input_transform.safetensors", "ivectors.safetensors"
# files that a model may consist of
MODEL_FILES = ("model.json", "model.safetensors", _TRANSFORM, _IVECTORS)
_LANGUAGE_FILES = ("lm.arpa", "HCLG.fst")
_MAX_BYTES = 1 << 34
# larger than that of any archive of examples
_MAX_CONTEXT, _MAX_FEATURES, _MAX_SILENCE_STATES = 1000, 10_000, 10
# far beyond all that decodes anything
_MAX_SCALE, _MAX_PENALTY = 100.0, 1000.0
# of the slope and the offset of a calibration
_MAX_CALIBRATION = 1e6
_UNCALIBRATED = Calibration()
_AGAIN = "copy it again, or write it again with: ngsgd export --format bundle RUN FILE"


@dataclass(frozen=True)
class Bundle:
    """A trained model and all that it recognizes speech with.

    Attributes:
        path: the folder or file.
        model: the network, in evaluation mode.
        prior_P: probability of each class, the divisor of decoding.
        window: frames and values of a row of the network's input.
        features: settings of the features, with the sampling rate.
        all_speech: sums over all training frames (2 x (D + 1), see `ngsgd.asr.features.cmvn`);
            None where the training set was not normalized.
        ivectors: what makes the i-vectors; None for a model without.
        language: words, pronunciations, phones and language model, or a graph of words.
        decode: beam and graph settings.
        weights: acoustic scale and word penalty that were best on the validation set.
        calibration: map from posteriors of words to confidences, fitted on the validation set.
        provenance: run, corpus and WER, as texts and numbers.
    """

    path: Path
    model: nn.Module
    prior_P: npt.NDArray[np.float64]
    window: Window
    features: FeatureConfig
    all_speech: Stats | None
    ivectors: IvectorModel | None
    language: Language
    decode: DecodeConfig
    weights: DecodingWeights
    calibration: Calibration
    provenance: Mapping[str, Any]

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> Bundle:
        """Read a run folder, its folder `final/`, or a file of `ngsgd export --format bundle`.

        Args:
            path: folder or file.
            trust: import the module of a custom network (`model._target_`), which runs its code.

        Raises:
            CheckpointError: nothing there, damaged, edited, or of a newer version.
            ConfigError: a custom network without `trust`.
        """
        path = Path(path)
        content = _read(path)
        try:
            return _bundle(path, content, trust=trust)
        except (
            SafetensorError,
            ValueError,
            LookupError,
            TypeError,
            RuntimeError,
            AttributeError,
            DataError,
            OverflowError,
            MemoryError,
        ) as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            raise CheckpointError(
                f"{path} cannot be used as a model ({reason}); {_AGAIN}."
            ) from error

    @cached_property
    def graph(self) -> Graph:
        """Graph of the words, with the word penalty."""
        return self.graph_of(self.language)

    def graph_of(self, language: Language, *, word_penalty: float | None = None) -> Graph:
        """Graph of other words or another language model over the same phones.

        Args:
            language: words and language model.
            word_penalty: cost of a word; None is that of the bundle.
        """
        penalty = self.weights.word_penalty if word_penalty is None else word_penalty
        return graphs.with_word_penalty(evaluation.build_graph(language, self.decode), penalty)

    @property
    def search(self) -> Search:
        """Settings of the beam search."""
        return Search(self.weights.acoustic_scale, self.decode.beam, self.decode.max_active)

    @torch.no_grad()
    def scores(self, x_TI: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """T x P: log posterior minus log prior of spliced frames in any order."""
        return self._log_likelihoods(self.model(torch.from_numpy(np.ascontiguousarray(x_TI))))

    @torch.no_grad()
    def log_likelihoods(
        self, features_TD: npt.NDArray[np.float32], side: Side | None = None
    ) -> npt.NDArray[np.float32]:
        """T x P: log posterior minus log prior of one utterance.

        Args:
            features_TD: normalized features.
            side: rows that go next to the features, such as i-vectors.
        """
        frames = FrameSet(
            features_TD,
            np.zeros(len(features_TD), np.int32),
            np.array([0, len(features_TD)]),
            ("",),
            side=side,
        )
        [x_TI] = spliced_utterances(frames, self.window.left_context, self.window.right_context)
        return self._log_likelihoods(utterance_logits(self.model, torch.from_numpy(x_TI)))

    def _log_likelihoods(self, logits_TP: Tensor) -> npt.NDArray[np.float32]:
        return np.asarray(
            (logits_TP.log_softmax(dim=1) - torch.from_numpy(np.log(self.prior_P)).float()).numpy()
        )


# Writing ------------------------------------------------------------------------------------------


def index_of(
    model_files: Mapping[str, bytes],
    *,
    language: Language,
    features: FeatureConfig,
    decode: DecodeConfig,
    weights: DecodingWeights,
    calibration: Calibration = _UNCALIBRATED,
    all_speech: Stats | None,
    provenance: Mapping[str, Any],
) -> str:
    """Text of `recognizer.json`.

    Args:
        model_files: name -> content of the `MODEL_FILES` that there are.
        language, features, decode, weights, calibration, all_speech, provenance: as in `Bundle`.
    """
    content = {**model_files, **language.files()}
    return json.dumps(
        files.sealed(
            {
                "kind": _KIND,
                "version": VERSION,
                "sha256": {
                    name: sha256(data).hexdigest() for name, data in sorted(content.items())
                },
                "language": language.to_json(),
                "features": asdict(features),
                "decode": asdict(decode),
                "weights": asdict(weights),
                "calibration": asdict(calibration),
                "all_speech": None if all_speech is None else all_speech.tolist(),
                "provenance": dict(provenance),
            }
        ),
        indent=1,
    )


def write_file(path: Path, content: Mapping[str, bytes]) -> None:
    """A bundle in one file: the index first, then the files that it lists, at a fixed time of
    their own.
    """
    with (
        files.new_file(path) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
    ):
        for name in sorted(content, key=lambda name: (name != INDEX, name)):
            # ZipInfo's default time: equal content gives an equal file
            archive.writestr(zipfile.ZipInfo(name), content[name])


# Reading ------------------------------------------------------------------------------------------


def read_files(path: Path) -> dict[str, bytes]:
    """Name -> content of every file of a model, with digests compared; the index comes last.

    Raises:
        CheckpointError: nothing there, damaged, edited, or of a newer version.
    """
    return {**_read(path)["files"], INDEX: _reader(path)(INDEX)}


def _read(path: Path) -> dict[str, Any]:
    """Content of the index, and under "files" that of the files it lists; all digests compared."""
    try:
        read = _reader(path)
        index, has_digest = files.unsealed(files.parse_json(read(INDEX).decode("utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as a model ({_reason(error)}); {_AGAIN}."
        ) from error
    if not has_digest or index.get("kind") != _KIND or type(index.get("version")) is not int:
        raise CheckpointError(f"{path} is not a model that ngsgd exported; {_AGAIN}.")
    if index["version"] > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer version of ngsgd (format {index['version']}, and this "
            f"one reads "
            f"up to {VERSION}); install a newer ngsgd."
        )
    listed = index.get("sha256")
    if not isinstance(listed, dict) or not set(listed) <= {*MODEL_FILES, *_LANGUAGE_FILES}:
        raise CheckpointError(f"{path} lists files that are not of a model; {_AGAIN}.")
    found: dict[str, bytes] = {}
    for name, digest in listed.items():
        try:
            found[name] = read(name)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: {name} cannot be read ({_reason(error)}); {_AGAIN}."
            ) from error
        if sha256(found[name]).hexdigest() != digest:
            raise CheckpointError(
                f"{path}: {name} is not what was written (its SHA-256 differs from {INDEX}); "
                f"{_AGAIN}."
            )
    return {**index, "files": found}


def _reader(path: Path) -> Callable[[str], bytes]:
    """A function from the name of a file to its content."""
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist; give a run folder, or a file of: ngsgd export --format "
            f"bundle RUN FILE."
        )
    if path.is_dir():
        folder = (
            path / "final"
            if (path / "config.yaml").is_file() or (path / "final").is_dir()
            else path
        )
        if not (folder / "model.json").is_file():
            raise CheckpointError(
                f"{path} has no final model; finish the run with: ngsgd resume {path}."
            )
        if not (folder / INDEX).is_file():
            raise CheckpointError(
                f"{path} was written by an earlier version of ngsgd, whose final/ has no {INDEX}; "
                f"make a "
                f"bundle with: ngsgd export --format bundle {path} FILE, and use FILE."
            )
        return lambda name: files.read_regular_bytes(folder / name, _MAX_BYTES)
    return _zip_reader(path)


def _zip_reader(path: Path) -> Callable[[str], bytes]:
    """Members of an archive that is not compressed, so that none is larger than the file."""
    content = files.read_regular_bytes(path, _MAX_BYTES)
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                if (
                    info.filename in members
                    or info.compress_type != zipfile.ZIP_STORED
                    or info.file_size > len(content)
                    or info.flag_bits & 1
                ):
                    raise ValueError(
                        f"its member {info.filename[:40]!r} is compressed, encrypted or there twice"
                    )
                members[info.filename] = archive.read(info)
    except (
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        OverflowError,
        MemoryError,
    ) as error:
        raise ValueError(str(error)) from error

    def read(name: str) -> bytes:
        if name not in members:
            raise ValueError(f"it has no {name}")
        return members[name]

    return read


def _bundle(path: Path, index: Mapping[str, Any], *, trust: bool) -> Bundle:
    found: dict[str, bytes] = index["files"]
    about = files.parse_json(found["model.json"].decode("utf-8"))
    config = _config(index, about)
    language = _language(index["language"], found)
    if config.model._target_ and not trust:
        raise ConfigError(
            f"{path} asks to import {config.model._target_}, which runs that code as you. Look at "
            f"that module; if "
            "you trust it, allow it with --trust (in Python: trust=True)."
        )
    state, transform = load_tensors(found["model.safetensors"]), None
    if _TRANSFORM in found:
        transform = load_tensors(found[_TRANSFORM])["input_transform"]
    window = _window(about, config, language)
    _require_size(
        config.model, about, {**state, **({} if transform is None else {_TRANSFORM: transform})}
    )
    model, prior_P = rebuild(about, about["model"], state, transform)
    if not (prior_P > 0.0).all():
        raise ValueError("a prior is not above 0")
    all_speech = index["all_speech"]
    return Bundle(
        path,
        model,
        prior_P,
        window,
        config.features,
        None
        if all_speech is None
        else cmvn.check(np.asarray(all_speech, np.float64), "all_speech", window.feature_dim),
        ivector_model.of_arrays(load_tensors(found[_IVECTORS]), config.ivectors)
        if config.ivectors.dim
        else None,
        language,
        config.decode,
        _weights(index["weights"]),
        _calibration(index.get("calibration")),
        dict(index["provenance"]),
    )


def _config(index: Mapping[str, Any], about: Mapping[str, Any]) -> RunConfig:
    """The sections that a bundle has, with all values in their ranges; the others have their
    defaults.
    """
    sections = {
        "model": about["model"],
        "features": index["features"],
        "decode": index["decode"],
        "ivectors": about.get("ivectors", {}),
    }
    config, problems = build(
        with_defaults({name: without_removed(name, values) for name, values in sections.items()})
    )
    wrong = [one.message for one in problems] or check_values(config)
    if wrong:
        raise ValueError(wrong[0])
    return config


def _calibration(values: Mapping[str, Any] | None) -> Calibration:
    """The calibration; a model of an earlier version has none."""
    if values is None:
        return Calibration()
    found = Calibration(float(values["slope"]), float(values["offset"]))
    if not (0.0 <= found.slope <= _MAX_CALIBRATION and abs(found.offset) <= _MAX_CALIBRATION):
        raise ValueError(f"its calibration is {found}")
    return found


def _weights(values: Mapping[str, Any]) -> DecodingWeights:
    weights = DecodingWeights(float(values["acoustic_scale"]), float(values["word_penalty"]))
    # false for NaN, too
    if not (0.0 < weights.acoustic_scale <= _MAX_SCALE and abs(weights.word_penalty) <= _MAX_PENALTY):
        raise ValueError(f"its decoding weights are {weights}")
    return weights


def _window(about: Mapping[str, Any], config: RunConfig, language: Language) -> Window:
    """The window, where features, i-vectors and words of the bundle fit the network."""
    window, features = window_of(about), config.features
    dim = {"fbank": features.num_mel_bins, "mfcc": features.num_ceps}.get(
        features.kind, window.feature_dim
    )
    sizes = (*window, about["num_inputs"], about["num_classes"])
    if (
        any(type(size) is not int for size in sizes)
        or not 0 < window.feature_dim <= _MAX_FEATURES
        or not all(0 <= size <= _MAX_CONTEXT for size in window[:2])
    ):
        raise ValueError(f"its network has an input of {window}")
    if (window.feature_dim, window.side_dim) != (
        dim,
        config.ivectors.dim,
    ) or window.num_inputs != about["num_inputs"]:
        raise ValueError(
            f"its network has an input of {window}, and its features have {dim} dimensions and "
            f"{config.ivectors.dim} next to them"
        )
    if about["num_classes"] != language.num_pdfs:
        raise ValueError(
            f"its network has {about['num_classes']} classes, and its words {language.num_pdfs} "
            f"HMM states"
        )
    return window


def _require_size(
    model: ModelConfig, about: Mapping[str, Any], state: Mapping[str, Tensor]
) -> None:
    """Raise ValueError for a description of more parameters than there are, before they are
    allocated.
    """
    size = sum(values.numel() for values in state.values())
    if (
        not model._target_
        and max(
            least_parameters(model, 1, about["num_classes"]),
            model.num_subclasses,
            len(about["class_counts"]),
        )
        > size
    ):
        raise ValueError(f"its description is of a larger network than its {size} parameters")


def _language(tree: Mapping[str, Any], found: Mapping[str, bytes]) -> Language:
    """Words, phones and language model, where they are what they must be."""
    language = Language.from_json(
        dict(tree), {name: found[name] for name in _LANGUAGE_FILES if name in found}
    )
    topology, given = language.topology, language.given
    phones = {*topology.phones, topologies.SILENCE_PHONE}
    texts = [*topology.phones, *topology.lexicon, *(given.words if given else ())]
    if not all(isinstance(text, str) and text.split() == [text] for text in texts) or len(
        set(topology.phones)
    ) != len(topology.phones):
        raise ValueError(
            "its words and phones are not texts without spaces, or a phone is there twice"
        )
    if (
        type(topology.num_silence_states) is not int
        or not 1 <= topology.num_silence_states <= _MAX_SILENCE_STATES
    ):
        raise ValueError(f"silence has {topology.num_silence_states} states")
    spoken = [phones_ for all_ in topology.lexicon.values() for phones_ in all_]
    if not all(topology.lexicon.values()) or not all(one and set(one) <= phones for one in spoken):
        raise ValueError("a word is spelled in phones that are not its own")
    if given and not all(type(pdf) is int and 0 <= pdf < 1 << 24 for pdf in given.tid2pdf):
        raise ValueError("a transition of its graph has no HMM state")
    return language


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]
