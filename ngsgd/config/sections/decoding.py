"""Options of alignment, of the final model and of decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class AlignConfig:
    """Alignment from transcripts alone (`ngsgd align`): flat start, then training and realignment."""

    num_gaussian_passes: int = option(
        20, "realignments with one Gaussian per state after the flat start", low=1, high=100)
    num_passes: int = option(
        2, "realignments with a small network, trained before each", low=0, high=100)
    num_epochs: float = option(2.0, "epochs of each training", above=0.0, high=100.0,
                               used="num_passes")
    num_layers: int = option(2, "hidden layers of the network", low=1, high=64, used="num_passes")
    hidden_dim: int = option(128, "dimension of the hidden layers", low=2, used="num_passes")
    samples_per_iter: int = option(16000, "frames of a job between two averaging steps",
                                   unit="frames", low=1, used="num_passes")


@dataclass(frozen=True)
class CombinationConfig:
    """The combination of the last models into the final model, on held-out frames (C.4)."""

    kind: Literal["none", "mean", "generalized"] = option(
        "mean", "final model: the last one, the mean of the last n, or weights by layer")
    max_models: int = option(20, "maximum number of models (Kaldi: 20)", low=1, high=1000,
                             used="kind=mean|generalized")


@dataclass(frozen=True)
class DecodeConfig:
    """Hybrid decoding: log posterior minus log prior, in a graph of words."""

    acoustic_scales: tuple[float, ...] = option(
        (0.05, 0.07, 0.1, 0.15, 0.2, 0.3), "acoustic scales that are tried on the validation set; "
                                           "the test set is decoded with the best one")
    word_penalties: tuple[float, ...] = option(
        (0.0, 2.0, 4.0, 6.0, 8.0), "costs per word that are tried on the validation set")
    beam: float = option(16.0, "beam of the search", unit="nats", above=0.0)
    max_active: int = option(7000, "maximum number of active states", low=2)
    graph: Literal["auto", "made", "given"] = option(
        "auto", "graph of words; auto: the corpus's graph if it has one, else a generated graph")
    silence_prob: float = option(
        0.0, "probability of silence between words in generated graphs (Kaldi: 0.5); 0: silence "
             "has no cost", low=0.0, high=0.99, used="graph=auto|made")
    oracle: bool = option(
        False, "also report the setting that is best on the test set, as Kaldi's RESULTS do")
    lattices: bool = option(False, "write the lattices of the test set in OpenFst's text form")
    lattice_beam: float = option(8.0, "beam of the lattices", unit="nats", above=0.0,
                                 used="lattices")
