"""Small networks, steps on them, and states that do not fit, for sweeps over the methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.preconditioners import METHODS, Preconditioner

X, Y = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
LR = 0.01


def network(width: int = 8, depth: int = 2, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    inner = [part for _ in range(depth - 2) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), *inner, nn.Linear(width, 3)).to(dtype)


def steps(preconditioner: Preconditioner, model: nn.Module, num: int = 3, x: Tensor = X, *, at_once: bool = False) -> list[Tensor]:
    """Take steps of SGD; return the last directions, of float64."""
    dtype = next(model.parameters()).dtype
    x = x.to(dtype) if x.is_floating_point() else x
    for _ in range(num):
        model.zero_grad()

        def closure() -> Tensor:
            return nn.functional.cross_entropy(model(x).float() if dtype == torch.float16 else model(x), Y)
        if at_once:
            preconditioner.evaluate_and_step(closure, lr=LR)
        else:
            preconditioner.evaluate(closure)
            preconditioner.step(lr=LR)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=LR)
    return [p.grad.double() for p in model.parameters() if p.grad is not None]


def trained(method: str, **network_options: Any) -> tuple[nn.Sequential, Preconditioner]:
    model = network(**network_options)
    preconditioner = METHODS[method](model)
    steps(preconditioner, model)
    return model, preconditioner


def damaged(state: Mapping[str, Mapping[str, Any]], every: int = 1) -> Iterator[tuple[str, Any]]:
    """(description, a state that is none); with `every`, only some entries of the layers."""
    wrong: list[Any] = [None, [], "state", 3, {}, torch.ones(3), {"model": {}, "preconditioner": dict(state)}]
    for each in wrong:
        yield f"{type(each).__name__} for the state", each
    yield "unknown layer", {**state, "nobody.weight": next(iter(state.values()))}
    for number, (name, entry) in enumerate(state.items()):
        if number % every and name:
            continue
        yield f"no {name or 'counters'}", {key: value for key, value in state.items() if key != name}
        for each in (None, "entry", 3):
            yield f"{name} is {each!r}", {**state, name: each}
        for extra in ("more", "statistics.more", "inverse.more"):
            yield f"{name} has {extra}", {**state, name: {**entry, extra: torch.ones(2)}}
        for key, value in entry.items():
            yield f"{name} has no {key}", {**state, name: {other: part for other, part in entry.items() if other != key}}
            tensor = torch.as_tensor(value)
            others: list[Any] = ["text", None, [[1.0], [1.0, 2.0]], torch.ones(2, 2, 2, 2, 2, 2), torch.tensor(1j), {}]
            if tensor.ndim:
                others += [tensor[None], *([tensor[:-1]] if tensor.numel() else [])]
            if tensor.is_floating_point() and "clipping" not in key:
                others += [tensor * float("nan")]
            for other in others:
                described = tuple(other.shape) if isinstance(other, Tensor) else repr(other)
                yield f"{name} {key} is {described}", {**state, name: {**entry, key: other}}
