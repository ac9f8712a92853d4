"""Conv1D of Hugging Face has the direction of a Linear with the transposed weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.curvature import collect
from ngsgd.errors import ConfigError
from ngsgd.preconditioners import METHODS, Preconditioner
from tests.preconditioners.problems import close

Conv1D: Any = pytest.importorskip("transformers.pytorch_utils").Conv1D
CE = nn.functional.cross_entropy


def _nets() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    conv = nn.Sequential(Conv1D(4, 5), nn.Tanh(), Conv1D(3, 4)).double()
    for one, other in zip(linear.parameters(), conv.parameters(), strict=True):
        other.data = one.detach().mT.clone() if one.ndim > 1 else one.detach().clone()
    return linear, conv


def _trained(kind: str, model: nn.Module, *, half_way: bool = False) -> list[Tensor]:
    """The parameters after some steps, outputs first; half-way the state moves on."""
    generator = torch.Generator().manual_seed(1)
    preconditioner: Preconditioner = METHODS[kind](model, damping=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        x, y = torch.randn(6, 2, 5, generator=generator, dtype=torch.float64), torch.arange(6) % 3
        if half_way and step == 2:
            state = preconditioner.state_dict()
            preconditioner = METHODS[kind](model, damping=0.1)
            preconditioner.load_state_dict(state)
        optimizer.zero_grad()
        preconditioner.evaluate(lambda x=x, y=y: CE(model(x).mean(dim=1), y))  # type: ignore[misc]
        preconditioner.step(lr=0.01)
        optimizer.step()
    is_transposed = any(isinstance(module, Conv1D) for module in model.modules())
    return [p.detach().mT if p.ndim > 1
            and is_transposed else p.detach() for p in model.parameters()]


@pytest.mark.entry("B16", "your model has layers of Hugging Face's Conv1D (GPT-2)", "works",
                   "preconditioners give it the direction of a Linear with the transposed weight; "
                   "`collect` raises ConfigError")
@pytest.mark.parametrize("kind", METHODS)
def test_the_steps_are_those_of_a_linear_layer(kind: str) -> None:
    linear, conv = _nets()
    for wanted, found in zip(_trained(kind, linear), _trained(kind, conv, half_way=True),
                             strict=True):
        close(found, wanted)


@pytest.mark.entry("B16")
@pytest.mark.parametrize("quantity", ["variance", "kfac"])
def test_collect_refuses_it(quantity: str) -> None:
    _, conv = _nets()
    with pytest.raises(ConfigError, match=r"layer 0 .*Conv1D"):
        collect(conv, quantity, loss_fn=nn.CrossEntropyLoss())
