"""A trained model with everything needed to recognize speech.

It is read from the folder `final/` of a run, or from one file (`ngsgd.asr.bundle_files`).

Letters: T frames, D features, S side values (i-vectors), P pdfs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load as load_arrays
from safetensors.torch import load as load_tensors
from torch import Tensor, nn

from ngsgd import files
from ngsgd.asr.adapt.speakers import FindPath, SpeakerAdaptation
from ngsgd.asr.bundle_files import (
    ADAPTATION,
    AGAIN,
    INDEX,
    IVECTORS,
    LANGUAGE_FILES,
    MODEL_FILES,
    TRANSFORM,
    index_of,
    read_files,
    read_index,
    write_file,
)
from ngsgd.asr.decode import evaluation
from ngsgd.asr.decode.calibration import Calibration
from ngsgd.asr.decode.decoding import Search
from ngsgd.asr.decode.tuning import DecodingWeights
from ngsgd.asr.features import cmvn
from ngsgd.asr.features.cmvn import Stats
from ngsgd.asr.ivectors import model as ivector_model
from ngsgd.asr.ivectors.model import IvectorModel
from ngsgd.asr.lang import graphs, vocabulary
from ngsgd.asr.lang import topology as topologies
from ngsgd.asr.lang.graphs import Graph
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.config import DecodeConfig, FeatureConfig, RunConfig, build, check_values
from ngsgd.config.build import with_defaults
from ngsgd.data.archives import spliced_utterances
from ngsgd.data.frames import FrameSet, Side
from ngsgd.errors import ArgumentError, CheckpointError, ConfigError, DataError, warn
from ngsgd.interface import option
from ngsgd.models import Window
from ngsgd.models.build import least_parameters, rebuild, window_of
from ngsgd.models.growing import utterance_logits

__all__ = ["INDEX", "MODEL_FILES", "Bundle", "index_of", "read_files", "write_file"]

# larger than that of any archive of examples
_MAX_CONTEXT, _MAX_FEATURES, _MAX_SILENCE_STATES = 1000, 10_000, 10
# maximum of the slope and the offset of a calibration
_MAX_CALIBRATION = 1e6
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
    all_speech: Stats | None
    ivectors: IvectorModel | None
    adaptation: SpeakerAdaptation | None
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
                Default: False.

        Returns:
            The model.

        Raises:
            CheckpointError: the model is missing, damaged, modified, or of another format.
            ConfigError: a custom network without `trust`.
        """
        path = Path(path)
        content = read_index(path)
        try:
            return _bundle(path, content, trust=trust)
        except _DAMAGE as error:
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            raise CheckpointError(f"{path} cannot be used as a model ({reason}); {AGAIN}.") from error

    @property
    def statistics(self) -> Stats:
        """`all_speech`; raises DataError if the model lacks it."""
        if self.all_speech is None:
            raise DataError(f"{self.path} has no statistics of its training speech, which "
                            "features.cmvn=online needs; export it again.")
        return self.all_speech

    @cached_property
    def graph(self) -> Graph:
        """Decoding graph of the words, with the word penalty."""
        return graphs.with_word_penalty(self.unpenalized_graph, self.weights.word_penalty)

    @cached_property
    def unpenalized_graph(self) -> Graph:
        """Decoding graph without the word penalty."""
        return evaluation.build_graph(self.language, self.decode)

    @cached_property
    def find_path(self) -> FindPath:
        """First pass of speaker adaptation."""
        return evaluation.first_pass(self.unpenalized_graph)

    def with_words(self, words: Vocabulary, *, scale: float | None = None, penalty: float | None = None,
                   report: Callable[[str], None] = warn) -> Bundle:
        """Return the model with other words over the same phones, or other decoding weights.

        Args:
            words: lexicon, word list, language model or grammar that replace those of the model.
            scale: acoustic scale; None keeps that of the model.
            penalty: cost per word; None keeps that of the model.
            report: receives lines about words that the language model lacks, and about numbers in a
                lexicon. Default: a warning.

        Returns:
            The model. Its calibration is that of the same weights, else none. Its provenance has no
            WER, which was measured with the former words and weights.

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
    def log_likelihoods(self, features_TD: npt.NDArray[np.float32],
                        side: Side | None = None) -> npt.NDArray[np.float32]:
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
    config = _config(index, about)
    language = _language(index["language"], found)
    if config.model._target_ and not trust:
        raise ConfigError(f"{path} requires importing {config.model._target_}, which runs that code "
                          "with your permissions. Inspect that module; if you trust it, allow it with "
                          f"{option('trust')}.")
    state, transform = load_tensors(found["model.safetensors"]), None
    if TRANSFORM in found:
        transform = load_tensors(found[TRANSFORM])["input_transform"]
    adaptation = ivectors = all_speech = None
    if ADAPTATION in found:
        arrays = load_arrays(found[ADAPTATION])
        adaptation = SpeakerAdaptation.of_arrays(arrays, language.num_pdfs)
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


def _config(index: Mapping[str, Any], about: Mapping[str, Any]) -> RunConfig:
    """Sections of a bundle with values checked for range; other sections have defaults."""
    sections = {"model": about["model"], "features": index["features"], "decode": index["decode"],
                "ivectors": about.get("ivectors", {})}
    config, problems = build(with_defaults(sections))
    if wrong := [one.message for one in problems] or check_values(config):
        raise ValueError(wrong[0])
    return config


def _window(about: Mapping[str, Any], config: RunConfig, language: Language,
            adaptation: SpeakerAdaptation | None) -> Window:
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
    """Parse words, phones and language model, and check them."""
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
    if language.grammar and not set(language.grammar.words()) <= set(topology.lexicon):
        raise ValueError("its grammar has words without a pronunciation")
    counts = language.word_counts
    if not isinstance(counts, dict) or not all(type(count) is int and count >= 0 for count in counts.values()):
        raise ValueError("its word counts are not a table of numbers from 0")
    return language
