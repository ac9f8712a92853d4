"""Small networks in float64 with a mean loss, and what the dense oracle of each layer needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ngsgd.preconditioners.base import Preconditioner
from tests.reference.preconditioners import derivative_rows

N = 6
NAMES = ("linear", "conv pooled", "conv frames")
SHARING = {"linear": "expand", "conv pooled": "reduce", "conv frames": "expand"}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def move(model: nn.Module, lr: float) -> None:
    """A step of SGD, in which every parameter has a gradient."""
    with torch.no_grad():
        for p in model.parameters():
            assert p.grad is not None
            p.sub_(p.grad, alpha=lr)


def directions(preconditioner: Preconditioner, loss: Callable[[], Tensor], *, steps: int = 2,
               lr: float = 0.01,
               at_once: bool = False, num_rows: int | None = None) -> dict[str, Tensor]:
    """The directions of the last of some steps, each followed by one of SGD."""
    for _ in range(steps):
        preconditioner.model.zero_grad()
        if at_once:
            preconditioner.evaluate_and_step(loss, lr=lr, num_rows=num_rows)
        else:
            preconditioner.evaluate(loss, num_rows=num_rows)
            preconditioner.step(lr=lr)
        torch.optim.SGD(preconditioner.model.parameters(), lr=lr).step()
    return gradients_of(preconditioner.model)


class Pooled(nn.Module):
    """The mean over time."""

    def forward(self, x_NCT: Tensor) -> Tensor:
        return x_NCT.mean(dim=2)


class Problem(NamedTuple):
    """A network, its minibatch and its loss, which is a mean over `num_rows`."""

    model: nn.Module
    x: Tensor
    y: Tensor
    num_rows: int

    def loss(self, output: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, self.y)

    def gradients(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.loss(self.model(self.x)).backward()
        return gradients_of(self.model)

    def preconditioned(self, preconditioner: Preconditioner, steps: int = 1, lr: float | None = None) -> dict[str, Tensor]:
        """The gradients after so many steps on the same parameters."""
        for _ in range(steps):
            self.model.zero_grad()
            with preconditioner.watch():
                preconditioner.backward(self.loss(self.model(self.x)))
            preconditioner.step(lr)
        return gradients_of(self.model)

    def layers(self, *, exact: bool = False) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, N x T x I, V x N x T x O) of every affine layer."""
        for name, layer in self.model.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv1d):
                yield name, *derivative_rows(self.model, layer, self.loss, self.x, num_rows=self.num_rows, exact=exact)


def problem(name: str, seed: int = 3) -> Problem:
    torch.manual_seed(seed)
    if name == "linear":
        model: nn.Module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        return Problem(model.double(), torch.randn(N, 5, dtype=torch.float64), torch.arange(N) % 3, N)
    model = nn.Sequential(nn.Conv1d(2, 3, 3, dilation=2, padding=1), nn.Tanh(), nn.Conv1d(3, 3, 2, bias=False))
    x = torch.randn(N, 2, 7, dtype=torch.float64)
    if name == "conv frames":
        return Problem(model.double(), x, torch.randint(3, (N, 4)), 4 * N)
    model.append(Pooled())
    return Problem(model.double(), x, torch.arange(N) % 3, N)


def joint(gradients: dict[str, Tensor], layer: str) -> Tensor:
    """O x I with the bias as last column."""
    g_OI = gradients[f"{layer}.weight"].flatten(1)
    return torch.cat([g_OI, gradients[f"{layer}.bias"][:, None]], dim=1) if f"{layer}.bias" in gradients else g_OI


def close(found: Tensor, wanted: Tensor) -> None:
    """Both float64, dimensions up to a hundred: the rounding of a solve at condition 1e5."""
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-10)


def order_of(case: Problem, names: list[str]) -> Tensor:
    """Where the elements of a block, with the bias last, are in the sorted flat vector."""
    sizes, starts, start = dict(case.model.named_parameters()), {}, 0
    for name, p in sorted(sizes.items()):
        starts[name], start = torch.arange(start, start + p.numel()).view(len(p), -1), start + p.numel()
    blocks = [torch.cat([starts[name] for name in names if name.startswith(layer)], dim=1).flatten()
              for layer in sorted({name[0] for name in names})]
    return torch.cat(blocks)


def step_of(preconditioner: Preconditioner, case: Problem, step: int) -> dict[str, Tensor]:
    """A step of SGD on a minibatch that depends on its number; the direction."""
    case.model.zero_grad()
    preconditioner.evaluate(lambda: case.loss(case.model(at_step(case, step))))
    preconditioner.step(lr=0.01)
    found = gradients_of(case.model)
    move(case.model, 0.01)
    return found


def at_step(case: Problem, step: int) -> Tensor:
    return case.x + 0.3 * torch.randn(case.x.shape, generator=torch.Generator().manual_seed(step), dtype=case.x.dtype)
