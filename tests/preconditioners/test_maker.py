"""GradientMaker: the five cases of the ASDL paper; and the examples of docs/preconditioners.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import KFAC, DummyObject, GradientMaker, Shampoo
from tests.preconditioners.problems import gradients_of

F = nn.functional


@dataclass
class Output:
    """What a model of case 4 returns."""

    loss: Tensor
    logits: Tensor


class Net(nn.Module):
    """Returns logits as they are, or packed in one of the ways."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.out, self.pack = nn.Linear(4, 5), nn.Linear(5, 3), pack

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.pack(self.out(torch.tanh(self.hidden(x))), y)


X = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([[0, 1, 2, 0, -100, 1], [2, 2, 1, -100, -100, 0]])


def _packed_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _tensor(maker: GradientMaker, y: DummyObject) -> None:
    maker.setup_loss_call(F.cross_entropy, y, Y.flatten())


def _tuple(maker: GradientMaker, y: DummyObject) -> None:
    maker.setup_loss_repr(y[0])
    maker.setup_logits_repr(y[1])


def _mapping(maker: GradientMaker, y: DummyObject) -> None:
    maker.setup_loss_repr(y["loss"])
    maker.setup_logits_repr(y["logits"])


def _dataclass(maker: GradientMaker, y: DummyObject) -> None:
    maker.setup_loss_repr(y.loss)
    maker.setup_logits_repr(y.logits)


def _operations(maker: GradientMaker, y: DummyObject) -> None:
    maker.setup_loss_call(F.cross_entropy, y.view(-1, y.size(-1)), Y.view(-1), ignore_index=-100)
    maker.setup_logits_repr(y.view(-1, y.size(-1)))


CASES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[GradientMaker, DummyObject], None]]] = {
    "tensor": (lambda f, y: f.flatten(0, 1), _tensor),
    "tuple": (lambda f, y: (_packed_loss(f, y), f), _tuple),
    "mapping": (lambda f, y: {"loss": _packed_loss(f, y), "logits": f}, _mapping),
    "dataclass": (lambda f, y: Output(_packed_loss(f, y), f), _dataclass),
    "operations": (lambda f, y: f, _operations)}


def _plain(model: Net, *, times: int = 1) -> dict[str, Tensor]:
    model.zero_grad()
    for _ in range(times):
        _packed_loss(model.out(torch.tanh(model.hidden(X))), Y).backward()
    found = gradients_of(model)
    model.zero_grad()
    return found


@pytest.mark.parametrize("case", CASES)
def test_each_case_gives_the_gradient_of_plain_torch_and_adds_it_up(case: str) -> None:
    pack, setup = CASES[case]
    model = Net(pack)
    wanted = _plain(model, times=2)
    maker = GradientMaker(model)
    setup(maker, maker.setup_model_call(model, X, Y))
    for _ in range(2):
        _, loss = maker.forward_and_backward()
    torch.testing.assert_close(loss, _packed_loss(model.out(torch.tanh(model.hidden(X))), Y))
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name])
    if case != "tensor":
        assert maker.logits.shape[-1] == 3


@pytest.mark.parametrize("method", [KFAC, Shampoo])
@pytest.mark.parametrize("case", CASES)
def test_each_case_gives_the_preconditioned_gradient_of_an_own_loop(case: str, method: type[KFAC]) -> None:
    pack, setup = CASES[case]
    model = Net(pack)
    own = method(model, damping=0.1, ema_decay=0.0)
    with own.watch():
        own.backward(_packed_loss(model.out(torch.tanh(model.hidden(X))), Y))
    own.step()
    wanted = gradients_of(model)
    model.zero_grad()
    maker = GradientMaker(model, method(model, damping=0.1, ema_decay=0.0))
    setup(maker, maker.setup_model_call(model, X, Y))
    for _ in range(2):
        maker.forward_and_backward()
    for name, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, 2.0 * wanted[name], rtol=1e-4, atol=1e-5)   # float32


def test_parts_of_the_output_are_joined_by_a_loss_call() -> None:
    model = Net(lambda f, y: {"loss": _packed_loss(f, y), "penalty": f.square().mean()})
    maker = GradientMaker(model)
    y = maker.setup_model_call(model, X, Y)
    maker.setup_loss_call(lambda loss, penalty: loss - 0.5 * penalty, y["loss"], y["penalty"])
    output, loss = maker.forward_and_backward()
    torch.testing.assert_close(loss, (output["loss"] - 0.5 * output["penalty"]).detach())


def test_mistakes_are_reported() -> None:
    model = Net(lambda f, y: f)
    maker = GradientMaker(model)
    with pytest.raises(ConfigError, match="setup_model_call first"):
        maker.forward_and_backward()
    y = maker.setup_model_call(model, X, Y)
    with pytest.raises(ConfigError, match="setup_loss_call or setup_loss_repr"):
        maker.forward_and_backward()
    maker.setup_loss_repr(y)
    with pytest.raises(ConfigError, match="scalar"):
        maker.forward_and_backward()
    with pytest.raises(TypeError, match="yet"):
        list(y)
    with pytest.raises(TypeError, match="yet"):
        bool(y.logits)
    with pytest.raises(ConfigError, match="another model"):
        GradientMaker(model, KFAC(Net(lambda f, y: f)))


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, as one program."""
    text = (Path(__file__).parents[2] / "docs" / "preconditioners.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    # a loop, without a closure, a combination, ASDL's interface, its five cases, several processes
    assert len(examples) == 6
    exec("\n".join(examples), {"__name__": "docs"})
    assert float(capsys.readouterr().out) < 1.4   # log 5 = 1.6 at the start
