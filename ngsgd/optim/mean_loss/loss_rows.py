"""Number of samples of the mean losses whose gradients an optimizer steps along, from all calls
of `torch.autograd._engine_run_backward`, which is replaced as `torch.compiler` does.
"""

from __future__ import annotations

import functools
import gc
import itertools
import weakref
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ngsgd.errors import ConfigError
from ngsgd.optim.mean_loss.loss_shape import LossShape, loss_shape, nodes_of

# Its type stubs lack the function.
_autograd: Any = torch.autograd
_functions: Any = torch._C._functions
_AccumulateGrad: Any = _functions.AccumulateGrad


class _Gradient(NamedTuple):
    """The gradient of a parameter after the last pass that ended in it."""

    parameter: Tensor
    address: int
    version: int


@dataclass
class _Minibatch:
    """Passes of the same samples, and the ids of the parameters next to their losses."""

    shape: LossShape
    parameters: set[int]
    # numbers of the passes with retained graphs
    passes: set[int]


class _Pass(NamedTuple):
    """A backward pass."""

    outputs: Sequence[Tensor]
    shape: LossShape
    # parameters that get gradients; empty: all
    inputs: Sequence[Tensor]
    # number if the graph is retained, which a later pass may share; 0 otherwise
    number: int


class LossRows:
    """Counts the samples of the mean losses whose gradients are in the `grad` of parameters.

    Passes whose gradients were cleared do not count, those that end in one layer are added, and
    those through a retained graph are of the same samples. Of others the number is not known.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._minibatches: list[_Minibatch] = []
        self._gradients: dict[int, _Gradient] = {}
        # by id: all parameters, and those whose steps depend on the number of samples
        self.parameters: dict[int, Tensor] = {}
        self.scaled: dict[int, Tensor] = {}
        observe_replicas()
        if not getattr(_autograd._engine_run_backward, "_is_of_ngsgd", False):
            _autograd._engine_run_backward = _reported(_autograd._engine_run_backward)
        _observers.append(weakref.ref(self, _observers.remove))

    def clear(self) -> None:
        """Forget all passes, as after a step."""
        if self._minibatches:
            self._minibatches, self._gradients = [], {}

    def number(self) -> int:
        """Return the number of samples since the last step; ConfigError if it is not known."""
        total, reason = 0, "" if self._minibatches else "no backward pass of a loss was seen since the last step"
        for one in self._minibatches:
            reason = reason or one.shape.reason
            total += one.shape.num_rows or 0
        if reason:
            raise ConfigError(f"NGSGD cannot find the number of samples of the mean loss: {reason}. Give it as "
                              "optimizer.step(num_samples=...), or sum the loss and give loss_reduction=\"sum\".")
        return max(1, total)

    def before_pass(self) -> int:
        """Drop passes whose gradients were cleared; return how many passes layers have had."""
        if self._gradients:
            self._gradients = {key: one for key, one in self._gradients.items() if not _is_cleared(one)}
            for one in self._minibatches:
                one.parameters &= self._gradients.keys()
            self._minibatches = [one for one in self._minibatches if one.parameters]
        return int(self._context.num_passes)

    def after_pass(self, num_passes: int, done: _Pass) -> Any:
        """Count a pass that has added to gradients; return the operation next to the loss."""
        parameter, user = self._nearest(done, self._context.num_passes != num_passes)
        if parameter is None or (grad := parameter.grad) is None:
            return None
        if self._minibatches:
            self._add(id(parameter), user, done)
        else:
            self._minibatches.append(_Minibatch(done.shape, {id(parameter)}, {done.number} if done.number else set()))
        self._gradients[id(parameter)] = _Gradient(parameter, 0 if grad.is_sparse else grad.data_ptr(), grad._version)
        return user

    def _add(self, parameter: int, user: Any, done: _Pass) -> None:
        shape, passes = done.shape, {done.number} if done.number else set[int]()
        marks = set[int]()
        if any(one.passes for one in self._minibatches):
            # passes that have gone through operations of the graph
            graph = nodes_of([output.grad_fn for output in done.outputs])
            marks = {node.metadata[_PASS] for node in graph if _PASS in node.metadata}
        if shared := [one for one in self._minibatches if not marks.isdisjoint(one.passes)]:
            same = shared[0]
            is_known = len(shared) == 1 and (parameter not in same.parameters
                                             or not same.passes.isdisjoint(user.metadata.get(_HEAD, ()) if user else ()))
            if not is_known:
                shape = LossShape(None, "backward passes through one graph have losses of several calls of the model")
            elif shape.num_rows != same.shape.num_rows and not (shape.reason or same.shape.reason):
                shape = LossShape(None, f"losses have {same.shape.num_rows} and {shape.num_rows} samples")
            same.shape = same.shape if same.shape.reason else shape
            same.parameters.add(parameter)
            same.passes |= passes
            return
        if any(parameter not in one.parameters for one in self._minibatches):
            shape = LossShape(None, "backward passes end in different layers, and their samples may be the same or not")
        last = self._minibatches[-1]
        if shape.reason or passes or last.passes or last.shape.reason:
            self._minibatches.append(_Minibatch(shape, {parameter}, passes))
        else:
            # No later pass can share their graphs.
            last.shape = LossShape((last.shape.num_rows or 0) + (shape.num_rows or 0))

    def _nearest(self, done: _Pass, has_reached: bool) -> tuple[Tensor | None, Any]:
        """Return (the parameter of the optimizer next to the loss, the operation that uses it)."""
        # A pass may have reached AdamW layers alone.
        parameters = self.parameters if has_reached else self.scaled
        if not parameters:
            return None, None
        allowed = {id(p) for p in done.inputs} if done.inputs else None
        nodes: list[Any] = [output.grad_fn for output in done.outputs if output.grad_fn is not None]
        seen, hides_layers = set[Any](), False
        # The list grows in the loop: breadth first.
        for node in nodes:
            for child, _ in node.next_functions:
                if child is None or child in seen:
                    continue
                seen.add(child)
                if type(child) is not _AccumulateGrad:
                    nodes.append(child)
                elif ((p := parameters.get(id(child.variable))) is not None and p.numel()
                      and (allowed is None or id(p) in allowed)):
                    return p, node
            # Reentrant checkpoints hide their layers; the last of them stands for these.
            hides_layers = hides_layers or type(node).__name__.startswith("CheckpointFunction")
        return (self._context.last_weight if hides_layers and has_reached else None), None


# Keys of marks in the metadata of operations: the last pass through them, and the passes whose
# next parameter they use.
_PASS, _HEAD = "ngsgd.pass", "ngsgd.head"
_numbers = itertools.count(1)


def _is_cleared(gradient: _Gradient) -> bool:
    grad = gradient.parameter.grad
    if grad is None:
        return True
    if grad.is_sparse:
        return not grad._nnz()
    if grad.data_ptr() == gradient.address and grad._version == gradient.version:
        return False
    # Clipping and unscaling change gradients, too. Rare, because it may wait for the device.
    return not bool(grad.any())


# All further backward passes are reported to these while they exist.
_observers: list[weakref.ref[LossRows]] = []


def _reported(original: Any) -> Any:
    @functools.wraps(original)
    def run(outputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        # Passes inside of a pass belong to reentrant checkpoints.
        if not _observers or not kwargs.get("accumulate_grad") or torch._C._current_graph_task_id() != -1:
            return original(outputs, *args, **kwargs)
        before = [(rows, rows.before_pass()) for one in _observers if (rows := one()) is not None]
        shape = loss_shape(outputs)
        result = original(outputs, *args, **kwargs)
        keeps = len(args) > 2 and (args[1] or args[2])
        done = _Pass(outputs, shape, args[3] if len(args) > 3 else (), next(_numbers) if keeps else 0)
        users = [rows.after_pass(num_passes, done) for rows, num_passes in before]
        if done.number:
            # Note the pass in the operations of its graph.
            for node in nodes_of([output.grad_fn for output in outputs]):
                node.metadata[_PASS] = done.number
            for user in (user for user in users if user is not None):
                user.metadata[_HEAD] = {*user.metadata.get(_HEAD, ()), done.number}
        return result

    run._is_of_ngsgd = True  # type: ignore[attr-defined]
    return run


# DistributedDataParallel modules of this process
_modules = weakref.WeakSet[DistributedDataParallel]()


def observe_replicas() -> None:
    """Register all DistributedDataParallel modules, also those that are created later."""
    original = DistributedDataParallel.__init__
    if getattr(original, "_is_of_ngsgd", False):
        return

    @functools.wraps(original)
    def init(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _modules.add(self)

    init._is_of_ngsgd = True  # type: ignore[attr-defined]
    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    # Modules from before the first optimizer. isinstance would call __class__ of proxies.
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _modules.update(found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel))


def module_around(parameters: Container[int]) -> DistributedDataParallel | None:
    """Return the module that averages gradients of one of the parameters, given by their ids."""
    if not _modules:
        return None
    return next((module for module in _modules if any(id(p) in parameters for p in module.parameters())), None)
