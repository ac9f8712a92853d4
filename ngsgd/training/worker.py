"""One job of one outer iteration: local SGD or NG-SGD over the shards of the job.

Momentum is reset in each job, as in Kaldi. Fisher estimates are reset too, unless
`optimizer.curvature_state` passes them on with the job. A job contains everything it depends on, so
a retry gives a bitwise identical result.
"""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.config import ClusterConfig, OptimizerConfig
from ngsgd.errors import BadBatchError, ConfigError
from ngsgd.optim import NGSGD, SGD, Optimizer
from ngsgd.optim.backstitch import backstitch_step
from ngsgd.optim.graphed_step import GraphedStep
from ngsgd.optim.groups import layer_options
from ngsgd.optim.inspection import figures
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.build import make_preconditioner
from ngsgd.training.devices import ALONE, Ranks, autocast, on_device, set_precision
from ngsgd.training.diagnostics.job_sums import JobSums
from ngsgd.training.job import BadBatch, Fisher, Job, JobInit, JobResult, LocalRef, WorkItem
from ngsgd.training.parameter_deltas import NO_LIMITS, Exact, PartOfStart, change_limits, compress, error_of, measure
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.snapshots.job_snapshots import JobSnapshots, JobState, Snapshots, is_random_reader, remaining
from ngsgd.training.task import Batch, BatchLoss, TaskSpec, data_to_device, map_tensors, seeded_model
from ngsgd.training.validation import bad_batches
from ngsgd.training.validation.bad_batches import Statistics
from ngsgd.training.validation.checksums import digest, not_finite
from ngsgd.training.validation.plausibility import impossible

# allocator: number of elements -> vector
Place = Callable[[int], Vector]


def never() -> bool:
    """A stop signal that is never set."""
    return False


def np_empty(size: int) -> Vector:
    """Allocate memory of this process."""
    return np.empty(size, dtype=np.float32)


# minibatches between two measurements of the cosine between natural and plain gradient, for the
# log; a period of 100 costs less than 1 % of a job (benchmarks/RESULTS.md)
COSINE_PERIOD = 100


def initial_parameters(start: JobInit, layout: FlatLayout) -> Vector:
    """The parameters before a job's first minibatch; see `JobInit`."""
    return part_of_initial_parameters(start, layout)(slice(0, layout.size))


def part_of_initial_parameters(start: JobInit, layout: FlatLayout) -> PartOfStart:
    """Return a function that computes any slice of the initial parameters."""
    model = start.model.read()
    own = None if start.own is None else start.own.read()
    if own is not None and start.codec is not None and not start.own_is_move:
        # the other part of the delta is in the model
        own = error_of(own, start.codec)
    is_move = start.own_is_move or start.codec is not None
    taken = [part for part, _ in layout.fragment(*start.take)] if start.take else []

    def part_of_start(part: slice) -> Vector:
        if own is None:
            return model[part]
        if is_move:
            return model[part] + own[part]
        vector = own[part].copy()
        for one in taken:
            inner = slice(max(one.start, part.start), min(one.stop, part.stop))
            if inner.start < inner.stop:
                to = slice(inner.start - part.start, inner.stop - part.start)
                vector[to] = start.mix * own[inner] + (1.0 - start.mix) * model[inner]
        return vector
    return part_of_start


@dataclass
class JobRun:
    """A job in progress, and its outcome."""

    # the job without the minibatches of earlier attempts
    rest: Job
    # initial parameters
    start: Vector
    network: nn.Module
    optimizer: Optimizer
    preconditioner: Preconditioner | None
    sums: JobSums
    statistics: Statistics
    snapshots: JobSnapshots | None
    # minibatches of earlier attempts that this one continues
    continued_at: int
    began: float
    seconds: float = 0.0
    remainder: tuple[WorkItem, ...] = ()
    bad_batches: tuple[BadBatch, ...] = ()


class Worker:
    """Holds the model and the task for the complete run, and runs one job after another."""

    def __init__(self, spec: TaskSpec, index: int, ranks: Ranks = ALONE) -> None:
        self.settings, self.index, self.ranks = spec.settings, index, ranks
        self.device = choose_device(self.settings.cluster.device, index * ranks.size + ranks.rank)
        # before the task, which may choose another precision
        set_precision(self.settings.cluster.precision, self.device)
        self._autocast = autocast(self.settings.cluster.precision, self.device)
        if self.settings.cluster.cuda_graphs == "on" and self.device.type != "cuda":
            raise ConfigError("cluster.cuda_graphs is on, but this worker found no GPU; set cluster.cuda_graphs=auto.")
        self.task = spec.task(self.device)
        self.model = seeded_model(self.task, self.settings.seed).to(self.device)
        self.layout = FlatLayout.of(self.model)
        self.snapshots = Snapshots(self.settings, self.device, is_possible=ranks.size == 1 and self.task.can_continue_jobs)
        # loss of a rank without a minibatch
        self._no_loss = BatchLoss(torch.zeros((), device=self.device), 0.0)

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        """Train on the work items of the job; return the new parameters or their delta.

        Args:
            job: work items, initial parameters and learning rate.
            place: allocates the float32 memory of a returned vector, given its number of elements.
            should_stop: called after every minibatch. Once it returns True, the job ends and
                reports the rest of its work as `remainder`.
        """
        return self._result(job, self.train(job, should_stop), place)

    def train(self, job: Job, should_stop: Callable[[], bool] = never) -> JobRun:
        """Train without building the result; every rank of a group takes part."""
        run = self._prepare(job)
        batches = self._batches(run.rest)
        if run.continued_at and not self.task.starts_anywhere:
            is_random, batches = is_random_reader(batches, self.device)
            if is_random:
                # from the beginning, since the snapshots of a job can be restored once
                run = self._prepare(job)
                batches = self._batches(run.rest)
        self._loop(run, batches, should_stop)
        run.sums.reduce(self.ranks)
        run.seconds = time.perf_counter() - run.began + (run.snapshots.earlier_s if run.snapshots else 0.0)
        run.bad_batches = self._bad_batches(job, run.network, run.sums)
        return run

    def _prepare(self, job: Job) -> JobRun:
        """Load the model, build the optimizer, and continue from a snapshot if there is one."""
        settings, start = self.settings.optimizer, self._load(job)
        network = self.task.growth.network(self.model, self.task.growth.stage(job.outer_iter))
        # random numbers of the model, such as those of dropout, differ between ranks
        own = [self.ranks.rank] if self.ranks.rank else []
        entropy = np.random.SeedSequence([self.settings.seed, job.outer_iter, job.job, *own])
        seed = int(entropy.generate_state(1)[0])
        self.task.prepare_job(self.model, progress=job.progress, seed=seed)
        optimizer = make_optimizer(network, settings, job.lr, job.lr_factor)
        preconditioner = make_preconditioner(network, settings, seed, self.model) if settings.preconditions else None
        if self.ranks.size > 1 and isinstance(optimizer, NGSGD):
            optimizer.share_rows(self.ranks.sum_in_place, self.device, self.ranks.size)
        load_fisher(optimizer, preconditioner, job.start.fisher)
        self.task.exclude(job.excluded)
        sums = JobSums(self.device)
        snapshots = self.snapshots.of(job, start, JobState(self.task, self.model, optimizer, preconditioner, sums, self.device))
        done = snapshots.restore() if snapshots else 0
        rest = replace(job, pieces=remaining(job.pieces, done, self._numbers)) if done else job
        return JobRun(rest, start, network, optimizer, preconditioner, sums, Statistics(network), snapshots, done,
                      time.perf_counter())

    def _loop(self, run: JobRun, batches: Iterator[tuple[Batch | None, int]], should_stop: Callable[[], bool]) -> None:
        """Train on the minibatches of a job until they or the time are over."""
        job, snapshots = run.rest, run.snapshots
        num_batches = sum(len(self._numbers(piece)) for piece in job.pieces)
        upcoming = (*job.pieces[1:], *job.upcoming)
        graphed = self.graphed_training(run.network, run.optimizer, run.preconditioner, run.statistics)
        optimizer = self.settings.optimizer
        scale = 0.0 if optimizer.preconditions else optimizer.backstitch_scale
        for index, (batch, num_done) in enumerate(on_device(batches, self.device), run.continued_at):
            if index == run.continued_at and upcoming:
                # the data of this job come first
                self.task.prefetch(upcoming)
            if graphed is not None and batch is not None and not scale:
                graphed(batch, run.sums)
            else:
                self._train(run.network, batch, run.optimizer, run.preconditioner, run.sums, run.statistics, scale)
            is_asked = self.ranks.any(should_stop())
            if snapshots and num_done < num_batches and snapshots.is_due(is_asked):
                snapshots.take(index + 1)
            if num_done < num_batches and is_asked:
                run.remainder = remaining(job.pieces, num_done, self._numbers)
                break

    def _bad_batches(self, job: Job, network: nn.Module, sums: JobSums) -> tuple[BadBatch, ...]:
        """Name the minibatches with a non-finite loss or gradient; end the job if asked to."""
        # the minibatches of a group of ranks have other positions
        bad = sums.bad() if self.ranks.size == 1 else {}
        if not bad:
            return ()
        places = [(piece, number) for piece in job.pieces for number in self._numbers(piece)]
        found = bad_batches.named(self.task, network, bad, places, self.settings.schedule.minibatch_size,
                                  self.settings.seed, lambda data: data_to_device(data, self.device))
        sums.omit(bad, found)
        if self.settings.failure.on_bad_batch == "stop":
            raise BadBatchError(bad_batches.message(found[0], job.job, job.outer_iter, self.index, "stop")
                                + " The run ends, because failure.on_bad_batch is stop: correct the data, or resume with "
                                  "failure.on_bad_batch=skip.")
        return found

    def _numbers(self, piece: WorkItem) -> range:
        last = self.task.num_batches(piece.shard, self.settings.schedule.minibatch_size) if piece.stop is None else piece.stop
        return range(piece.first, last)

    def _load(self, job: Job) -> Vector:
        """Load the initial parameters of the job into the model and return them."""
        vector = self.ranks.start_vector(lambda: initial_parameters(job.start, self.layout), self.layout.size)
        self.layout.load(self.model, vector)
        return vector

    def _batches(self, job: Job) -> Iterator[tuple[Batch | None, int]]:
        """Yield the minibatches of this rank in order, with the number of minibatches up to each.

        None stands for the last step of a work item that lacks a minibatch for every rank.
        """
        num_ranks, before = self.ranks.size, 0
        for piece in job.pieces:
            numbers = self._numbers(piece)
            first, stop, length = numbers.start, numbers.stop, len(numbers)
            read = partial(self.task.batches, piece.shard, self.settings.schedule.minibatch_size,
                           seed=(self.settings.seed, piece.outer_iter, piece.job))
            if num_ranks == 1:
                batches = read(first=first, stop=stop)
            elif self.task.starts_anywhere:
                batches = itertools.chain.from_iterable(
                    read(first=number, stop=number + 1) for number in range(first + self.ranks.rank, stop, num_ranks))
            else:
                batches = itertools.islice(read(first=first, stop=stop), self.ranks.rank, None, num_ranks)
            for done in range(num_ranks, length + num_ranks, num_ranks):
                yield next(batches, None), before + min(done, length)
            before += length

    def _train(self, network: nn.Module, batch: Batch | None, optimizer: Optimizer,
               preconditioner: Preconditioner | None, sums: JobSums, statistics: Statistics, backstitch_scale: float) -> None:
        """Process one minibatch: forward, backward and the update of the parameters."""
        num_examples = 0 if batch is None else batch.num_examples
        found = [self._no_loss]
        if backstitch_scale:
            def gradients() -> Tensor:
                loss, found[0], _ = self._gradients(network, batch, optimizer, preconditioner)
                return loss
            loss = backstitch_step(optimizer, gradients, backstitch_scale, num_samples=num_examples)
        else:
            loss, found[0], num_samples = self._gradients(network, batch, optimizer, preconditioner)
            optimizer.step(num_samples=num_samples)
        statistics.settle(loss, optimizer.last_update)
        sums.add(num_examples, found[0], loss, optimizer.last_update)

    def _gradients(self, network: nn.Module, batch: Batch | None, optimizer: Optimizer,
                   preconditioner: Preconditioner | None) -> tuple[Tensor, BatchLoss, int]:
        """Return the loss of this rank, alone and with its sums, and the examples of all ranks."""
        optimizer.zero_grad(set_to_none=True)
        found = [self._no_loss]
        loss = self._no_loss.total

        def forward() -> Tensor:
            found[0] = self._loss(network, None if batch is None else batch.data)
            return found[0].total
        lr = optimizer.param_groups[0]["lr"]
        if preconditioner is not None and self.ranks.size == 1:
            loss = preconditioner.evaluate_and_step(forward, lr)
        elif preconditioner is not None and batch is not None:
            preconditioner.evaluate(forward)
            loss = found[0].total
        elif batch is not None:
            loss = forward()
            loss.backward()
        num_samples = self.ranks.sum_gradients(network, 0 if batch is None else batch.num_examples)
        if preconditioner is not None and self.ranks.size > 1:
            preconditioner.step(lr)
        return loss, found[0], num_samples

    def _loss(self, network: nn.Module, data: Any) -> BatchLoss:
        with self._autocast:
            return self.task.loss(network, data)

    def graphed_training(self, network: nn.Module, optimizer: Optimizer, preconditioner: Preconditioner | None,
                         statistics: Statistics) -> Callable[[Batch, JobSums], None] | None:
        """Return a function that trains on a minibatch with CUDA graphs; None without graphs."""
        wanted = self.settings.cluster.cuda_graphs
        is_possible = self.device.type == "cuda" and preconditioner is None and self.ranks.size == 1
        if not is_possible or not (wanted == "on" or (wanted == "auto" and self.task.can_be_graphed)):
            return None
        current: Batch

        def run(*tensors: Tensor) -> list[Tensor | float]:
            rest = iter(tensors)
            optimizer.zero_grad(set_to_none=True)
            found = self._loss(network, map_tensors(current.data, lambda _: next(rest)))
            found.total.backward()
            optimizer.step(num_samples=current.num_examples)
            assert optimizer.last_update is not None
            statistics.settle(found.total, optimizer.last_update)
            return [found.total.detach(), found.weight, found.num_correct, optimizer.last_update]

        step = GraphedStep(optimizer, run)

        def train(batch: Batch, sums: JobSums) -> None:
            nonlocal current
            current, tensors = batch, list[Tensor]()
            # exact, unlike the repr of a long array
            others = pickle.dumps(map_tensors(batch.data, tensors.append))
            total, weight, num_correct, update = step(*tensors, key=(batch.num_examples, others)).unbind()
            sums.add(batch.num_examples, BatchLoss(total, weight, num_correct), total, update)
        return train

    def _result(self, job: Job, trained: JobRun, place: Place) -> JobResult:
        sums, optimizer = trained.sums, trained.optimizer
        is_complete = job.send == (0, 1)
        is_move = job.returns == "move" or job.start.codec is not None
        end = self.layout.flatten(self.model.state_dict(), place(self.layout.size) if is_complete or job.keep_own else None)
        if is_move:
            np.subtract(end, trained.start, out=end)
        pieces = self.layout.fragment(*job.send)
        sent = end
        if not is_complete:
            sent = place(pieces[-1][1].stop if pieces else 0)
            for part, target in pieces:
                sent[target] = end[part]
        objf, accuracy = sums.means()
        activity = optimizer.activity()
        layer_shares = activity.layer_share.values()
        # the forward pass of some models changes parameters
        limits = NO_LIMITS
        if self.task.has_bounded_updates:
            limits = change_limits(self.model, optimizer, self.settings.optimizer, sums.num_batches)
        start_of = part_of_initial_parameters(job.start, self.layout)
        deltas = measure(sent, is_move, start_of, self.layout, pieces, limits)
        reason = not_finite(sent, self.layout, pieces)
        if not reason and activity.num_skipped >= sums.num_batches > 0:
            reason = f"all {sums.num_batches} of its steps were skipped, since gradients or new parameters were not finite"
        own, encoded = end if job.keep_own else None, None
        exact: Exact = ()
        if job.start.codec is not None:
            own = place(self.layout.size)
            own.fill(0.0)
            if not reason:
                before = None if job.start.own is None else job.start.own.read()
                encoded, exact = compress(sent, before, job.start.codec, self.layout, own)
            if job.returns == "parameters":
                np.add(sent, job.start.model.read(), out=sent)
        result = JobResult(job, self.index, LocalRef(sent), digest(sent), sums.num_examples, sums.num_batches, objf, accuracy,
                           trained.seconds, sum(layer_shares) / len(layer_shares), activity.model_share, activity.num_skipped,
                           own=LocalRef(own) if own is not None else None, encoded=encoded, exact=exact,
                           fisher=fisher_of(optimizer, trained.preconditioner) if job.keep_fisher else None,
                           rejection_reason=reason, remainder=trained.remainder, health=figures(optimizer)
                           if isinstance(optimizer, NGSGD) else {}, deltas=deltas, bad_batches=trained.bad_batches,
                           continued_at=trained.continued_at)
        # checked before all jobs have ended, because a successor may start from this result earlier
        return replace(result, rejection_reason=reason or impossible(result, self.layout))


def fisher_of(optimizer: Optimizer, preconditioner: Preconditioner | None = None) -> Fisher | None:
    """States of all Fisher estimates, or of the preconditioner, as NumPy arrays."""
    states: Mapping[str, Mapping[str, Any]]
    if preconditioner is not None:
        states = preconditioner.state_dict()
    elif isinstance(optimizer, NGSGD):
        states = {name: estimate.state_dict() for name, estimate in optimizer.preconditioners()}
    else:
        return None
    return {name: {key: value.cpu().numpy() if isinstance(value, Tensor) else value
                   for key, value in state.items()} for name, state in states.items()}


def load_fisher(optimizer: Optimizer, preconditioner: Preconditioner | None, fisher: Fisher | None) -> None:
    """Load the states that a job with the same layers ended with; None leaves the new states."""
    if not fisher:
        return
    if isinstance(optimizer, NGSGD):
        for name, estimate in optimizer.preconditioners():
            state = {key: torch.as_tensor(value) for key, value in fisher[name].items()}
            estimate.load_state_dict(state)
    if preconditioner is not None:
        preconditioner.load_state_dict(fisher)


def make_optimizer(model: nn.Module, config: OptimizerConfig, lr: float, lr_factor: float) -> Optimizer:
    """Build the optimizer of one job."""
    # lr contains this factor and every job applies l2, so each job divides its l2 by it (Kaldi)
    own = {layer: {key: value / lr_factor if key == "weight_decay" else value for key, value in options.items()} for layer,
           options in (config.layer_options or {}).items()}
    common: dict[str, Any] = {"layer_options": {**layer_options(model), **own}, "momentum": config.momentum,
                              "max_change": config.max_change, "max_param_change": config.max_param_change,
                              "weight_decay": config.weight_decay / lr_factor}
    if config.preconditions or config.kind == "sgd":
        return SGD(model, lr, **common)
    # AdamW is the default, too, but then a warning lists the layers that it trains
    return NGSGD(model, lr, loss_reduction="sum", fallback="adamw", rank_in=config.rank_in,
                 rank_out=config.rank_out, update_period=config.update_period, alpha=config.alpha,
                 num_samples_history=config.num_samples_history, update=config.update, cosine_period=COSINE_PERIOD, **common)


def choose_device(wanted: str, index: int = 0) -> torch.device:
    """Choose the device of worker `index`; ConfigError if the GPU accepts no further process.

    Ray shows a worker only its own GPU; others are assigned round-robin to those of their machine.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cluster.device is cuda, but " + (
            "this worker has no visible GPU; set cluster.device=auto or cpu." if torch.backends.cuda.is_built() else
            f"torch {torch.__version__} of this worker is for CPUs; install torch for CUDA there (in an image: build it with "
            "--build-arg TORCH_INDEX=...), or set cluster.device=cpu."))
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", index % torch.cuda.device_count())
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        # in exclusive mode, another worker or program holds the device
        raise ConfigError(f"{device} accepts no further process ({str(error).partition(chr(10))[0].rstrip('.')}); in "
                          "exclusive mode set cluster.num_workers to at most the number of free GPUs.") from error
    return device


def resolve_threads(config: ClusterConfig, num_cores: int) -> int:
    """Compute threads of one worker: all together use at most the number of cores."""
    # spinning threads of one worker starve another
    num_processes = config.num_workers * config.ranks_per_worker
    return config.threads_per_worker or max(1, num_cores // num_processes)
