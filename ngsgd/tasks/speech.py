"""The speech task of a run, and the description from which workers build it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ngsgd.config import RunConfig
from ngsgd.data.fetching.files import Offer, RemoteData
from ngsgd.data.reader import EgsReader
from ngsgd.errors import ConfigError
from ngsgd.optim.layers.common import without_autocast
from ngsgd.sequence.archives import SequenceReader
from ngsgd.sequence.objectives import Denominator, SequenceObjective
from ngsgd.tasks.frames import FrameClassification, with_accuracy
from ngsgd.training.settings import EngineSettings
from ngsgd.training.task import BatchLoss


class SequenceTraining(FrameClassification):
    """Training on chunks of utterances with a sequence objective and a denominator graph.

    Held-out scores are those of single frames. Results are compared by them, but a drop of the
    average is not divergence, because the training objective is another one.
    """

    optimizes_held_out_objf = False

    def __init__(self, config: RunConfig, frames: EgsReader, sequences: SequenceReader, denominator: Denominator,
                 device: torch.device | None = None) -> None:
        super().__init__(config, frames, device, sequences)
        # the host plans the sums over the paths of each minibatch
        self.can_be_graphed = False
        self._denominator = denominator

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        # sums over all paths need the precision and the range of float32
        logits_NP = model(data.x_ND).float()
        with without_autocast(logits_NP.device.type):
            loss = self._criterion(logits_NP, data.pdf_N, data.lengths, data.log_weight_B, data.chains)
        return with_accuracy(loss, logits_NP, data)

    @cached_property
    def _criterion(self) -> SequenceObjective:
        return SequenceObjective(self.config.objective, self._denominator, device=self.device)


@dataclass(frozen=True)
class SequenceData:
    """Data of sequence objectives, in addition to the examples."""

    # of the archives of sequences
    directory: str
    denominator: Denominator


@dataclass(frozen=True)
class SpeechTaskSpec:
    """The configuration of a run and the folders of its data; small and picklable."""

    config: RunConfig
    egs_directory: str
    sequences: SequenceData | None = None
    # access to the folders that this node does not see; None: it sees all
    remote: RemoteData | None = None

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings.of(self.config)

    def task(self, device: torch.device | None = None) -> FrameClassification:
        """Build the task; the device decides where the objective is computed, and prefetching."""
        if self.config.objective.kind == "ce":
            return FrameClassification(self.config, self.frames(), device, self.shards())
        if self.sequences is None:
            raise ConfigError(f"objective.kind is {self.config.objective.kind}, but this command "
                              "supports single frames only; set objective=ce.")
        reader = self._sequences(self.sequences)
        return SequenceTraining(self.config, self.frames(), reader, self.sequences.denominator, device)

    def frames(self) -> EgsReader:
        """Reader of the examples of single frames."""
        files = self.remote.files(self.egs_directory) if self.remote else None
        return EgsReader(Path(self.egs_directory), files)

    def shards(self) -> EgsReader | SequenceReader:
        """Reader of the shards of jobs."""
        return self.frames() if self.sequences is None else self._sequences(self.sequences)

    def offers(self) -> list[Offer]:
        """Describe the folders to nodes that do not see them; for the coordinator."""
        return [self.frames().offer(), *([self._sequences(self.sequences).offer()] if self.sequences else [])]

    def fetching(self, remote: RemoteData) -> SpeechTaskSpec:
        """Return the description for a node that does not see the folders."""
        return replace(self, remote=remote)

    def _sequences(self, data: SequenceData) -> SequenceReader:
        files = self.remote.files(data.directory) if self.remote else None
        return SequenceReader(Path(data.directory), self.frames(), files)
