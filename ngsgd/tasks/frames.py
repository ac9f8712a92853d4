"""Frame classification: an acoustic model trained with cross-entropy on single frames.

Letters: N rows (frames), D inputs, P classes.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.config import RunConfig
from ngsgd.data.reader import EgsReader, Minibatch
from ngsgd.models.growing import Stage, StagedModel, Stages, network_at, set_stage
from ngsgd.models.statistics import model_for
from ngsgd.schedules import DropoutSchedule, Schedule, Shard
from ngsgd.sequence.archives import SequenceMinibatch, SequenceReader
from ngsgd.tasks.frame_scores import check_layers, diagnose, score_subset, summed_loss
from ngsgd.training.job import WorkItem
from ngsgd.training.task import Batch, BatchLoss, Evaluation, Growth, ShardGrid, Task

NUM_CHECK_FRAMES = 128
_GPU_PREFETCH = 4  # minibatches


def schedule_of(config: RunConfig, reader: EgsReader | SequenceReader) -> Schedule:
    """Schedule of a run over the archives of a reader."""
    return ShardGrid(reader.info.num_archives, reader.info.frames_per_eg).schedule(config.schedule)


def stages_of(config: RunConfig, reader: EgsReader | SequenceReader) -> Stages:
    """Active parts of the model by outer iteration; raises ConfigError if these are too few."""
    return Stages.of(config.model, config.schedule, schedule_of(config, reader).num_outer_iters)


@dataclass(frozen=True)
class ModelGrowth(Growth):
    """Layers that are added one after another, and an output layer that is split."""

    stages: Stages

    def stage(self, outer_iter: int) -> Stage:
        return self.stages.at(outer_iter)

    def is_early(self, outer_iter: int) -> bool:
        return self.stages.is_early(outer_iter)

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

    Held-out scores use the fixed subsets "train" and "valid" of the archives. The check before a
    commit uses 128 frames of "valid". One forward pass over them costs about a quarter of a
    training minibatch of 128, so an outer iteration of 125 minibatches (16000 frames) takes 0.2 to
    0.3 % longer (measured for 0.3 and 28 million parameters).
    """

    can_continue_jobs = True

    def __init__(self, config: RunConfig, frames: EgsReader, device: torch.device | None = None,
                 reader: EgsReader | SequenceReader | None = None) -> None:
        """Build the task.

        Args:
            config: configuration of the run.
            frames: archives of frames; also for held-out scores.
            device: device of the worker. Default: CPU.
            reader: archives of the shards of jobs. Default: `frames`.
        """
        self.config = config
        self.frames = frames
        self.reader = reader or frames
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
            augment=self.config.augment, prefetch=resolve_prefetch(self.config.egs.prefetch, self.device),
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


def resolve_prefetch(wanted: int, device: torch.device) -> int:
    """Minibatches prepared in advance; on a CPU worker the thread would slow down training."""
    if wanted >= 0:
        return wanted
    return _GPU_PREFETCH if device.type == "cuda" else 0
