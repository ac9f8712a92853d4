"""The description from which workers make the speech task of a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ngsgd.config import RunConfig
from ngsgd.data.reader import EgsReader
from ngsgd.errors import ConfigError
from ngsgd.sequence.archives import SequenceReader
from ngsgd.sequence.objectives import Denominator
from ngsgd.tasks.frames import FrameClassification
from ngsgd.tasks.sequences import SequenceTraining
from ngsgd.training.settings import EngineSettings


@dataclass(frozen=True)
class SequenceData:
    """The data of sequence objectives, in addition to the examples."""

    # of the archives of sequences
    directory: str
    denominator: Denominator


@dataclass(frozen=True)
class SpeechTaskSpec:
    """A run's configuration and the folders of its data; small and picklable."""

    config: RunConfig
    egs_directory: str
    sequences: SequenceData | None = None

    @property
    def settings(self) -> EngineSettings:
        return EngineSettings.of(self.config)

    def task(self, device: torch.device | None = None) -> FrameClassification:
        """The task; the device decides where the objective is computed and how data is prefetched."""
        if self.config.objective.kind == "ce":
            return FrameClassification(self.config, self.frames(), device, self.shards())
        if self.sequences is None:
            raise ConfigError(f"objective.kind is {self.config.objective.kind}, and this works with single frames alone; "
                              "give it objective=ce.")
        frames = self.frames()
        reader = SequenceReader(Path(self.sequences.directory), frames)
        return SequenceTraining(self.config, frames, reader, self.sequences.denominator, device)

    def frames(self) -> EgsReader:
        """The examples of single frames."""
        return EgsReader(Path(self.egs_directory))

    def shards(self) -> EgsReader | SequenceReader:
        """The reader of the shards that jobs are given."""
        return self.frames() if self.sequences is None else SequenceReader(Path(self.sequences.directory), self.frames())
