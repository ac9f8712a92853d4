"""Options of alignment, of the final model and of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import Section, option
from ngsgd.config.sections.objective import OF_SEQUENCES


@dataclass(frozen=True)
class AlignConfig:
    """Alignment from transcripts (`ngsgd align`): flat start, then Gaussian mixtures."""

    num_gaussians: int = option(1000, "maximum number of Gaussians of all states (Kaldi: 1000)", low=1, high=1_000_000)
    num_full_passes: int = option(
        0, "number of realignments with the network of the run, which is trained for two thirds of "
           "schedule.num_epochs before each; 0: none", low=0, high=10)


@dataclass(frozen=True)
class CombinationConfig(Section):
    """The combination of the last models into the final model, on held-out frames (C.4)."""

    kind: Literal["none", "mean", "generalized"] = option(
        "mean", "final model; none: the last model; mean: mean of the last models; generalized: weights by layer",
        # held-out cross-entropy would choose the model that was trained least
        default_of_kind={f"objective={kind}": "none" for kind in OF_SEQUENCES})


@dataclass(frozen=True)
class DecodeConfig(Section):
    """Hybrid decoding: log posterior minus log prior, in a graph of words."""

    acoustic_scales: tuple[float, ...] = option(
        (0.05, 0.07, 0.1, 0.15, 0.2, 0.3), "acoustic scales to try on the validation set; the best one decodes the test set",
        # the outputs are scores relative to a graph already, so the natural scale is 1
        default_of_kind={"objective=lfmmi": (0.3, 0.5, 0.7, 1.0, 1.4)})
    word_penalties: tuple[float, ...] = option(
        (0.0, 2.0, 4.0, 6.0, 8.0), "costs per word to try on the validation set", unit="nats")
    beam: float = option(16.0, "beam of the decoder", unit="nats", above=0.0)
    max_active: int = option(7000, "maximum number of active states of the decoder", low=2)
    graph: Literal["auto", "made", "given"] = option(
        "auto", "decoding graph; auto: that of the corpus, else generated; made: generated; given: that of the corpus")
    silence_prob: float = option(
        0.0, "probability of silence between words in generated graphs (Kaldi: 0.5); 0: silence "
        "without cost", low=0.0, high=0.99, used="graph=auto|made")
    oracle: bool = option(False, "additional report of the scale and penalty that are best on the "
                          "test set, as in Kaldi's RESULTS files")
    lattices: bool = option(False, "output of the lattices of the test set, in OpenFst's text format")
