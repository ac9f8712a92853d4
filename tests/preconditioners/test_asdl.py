"""Scripts written for ASDL run with another import, and its config has its meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners import KFAC, PSGD, SKFAC, GradientMaker, Shampoo, asdl
from ngsgd.preconditioners.options import is_due

F = nn.functional
MAKERS = sorted(name for name, one in vars(asdl).items() if isinstance(one, type) and issubclass(one, GradientMaker)
                and one not in (GradientMaker, asdl.PreconditionedGradientMaker, asdl.NaturalGradientMaker))
IMPORT = "from ngsgd.preconditioners import asdl\n"

# The call sequences of ASDL's examples: outputs of several forms, a training loop, an MSE.
DEMO = """
import torch
from torch import nn
import torch.nn.functional as F

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x, targets=None):
        logits = self.fc(x)
        return logits if targets is None else (F.cross_entropy(logits, targets), logits)

torch.manual_seed(1)
model, x, t = Network(), torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])
F.cross_entropy(model(x), t).backward()
expected = [p.grad.clone() for p in model.parameters()]
grad_maker = asdl.GradientMaker(model)

model.zero_grad()
dummy_y = grad_maker.setup_model_call(model, x)
grad_maker.setup_loss_call(F.cross_entropy, dummy_y, t)
logits, loss = grad_maker.forward_and_backward()
seen = [[p.grad.clone() for p in model.parameters()]]

model.zero_grad()
dummy_y = grad_maker.setup_model_call(model, x, targets=t)
grad_maker.setup_loss_repr(dummy_y[0])
(loss, logits), _ = grad_maker.forward_and_backward()
seen.append([p.grad.clone() for p in model.parameters()])
result = all(torch.equal(p, q) for each in seen for p, q in zip(each, expected)) and any(p.any() for p in expected)
"""
LOOP = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
config = asdl.PreconditioningConfig(data_size=32, damping=1e-1, ema_decay=0.1, preconditioner_upd_interval=2,
                                    curvature_upd_interval=2, ignore_modules=[nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm])
grad_maker = asdl.KfacGradientMaker(model, config)
x = torch.randn(32, 8)
t = x[:, :4].argmax(dim=1)
losses = []
for _ in range(60):
    optimizer.zero_grad(set_to_none=True)
    dummy_y = grad_maker.setup_model_call(model, x)
    grad_maker.setup_loss_call(F.cross_entropy, dummy_y, t, label_smoothing=0.1)
    y, loss = grad_maker.forward_and_backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
    optimizer.step()
    losses.append(float(loss))
result = losses[-1] < 0.7 * losses[0]
"""
MSE = """
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(1)
model = nn.Linear(3, 2, bias=False)
start = model.weight.detach().clone()
x = torch.randn(40, 3)
target = x @ torch.randn(3, 2)
config = asdl.PreconditioningConfig(data_size=40, damping=1e-6)
grad_maker = asdl.FullNaturalGradientMaker(model, config, fisher_type=asdl.FISHER_EXACT, loss_type=asdl.LOSS_MSE)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
dummy_y = grad_maker.setup_model_call(model, x)
grad_maker.setup_loss_call(F.mse_loss, dummy_y, target)
_, loss = grad_maker.forward_and_backward()
optimizer.step()
# one Gauss-Newton step solves a linear regression; 1e-6 of damping is left
result = float(F.mse_loss(model(x), target)) < 1e-8 < 1e-2 < float(loss) and not torch.equal(start, model.weight)
"""


@pytest.mark.parametrize("script", [DEMO, LOOP, MSE], ids=["demo", "loop", "mse"])
def test_a_script_runs_with_another_import(script: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(IMPORT + script, "script", "exec"), names)
    assert names["result"] is True


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))


def _gradients(maker: GradientMaker, steps: int = 5) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x, t = torch.randn(7, 4, generator=draw), torch.randint(0, 3, (7,), generator=draw)
        maker.model.zero_grad()
        maker.setup_loss_call(F.cross_entropy, maker.setup_model_call(maker.model, x), t)
        maker.forward_and_backward()
        with torch.no_grad():
            for p in maker.model.parameters():
                p.sub_(torch.as_tensor(p.grad), alpha=0.01)
    return [p.grad for p in maker.model.parameters() if p.grad is not None]


def _same(maker: GradientMaker, preconditioner: Any) -> None:
    found, expected = _gradients(maker), _gradients(GradientMaker(preconditioner.model, preconditioner))
    plain = _gradients(GradientMaker(_net()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found[:2], plain[:2], strict=True))


@pytest.mark.parametrize("name", MAKERS)
def test_each_maker_preconditions(name: str) -> None:
    maker = getattr(asdl, name)(_net(), asdl.PreconditioningConfig(damping=1e-2))
    _same(maker, type(maker.preconditioner)(_net(), **maker.preconditioner.arguments()))


def test_the_config_has_its_meaning() -> None:
    config = asdl.PreconditioningConfig(damping=1e-2, ema_decay=0.3, curvature_upd_interval=2, preconditioner_upd_interval=4)
    _same(asdl.KfacGradientMaker(_net(), config, "fisher_emp"),
          KFAC(_net(), damping=1e-2, ema_decay=0.7, curvature_interval=2, inverse_interval=4))
    _same(asdl.KfacGradientMaker(_net(), asdl.PreconditioningConfig(damping=1e-2), "fisher_exact", swift=True),
          SKFAC(_net(), damping=1e-2, fisher="exact"))
    _same(asdl.ShampooGradientMaker(_net(), asdl.PreconditioningConfig(damping=1e-4)), Shampoo(_net(), damping=1e-4, history="sum"))
    _same(asdl.PsgdGradientMaker(_net()), PSGD(_net(), damping=1e-7, form="full"))


def _due(config: asdl.PreconditioningConfig, kind: str, steps: int) -> list[int]:
    found: list[int] = []
    for step in range(steps):
        if is_due(config.interval(kind), step, found[-1] if found else None):
            found.append(step)
    return found


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("every", [1, 3])
def test_intervals_begin_after_the_warm_up(first: int, every: int) -> None:
    expected = [step for step in range(30) if step < first or (step - first) % every == 0]
    inverses = asdl.PreconditioningConfig(preconditioner_upd_interval=every, preconditioner_warmup_steps=first)
    assert _due(inverses, "preconditioner", 30) == _due(inverses, "curvature", 30) == expected
    curvature = asdl.PreconditioningConfig(curvature_upd_interval=every, curvature_warmup_steps=first)
    assert _due(curvature, "curvature", 30) == expected and _due(curvature, "preconditioner", 30) == list(range(30))


@pytest.mark.parametrize(("ratio", "first", "expected"), [
    (1.0, 0.0, list(range(20))), (0.25, 0.0, [0, 4, 8, 12, 16]), (0.3, 0.1, [0, 1, 2, 6, 10, 14]), (0.15, 0.0, [0, 6, 12])])
def test_ratios_are_of_the_total_number_of_steps(ratio: float, first: float, expected: list[int]) -> None:
    config = asdl.PreconditioningConfig(num_total_steps=20, preconditioner_upd_ratio=ratio, preconditioner_warmup_ratio=first)
    assert _due(config, "preconditioner", 20) == _due(config, "curvature", 20) == expected


def test_modules_are_ignored_by_themselves_their_class_or_a_part_of_their_name() -> None:
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "last": nn.ModuleDict({"out": nn.Linear(2, 2)})})
    for ignored, expected in (([model["norm"]], ("norm",)), ([nn.Linear], ("first", "last.out")), (["last."], ("last.out",)),
                              ([nn.BatchNorm3d], ()), (None, ())):
        assert asdl.PreconditioningConfig(ignore_modules=ignored).ignored(model) == expected


@pytest.mark.parametrize(("make", "said"), [
    (lambda: asdl.KfacGradientMaker(_net(), fisher_type="emp"), "fisher_mc"),
    (lambda: asdl.KfacGradientMaker(_net(), loss_type="mae"), "mae"),
    (lambda: asdl.ShampooGradientMaker(_net(), asdl.PreconditioningConfig(preconditioner_upd_ratio=0.5)),
     "num_total_steps"),
    (lambda: asdl.ShampooGradientMaker(_net(), asdl.PreconditioningConfig(curvature_upd_ratio=0.5)),
     "num_total_steps"),
    (lambda: asdl.ShampooGradientMaker(_net(), asdl.PreconditioningConfig(num_total_steps=9, preconditioner_upd_ratio=2.0)),
     "preconditioner_upd_ratio 2.0"),
    (lambda: asdl.ShampooGradientMaker(_net(), asdl.PreconditioningConfig(num_total_steps=9, curvature_upd_interval=2)),
     "num_total_steps"),
    (lambda: asdl.KfacGradientMaker(_net(), asdl.PreconditioningConfig(ema_decay=1.5)), "ema_decay"),
    (lambda: asdl.SengGradientMaker(_net(), asdl.PreconditioningConfig(ema_decay=0.1)), "SENG: ema_decay"),
    (lambda: asdl.PsgdGradientMaker(_net(), asdl.PreconditioningConfig(ema_decay=0.1)), "PSGD: ema_decay")])
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make()
