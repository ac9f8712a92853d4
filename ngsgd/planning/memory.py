"""Memory of a training step: the state of the optimizer exactly, the peak as an estimate.

    state   SGD: 4 bytes per parameter with momentum, else 0;  AdamW: 8
            NG-SGD: as SGD, plus 4 R D for each side of each layer (W of the Fisher estimate, R
            ranks, D dimensions)
    peak    parameters + state + minibatch + the largest of
              backward:  activations still saved + gradients so far + temporaries of the operation
              step:      all gradients + temporaries of the update

Activations are counted in a forward pass on the meta device of torch, which computes nothing.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.optim import NGSGD, Optimizer
from ngsgd.schedules import Shard
from ngsgd.training.task import Batch, Task, seeded_model
from ngsgd.training.worker import make_optimizer

# tensors of the size of the parameters that an update allocates besides the gradients: the
# denominator of Adam
_ADAM_TEMPORARIES = 1.0
# tensors of the size of a saved activation that its backward pass allocates: gradients of output
# and input
_BACKWARD_TEMPORARIES = 2.0
# with NG-SGD also projected rows of both sides, and their products with the rows
_NATURAL_TEMPORARIES = 6.0
# maximum bytes of rows that wait on a device to be preconditioned together
_MOST_WAITING = 1 << 28
# layers that keep their normalized rows with NG-SGD
_KEEPS_ROWS = nn.modules.batchnorm._BatchNorm
# state tensors of the size of a parameter, of optimizers of torch
_MOMENTS = {"Adam": 2, "AdamW": 2, "Muon": 1}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the device of the model."""

    parameters: int
    gradients: int
    # of the optimizer, between steps
    state: int
    # saved by the forward pass for the backward pass
    activations: int
    # of a complete training step, including the minibatch
    peak: int


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state that an optimizer has after its first step.

    Counted are tensors of the size of parameters and Fisher estimates; counters are neglected.

    Args:
        optimizer: `NGSGD`, `ngsgd.optim.SGD`, or SGD, Adam, AdamW or Muon of torch, before or after
            steps.

    Raises:
        ConfigError: another optimizer.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer_state_bytes(torch.optim.AdamW(model.parameters()))     # two moments
    64
    """
    tensors: int = sum(
        _tensors_per_parameter(optimizer, group) * p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
    )
    return tensors + (sum(_fisher_bytes(optimizer)) if isinstance(optimizer, NGSGD) else 0)


def _tensors_per_parameter(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> int:
    kind = type(optimizer).__name__
    if isinstance(optimizer, Optimizer) and group["rule"] == "adamw":
        return _MOMENTS["AdamW"]
    if isinstance(optimizer, Optimizer | torch.optim.SGD):
        return int(group["momentum"] > 0.0)
    if kind not in _MOMENTS:
        raise ConfigError(
            f"The memory of {kind} cannot be predicted; measure it on a GPU with "
            "torch.cuda.max_memory_allocated."
        )
    return _MOMENTS[kind] + bool(group.get("amsgrad"))


def _fisher_bytes(optimizer: NGSGD) -> Iterator[int]:
    for _, estimate in optimizer.preconditioners():
        # rows of dimension 1 have no estimate
        if estimate.dim is not None and estimate.dim > 1:
            yield 4 * min(estimate.rank, estimate.dim - 1) * estimate.dim


def predict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, Any], Tensor],
    data: Any,
) -> MemoryUse:
    """Predict the memory of a training step on a minibatch.

    Args:
        model: the model; neither it nor its parameters are changed.
        optimizer: of the model, as for `optimizer_state_bytes`.
        loss: `loss(model, data)` returns the scalar to differentiate.
        data: a minibatch, tensors in tuples and dictionaries; only shapes and types are used.

    Returns:
        Bytes by purpose, and the peak.

    Raises:
        ConfigError: the forward pass needs the values of its input, so it cannot run on the meta
            device.
    """
    saved = _saved_tensors(model, loss, data, is_natural=isinstance(optimizer, NGSGD))
    parameters = _bytes_of(model.parameters())
    buffers = _bytes_of(model.buffers())
    gradients = _bytes_of(p for p in model.parameters() if p.requires_grad)
    state = optimizer_state_bytes(optimizer)
    always = (
        parameters
        + buffers
        + state
        + _bytes_of(x for x in tree_leaves(data) if isinstance(x, Tensor))
    )
    activations, in_backward = _walk(saved)
    is_adam = type(optimizer).__name__ in ("Adam", "AdamW")
    in_step = gradients * (1.0 + (_ADAM_TEMPORARIES if is_adam else 0.0))
    if isinstance(optimizer, NGSGD):
        # products of the estimates with the minibatch, until the update
        in_step += sum(_fisher_bytes(optimizer))
        if next(model.parameters()).device.type != "cpu":
            in_backward += min(activations, _MOST_WAITING)
    return MemoryUse(
        parameters, gradients, state, activations, round(always + max(in_backward, in_step))
    )


def predict_run(config: RunConfig, task: Task, *, size: int | None = None) -> MemoryUse:
    """Predict the memory of a step of a run, with its minibatch size or `size` examples.

    Raises:
        ConfigError: as `predict`, or the optimizer of the run is a preconditioner.
    """
    if config.optimizer.preconditions:
        raise ConfigError(
            f"The memory of optimizer={config.optimizer.kind} cannot be predicted; measure it on a "
            "GPU with torch.cuda.max_memory_allocated."
        )
    model = seeded_model(task, config.seed)
    optimizer = make_optimizer(model, config.optimizer, config.schedule.lr_initial, 1.0)
    batch = first_batch(config, task, size or config.schedule.minibatch_size)
    return predict(model, optimizer, lambda one, data: task.loss(one, data).total, batch.data)


def first_batch(config: RunConfig, task: Task, size: int) -> Batch:
    """Return a minibatch of the first shard; it is smaller if the shard has fewer examples."""
    return next(iter(task.batches(Shard(0, 0), size, seed=(config.seed, 0, 0))))


@dataclass(frozen=True)
class _Saved:
    """A tensor saved by the forward pass: an activation, or a parameter with its gradient."""

    storage: int
    num_bytes: int
    is_parameter: bool
    # part of the minibatch, which is never freed
    is_given: bool
    # tensors of this size that its backward pass allocates
    temporaries: float


def _saved_tensors(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], data: Any, *, is_natural: bool
) -> list[_Saved]:
    """Saved tensors in the order of the forward pass."""
    shadow = copy.deepcopy(model).to("meta")
    on_meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, data)
    own = {_storage(p) for p in shadow.parameters()}
    given = {_storage(x) for x in tree_leaves(on_meta) if isinstance(x, Tensor)}
    saved: list[_Saved] = []

    temporaries = _NATURAL_TEMPORARIES if is_natural else _BACKWARD_TEMPORARIES

    def pack(x: Tensor) -> Tensor:
        saved.append(
            _Saved(
                _storage(x),
                x.untyped_storage().nbytes(),
                _storage(x) in own,
                _storage(x) in given,
                temporaries,
            )
        )
        # kept alive by the graph, so that no other tensor reuses its storage
        return x

    def add_rows(_: nn.Module, __: Any, output: Tensor) -> None:
        # no storage has a negative id
        saved.append(
            _Saved(-len(saved) - 1, output.untyped_storage().nbytes(), False, False, temporaries)
        )

    for module in shadow.modules():
        if is_natural and isinstance(module, _KEEPS_ROWS):
            module.register_forward_hook(add_rows)

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            total = loss(shadow, on_meta)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        raise ConfigError(
            "The memory of this model cannot be predicted: its forward pass does not run on the "
            f"meta device of torch ({str(error).partition(chr(10))[0]}); measure it on a GPU with "
            "torch.cuda.max_memory_allocated."
        ) from error
    del total
    return saved


def _walk(saved: list[_Saved]) -> tuple[int, float]:
    """(bytes of all activations, peak of the backward pass).

    The peak includes activations, gradients and temporaries.
    """
    total = sum(
        {
            one.storage: one.num_bytes for one in saved if not one.is_parameter and not one.is_given
        }.values()
    )
    live = peak = float(total)
    uses = Counter(one.storage for one in saved)
    done = set[int]()
    for one in reversed(saved):
        uses[one.storage] -= 1
        if one.is_parameter:
            live += 0 if one.storage in done else one.num_bytes
            done.add(one.storage)
            continue
        peak = max(peak, live + one.temporaries * one.num_bytes)
        if not one.is_given and not uses[one.storage]:
            live -= one.num_bytes
    return total, max(peak, live)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
