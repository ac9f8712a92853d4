"""Small version of a run of `ngsgd train` as a task; letters: N rows (frames), P classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from ngsgd.config import RunConfig
from ngsgd.data.reader import EgsReader, Minibatch
from ngsgd.errors import ConfigError
from ngsgd.hypergrad.training_task import Batch, MinibatchIndex, ModuleTask
from ngsgd.models.statistics import model_for
from ngsgd.schedules import DropoutSchedule, Shard

# Jobs whose minibatches stay in memory: the current one and its successor.
_SEGMENTS_KEPT = 2


class EgsTask(ModuleTask):
    """Jobs of `steps_per_iter` minibatches per outer iteration, with archives in their order.

    The loss is summed over a minibatch, so learning rates are per frame. The validation loss is
    minus the objf per frame, on every second frame of the fixed validation subset. `held_out` has
    the other frames.
    """

    def __init__(self, config: RunConfig, reader: EgsReader, *, steps_per_iter: int, num_jobs: int, num_outer_iters: int) -> None:
        if config.model.num_subclasses or config.model.add_layers_period:
            raise ConfigError("ngsgd tune needs a model of fixed architecture; set "
                              "model.num_subclasses=0 model.add_layers_period=0.")
        if config.cluster.precision != "float32":
            raise ConfigError("ngsgd tune computes in float32; set cluster.precision=float32.")
        self.config, self.reader = config, reader
        self.steps_per_iter, self.num_jobs, self.num_outer_iters = steps_per_iter, num_jobs, num_outer_iters
        valid = reader.diagnostic("valid")
        super().__init__(model_for(config, reader), lambda place: self._segment(place.outer_iter, place.job)[place.step], _loss,
                         [_every_other(valid, 0)], config.seed)
        # the same run, evaluated on other frames
        self.held_out = ModuleTask(self.module, self.batch, _loss, [_every_other(valid, 1)], self.seed)
        self.held_out.loss = self.loss  # type: ignore[method-assign]
        self._segment = lru_cache(maxsize=_SEGMENTS_KEPT)(self._load)

    @property
    def num_frames(self) -> int:
        """Return the number of frames of a run; the last minibatch of an archive may be smaller."""
        return self.steps_per_iter * self.num_jobs * self.num_outer_iters * self.config.schedule.minibatch_size

    def loss(self, parameters: Mapping[str, Tensor], place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        if self._dropout is not None:
            progress = (place.outer_iter + place.step / self.steps_per_iter) / self.num_outer_iters
            for name, module in self.module.named_modules():
                if isinstance(module, nn.Dropout):
                    module.p = self._dropout.proportion(progress, name)
        return super().loss(parameters, place, data_weights)

    @cached_property
    def _dropout(self) -> DropoutSchedule | None:
        text = self.config.model.dropout_schedule
        return DropoutSchedule.parse(text) if text else None

    def _load(self, outer_iter: int, job: int) -> Sequence[Batch]:
        found = list(itertools.islice(self._passes(outer_iter, job), self.steps_per_iter))
        return [(x_ND, pdf_N) if weight_N is None else (x_ND, pdf_N, weight_N) for x_ND, pdf_N, weight_N in found]

    def _passes(self, outer_iter: int, job: int) -> Iterator[Minibatch]:
        info = self.reader.info
        for number in itertools.count():
            index = (number * self.num_outer_iters + outer_iter) * self.num_jobs + job
            archive = index % info.num_archives
            shard = Shard(archive, (index // info.num_archives + archive + 1) % info.frames_per_eg)
            yield from self.reader.minibatches(shard, self.config.schedule.minibatch_size, seed=self.config.seed,
                                               outer_iter=outer_iter + number * self.num_outer_iters, job=job,
                                               augment=self.config.augment)


def _loss(logits_NP: Tensor, batch: Batch, _: Tensor | None) -> Tensor:
    """Return the sum; per frame on validation rows, which contain their total weight."""
    each_N = nn.functional.cross_entropy(logits_NP, batch[1], reduction="none")
    if len(batch) > 2:
        each_N = each_N * batch[2]
    return each_N.sum() / batch[3] if len(batch) > 3 else each_N.sum()


def _every_other(rows: Minibatch, first: int) -> Batch:
    x_ND, pdf_N = rows.x_ND[first::2], rows.pdf_N[first::2]
    weight_N = torch.ones(len(pdf_N)) if rows.weight_N is None else rows.weight_N[first::2]
    return x_ND, pdf_N, weight_N, weight_N.sum()
