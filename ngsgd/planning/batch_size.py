"""The largest minibatch whose training step fits on a device.

It is measured on a GPU and predicted on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.planning.memory import first_batch, predict_run
from ngsgd.preconditioners.build import make_preconditioner
from ngsgd.training.task import Task, data_to_device, seeded_model
from ngsgd.training.worker import make_optimizer

# usable fraction of the free memory: allocators keep unused blocks
_USABLE = 0.9
# the first updates of a Fisher estimate and of a state occur in the first two
_STEPS = 2


@dataclass(frozen=True)
class FittingBatch:
    """The largest minibatch, and the measurements."""

    # examples, a power of two; less than 1: no example fits
    size: int
    fixed_bytes: float
    bytes_per_example: float
    free_bytes: int
    # False: predicted
    is_measured: bool
    # whether a step of `size` examples was run on the device
    is_verified: bool


def fitting_batch(
    config: RunConfig, task: Task, device: torch.device, free_bytes: int
) -> FittingBatch:
    """Return the largest power of two of examples whose training step fits into `free_bytes`.

    The bytes of two minibatch sizes give a line. On a GPU they are measured, and a step of the
    resulting size is run if a shard has as many examples.

    Raises:
        ConfigError: the shard is too small for two sizes, or the memory cannot be predicted on a
            CPU.
    """
    small = max(1, config.schedule.minibatch_size // 2)
    sizes = [first_batch(config, task, size).num_examples for size in (small, 2 * small)]
    if sizes[0] >= sizes[1]:
        raise ConfigError(
            f"The first shard has {sizes[1]} examples, too few for minibatches of {2 * small}; "
            "lower schedule.minibatch_size."
        )
    on_gpu = device.type == "cuda"
    used = [
        step_bytes(config, task, device, size)
        if on_gpu
        else predict_run(config, task, size=size).peak
        for size in sizes
    ]
    slope = max((used[1] - used[0]) / (sizes[1] - sizes[0]), 1.0)
    fixed = used[1] - slope * sizes[1]
    size = _power_of_two((_USABLE * free_bytes - fixed) / slope)
    is_verified = False
    while on_gpu and size > sizes[1] and not is_verified:
        if first_batch(config, task, size).num_examples < size:
            break
        try:
            step_bytes(config, task, device, size)
            is_verified = True
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            size //= 2
    return FittingBatch(size, fixed, slope, free_bytes, on_gpu, is_verified)


def step_bytes(config: RunConfig, task: Task, device: torch.device, size: int) -> int:
    """Measure the peak memory of training steps of `size` examples on a GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    model = seeded_model(task, config.seed).to(device)
    is_preconditioned = config.optimizer.preconditions
    optimizer = make_optimizer(
        model, config.optimizer, config.schedule.lr_initial, 1.0, fast_gemm=not is_preconditioned
    )
    maker = (
        make_preconditioner(model, config.optimizer, config.seed, model)
        if is_preconditioned
        else None
    )
    batch = first_batch(config, task, size)
    data = data_to_device(batch.data, device)
    for _ in range(_STEPS):
        optimizer.zero_grad(set_to_none=True)
        if maker is None:
            task.loss(model, data).total.backward()
        else:
            maker.evaluate_and_step(
                lambda: task.loss(model, data).total, config.schedule.lr_initial
            )
        optimizer.step(num_samples=batch.num_examples)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device) - before)


def _power_of_two(examples: float) -> int:
    return 1 << (int(examples).bit_length() - 1) if examples >= 1.0 else 0
