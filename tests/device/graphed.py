"""Training with recorded steps on the pretended device, compared with the same steps run one by
one; one JSON object on each line.

    python -m tests.device.graphed [MODEL ...]

A recorded step here is the list of its operators.  A replay runs them again and copies each result
to where the first result is, as a CUDA graph does.  An operator that waits for the device raises an
error while it is recorded.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import ngsgd
from ngsgd.optim import graphed_step
from ngsgd.optim.graphed_step import GraphedStep
from tests.device import pretended
from tests.device.equality import CLASSES, MODELS, D, N
from tests.device.pretended import PretendedTensor, Watch, host, moved

STEPS = 40
CE = nn.functional.cross_entropy


class _Recorder(TorchDispatchMode):
    """Keeps each operator with a tensor of the device, its arguments and its results."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self._watch = watch

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if self._watch.waits.total():
            raise RuntimeError("operation not permitted when stream is capturing")
        flat = tree_flatten((args, kwargs, found))[0]
        if any(isinstance(thing, PretendedTensor) for thing in flat):
            self.calls.append((function, args, kwargs or {}, found))
        return found


class _Graph:
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._calls = calls
        self._is_first = True

    def replay(self) -> None:
        # recording has run the operators once
        if self._is_first:
            self._is_first = False
            return
        for function, args, kwargs, found in self._calls:
            again = pretended._run(function, args, kwargs)
            for to, value in zip(tree_flatten(found)[0], tree_flatten(again)[0], strict=True):
                if isinstance(to, PretendedTensor) and to.data_ptr() != value.data_ptr():
                    to.raw.copy_(value.raw)


def _recorder_of(watch: Watch) -> Callable[..., tuple[_Graph, Tensor]]:
    def record(run: Callable[[], Tensor], _: torch.device) -> tuple[_Graph, Tensor]:
        with watch.step(), _Recorder(watch) as recorder:
            result = run()
        return _Graph(recorder.calls), result
    return record


def _trained(name: str, watch: Watch, *, graphed: bool) -> dict[str, Any]:
    """The state after steps of two sizes of minibatch and two learning rates."""
    make, options = MODELS[name]
    torch.manual_seed(0)
    model = moved(make())
    optimizer = ngsgd.NGSGD(model, **{"lr": 0.01, "loss_reduction": "sum", "momentum": 0.5, "max_change": 0.1, **options})

    def run(x: Tensor, y: Tensor) -> list[Tensor | float]:
        optimizer.zero_grad()
        loss = CE(model(x), y, reduction=optimizer.loss_reduction)
        loss.backward()
        optimizer.step(num_samples=len(y))
        assert optimizer.last_update is not None
        return [loss.detach(), float(len(y)), optimizer.last_update]

    step = GraphedStep(optimizer, run)
    # no step is recorded where there are too many already
    graphed_step.MOST_GRAPHS = 16 if graphed else 0
    numbers = []
    random = torch.Generator("cpu").manual_seed(1)
    for number in range(STEPS):
        if number == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] /= 2
        size = N // 2 if number % 9 == 8 else N
        x, y = torch.randn(size, D, generator=random), torch.randint(CLASSES, (size,), generator=random)
        numbers.append(host(step(PretendedTensor(x), PretendedTensor(y))))
    done = optimizer.activity()
    return {"parameters": [host(p.detach()) for p in model.parameters()], "numbers": numbers,
            "estimates": [host(state.W_RD) for _, one in optimizer.preconditioners()
                          if (state := one.state) is not None],
            "calls": [torch.tensor(one.num_calls) for _, one in optimizer.preconditioners()],
            "activity": [torch.tensor([done.num_steps, done.num_skipped, done.model_share, *done.layer_share.values()])],
            "graphs": len(step._recorded)}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pretended.register()
    for name in sys.argv[1:] or MODELS:
        watch = Watch()
        with watch:
            graphed_step.record_graph = _recorder_of(watch)
            try:
                plain, graphed = (_trained(name, watch, graphed=each) for each in (False, True))
                equal = [key for key in plain if key != "graphs"
                         and all(map(torch.equal, plain[key], graphed[key]))]
                found = {"equal": equal, "graphs": graphed["graphs"]}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
