"""The speech tasks of a run; letters: N rows (frames), D inputs, P classes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.config import RunConfig
from ngsgd.data.fetching.files import Offer, RemoteData
from ngsgd.data.reader import EgsReader, Minibatch
from ngsgd.errors import ConfigError
from ngsgd.models.growing import Stage, StagedModel, Stages, network_at, set_stage
from ngsgd.models.statistics import model_for
from ngsgd.ops.tensors import without_autocast
from ngsgd.schedules import DropoutSchedule, Schedule, Shard
from ngsgd.sequence.archives import SequenceMinibatch, SequenceReader
from ngsgd.sequence.objectives import Denominator, SequenceObjective
from ngsgd.tasks.frame_scores import check_layers, diagnose, score_subset, summed_loss
from ngsgd.training.job import WorkItem
from ngsgd.training.settings import EngineSettings
from ngsgd.training.task import Batch, BatchLoss, Evaluation, Growth, ShardGrid, Task

NUM_CHECK_FRAMES = 128
# minibatches that a thread prepares in advance; on a CPU worker it would slow down training
_GPU_PREFETCH = 4


def schedule_of(config: RunConfig, reader: EgsReader | SequenceReader) -> Schedule:
    """Schedule of a run over the archives of a reader."""
    return ShardGrid(reader.info.num_archives, reader.info.frames_per_eg).schedule(config.schedule)


def stages_of(config: RunConfig, reader: EgsReader | SequenceReader) -> Stages:
    """Active parts of the model by outer iteration; raises ConfigError if these are too few."""
    return Stages.of(config.model, schedule_of(config, reader).num_outer_iters)


@dataclass(frozen=True)
class ModelGrowth(Growth):
    """Layers that are added one after another, and an output layer that is split."""

    stages: Stages

    def stage(self, outer_iter: int) -> Stage:
        return self.stages.at(outer_iter)

    def network(self, model: nn.Module, stage: Hashable) -> nn.Module:
        assert isinstance(stage, Stage)
        return network_at(model, stage)

    def select(self, model: nn.Module, stage: Hashable) -> None:
        assert isinstance(stage, Stage)
        set_stage(model, stage)

    def new_parts(self, model: nn.Module, state: Mapping[str, Tensor], before: Hashable, after: Hashable,
                  seed: int) -> Mapping[str, Tensor]:
        assert isinstance(model, StagedModel) and isinstance(before, Stage) and isinstance(after, Stage)
        return model.remade(state, before, after, seed)


class FrameClassification(Task):
    """Cross-entropy training on the labeled frames of archives of examples.

    Held-out scores use the subsets "train" and "valid" of the archives, and the check before a
    commit 128 frames of "valid", which takes 0.2 to 0.3 % of an outer iteration of 16000 frames.
    """

    can_continue_jobs = True

    def __init__(self, config: RunConfig, frames: EgsReader, device: torch.device | None = None,
                 reader: EgsReader | SequenceReader | None = None) -> None:
        """Build the task; `frames` are also for held-out scores, `reader` for jobs (`frames`)."""
        self.config, self.frames, self.reader = config, frames, reader or frames
        self.device = device or torch.device("cpu")
        self.growth = ModelGrowth(stages_of(config, self.reader))
        self.chance_objf = -math.log(frames.info.num_classes)
        # the forward pass of a custom module may change its parameters
        self.has_bounded_updates = not config.model._target_
        # it may also wait for the GPU
        self.can_be_graphed = not config.model._target_
        self._excluded: frozenset[str] = frozenset()
        # (shard, seed) of the last pass whose rows were named, and their utterance ids
        self._ids: tuple[object, list[str]] | None = None

    def model(self) -> nn.Module:
        return model_for(self.config, self.frames)

    def shards(self) -> ShardGrid:
        return ShardGrid(self.reader.info.num_archives, self.reader.info.frames_per_eg)

    def num_batches(self, shard: Shard, size: int) -> int:
        return self.reader.num_minibatches(shard, size)

    def batches(self, shard: Shard, size: int, *, seed: tuple[int, int, int], first: int = 0,
                stop: int | None = None) -> Iterator[Batch]:
        run_seed, outer_iter, job = seed
        minibatches: Iterator[Minibatch | SequenceMinibatch] = self.reader.minibatches(
            shard, size, seed=run_seed, outer_iter=outer_iter, job=job, first=first, stop=stop,
            augment=self.config.augment, prefetch=_GPU_PREFETCH if self.device.type == "cuda" else 0,
            pin_memory=self.device.type == "cuda")
        for number, minibatch in enumerate(minibatches, first):
            kept: Any = minibatch
            if self._excluded:
                ids = self._row_ids(shard, size, seed, number)
                rows = [row for row, name in enumerate(ids) if name not in self._excluded]
                # without utterances in quarantine, unless none would be left
                if len(rows) not in (0, len(ids)):
                    kept = type(kept)(*(None if part is None else part[torch.tensor(rows)] for part in minibatch))
            yield Batch(kept, len(kept.pdf_N))

    @property
    def names_examples(self) -> bool:  # type: ignore[override]
        """Whether the shards are archives of frames, whose rows have utterances."""
        return isinstance(self.reader, EgsReader)

    def example_ids(self, shard: Shard, size: int, *, seed: tuple[int, int, int], number: int) -> list[str]:
        """Utterance ids."""
        ids = self._row_ids(shard, size, seed, number)
        return [name for name in ids if name not in self._excluded] or ids

    def _row_ids(self, shard: Shard, size: int, seed: tuple[int, int, int], number: int) -> list[str]:
        """Utterance ids of the rows of a minibatch, before any is omitted."""
        if not isinstance(self.reader, EgsReader):
            return []
        key = (shard, seed)
        if self._ids is None or self._ids[0] != key:
            run_seed, outer_iter, job = seed
            self._ids = key, self.reader.utterances_of_pass(shard, seed=run_seed, outer_iter=outer_iter, job=job).tolist()
        return self._ids[1][number * size:(number + 1) * size]

    def exclude(self, examples: Sequence[str]) -> None:
        self._excluded = frozenset(examples)

    def loss(self, model: nn.Module, data: Any) -> BatchLoss:
        logits_NP = model(data.x_ND)
        return with_accuracy(summed_loss(logits_NP, data.pdf_N, data.weight_N), logits_NP, data)

    def evaluate(self, model: nn.Module) -> Evaluation:
        return diagnose(model, self._subsets["train"], self._subsets["valid"], self.frames.info.silence_classes,
                        self.config.tracking.curvature_frames)

    def prepare_evaluation(self, model: nn.Module) -> None:
        self._subsets  # noqa: B018  reads the files of the subsets
        if self.config.tracking.curvature_frames:
            check_layers(model)

    def held_out_objf(self, model: nn.Module) -> float:
        return score_subset(model, self._check_frames).objf

    def prefetch(self, items: Sequence[WorkItem]) -> None:
        self.reader.prefetch(list(dict.fromkeys(item.shard.archive for item in items)))

    def prepare_job(self, model: nn.Module, *, progress: float, seed: int) -> None:
        if self.config.model.dropout_schedule:
            schedule = DropoutSchedule.parse(self.config.model.dropout_schedule)
            for name, module in model.named_modules():
                if isinstance(module, nn.Dropout):
                    module.p = schedule.proportion(progress, name)
        elif not self.config.model._target_:
            # only dropout and custom modules use random numbers
            return
        torch.manual_seed(seed)

    @cached_property
    def _subsets(self) -> dict[str, Minibatch]:
        return {name: self.frames.diagnostic(name) for name in ("train", "valid")}

    @cached_property
    def _check_frames(self) -> Minibatch:
        """At most NUM_CHECK_FRAMES frames, evenly spaced: neighbors may share an utterance."""
        subset = self._subsets["valid"]
        count = len(subset.pdf_N)
        chosen = torch.linspace(0, count - 1, min(count, NUM_CHECK_FRAMES)).long()
        return Minibatch(subset.x_ND[chosen], subset.pdf_N[chosen],
                         None if subset.weight_N is None else subset.weight_N[chosen])


def with_accuracy(loss: Tensor, logits_NP: Tensor, data: Any) -> BatchLoss:
    """Return the loss with the weighted sums of a minibatch of frames."""
    is_right_N = logits_NP.detach().argmax(dim=1) == data.pdf_N
    if data.weight_N is None:
        return BatchLoss(loss, len(data.pdf_N), is_right_N.sum())
    return BatchLoss(loss, data.weight_N.sum(), (is_right_N * data.weight_N).sum())


class SequenceTraining(FrameClassification):
    """Training on chunks of utterances with a sequence objective and a denominator graph."""

    # Held-out scores are those of single frames: a drop of the average is no divergence.
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
