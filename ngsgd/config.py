"""Every knob of a training run: its unit, range, default, and where the paper or Kaldi sets it.

Section and equation numbers: arXiv 1410.7455.  The dataclasses hold plain values, know nothing of YAML, and are the
only place where the default of a run's setting is written; signatures of the library's classes repeat some of them, and
tests/test_defaults.py holds both equal.  `check()` returns sentences, so that all mistakes are shown at once, and `unused()`
the settings that have no effect with the others.

Learning rates are per frame, on the objective *summed* over the minibatch (Kaldi's convention).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ngsgd.errors import ConfigError
from ngsgd.schedules import DropoutSchedule

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Section = TypeVar("Section", bound=DataclassInstance)

_LARGEST_INT = 2**63 - 1   # what NumPy, torch and files hold


def knob(default: Any, *, one_of: tuple[Any, ...] = (), low: float | None = None, high: float | None = None,
         above: float | None = None, used: str = "", of_kind: Mapping[str, Any] | None = None) -> Any:
    """A dataclass field with its allowed values: `one_of`, or the range [low, high], or (above, high].

    Args:
        used: the condition under which a run uses the setting; empty: always.  Terms joined by " & ", each
            "kind=bmuf|diloco" (has one of these values), "noise" (on, not 0, not empty) or "!graph" (the opposite).
            A name stands for a setting of the same section.
        of_kind: defaults of single kinds; None in the field stands for the default of the section's kind.
    """
    metadata = {"one_of": one_of, "low": low, "high": high, "above": above, "used": used, "default": default,
                "of_kind": of_kind or {}}
    return field(default=None if of_kind else default, metadata=metadata)


@dataclass(frozen=True)
class DataConfig:
    """Which speech, from where, and how much of it."""

    corpus: str = knob("digits", one_of=("digits", "fsdd", "yesno", "an4", "kaldi", "lhotse"))
    # folder or archive of the speech; fsdd, empty: download (pinned, checksummed)
    source: str = knob("", used="corpus=fsdd|yesno|an4|kaldi|lhotse")
    cache_dir: str = knob("")         # where prepared data is kept; empty: <output_dir>/data
    # test on two unseen speakers; its own; held_out
    split: str = knob("speaker", one_of=("speaker", "official", "loo"), used="corpus=fsdd")
    held_out: str = knob("", used="corpus=fsdd")  # fsdd, split=loo: the speaker of the test set
    # strings in noise, or the recordings as they are
    style: str = knob("connected", one_of=("connected", "isolated"), used="corpus=fsdd")
    lexicon: str = knob("", used="corpus=kaldi|lhotse")  # file of lines "word phone phone ..."; empty: data.source/lexicon.txt
    arpa: str = knob("", used="corpus=kaldi|lhotse")  # n-gram model of the words; empty: any word may follow any, equally likely
    oov: str = knob("", used="corpus=kaldi|lhotse")  # word of the lexicon for unknown ones; empty: they are errors
    graph: str = knob("", used="corpus=kaldi|lhotse")  # folder with HCLG.fst, words.txt and tid2pdf, in place of a graph made here
    # HMM states of the frames: file of `ngsgd align`, or text "utt pdf pdf ...", or folder of Kaldi's ali archives with tid2pdf;
    alignment: str = knob("")         # flat: made from a flat start; empty: the one that comes with the corpus, else flat
    num_silence_states: int = knob(1, low=1, high=10, used="corpus=yesno|kaldi|lhotse")  # yesno, kaldi, lhotse
    # an4, yesno, kaldi, lhotse without a valid set: taken from train
    valid_share: float = knob(0.1, above=0.0, high=0.5, used="corpus=an4|yesno|kaldi|lhotse")
    # minutes of audio made for training (connected strings)
    train_minutes: float = knob(80.0, above=0.0, high=6000.0, used="corpus=digits|fsdd & style=connected")
    valid_minutes: float = knob(5.0, above=0.0, high=600.0, used="corpus=digits|fsdd & style=connected")
    test_minutes: float = knob(10.0, above=0.0, high=600.0, used="corpus=digits|fsdd & style=connected")
    # signal-to-noise ratio of added noise, drawn per utterance
    snr_db_low: float = knob(0.0, low=-20.0, high=60.0, used="corpus=digits|fsdd & style=connected")
    snr_db_high: float = knob(15.0, low=-20.0, high=60.0, used="corpus=digits|fsdd & style=connected")
    # of the corpus; apart from the training seed, so that training seeds share one corpus
    seed: int = knob(0, low=0, used="corpus=digits|fsdd")


@dataclass(frozen=True)
class FeatureConfig:
    """Acoustic features: 25 ms windows every 10 ms, no dither."""

    kind: str = knob("fbank", one_of=("fbank", "mfcc", "given"))  # given: those that come with the corpus (feats.scp)
    sample_rate_hz: int = knob(8000, low=4000, high=192000)      # of the audio; what comes at another rate is refused
    num_mel_bins: int = knob(40, low=3, high=256, used="kind=fbank|mfcc")
    num_ceps: int = knob(13, low=1, high=80, used="kind=mfcc")  # mfcc only; at most num_mel_bins
    # mean and variance are normalised over this unit; online: the mean of the frames so far; given: as the corpus' cmvn.scp says
    cmvn: str = knob("utterance", one_of=("none", "utterance", "speaker", "online", "given"))
    cmn_window: int = knob(600, low=1, used="cmvn=online")  # frames that the mean is taken over (Kaldi: 600)
    # of those at most as many from the speaker's utterances before (Kaldi: 600)
    cmn_speaker_frames: int = knob(600, low=0, used="cmvn=online")
    # at most as many from the mean of all training speech (Kaldi: 200)
    cmn_global_frames: int = knob(200, low=0, used="cmvn=online")


@dataclass(frozen=True)
class IvectorConfig:
    """i-vectors (C.9): a few numbers about speaker and channel, from the frames so far, beside the features; docs/ivectors.md."""

    dim: int = knob(0, low=0, high=1000)             # 0: none (paper: 100)
    num_gaussians: int = knob(128, low=1, high=8192, used="dim")  # of the background model (paper: 512)
    context: int = knob(3, low=0, high=50, used="dim")  # frames on either side that are seen with a frame (Kaldi: 3)
    pca_dim: int = knob(40, low=1, used="dim")  # of those frames together; at most as many as there are (Kaldi: 40)
    ubm_frames: int = knob(200000, low=1, used="dim")  # that the background model is trained on (Kaldi: 500000)
    max_utterances: int = knob(5000, low=1, used="dim")  # that the extractor is trained on
    num_iters: int = knob(10, low=1, high=100, used="dim")  # passes of the extractor's training (Kaldi: 10)
    num_gselect: int = knob(5, low=1, used="dim")  # Gaussians that a frame may belong to (Kaldi: 5)
    min_post: float = knob(0.025, low=0.0, high=0.5, used="dim")  # posteriors below become 0 (Kaldi: 0.025)
    posterior_scale: float = knob(0.1, above=0.0, high=1.0, used="dim")  # as neighbouring frames are not independent (Kaldi: 0.1)
    # scaled frames from which on the prior grows with them; 0: never (nnet3: 100)
    max_count: float = knob(100.0, low=0.0, used="dim")
    period: int = knob(10, low=1, high=1000, used="dim")  # frames between two estimates (Kaldi: 10)
    max_remembered_frames: float = knob(1000.0, low=0.0, used="dim")  # of a speaker's utterances before (Kaldi: 1000)
    # training utterances in a row that a speaker is remembered over; 0: all (Kaldi: 2)
    train_utterances: int = knob(2, low=0, used="dim")
    test_utterances: int = knob(0, low=0, used="dim")  # likewise of valid and test; 1: every utterance begins anew


@dataclass(frozen=True)
class AlignConfig:
    """Labels from transcripts alone (`ngsgd align`): models learn them and move them, several times over."""

    num_gaussian_passes: int = knob(20, low=1, high=100)  # after the flat start: one Gaussian a state, in closed form
    num_passes: int = knob(2, low=0, high=100)           # after those: a small network is trained, then everything realigned
    num_epochs: float = knob(2.0, above=0.0, high=100.0, used="num_passes")  # of each training
    num_layers: int = knob(2, low=1, high=64, used="num_passes")
    hidden_dim: int = knob(128, low=2, used="num_passes")
    lr_initial: float = knob(0.005, above=0.0, used="num_passes")  # per frame, as schedule.lr_initial
    lr_final: float = knob(0.0005, above=0.0, used="num_passes")
    samples_per_iter: int = knob(16000, low=1, used="num_passes")  # as egs.samples_per_iter
    beam: float = knob(200.0, above=0.0)                 # of the search through a transcript's graph; wide, as the graph is narrow


@dataclass(frozen=True)
class EgsConfig:
    """Archives of training examples (C.2): shuffled once on disk, again at every reading."""

    left_context: int = knob(5, low=0, high=100)     # frames
    right_context: int = knob(5, low=0, high=100)    # frames
    frames_per_eg: int = knob(8, low=1, high=256)    # an example gives one frame per pass; Kaldi uses 8
    samples_per_iter: int = knob(16000, low=1)       # K, frames per job between two averagings; Kaldi uses 400000
    num_diagnostic_frames: int = knob(4000, low=1)   # frames of each fixed subset on which objf is measured
    silence_weight: float = knob(1.0, low=0.0, high=1.0)  # of a silence frame in the objf; 0 leaves silence out of training
    num_writers: int = knob(0, low=0, high=1000)     # processes that write archives; 0: one per core where it pays
    prefetch: int = knob(-1, low=-1, high=1000)      # minibatches made in advance by a thread; -1: 4 for a GPU, else none
    on_corrupt: str = knob("stop", one_of=("stop", "quarantine"))  # for an archive that is damaged: end, or go on without it


@dataclass(frozen=True)
class AugmentConfig:
    """More speech from what there is; for training only, never for valid and test.  All off by default.

    Audio changes before features are made: speed, then reverberation, noise and volume.  Masks change windows at training time.
    """

    seed: int = knob(0, low=0)                       # of the audio's changes; masks go by the run's seed
    num_copies: int = knob(1, low=1, high=100)       # of each training utterance, each changed anew; the first one too
    speed: str = knob("none", one_of=("none", "all", "draw"))  # all: once at each factor, Kaldi's three-fold data; draw: one factor
    # 1.1: shorter and higher; Kaldi's are the default
    speed_factors: tuple[float, ...] = knob((0.9, 1.0, 1.1), used="speed=all|draw")
    # speed=draw: of a factor from the list; else the speed stays
    speed_probability: float = knob(1.0, low=0.0, high=1.0, used="speed=draw")
    reverb: bool = knob(False)                       # convolution with the impulse response of a room
    reverb_probability: float = knob(0.5, low=0.0, high=1.0, used="reverb")
    rir_dir: str = knob("", used="reverb")  # folder of wav files, one impulse response each; empty: simulated rooms
    # simulated rooms: time to decay by 60 dB, drawn log-uniformly
    rt60_ms_low: float = knob(100.0, above=0.0, high=5000.0, used="reverb & !rir_dir")
    rt60_ms_high: float = knob(600.0, above=0.0, high=5000.0, used="reverb & !rir_dir")
    noise: bool = knob(False)                        # added to the speech
    noise_probability: float = knob(0.5, low=0.0, high=1.0, used="noise")
    noise_dir: str = knob("", used="noise")  # folder of wav files; empty: white and pink noise
    noise_snr_db_low: float = knob(5.0, low=-20.0, high=60.0, used="noise")  # speech over noise, drawn uniformly
    noise_snr_db_high: float = knob(20.0, low=-20.0, high=60.0, used="noise")
    volume: bool = knob(False)                       # of the whole utterance, noise and all
    volume_probability: float = knob(1.0, low=0.0, high=1.0, used="volume")
    volume_low: float = knob(0.125, above=0.0, high=100.0, used="volume")  # amplitude factor, drawn uniformly; Kaldi: 0.125 to 2
    volume_high: float = knob(2.0, above=0.0, high=100.0, used="volume")
    spec: bool = knob(False)                         # SpecAugment: masks on each window of spliced frames
    spec_probability: float = knob(0.5, low=0.0, high=1.0, used="spec")
    spec_num_time_masks: int = knob(1, low=0, high=100, used="spec")
    # widest mask; the window has left + 1 + right context
    spec_time_frames: int = knob(3, low=0, high=1000, used="spec & spec_num_time_masks")
    spec_num_freq_masks: int = knob(1, low=0, high=100, used="spec")
    spec_freq_bins: int = knob(8, low=0, high=1000, used="spec & spec_num_freq_masks")  # widest mask, of features.num_mel_bins

    @property
    def changes_audio(self) -> bool:
        """Whether the prepared data is other than without augmentation."""
        return self.num_copies > 1 or self.speed != "none" or self.reverb or self.noise or self.volume


@dataclass(frozen=True)
class ModelConfig:
    """The acoustic model: affine layers, a nonlinearity and a normalisation each; or a module of the user's own."""

    kind: str = knob("relu", one_of=("relu", "pnorm", "tdnn", "tdnnf"), used="!_target_")
    num_layers: int = knob(4, low=1, high=64, used="!_target_")
    hidden_dim: int = knob(256, low=2, used="!_target_")  # outputs of each hidden affine layer
    # hidden_dim / pnorm_group values go on; must divide hidden_dim
    pnorm_group: int = knob(5, low=2, used="!_target_ & kind=pnorm")
    # batchnorm: Kaldi's, without scale and offset
    normalize: str = knob("renormalize", one_of=("renormalize", "batchnorm"), used="!_target_")
    dropout_schedule: str = knob("")                 # as Kaldi's: 0,0@0.2,0.3@0.5,0 over the data processed; empty: no dropout
    # tdnn, tdnnf: the frames that each layer sees around its output frame, a group for each layer; sums must fit egs.*_context
    tdnn_offsets: str = knob("-2,-1,0,1,2 -1,1 -2,2 0", used="!_target_ & kind=tdnn|tdnnf")
    bottleneck_dim: int = knob(64, low=1, used="!_target_ & kind=tdnnf")  # rows of the semi-orthogonal factors
    # share of a layer's input that is added to its output (Kaldi: 0.66)
    bypass_scale: float = knob(0.66, low=0.0, high=1.0, used="!_target_ & kind=tdnnf")
    input_transform: str = knob("none", one_of=("none", "lda"))  # fixed, from the training examples (C.6)
    # floor on how far a dimension is shrunk (Kaldi: 0.001)
    lda_within_class_factor: float = knob(0.001, low=0.0, high=1.0, used="input_transform=lda")
    lda_max_singular_value: float = knob(5.0, low=0.0, used="input_transform=lda")  # of the transform; 0 = no limit (Kaldi: 5)
    lda_dim: int = knob(0, low=0, used="input_transform=lda")  # rows that are kept; 0 = all (Kaldi)
    prior_scale_power: float = knob(0.0, low=-1.0, high=0.0)  # outputs are scaled by prior^this before the softmax (nnet2: -0.25)
    num_subclasses: int = knob(0, low=0)             # of all classes together, after the split (C.5); 0 = none
    # classes get sub-classes by count^this (paper: 1/3)
    subclass_power: float = knob(0.25, above=0.0, high=1.0, used="num_subclasses")
    # frames that each sub-class must have (Kaldi's scripts: 10)
    subclass_min_count: float = knob(10.0, low=0.0, used="num_subclasses")
    add_layers_period: int = knob(0, low=0)          # outer iterations between two new layers (C.7; nnet2: 2); 0: all at once
    _target_: str = knob("")                         # package.module:Name makes the model in place of the above: docs/own-model.md
    args: Mapping[str, Any] | None = knob(None, used="_target_")  # keyword arguments for it, such as {width: 64}
    search_path: str = knob("", used="_target_")  # folder that it is imported from; empty: the current one
    init_scales: Mapping[str, Any] | None = knob(None)  # factors on the starting parameters of layers, such as {affine1: 0.8}

    @property
    def label(self) -> str:
        """What a run with this model is called."""
        return self._target_.replace(":", ".").rpartition(".")[2] or self.kind

    def layer_offsets(self) -> tuple[tuple[int, ...], ...]:
        """`tdnn_offsets` by layer; raises ValueError unless each has rising whole numbers."""
        layers = tuple(tuple(int(offset) for offset in layer.split(",")) for layer in self.tdnn_offsets.split())
        if not layers or any(list(layer) != sorted(set(layer)) for layer in layers):
            raise ValueError(self.tdnn_offsets)
        return layers


@dataclass(frozen=True)
class OptimizerConfig:
    """What a worker does with a minibatch."""

    kind: str = knob("ngsgd", one_of=("ngsgd", "sgd"))
    momentum: float = knob(0.0, low=0.0, high=0.999)
    max_change: float = knob(0.75, low=0.0)          # L2 norm of one layer's change per minibatch; 0 = no limit (C.3)
    max_param_change: float = knob(2.0, low=0.0)     # L2 norm of the whole model's change per minibatch; 0 = no limit (C.3)
    weight_decay: float = knob(0.0, low=0.0)         # Kaldi's l2: adds -weight_decay * |W|^2 per frame to the objf
    rank_in: int = knob(20, low=1, used="kind=ngsgd")  # Fisher rank on the input side; lowered to (dim + 1) / 2
    rank_out: int = knob(80, low=1, used="kind=ngsgd")  # Fisher rank on the output-derivative side; lowered likewise
    update_period: int = knob(4, low=1, used="kind=ngsgd")  # minibatches between Fisher updates
    # frames; forgetting time constant of the Fisher (eq. 78)
    num_samples_history: float = knob(2000.0, above=0.0, high=1e6, used="kind=ngsgd")
    alpha: float = knob(4.0, low=0.0, used="kind=ngsgd")  # smoothing towards the identity (eq. 19)
    # between a job and its successor; Kaldi starts afresh
    ng_state: str = knob("reset", one_of=("reset", "keep"), used="kind=ngsgd")
    # of the Fisher: Kaldi's today, or the paper's own code
    update_schedule: str = knob("nnet3", one_of=("nnet3", "nnet2"), used="kind=ngsgd")
    # the paper's limit (C.3), nnet2's scripts use 0.075; 0 = none
    max_change_per_sample: float = knob(0.0, low=0.0, used="kind=ngsgd")
    backstitch_scale: float = knob(0.0, low=0.0)     # a step of -scale, then one of 1 + scale (Kaldi: 0.3 to 1); 0 = off
    backstitch_interval: int = knob(1, low=1, used="backstitch_scale")  # minibatches between two with backstitch
    proportional_shrink: float = knob(0.0, low=0.0)  # a job starts from the model times 1 - this * its learning rate
    # lr_factor, max_change and weight_decay of single layers by name or pattern, such as {affine1: {lr_factor: 1.3}}
    layer_options: Mapping[str, Any] | None = knob(None)
    cosine_period: int = knob(100, low=0, used="kind=ngsgd")  # minibatches between looks at the plain gradient, for the log


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is maximised: cross-entropy, frame by frame, or a criterion of whole sequences (C.8); docs/sequence.md."""

    kind: str = knob("ce", one_of=("ce", "mmi", "bmmi", "mpe", "smbr", "lfmmi"))
    # of log likelihoods against the graph; not for lfmmi (Kaldi: 0.1)
    acoustic_scale: float = knob(0.1, above=0.0, high=10.0, used="kind=mmi|bmmi|mpe|smbr")
    boost: float = knob(0.1, low=0.0, high=10.0, used="kind=bmmi")  # nats that a wrong frame is given (Kaldi: 0.1)
    one_silence_class: bool = knob(True, used="kind=mpe|smbr|bmmi")  # any silence is right where silence is; else none is
    # share of cross-entropy (frame smoothing); lfmmi: added, times this
    cross_entropy: float = knob(0.0, low=0.0, high=1.0, used="kind=mmi|bmmi|mpe|smbr|lfmmi")
    chunk_frames: int = knob(0, low=0, high=100000, used="kind=lfmmi")  # length of pieces of utterances; 0: whole (Kaldi: 150)
    ngram_order: int = knob(7, low=2, high=100, used="kind=lfmmi")  # of the denominator's n-gram of states; 1 + 3 k: k phones back
    # weight of jumps to any state (Kaldi: 1e-5, its recipes 0.1)
    leaky_hmm: float = knob(0.1, low=0.0, high=1.0, used="kind=lfmmi")
    output_l2: float = knob(0.00005, low=0.0, used="kind=lfmmi")  # on the outputs, per frame (Kaldi: 0, its recipes 5e-5)
    equalise_layers: bool = knob(False)                       # layers' rates follow, so that all change alike (nnet2)
    # with it: how much the output layer changes, relative to that
    last_layer_factor: float = knob(1.0, above=0.0, high=100.0, used="equalise_layers")


# Kinds of preconditioners, as `ngsgd.preconditioners` has them
METHODS = ("kfac", "skfac", "ekfac", "kflr", "kfra", "tnt", "diagonal", "unit", "layer", "full", "seng", "smw", "shampoo", "soap",
            "mfac", "tonga", "psgd", "kbfgs", "lbfgs", "hessian_free", "adahessian", "simple", "online", "adam", "adamw", "muon")
WITHOUT_DECAY = ("skfac", "seng", "smw", "mfac", "lbfgs", "simple", "online")
WITHOUT_MEAN = (*WITHOUT_DECAY, "tonga")
EVERY_MINIBATCH = ("hessian_free", "simple", "online", "adam", "adamw", "muon")
FISHER_OF = {"kflr": "exact", "kfra": "exact", "tnt": "mc", "kbfgs": "empirical", "simple": "empirical", "online": "empirical"}
# Options whose default in a run differs from that of the library's classes, which do the plain method at every step: in a run
# steps have the norm of the gradient, so that learning rates keep their meaning, the curvature is updated every 10
# minibatches, and jobs hand it on.  All other defaults are equal, which a test holds.
OF_A_RUN = ("graft", "curvature_interval", "inverse_interval", "averaging")


def _kinds(kinds: Iterable[str]) -> str:
    return f"kind={'|'.join(kinds)}"


def _all_but(*kinds: str) -> str:
    return _kinds(kind for kind in METHODS if kind not in kinds)


_ADAM = ("adam", "adamw", "muon")
_OF_FISHER = ("kfac", "skfac", "ekfac", "diagonal", "unit", "layer", "full", "seng", "smw")   # any Fisher matrix


@dataclass(frozen=True)
class PreconditionerConfig:
    """What turns a minibatch's gradient into the direction of a step, in place of the online natural gradient."""

    kind: str = knob("none", one_of=("none", *METHODS))
    # added to the curvature of the mean loss per frame; shampoo: times the largest eigenvalue; soap, adam, adamw, muon: Adam's eps;
    # simple, online: of layers that are not affine alone
    damping: float = knob(1e-2, above=0.0, used=_all_but(),
                          of_kind={"shampoo": 1e-6, **dict.fromkeys(("soap", *_ADAM), 1e-8)})
    # minibatches between two curvature updates
    curvature_interval: int = knob(10, low=1, used=_all_but(*EVERY_MINIBATCH),
                                   of_kind=dict.fromkeys(("mfac", *EVERY_MINIBATCH), 1))
    # minibatches between two inverses of the curvature
    inverse_interval: int = knob(10, low=1, used=_all_but("lbfgs", *EVERY_MINIBATCH),
                                 of_kind=dict.fromkeys(("mfac", *EVERY_MINIBATCH), 1))
    # share of the past in the curvature at each update; soap, adam, adamw, muon: beta 2
    ema_decay: float = knob(0.95, low=0.0, high=0.9999, used=_all_but("psgd", *WITHOUT_DECAY),
                            of_kind={**dict.fromkeys(WITHOUT_DECAY, 0.0), **dict.fromkeys(_ADAM, 0.999)})
    # whose derivatives: empirical (of targets), mc (of sampled targets), exact (Gauss-Newton)
    fisher: str = knob("empirical", one_of=("empirical", "mc", "exact"), used=_kinds(_OF_FISHER), of_kind=FISHER_OF)
    # Monte Carlo samples per frame
    num_draws: int = knob(1, low=1, used=f"{_kinds((*_OF_FISHER, 'tnt'))} & fisher=mc")
    # positions of a sample as frames, or as one
    sharing: str = knob("expand", one_of=("expand", "reduce"), used="kind=kfac|skfac|ekfac|kflr|kfra")
    # gradient: each layer's direction gets the norm of its gradient
    graft: str = knob("gradient", one_of=("none", "gradient"), used=_all_but())
    # limit on lr^2 <P g, g> of a minibatch; 0 = none
    kl_clip: float = knob(0.0, low=0.0, used=_all_but())
    # limit on the L2 norm of the direction; 0 = none
    max_grad_norm: float = knob(0.0, low=0.0, used=_all_but())
    # layers that keep their gradient: names, patterns or classes, by commas
    skip: str = knob("", used=_all_but())
    # the curvature between jobs: reset, keep its own, or average all jobs' for all
    averaging: str = knob("reset", one_of=("reset", "keep", "average"), used=_all_but(),
                          of_kind={**dict.fromkeys(("diagonal", "adahessian", "adam", "adamw"), "average"), "soap": "keep"})
    block_size: int = knob(1024, low=1, used="kind=shampoo|soap")  # largest dimension of a factor
    sketch: int = knob(0, low=0, used="kind=seng")                 # coordinates that the Gram matrix is estimated from; 0 = all
    num_gradients: int = knob(32, low=1, used="kind=mfac")         # gradients kept
    rank: int = knob(10, low=1, used="kind=tonga")                 # eigenvectors kept of each layer
    # factors of each layer, or one matrix for a tiny model
    form: str = knob("kronecker", one_of=("kronecker", "full"), used="kind=psgd")
    factor_lr: float = knob(0.1, above=0.0, high=0.99, used="kind=psgd")  # relative step of a factor
    hessian_power: float = knob(1.0, above=0.0, high=1.0, used="kind=adahessian")  # of the diagonal; 0.5 is gentler
    num_pairs: int = knob(10, low=1, used="kind=lbfgs")            # pairs of steps and changes of the gradient kept
    # of the Gauss-Newton matrix or of the Hessian
    products: str = knob("ggn", one_of=("ggn", "hessian"), used="kind=hessian_free")
    max_cg_steps: int = knob(10, low=1, used="kind=hessian_free")  # products per minibatch, each about two backward passes
    alpha: float = knob(4.0, above=0.0, used="kind=simple|online")  # smoothing towards the identity
    # share of the past in the first moment, beta 1
    momentum: float = knob(0.9, low=0.0, high=0.9999, used=_kinds(("soap", *_ADAM)), of_kind={"muon": 0.95, "soap": 0.95})
    # share of the parameter in the direction
    weight_decay: float = knob(0.0, low=0.0, used=_kinds(_ADAM), of_kind={"adamw": 0.01})

    def __post_init__(self) -> None:
        for spec in fields(self):
            if getattr(self, spec.name) is None:   # not given
                object.__setattr__(self, spec.name, default_of(spec, self.kind))


@dataclass(frozen=True)
class OuterConfig:
    """What turns the mean of the jobs into the next model (`ngsgd.optim.outer`)."""

    kind: str = knob("bmuf", one_of=("average", "bmuf", "diloco", "slowmo", "easgd", "fedopt", "streaming"))
    gain: float = knob(0.0, low=0.0, used="kind=bmuf")  # 1 = averaging, num_jobs = BMUF; 0: its square root, if there is time
    nesterov_lr: float = knob(0.7, above=0.0, used="kind=diloco|streaming")  # outer learning rate
    nesterov_momentum: float = knob(0.9, low=0.0, high=0.999, used="kind=diloco|streaming")  # diloco, streaming
    # momentum; fairscale: 0 below 4 nodes, 0.2 at 4, 0.5 at 8, 0.6 at 16
    slowmo_beta: float = knob(0.5, low=0.0, high=0.999, used="kind=slowmo")
    slowmo_alpha: float = knob(1.0, above=0.0, used="kind=slowmo")  # outer learning rate
    # how far the centre goes to the mean; a job is pulled by beta / num_jobs
    easgd_beta: float = knob(0.9, above=0.0, high=1.0, used="kind=easgd")
    fedopt_kind: str = knob("adam", one_of=("adam", "yogi"), used="kind=fedopt")
    fedopt_lr: float = knob(0.01, above=0.0, used="kind=fedopt")
    num_fragments: int = knob(1, low=1, high=1000, used="kind=streaming")  # groups of layers; one is averaged per outer iteration
    delay: int = knob(0, low=0, high=1, used="kind=streaming")  # outer iterations before a fragment's average is taken in
    # share of its own fragment that a job keeps (0.5 with delay)
    mixing: float = knob(0.0, low=0.0, high=1.0, used="kind=streaming")
    overlap: bool = knob(False)                      # jobs go on while the others' are averaged, on a model one outer iteration old
    ema_decay: float = knob(0.0, low=0.0, high=0.9999)  # the final model is a moving average over outer iterations; 0 = it is not

    @property
    def goes_on(self) -> bool:
        """Jobs start from what the job of the same number left, and not from the model alone."""
        return self.overlap or self.kind in ("easgd", "streaming")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long, at which rate, on how many jobs; the formulas are Kaldi's (`ngsgd.schedules`)."""

    num_epochs: float = knob(2.5, above=0.0, high=1000.0)
    minibatch_size: int = knob(128, low=1)           # frames; C.1: 128 for CPU threads, 512 for GPUs
    lr_initial: float = knob(0.005, above=0.0)       # effective learning rate per frame; a job's rate is this times num_jobs
    lr_final: float = knob(0.0003, above=0.0)
    # on the exponential schedule between the two, at even distances over the data, geometric between; made by ngsgd tune
    lr_factors: tuple[float, ...] = knob((1.0,))
    num_jobs_initial: int = knob(1, low=1, high=100000)
    num_jobs_final: int = knob(2, low=1, high=100000)
    num_jobs_step: int = knob(1, low=1, high=100000)              # num_jobs grows in multiples of this
    shares: str = knob("equal", one_of=("equal", "speed", "time"))  # of a job: a whole archive; by its worker's speed; round_s long
    # shares=time: seconds of an outer iteration; every job has what it could do
    round_s: float = knob(60.0, above=0.0, used="shares=time")
    # kaldi: the first outer iteration, and each with a new layer, halves the minibatch, limits the change more, keeps the best job
    early_rules: str = knob("none", one_of=("none", "kaldi"))


@dataclass(frozen=True)
class ClusterConfig:
    """Where the jobs run."""

    kind: str = knob("ray", one_of=("in_process", "local", "ray", "slurm", "kubernetes"))  # the last two: for ngsgd submit
    num_workers: int = knob(2, low=1, high=10000)
    threads_per_worker: int = knob(0, low=0)         # 0: cores divided by workers, at least 1
    device: str = knob("auto", one_of=("auto", "cpu", "cuda"))  # auto: a GPU where Ray offers one, else CPU
    address: str = knob("", used="kind=ray")  # Ray cluster to join, host:port or auto; empty: start one on this machine
    start_timeout_s: float = knob(120.0, above=0.0)  # for a worker to report that it is ready
    min_workers: int = knob(1, low=1)                # with fewer for longer than start_timeout_s the run stops
    # where means are made: by the coordinator, from shared memory on its machine and Ray's object store elsewhere (auto), or by the
    # workers themselves over gloo (collective) or between whole GPUs (nccl, untested); auto never chooses the last two
    exchange: str = knob("auto", one_of=("auto", "shared_memory", "object_store", "collective", "nccl"))
    # collective: a worker that has not given its share of the mean by then hangs
    exchange_timeout_s: float = knob(60.0, above=0.0, used="exchange=collective|nccl")
    compression: str = knob("none", one_of=("none", "bf16", "int8", "e3m0"))  # of moves on their way to other machines; not exact
    elastic: bool = knob(False)                      # with fewer workers alive: fewer jobs per outer iteration, in place of a queue


@dataclass(frozen=True)
class FailureConfig:
    """What may go wrong before the run stops."""

    policy: str = knob("retry", one_of=("retry", "defer", "drop"))  # a failed job: at once, in the next outer iteration, not at all
    max_attempts: int = knob(3, low=1)               # tries for one shard
    on_poison: str = knob("quarantine", one_of=("quarantine", "stop"))  # for a shard all of whose tries ended a worker
    progress_timeout_s: float = knob(30.0, above=0.0)  # a worker without a minibatch for this long, and for 5 median ones, hangs
    max_worker_deaths: int = knob(-1, low=-1)        # for the whole run; -1 = unlimited
    max_restarts_per_hour: int = knob(60, low=-1)    # of one worker; beyond that the run goes on without it; -1 = unlimited
    objf_tolerance: float = knob(1.0, above=0.0)     # nats per frame; a job this far below the best is rejected (Kaldi: 1.0)
    min_accepted: float = knob(0.5, above=0.0, high=1.0)  # share of an iteration's jobs that must be accepted
    on_divergence: str = knob("stop", one_of=("stop", "halve"))  # too few accepted: stop, or go back and halve the learning rate
    max_rollbacks: int = knob(3, low=1, used="on_divergence=halve")  # in a row, for one outer iteration
    grace_s: float = knob(5.0, low=0.0)              # after Ctrl-C or SIGTERM: time for the running outer iteration to finish


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint follows every outer iteration."""

    num_to_keep: int = knob(3, low=1)


@dataclass(frozen=True)
class CombinationConfig:
    """The final model from the last ones, chosen on held-out frames (C.4)."""

    kind: str = knob("mean", one_of=("none", "mean", "generalised"))  # newest; mean of the newest n; weights by layer
    max_models: int = knob(20, low=1, high=1000, used="kind=mean|generalised")  # Kaldi: 20
    max_evaluations: int = knob(30, low=1, used="kind=mean|generalised")  # of the held-out objf


@dataclass(frozen=True)
class DecodeConfig:
    """Hybrid decoding: log posterior minus log prior, in a graph of words."""

    acoustic_scales: tuple[float, ...] = knob((0.05, 0.07, 0.1, 0.15, 0.2, 0.3))  # swept on valid; the best one is used on test
    word_penalties: tuple[float, ...] = knob((0.0, 2.0, 4.0, 6.0, 8.0))         # cost per word, swept likewise
    beam: float = knob(16.0, above=0.0)
    max_active: int = knob(7000, low=2)
    num_prior_frames: int = knob(20000, low=1)       # training frames whose average posterior is the prior (Kaldi: 20000)
    graph: str = knob("auto", one_of=("auto", "made", "given"))  # auto: the one that comes with the corpus, else made
    # made graphs: silence between words (Kaldi: 0.5); 0: it costs nothing
    silence_prob: float = knob(0.0, low=0.0, high=0.99, used="graph=auto|made")
    oracle: bool = knob(False)                       # also the setting that is best on test, as in Kaldi's RESULTS; so labelled
    lattices: bool = knob(False)                     # write the test set's lattices (OpenFst's text form)
    lattice_beam: float = knob(8.0, above=0.0, used="lattices")


@dataclass(frozen=True)
class ProxyConfig:
    """The short run that hyperparameters are tuned on."""

    steps: int = knob(400, low=2, high=1000000)      # minibatches of each job
    outer_iters: int = knob(4, low=1, high=10000)    # averagings; must divide steps


@dataclass(frozen=True)
class TuneConfig:
    """Hyperparameters by gradient (`ngsgd tune`): docs/tuning.md."""

    space: tuple[str, ...] = knob(("schedule", "layer_lr", "l2", "momentum"))  # also max_change, init_scale
    knots: int = knob(6, low=2, high=100)            # of the learning-rate schedule; 2: an exponential one
    proxy: ProxyConfig = field(default_factory=ProxyConfig)
    budget: float = knob(60.0, above=0.0)            # plain runs of the proxy; a hypergradient counts as 4.2
    seed_share: float = knob(0.25, low=0.0, high=1.0)  # of the budget for the coarse search over initial and final rate
    workers: int = knob(0, low=0, high=1000)         # jobs that are averaged; 0: schedule.num_jobs_final
    engine: str = knob("auto", one_of=("auto", "store", "reversible", "checkpoint"))
    memory_gb: float = knob(1.0, above=0.0, used="engine=auto")  # store where all steps fit into this
    rates: float = knob(30.0, above=1.0)             # rates move by at most this factor from the recipe's
    multipliers: tuple[float, ...] = knob((1.0, 0.5, 0.25))  # ngsgd tune transfer: of all rates, on a longer run
    transfer_steps: int = knob(0, low=0)             # minibatches of each job of that run; 0: four times the proxy's


@dataclass(frozen=True)
class TrackingConfig:
    """MLflow; the event log in the run folder is written in any case."""

    kind: str = knob("mlflow", one_of=("mlflow", "none"))
    uri: str = knob("", used="kind=mlflow")  # MLflow tracking URI; empty: sqlite:///<output_dir>/mlflow.db
    experiment: str = knob("", used="kind=mlflow")  # empty: <corpus>-<model kind>
    # a child run for each worker, up to 32: their curves overlaid, at a request each
    worker_runs: bool = knob(False, used="kind=mlflow")
    model: bool = knob(True, used="kind=mlflow")  # the final model too, for mlflow.pyfunc.load_model; safetensors, no pickle
    # name in MLflow's model registry that the final model becomes a version of; empty: none
    register_as: str = knob("", used="kind=mlflow")
    curvature_frames: int = knob(0, low=0)  # of the train subset: gradient noise and curvature by layer; 0: none, else at least 2
    # load, memory, disk and network of each machine (up to 32), with every outer iteration
    system: bool = knob(True, used="kind=mlflow")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run."""

    output_dir: str = knob("runs")    # holds run folders, prepared data and the tracking database
    name: str = knob("")              # run name; empty: made from what tells runs apart
    seed: int = knob(0, low=0)        # with the outer iteration and the job it decides every random draw of training
    init_model: str = knob("")        # run whose final model training starts from, with its priors; empty: a random start
    data: DataConfig = field(default_factory=DataConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    ivectors: IvectorConfig = field(default_factory=IvectorConfig)
    align: AlignConfig = field(default_factory=AlignConfig)
    egs: EgsConfig = field(default_factory=EgsConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    preconditioner: PreconditionerConfig = field(default_factory=PreconditionerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    failure: FailureConfig = field(default_factory=FailureConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    combination: CombinationConfig = field(default_factory=CombinationConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)

    @property
    def keeps_curvature(self) -> bool:
        """A job goes on from the Fisher estimates, or the preconditioner's curvature, that its predecessor left."""
        return (self.optimizer.ng_state if self.preconditioner.kind == "none" else self.preconditioner.averaging) != "reset"


def default_of(spec: Field[Any], kind: str) -> Any:
    """The default of a setting in a section of that kind."""
    return spec.metadata["of_kind"].get(kind, spec.metadata["default"])


@dataclass(frozen=True)
class Unused:
    """A setting that has no effect with the other settings of a run."""

    path: str        # such as outer.nesterov_lr
    value: Any
    is_set: bool     # to another value than its default
    switches: tuple[str, ...]  # the settings that decide whether it is used
    switch: str      # the one of them that does not fit, what it is, and what it has to be
    is_now: Any
    wanted: str
    options: tuple[str, ...]   # settings of the same section that have an effect

    @property
    def sentence(self) -> str:
        """For the person who set it."""
        told, now = f"{self.path} is {_text(self.value)}, but", f"{self.switch}={_text(self.is_now)}"
        if self.switch.rpartition(".")[2] in ("kind", "corpus") and self.wanted:
            options = f"Options of {self.is_now}: {', '.join(self.options)}." if self.options else f"{self.is_now} has no options."
            return f"{told} {now} does not use it; leave it out. {options}"
        if self.wanted == "!":
            return f"{told} {now} does not use it; leave it out."
        needed = self.wanted.replace("|", " or ") or ("true" if self.is_now is False else "VALUE")
        return f"{told} it has no effect with {now}; leave it out, or set {self.switch}={needed}."


def unused(config: RunConfig) -> Iterator[Unused]:
    """All settings of a run that have no effect in it, whatever their value."""
    for spec in fields(config):
        section = getattr(config, spec.name)
        if is_dataclass(section):
            yield from unused_in(section, f"{spec.name}.")


def unused_in(section: Any, prefix: str = "") -> Iterator[Unused]:
    """The same for one section, whose settings are called `prefix` and their name."""
    terms = {spec.name: [term for term in spec.metadata.get("used", "").split(" & ") if term] for spec in fields(section)}
    broken = {name: next((term for term in of_it if not _holds(term, section)), "") for name, of_it in terms.items()}
    for spec in fields(section):
        if term := broken[spec.name]:
            name, _, wanted = term.lstrip("!").partition("=")
            value = getattr(section, spec.name)
            options = tuple(other for other in broken if not broken[other] and other != name
                            and not is_dataclass(getattr(section, other)))
            yield Unused(f"{prefix}{spec.name}", value, value != default_of(spec, getattr(section, "kind", "")),
                         tuple(prefix + other.lstrip("!").partition("=")[0] for other in terms[spec.name]),
                         prefix + name, getattr(section, name), "!" if term.startswith("!") else wanted, options)


def without_unused(section: Section) -> Section:
    """The same with the default of each setting that has no effect in it."""
    specs = {spec.name: spec for spec in fields(section)}
    return replace(section, **{found.path: default_of(specs[found.path], getattr(section, "kind", ""))
                               for found in unused_in(section)})


def _holds(term: str, section: Any) -> bool:
    name, _, wanted = term.lstrip("!").partition("=")
    value = getattr(section, name)
    return (value in wanted.split("|") if wanted else bool(value)) != term.startswith("!")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if value == "" else f"{value}"


def check(config: RunConfig) -> list[str]:
    """One sentence per wrong value; an empty list when the configuration can run."""
    problems = [sentence for path, spec, value in _leaves(config, "") for sentence in _check_value(path, spec.metadata, value)]
    return problems or [sentence for rule in _RULES for sentence in rule(config)]


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any, Any]]:
    for spec in fields(node):
        value = getattr(node, spec.name)
        if is_dataclass(value):
            yield from _leaves(value, f"{prefix}{spec.name}.")
        else:
            yield f"{prefix}{spec.name}", spec, value


def _check_value(path: str, allowed: Any, value: Any) -> Iterator[str]:
    if allowed.get("one_of") and value not in allowed["one_of"]:
        yield f"{path} is {value!r}; choose one of {', '.join(map(str, allowed['one_of']))}."
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high, above = allowed.get("low"), allowed.get("high"), allowed.get("above")
        if math.isnan(value):  # passes every comparison below
            yield f"{path} is not a number; give a finite value."
        elif low is not None and value < low:
            yield f"{path} is {value}; it must be at least {low:g}."
        elif above is not None and value <= above:
            yield f"{path} is {value}; it must be greater than {above:g}."
        elif high is None and isinstance(value, int) and value > _LARGEST_INT:
            yield f"{path} is {value}; it must be at most {_LARGEST_INT}."
        elif high is not None and value > high:
            yield f"{path} is {value}; it must be at most {high:g}."


_MAX_NAME_BYTES = 200   # a folder's name has at most 255, and a run's has its time and a number behind this


def _rule_name(c: RunConfig) -> Iterator[str]:
    """The name is a part of a folder's name, by which --continue and other commands find the run again."""
    if not c.name:
        return
    if not c.name.isprintable() or any(letter in c.name for letter in "/\\") or c.name[0] in ".- " or c.name[-1] == " ":
        yield (f"name is {c.name!r}, and it becomes part of a folder's name; leave out / and \\, characters that cannot be "
               "printed, and . - or a space at its beginning. Another place is output_dir=PATH.")
    elif len(c.name.encode()) > _MAX_NAME_BYTES:
        yield f"name has {len(c.name.encode())} bytes; give at most {_MAX_NAME_BYTES}."


def _rule_snr(c: RunConfig) -> Iterator[str]:
    if c.data.snr_db_low > c.data.snr_db_high:
        yield f"data.snr_db_low is {c.data.snr_db_low} and above data.snr_db_high, {c.data.snr_db_high}; swap them."


def _rule_augment(c: RunConfig) -> Iterator[str]:
    for low, high in (("noise_snr_db_low", "noise_snr_db_high"), ("rt60_ms_low", "rt60_ms_high"), ("volume_low", "volume_high")):
        if getattr(c.augment, low) > getattr(c.augment, high):
            yield (f"augment.{low} is {getattr(c.augment, low)} and above augment.{high}, {getattr(c.augment, high)}; "
                   "swap them.")
    wrong = [factor for factor in c.augment.speed_factors if not 0.5 <= factor <= 2.0]
    if wrong or not c.augment.speed_factors:
        yield f"augment.speed_factors is {list(c.augment.speed_factors)}; give one or more factors from 0.5 to 2."
    elif len(set(c.augment.speed_factors)) < len(c.augment.speed_factors):
        yield f"augment.speed_factors is {list(c.augment.speed_factors)}; name each factor once."
    if c.augment.changes_audio and c.features.kind == "given":
        yield (f"augment changes audio, and data.corpus={c.data.corpus} comes as features; leave only augment.spec on "
               "(augment=spec).")


def _rule_curvature(c: RunConfig) -> Iterator[str]:
    for name, value in (("tracking.curvature_frames", c.tracking.curvature_frames),
                        ("egs.num_diagnostic_frames", c.egs.num_diagnostic_frames)):
        if c.tracking.curvature_frames and value < 2:
            yield (f"{name} is {value}, and the noise of a gradient takes at least 2 frames; raise it, or set "
                   "tracking.curvature_frames=0.")


def _rule_rate(c: RunConfig) -> Iterator[str]:
    if c.data.corpus in ("digits", "fsdd", "yesno") and c.features.sample_rate_hz != 8000:
        yield f"features.sample_rate_hz is {c.features.sample_rate_hz}, and {c.data.corpus} is sampled at 8000 Hz; set 8000."


def _rule_given_features(c: RunConfig) -> Iterator[str]:
    if c.data.corpus == "an4" and c.features.kind != "given":
        yield f"features.kind is {c.features.kind}, and data.corpus=an4 comes as cepstra, without audio; set features.kind=given."
    if c.features.kind == "given" and c.data.corpus not in ("an4", "kaldi"):
        yield f"features.kind is given, and data.corpus={c.data.corpus} comes as audio; set features.kind=fbank or mfcc."


def _rule_given_cmvn(c: RunConfig) -> Iterator[str]:
    if c.features.cmvn == "given" and (c.features.kind != "given" or c.data.corpus != "kaldi"):
        yield (f"features.cmvn is given with features.kind {c.features.kind} and data.corpus {c.data.corpus}; cmvn.scp stands in "
               "Kaldi data directories beside feats.scp (recipe=kaldi features.kind=given).")


def _rule_held_out(c: RunConfig) -> Iterator[str]:
    if (c.data.split == "loo") != bool(c.data.held_out):
        yield (f"data.split is {c.data.split} with data.held_out {c.data.held_out!r}; split=loo, and only that, needs the speaker "
               "of the test set: data.split=loo data.held_out=theo.")


def _rule_align_lr(c: RunConfig) -> Iterator[str]:
    if c.align.lr_final > c.align.lr_initial:
        yield f"align.lr_final is {c.align.lr_final} and above align.lr_initial, {c.align.lr_initial}; the rate can only fall."


def _rule_ceps(c: RunConfig) -> Iterator[str]:
    if c.features.kind == "mfcc" and c.features.num_ceps > c.features.num_mel_bins:
        yield f"features.num_ceps is {c.features.num_ceps}; it can be at most features.num_mel_bins, {c.features.num_mel_bins}."


def _rule_pnorm(c: RunConfig) -> Iterator[str]:
    if c.model.kind == "pnorm" and not c.model._target_ and c.model.hidden_dim % c.model.pnorm_group:
        yield (f"model.hidden_dim is {c.model.hidden_dim}; with model=pnorm it must be a multiple of model.pnorm_group, "
               f"{c.model.pnorm_group}.")


def _rule_tdnn(c: RunConfig) -> Iterator[str]:
    if c.model.kind not in ("tdnn", "tdnnf") or c.model._target_:
        return
    try:
        layers = c.model.layer_offsets()
    except ValueError:
        yield (f"model.tdnn_offsets is {c.model.tdnn_offsets!r}; write rising frame offsets with commas between them, and a space "
               "between two layers, such as '-2,-1,0,1,2 -1,1'.")
        return
    if len(layers) != c.model.num_layers:
        yield f"model.tdnn_offsets is for {len(layers)} layers, and model.num_layers is {c.model.num_layers}; make them equal."
    else:
        left, right = -sum(min(0, layer[0]) for layer in layers), sum(max(0, layer[-1]) for layer in layers)
        if left > c.egs.left_context or right > c.egs.right_context:
            yield (f"model.tdnn_offsets reaches {left} frames back and {right} ahead, but examples have egs.left_context "
                   f"{c.egs.left_context} and egs.right_context {c.egs.right_context}; raise these or narrow the offsets.")


def _rule_stages(c: RunConfig) -> Iterator[str]:
    changes = [name for name, used in (("add_layers_period", c.model.add_layers_period), ("num_subclasses", c.model.num_subclasses))
               if used]
    if changes and c.outer.goes_on:
        why = "outer.overlap" if c.outer.overlap else f"outer.kind {c.outer.kind}"
        yield (f"model.{changes[0]} changes the model between outer iterations, but with {why} jobs go on from what they had "
               "before; choose another outer optimiser, or leave it 0.")
    if c.schedule.early_rules == "kaldi" and (c.outer.goes_on or c.schedule.shares != "equal"):
        why = f"schedule.shares {c.schedule.shares}" if c.schedule.shares != "equal" else f"outer.kind {c.outer.kind}"
        why = "outer.overlap" if c.outer.overlap else why
        yield f"schedule.early_rules is kaldi with {why}, which needs every job's result; leave it none."


def _rule_own_model(c: RunConfig) -> Iterator[str]:
    if c.model._target_:
        for name in ("num_subclasses", "add_layers_period", "prior_scale_power"):
            if getattr(c.model, name):
                yield f"model.{name} is {getattr(c.model, name)} with model._target_, whose layers are its own; leave it 0."
        if c.model.input_transform != "none":
            yield (f"model.input_transform is {c.model.input_transform} with model._target_, which takes features as they are; "
                   "leave it none.")


def _rule_lr(c: RunConfig) -> Iterator[str]:
    if c.schedule.lr_final > c.schedule.lr_initial:
        yield (f"schedule.lr_final is {c.schedule.lr_final} and above schedule.lr_initial, {c.schedule.lr_initial}; "
               "the rate can only fall.")


def _rule_jobs(c: RunConfig) -> Iterator[str]:
    if c.schedule.num_jobs_final < c.schedule.num_jobs_initial:
        yield (f"schedule.num_jobs_final is {c.schedule.num_jobs_final}; it must be at least schedule.num_jobs_initial, "
               f"{c.schedule.num_jobs_initial}.")


def _rule_backstitch(c: RunConfig) -> Iterator[str]:
    if c.optimizer.backstitch_scale and c.optimizer.momentum:
        yield (f"optimizer.backstitch_scale is {c.optimizer.backstitch_scale} with optimizer.momentum {c.optimizer.momentum}; "
               "backstitch needs momentum 0.")


def _rule_preconditioner(c: RunConfig) -> Iterator[str]:
    if c.preconditioner.kind == "none":
        return
    if c.optimizer.kind != "sgd":
        yield (f"preconditioner.kind is {c.preconditioner.kind} with optimizer.kind {c.optimizer.kind}, which preconditions too; "
               "choose optimizer.kind=sgd.")
    if c.optimizer.backstitch_scale:
        yield (f"optimizer.backstitch_scale is {c.optimizer.backstitch_scale} with preconditioner.kind "
               f"{c.preconditioner.kind}, whose curvature would be taken twice from a minibatch; set it to 0.")
    if c.preconditioner.kind in WITHOUT_MEAN and c.preconditioner.averaging == "average":
        yield (f"preconditioner.averaging is average, but rows or gradients, which {c.preconditioner.kind} keeps, have no mean; "
               "choose reset or keep.")


def _rule_shrink(c: RunConfig) -> Iterator[str]:
    lr = c.schedule.lr_initial * c.schedule.num_jobs_final
    if c.optimizer.proportional_shrink * lr >= 0.5:
        yield (f"optimizer.proportional_shrink is {c.optimizer.proportional_shrink}; at a job's learning rate of {lr} it would "
               "take half of the model or more, so lower it.")


def _rule_dropout(c: RunConfig) -> Iterator[str]:
    if c.model.dropout_schedule:
        try:
            DropoutSchedule.parse(c.model.dropout_schedule)
        except ConfigError as error:
            yield f"model.dropout_schedule: {error}"


def _rule_outer(c: RunConfig) -> Iterator[str]:
    if c.outer.overlap and c.outer.kind in ("easgd", "streaming"):
        also = "; outer.delay=1 is its own overlap" if c.outer.kind == "streaming" else ""
        yield f"outer.overlap is true with outer.kind {c.outer.kind}, whose jobs go on from their own models{also}; leave it false."
    if c.cluster.min_workers > c.cluster.num_workers:
        yield f"cluster.min_workers is {c.cluster.min_workers}, more than cluster.num_workers, {c.cluster.num_workers}; lower it."
    if c.schedule.shares == "time" and c.cluster.kind == "in_process":
        yield "schedule.shares is time with cluster.kind in_process, where jobs run one after another; choose local or ray."
    if c.outer.gain and not 1.0 <= c.outer.gain <= c.schedule.num_jobs_final:
        yield (f"outer.gain is {c.outer.gain}; it goes from 1 (averaging) to schedule.num_jobs_final, "
               f"{c.schedule.num_jobs_final}, or is 0 for a good value in between.")


def _rule_exchange(c: RunConfig) -> Iterator[str]:
    cluster = c.cluster
    possible = {"in_process": ("auto",), "local": ("auto", "shared_memory", "collective")}.get(cluster.kind)
    if possible and cluster.exchange not in possible:
        yield f"cluster.exchange is {cluster.exchange}; with cluster.kind {cluster.kind} it can be {' or '.join(possible)}."
    if cluster.exchange in ("collective", "nccl") and c.outer.goes_on:
        why = "outer.overlap" if c.outer.overlap else f"outer.kind {c.outer.kind}"
        yield f"cluster.exchange is {cluster.exchange} with {why}, whose jobs go on from their own results; leave it auto."
    if cluster.compression != "none" and (cluster.exchange == "shared_memory" or (possible and cluster.exchange == "auto")):
        yield (f"cluster.compression is {cluster.compression}, but nothing leaves this machine; leave it none, or choose "
               "cluster.exchange=collective.")


def _rule_layers(c: RunConfig) -> Iterator[str]:
    known = ("lr_factor", "max_change", "weight_decay")
    for layer, options in (c.optimizer.layer_options or {}).items():
        if not isinstance(options, Mapping) or not all(key in known and _is_number(value) and value >= 0.0
                                                       for key, value in options.items()):
            yield (f"optimizer.layer_options[{layer}] is {options!r}; give {', '.join(known)}, at least 0 each, such as "
                   "{lr_factor: 1.3}.")
    for layer, scale in (c.model.init_scales or {}).items():
        if not _is_number(scale) or scale <= 0.0:
            yield f"model.init_scales[{layer}] is {scale!r}; give a number above 0."
    if wrong := [factor for factor in c.schedule.lr_factors if factor <= 0.0]:
        yield f"schedule.lr_factors has {wrong[0]}; each must be above 0."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _rule_objective(c: RunConfig) -> Iterator[str]:
    kind = c.objective.kind
    if c.init_model and (c.model.num_subclasses or c.model.add_layers_period):
        name = "num_subclasses" if c.model.num_subclasses else "add_layers_period"
        yield f"init_model is {c.init_model} with model.{name} {getattr(c.model, name)}, which builds a model up anew; leave it 0."
    if kind == "ce":
        return
    if c.combination.kind != "none":
        yield (f"combination.kind is {c.combination.kind}, which chooses by the cross-entropy of held-out frames, and "
               f"objective.kind is {kind}; set combination.kind=none (objective={kind} does).")
    if c.preconditioner.kind != "none":
        yield (f"preconditioner.kind is {c.preconditioner.kind}, which needs the loss of single frames, and objective.kind is "
               f"{kind}; set preconditioner=none.")
    if c.augment.spec:
        yield f"augment.spec masks windows of single frames, and objective.kind is {kind}; set augment.spec=false."
    if c.model.num_subclasses or c.model.add_layers_period:
        yield f"objective.kind is {kind}, and the model changes on the way; set model.num_subclasses and add_layers_period to 0."


def _rule_tune(c: RunConfig) -> Iterator[str]:
    if c.tune.proxy.steps % c.tune.proxy.outer_iters:
        yield (f"tune.proxy.steps is {c.tune.proxy.steps}, no multiple of tune.proxy.outer_iters, {c.tune.proxy.outer_iters}; "
               "between two averagings every job takes as many minibatches.")


_RULES: tuple[Callable[[RunConfig], Iterator[str]], ...] = (_rule_name, _rule_snr, _rule_augment, _rule_curvature, _rule_rate,
                                                           _rule_given_features, _rule_given_cmvn,
                                                           _rule_held_out, _rule_align_lr, _rule_ceps, _rule_pnorm, _rule_tdnn,
                                                           _rule_stages, _rule_own_model, _rule_lr, _rule_jobs,
                                                          _rule_backstitch, _rule_preconditioner, _rule_shrink, _rule_dropout,
                                                          _rule_outer, _rule_exchange, _rule_layers, _rule_objective, _rule_tune)
