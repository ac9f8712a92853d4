"""Training steps as CUDA graphs: one launch per minibatch instead of several hundred."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.errors import ConfigError
from ngsgd.optim.fisher.stack import Number
from ngsgd.optim.optimizer import ORTHONORMAL_PERIOD, Optimizer
from ngsgd.optim.rule import StepRecord

# Equal steps that run without a graph first; they create the tensors that all steps share.
_WARM_UP = 2
# Recorded steps; each keeps the memory of one step.
MOST_GRAPHS = 16
# Different steps that are counted.
_MOST_COUNTED = 1000


class _Recorded(NamedTuple):
    """A recorded step: its graph and the memory that the graph reads and writes."""

    graph: Any
    inputs: list[Tensor]
    numbers_M: Tensor
    record: StepRecord


class GraphedStep:
    """Take the steps of `SGD` or `NGSGD` as CUDA graphs, with the same results.

    The first steps of each kind (shapes of the tensors, `key`, settings of the optimizer) run
    without a graph, and so do steps that wait for the device. A learning rate that changes in
    every step is never recorded.

    Args:
        optimizer: the optimizer of the step, for parameters on a GPU.
        run: `zero_grad`, forward pass, backward pass and `optimizer.step` on the given tensors.
            Returns M numbers, such as the loss, as 0-d tensors or floats. It must not wait for the
            device (`.item()`, printing a loss), and it may use no random numbers but those of
            torch's default generator.

    Example:
        >>> from ngsgd import NGSGD
        >>> device = "cuda" if torch.cuda.is_available() else "cpu"
        >>> model = torch.nn.Linear(4, 3).to(device)
        >>> optimizer = NGSGD(model)
        >>> def run(x, y):
        ...     optimizer.zero_grad()
        ...     loss = torch.nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return [loss.detach()]
        >>> step = GraphedStep(optimizer, run)
        >>> x, y = torch.randn(8, 4, device=device), torch.zeros(8, dtype=torch.int64, device=device)
        >>> [step(x, y).shape for _ in range(2)]        # the first steps run without a graph
        [torch.Size([1]), torch.Size([1])]
    """

    def __init__(self, optimizer: Optimizer, run: Callable[..., Sequence[Number]]) -> None:
        self._optimizer, self._run = optimizer, run
        self._recorded: dict[Hashable, _Recorded] = {}
        self._num_seen = Counter[Hashable]()

    def __call__(self, *tensors: Tensor, key: Hashable = None) -> Tensor:
        """Take one step on a minibatch, of which a graph reads copies; return the numbers of `run`.

        `key` is everything else that `run` depends on. ConfigError: the step cannot be recorded.
        """
        own, optimizer = self._settings(), self._optimizer
        if own is None:
            return self._numbers(tensors)
        kind = (own, key, tuple((tensor.shape, tensor.dtype) for tensor in tensors))
        found = self._recorded.get(kind)
        if found is not None:
            optimizer.counts.num_steps += 1
            optimizer.step_count += 1
            optimizer.rule.replayed(optimizer, found.record)
            torch._foreach_copy_(found.inputs, list(tensors))
        else:
            self._num_seen[kind] += 1
            if self._num_seen[kind] <= _WARM_UP or len(self._recorded) >= MOST_GRAPHS:
                if len(self._num_seen) > _MOST_COUNTED:
                    self._num_seen.clear()
                return self._numbers(tensors)
            found = self._recorded[kind] = self._record(tensors)
        found.graph.replay()
        optimizer.rule.send_updates(found.record)
        # The next replay overwrites the numbers.
        return found.numbers_M.clone()

    def _settings(self) -> Hashable | None:
        """Return what the next step depends on besides data; None if it waits for the device."""
        own = self._optimizer
        number = own.counts.num_steps + 1
        if own.on_nonfinite == "raise" or number & (number - 1) == 0 or (of_rule := own.rule.graph_key(own)) is None:
            return None
        groups = tuple(tuple(value for key, value in group.items() if key != "params") for group in own.param_groups)
        is_constrained = any(group["orthonormal_constraint"] for group in own.param_groups)
        return (groups, own.max_param_change, own.counts.hits.data_ptr(),
                own.step_count % ORTHONORMAL_PERIOD if is_constrained else 0, of_rule)

    def _numbers(self, tensors: Sequence[Tensor]) -> Tensor:
        numbers = self._run(*tensors)
        self._optimizer.counts.sum_up()
        device = tensors[0].device
        return torch.stack([number.to(torch.float64) if isinstance(number, Tensor) else
                            torch.full((), number, dtype=torch.float64, device=device)
                            for number in numbers])

    def _record(self, tensors: Sequence[Tensor]) -> _Recorded:
        inputs = [tensor.clone() for tensor in tensors]
        # The graph counts its own step only.
        self._optimizer.counts.sum_up()
        try:
            with self._optimizer.rule.recording() as record:
                graph, numbers_M = record_graph(lambda: self._numbers(inputs), inputs[0].device)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ConfigError(f"the training step cannot be recorded as a CUDA graph: {reason}. A "
                              "step with a graph may not wait for the GPU; remove the place, or "
                              "train without graphs (cluster.cuda_graphs=off).") from error
        return _Recorded(graph, inputs, numbers_M, record)


def record_graph(run: Callable[[], Tensor], device: torch.device) -> tuple[Any, Tensor]:
    """Record the operations of `run` without executing them; return (graph, its result)."""
    graph, stream, current = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        # Other threads, which read and copy data, may allocate memory meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    current.wait_stream(stream)
    return graph, result
