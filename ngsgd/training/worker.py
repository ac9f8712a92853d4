"""One job of one outer iteration: local SGD or NG-SGD over a shard.

The order of arithmetic is the order of the lines, and nothing survives from one job to the next: Fisher estimates and
momentum start afresh, as in Kaldi, so a job that is repeated gives the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig, RunConfig
from ngsgd.data.reader import Minibatch
from ngsgd.errors import ConfigError
from ngsgd.models.growing import network_at
from ngsgd.models.layer_options import layer_options
from ngsgd.models.statistics import model_for
from ngsgd.optim import NGSGD, SGD
from ngsgd.optim.inspection import figures
from ngsgd.optim.rules import backstitch_step, shrink
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.build import make_preconditioner
from ngsgd.schedules import DropoutSchedule
from ngsgd.sequence.archives import SequenceMinibatch
from ngsgd.training.job import Fisher, Held, Job, JobResult, Piece, Start, WorkerSpec
from ngsgd.training.objective import make_objective, on_device
from ngsgd.training.parameter_deltas import NO_LIMITS, Deltas, PartOfStart, change_limits, measure
from ngsgd.training.parameter_vector import Layout, Pieces, Vector
from ngsgd.training.planning import stages_of
from ngsgd.training.validation.checksums import digest, not_finite
from ngsgd.training.validation.plausibility import impossible

Place = Callable[[int], Vector]  # memory for so many elements
_GPU_PREFETCH = 4  # minibatches


def never() -> bool:
    """A stop signal that does not come."""
    return False


def np_empty(size: int) -> Vector:
    """Memory of this process."""
    return np.empty(size, dtype=np.float32)


def starting_point(start: Start, layout: Layout) -> Vector:
    """The parameters before a job's first minibatch; see `Start`."""
    return parts_of_start(start, layout)(slice(0, layout.size))


def parts_of_start(start: Start, layout: Layout) -> PartOfStart:
    """A function that makes any part of the starting point.

    A job that needs it at its end again does not have to keep a second vector until then.
    """
    model = start.model.read()
    own = None if start.own is None else start.own.read()
    taken = [part for part, _ in layout.fragment(*start.take)] if start.take else []

    def part_of_start(part: slice) -> Vector:
        if own is None:
            return model[part]
        if start.own_is_move:
            return model[part] + own[part]
        vector = own[part].copy()
        for one in taken:
            inner = slice(max(one.start, part.start), min(one.stop, part.stop))
            if inner.start < inner.stop:
                to = slice(inner.start - part.start, inner.stop - part.start)
                vector[to] = start.mix * own[inner] + (1.0 - start.mix) * model[inner]
        return vector
    return part_of_start


def fisher_of(optimizer: NGSGD) -> Fisher:
    """The states of all Fisher estimates, ready to travel."""
    return {name: {key: value.cpu().numpy() if isinstance(value, Tensor) else value for key, value in estimate.state_dict().items()}
            for name, estimate in optimizer.preconditioners()}


def curvature_of(preconditioner: Preconditioner) -> Fisher:
    """The preconditioner's state, ready to travel."""
    return {name: {key: value.cpu().numpy() if isinstance(value, Tensor) else value for key, value in entry.items()}
            for name, entry in preconditioner.state_dict().items()}


def load_fisher(optimizer: NGSGD, fisher: Fisher) -> None:
    """Goes on from the states of an optimiser of the same layers."""
    for name, estimate in optimizer.preconditioners():
        estimate.load_state_dict({key: torch.as_tensor(value) for key, value in fisher[name].items()})


def _gather(vector: Vector, pieces: Pieces, place: Place) -> Vector:
    gathered = place(pieces[-1][1].stop if pieces else 0)
    for part, target in pieces:
        gathered[target] = vector[part]
    return gathered


class Worker:
    """Lives for the whole run: holds the model and the reader, and runs one job after the other."""

    def __init__(self, spec: WorkerSpec, index: int) -> None:
        self.config = spec.config
        self.index = index
        self.device = choose_device(spec.config.cluster.device, index)
        self.reader = spec.shards()
        self.objective = make_objective(spec.config.objective, spec.denominator, self.device)
        self.model = model_for(spec.config, spec.frames()).to(self.device)
        self.stages = stages_of(spec.config, self.reader)
        self.layout = Layout.of(self.model)

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        """Trains on the job's pieces; `place(size)` gives the memory that a returned vector is written to.

        Once `should_stop()`, asked after every minibatch, is true the job ends there and says what is left.
        """
        settings = self._settings(job)
        start = self._load(job)
        network = network_at(self.model, self.stages.at(job.outer_iter))
        shrink(network, settings.proportional_shrink, job.lr)
        self._set_dropout(job)
        # preconditioners read rows from torch's own layers
        optimizer = make_optimizer(network, settings, job.lr, job.lr_factor, job.layer_rates,
                                   fast_gemm=self.config.preconditioner.kind == "none")
        preconditioner = self._preconditioner(network, job)
        if job.start.fisher and isinstance(optimizer, NGSGD):
            load_fisher(optimizer, job.start.fisher)
        sums = _Sums(self.device)
        began = time.perf_counter()
        remainder: tuple[Piece, ...] = ()
        for index, (minibatch, left) in enumerate(self._minibatches(job)):
            steps_back = bool(settings.backstitch_scale) and (index + job.outer_iter) % settings.backstitch_interval == 0
            self._train(network, minibatch, optimizer, preconditioner, sums, settings.backstitch_scale if steps_back else 0.0)
            if should_stop() and left:
                remainder = left
                break
        return self._result(job, start, place, sums, optimizer, preconditioner, time.perf_counter() - began, remainder)

    def _settings(self, job: Job) -> OptimizerConfig:
        """The optimiser's; an early outer iteration is kept from changing too fast (Kaldi: by sqrt 2)."""
        settings = self.config.optimizer
        if not self.stages.is_early(job.outer_iter):
            return settings
        return replace(settings, max_param_change=settings.max_param_change / math.sqrt(2.0))

    def _load(self, job: Job) -> Vector | None:
        """Sets the parameters that the job starts from, and returns them if the job's move is wanted."""
        vector = starting_point(job.start, self.layout)
        self.layout.load(self.model, vector)
        return vector if job.returns == "move" else None

    def _minibatches(self, job: Job) -> Iterator[tuple[Minibatch | SequenceMinibatch, tuple[Piece, ...]]]:
        """Each minibatch of the job's pieces in order, and what is left after it."""
        for index, piece in enumerate(job.pieces):
            later = job.pieces[index + 1:]
            size = self.stages.minibatch_size_of(piece.outer_iter)
            last = self.reader.num_minibatches(piece.shard, size) if piece.stop is None else piece.stop
            minibatches: Iterator[Minibatch | SequenceMinibatch] = self.reader.minibatches(
                piece.shard, size, seed=self.config.seed, outer_iter=piece.outer_iter, job=piece.job, first=piece.first, stop=last,
                augment=self.config.augment, prefetch=resolve_prefetch(self.config.egs.prefetch, self.device),
                pin_memory=self.device.type == "cuda")
            for number, minibatch in enumerate(minibatches, start=piece.first + 1):
                yield minibatch, ((replace(piece, first=number),) if number < last else ()) + later

    def _result(self, job: Job, start: Vector | None, place: Place, sums: _Sums, optimizer: SGD,
                preconditioner: Preconditioner | None, seconds: float, remainder: tuple[Piece, ...]) -> JobResult:
        whole = job.send == (0, 1)
        end = self.layout.flatten(self.model.state_dict(), place(self.layout.size) if whole or job.keep_own else None)
        if start is not None:
            np.subtract(end, start, out=end)
        pieces = self.layout.fragment(*job.send)
        sent = end if whole else _gather(end, pieces, place)
        objf, accuracy = sums.per_frame()
        activity = optimizer.activity()
        layer_shares = activity.layer_share.values()
        result = JobResult(
            job, self.index, Held(sent), digest(sent), sums.num_frames, sums.num_minibatches, objf, accuracy, seconds,
            sum(layer_shares) / len(layer_shares), activity.model_share, activity.num_skipped,
            Held(end) if job.keep_own else None,
            self._fisher(job, optimizer, preconditioner),
            not_finite(sent, self.layout, pieces), remainder,
            figures(optimizer) if isinstance(optimizer, NGSGD) else {},
            deltas=self._deltas(job, sent, pieces, optimizer, sums.num_minibatches))
        # known now, and not when all jobs have ended: a successor may start from this result before
        return replace(result, trouble=result.trouble or impossible(result, self.layout))

    def _deltas(self, job: Job, sent: Vector, pieces: Pieces, optimizer: SGD,
                num_minibatches: int) -> Deltas:
        """Norms of the parameter delta, and the bounds on them."""
        # the forward pass of a custom module may change its own parameters
        limits = NO_LIMITS if self.config.model._target_ else change_limits(
            self.model, optimizer, self._settings(job), num_minibatches, job.lr)
        return measure(sent, job.returns == "move", parts_of_start(job.start, self.layout),
                       self.layout, pieces, limits)

    def _preconditioner(self, network: nn.Module, job: Job) -> Preconditioner | None:
        """The configured one; draws are decided by the job alone."""
        if self.config.preconditioner.kind == "none":
            return None
        seed = int(np.random.SeedSequence([self.config.seed, job.outer_iter, job.job]).generate_state(1)[0])
        preconditioner = make_preconditioner(network, self.config.preconditioner, seed)
        if job.start.fisher:
            preconditioner.load_state_dict(job.start.fisher)
        return preconditioner

    @staticmethod
    def _fisher(job: Job, optimizer: SGD, preconditioner: Preconditioner | None) -> Fisher | None:
        if not job.keep_fisher:
            return None
        if preconditioner is not None:
            return curvature_of(preconditioner)
        return fisher_of(optimizer) if isinstance(optimizer, NGSGD) else None

    def _train(self, network: nn.Module, minibatch: Minibatch | SequenceMinibatch, optimizer: SGD,
               preconditioner: Preconditioner | None, sums: _Sums, backstitch_scale: float) -> None:
        there = on_device(minibatch, self.device)
        pdf_N = there.pdf_N
        logits_NP = there.x_ND.new_empty(0)

        def gradients() -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            if preconditioner is None:
                loss = forward()
                loss.backward()
                return loss.detach()
            return preconditioner.evaluate_and_step(forward, optimizer.param_groups[0]["lr"])

        def forward() -> Tensor:
            nonlocal logits_NP
            logits_NP = network(there.x_ND)
            return self.objective(logits_NP, there)

        if backstitch_scale:
            loss = backstitch_step(optimizer, gradients, backstitch_scale, num_samples=len(pdf_N))
        else:
            loss = gradients()
            optimizer.step(num_samples=len(pdf_N))
        sums.add(logits_NP.detach(), pdf_N, there.weight_N, loss)

    def _set_dropout(self, job: Job) -> None:
        """The proportions of this outer iteration, and random numbers that the job alone decides."""
        if self.config.model.dropout_schedule:
            schedule = DropoutSchedule.parse(self.config.model.dropout_schedule)
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Dropout):
                    module.p = schedule.proportion(job.progress, name)
        elif not self.config.model._target_:  # a module of the user's own may draw whatever it likes
            return
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, job.outer_iter, job.job]).generate_state(1)[0]))


class _Sums:
    """Running totals that stay on the device until they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.num_frames = 0
        self.num_minibatches = 0
        self._objf, self._correct, self._weight = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, logits_NP: Tensor, pdf_N: Tensor, weight_N: Tensor | None, loss: Tensor) -> None:
        self.num_frames += len(pdf_N)
        self.num_minibatches += 1
        self._objf -= loss
        is_right_N = logits_NP.argmax(dim=1) == pdf_N
        if weight_N is None:
            self._correct += is_right_N.sum()
            self._weight += len(pdf_N)
        else:
            self._correct += (is_right_N * weight_N).sum()
            self._weight += weight_N.sum()

    def per_frame(self) -> tuple[float, float]:
        """(objf, accuracy) of a frame of weight 1, as in Kaldi; not a number for a shard without frames."""
        return tuple((torch.stack([self._objf, self._correct]) / self._weight).tolist())


def make_optimizer(model: nn.Module, config: OptimizerConfig, lr: float, lr_factor: float,
                   layer_rates: Mapping[str, float] | None = None, *, fast_gemm: bool = True) -> SGD:
    """The optimizer of one job."""
    # lr carries this factor and every job applies l2, so its share is divided by it, as in Kaldi
    options = {**layer_options(model), **_own_options(config, lr_factor)}
    for layer, factor in (layer_rates or {}).items():
        options[layer] = {**options.get(layer, {}), "lr_factor": factor * options.get(layer, {}).get("lr_factor", 1.0)}
    common: dict[str, Any] = {"layer_options": options, "momentum": config.momentum, "max_change": config.max_change,
                              "max_param_change": config.max_param_change, "weight_decay": config.weight_decay / lr_factor}
    if config.kind == "sgd":
        return SGD(model, lr, fast_gemm=fast_gemm, **common)
    return NGSGD(model, lr, rank_in=config.rank_in, rank_out=config.rank_out, update_period=config.update_period,
                 num_samples_history=config.num_samples_history, alpha=config.alpha, schedule=config.update_schedule,
                 max_change_per_sample=config.max_change_per_sample, cosine_period=config.cosine_period, **common)


def _own_options(config: OptimizerConfig, lr_factor: float) -> dict[str, dict[str, Any]]:
    """The user's settings of single layers, l2 with its share of the rate."""
    return {layer: {key: value / lr_factor if key == "weight_decay" else value for key, value in options.items()}
            for layer, options in (config.layer_options or {}).items()}


def choose_device(wanted: str, index: int = 0) -> torch.device:
    """The device of worker `index`: Ray shows a worker only the GPU it was given, other workers of a machine take turns.

    Raises ConfigError for a GPU that takes no further process.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cluster.device is cuda, but this worker sees no GPU; set cluster.device=auto or cpu.")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:  # in exclusive mode it is taken by another worker, or by somebody else
        raise ConfigError(f"{device} takes no further process ({str(error).partition(chr(10))[0].rstrip('.')}); in exclusive mode "
                          "ask for no more cluster.num_workers than there are free GPUs.") from error
    return device


def resolve_prefetch(wanted: int, device: torch.device) -> int:
    """Minibatches made in advance: a CPU worker's thread would only take time from the core that trains."""
    if wanted >= 0:
        return wanted
    return _GPU_PREFETCH if device.type == "cuda" else 0


def resolve_threads(config: RunConfig, num_cores: int) -> int:
    """Compute threads of one worker: no more than cores in all, since spinning threads of one worker starve another."""
    return config.cluster.threads_per_worker or max(1, num_cores // config.cluster.num_workers)
