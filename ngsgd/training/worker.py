"""One job of one outer iteration: local SGD or NG-SGD over a shard.

The order of arithmetic is the order of the lines, and nothing survives from one job to the next: Fisher estimates and
momentum start afresh, as in Kaldi, so a job that is repeated gives the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig, RunConfig
from ngsgd.egs.reader import EgsReader, Minibatch
from ngsgd.errors import ConfigError, RunInterrupted
from ngsgd.models import build_model
from ngsgd.optim import NGSGD, SGD
from ngsgd.optim.inspection import figures
from ngsgd.optim.rules import backstitch_step, shrink
from ngsgd.schedules import DropoutSchedule
from ngsgd.training.flat import Layout, Vector
from ngsgd.training.job import Job, JobResult, WorkerSpec


def never() -> bool:
    """A stop signal that does not come."""
    return False


class Worker:
    """Lives for the whole run: holds the model and the reader, and runs one job after the other."""

    def __init__(self, spec: WorkerSpec, index: int) -> None:
        self.config = spec.config
        self.index = index
        self.device = choose_device(spec.config.cluster.device)
        self.reader = EgsReader(Path(spec.egs_directory))
        info = self.reader.info
        self.model = build_model(spec.config.model, info.num_inputs, info.num_classes, spec.config.seed).to(self.device)
        self.layout = Layout.of(self.model)

    def run(self, job: Job, parameters: Vector, should_stop: Callable[[], bool] = never) -> JobResult:
        """Trains from `parameters` on the job's shard.

        Raises RunInterrupted between two minibatches once `should_stop()` is true.
        """
        settings = self.config.optimizer
        self.layout.load(self.model, parameters)
        shrink(self.model, settings.proportional_shrink, job.lr)
        self._set_dropout(job)
        optimizer = make_optimizer(self.model, settings, job.lr, job.num_jobs)
        sums = _Sums(self.device)
        start = time.perf_counter()
        minibatches = self.reader.minibatches(job.shard, self.config.schedule.minibatch_size, seed=self.config.seed,
                                              outer_iter=job.outer_iter, job=job.job)
        for index, minibatch in enumerate(minibatches):
            if should_stop():
                raise RunInterrupted(f"job {job.job} of outer iteration {job.outer_iter + 1} was stopped")
            steps_back = bool(settings.backstitch_scale) and (index + job.outer_iter) % settings.backstitch_interval == 0
            self._train(minibatch, optimizer, sums, settings.backstitch_scale if steps_back else 0.0)
        objf, accuracy = sums.per_frame()
        activity = optimizer.activity()
        layer_shares = activity.layer_share.values()
        return JobResult(job, self.index, self.layout.flatten(self.model.state_dict()), sums.num_frames,
                         sums.num_minibatches, objf, accuracy, time.perf_counter() - start,
                         sum(layer_shares) / len(layer_shares), activity.model_share, activity.num_skipped,
                         figures(optimizer) if isinstance(optimizer, NGSGD) else {})

    def _train(self, minibatch: Minibatch, optimizer: SGD, sums: _Sums, backstitch_scale: float) -> None:
        x_ND, pdf_N = minibatch.x_ND.to(self.device), minibatch.pdf_N.to(self.device)
        logits_NP = x_ND.new_empty(0)

        def gradients() -> Tensor:
            nonlocal logits_NP
            optimizer.zero_grad(set_to_none=True)
            logits_NP = self.model(x_ND)
            loss = nn.functional.cross_entropy(logits_NP, pdf_N, reduction="sum")  # minus the objf, summed over the frames
            loss.backward()
            return loss.detach()

        if backstitch_scale:
            loss = backstitch_step(optimizer, gradients, backstitch_scale, num_samples=len(pdf_N))
        else:
            loss = gradients()
            optimizer.step(num_samples=len(pdf_N))
        sums.add(logits_NP.detach(), pdf_N, loss)

    def _set_dropout(self, job: Job) -> None:
        """The proportions of this outer iteration, and random numbers that the job alone decides."""
        if not self.config.model.dropout_schedule:
            return
        schedule = DropoutSchedule.parse(self.config.model.dropout_schedule)
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout):
                module.p = schedule.proportion(job.progress, name)
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, job.outer_iter, job.job]).generate_state(1)[0]))


class _Sums:
    """Running totals that stay on the device until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.num_frames = 0
        self.num_minibatches = 0
        self._objf = torch.zeros((), dtype=torch.float64, device=device)
        self._correct = torch.zeros((), dtype=torch.int64, device=device)

    def add(self, logits_NP: Tensor, pdf_N: Tensor, loss: Tensor) -> None:
        self.num_frames += len(pdf_N)
        self.num_minibatches += 1
        self._objf -= loss
        self._correct += (logits_NP.argmax(dim=1) == pdf_N).sum()

    def per_frame(self) -> tuple[float, float]:
        """(objf, accuracy); not a number for a shard without frames."""
        return tuple((torch.stack([self._objf, self._correct.double()]) / self.num_frames).tolist())


def make_optimizer(model: nn.Module, config: OptimizerConfig, lr: float, num_jobs: int) -> SGD:
    """The optimiser of one job."""
    # lr carries a factor num_jobs and every job applies l2, so its share is divided by num_jobs, as in Kaldi
    common: dict[str, Any] = {"momentum": config.momentum, "max_change": config.max_change,
                              "max_param_change": config.max_param_change, "weight_decay": config.weight_decay / num_jobs}
    if config.kind == "sgd":
        return SGD(model, lr, **common)
    return NGSGD(model, lr, rank_in=config.rank_in, rank_out=config.rank_out, update_period=config.update_period,
                 num_samples_history=config.num_samples_history, alpha=config.alpha, schedule=config.update_schedule,
                 max_change_per_sample=config.max_change_per_sample, cosine_period=config.cosine_period, **common)


def choose_device(wanted: str) -> torch.device:
    """The device of this process; Ray shows a worker only the GPU it was given."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cluster.device is cuda, but this worker sees no GPU; set cluster.device=auto or cpu.")
    return torch.device("cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu")


def resolve_threads(config: RunConfig, num_cores: int) -> int:
    """Compute threads of one worker: no more than cores in all, since spinning threads of one worker starve another."""
    return config.cluster.threads_per_worker or max(1, num_cores // config.cluster.num_workers)
