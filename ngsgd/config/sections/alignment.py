"""Options of alignment from transcripts."""

from __future__ import annotations

from dataclasses import dataclass

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
