"""NG-SGD: the same trajectory as the optimizer's, and a gradient that is exact but for the
preconditioner being held constant.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ngsgd.config import OptimizerConfig
from ngsgd.errors import ConfigError
from ngsgd.hypergrad import HyperparameterPlan, MinibatchIndex, hypergradient
from ngsgd.hypergrad.gradient import LocalJobs
from ngsgd.hypergrad.natural import NaturalGradients, natural_gradients
from ngsgd.hypergrad.training_task import Flat, ModuleTask
from ngsgd.optim import NGSGD
from tests.hypergrad import tasks

CONFIG = OptimizerConfig(rank_in=3, rank_out=2)


def plan(num_steps: int, momentum: float = 0.0) -> HyperparameterPlan:
    made = tasks.plan(num_steps, weights=False)
    return replace(made, momentum_TG=torch.full_like(made.momentum_TG, momentum), init_scale_G=torch.ones_like(made.init_scale_G),
                   l2_G=torch.zeros_like(made.l2_G), lr_TG=made.lr_TG * 0.2)


def test_trajectory_equals_the_optimizers() -> None:
    task, made = tasks.task(tasks.mlp(dropout=0.0)), plan(30)
    jobs = LocalJobs(task, made, "none", natural_gradients(task, CONFIG))
    end_P = jobs.run(0, 0, jobs.flat.flatten(list(task.start.values())))
    model = tasks.mlp(dropout=0.0)
    optimizer = NGSGD(model, 1.0, loss_reduction="sum", max_change=0.0, max_param_change=0.0, rank_in=3, rank_out=2)
    for step in range(30):
        for group, lr in zip(optimizer.param_groups, made.lr_TG[step].tolist(), strict=True):
            group["lr"] = lr
        x_ND, y_N = task.batch(MinibatchIndex(0, 0, step))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x_ND), y_N).backward()
        optimizer.step()
    theirs_P = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    # the same products in another order, and 2^-44
    assert float((end_P - theirs_P).abs().max()) < 1e-8


class _Recorded(NaturalGradients):
    """Keeps the preconditioner of every step of the way there."""

    def __init__(self, task: ModuleTask) -> None:
        own = natural_gradients(task, CONFIG)
        super().__init__(task, own.flat, own._settings, own._ranks)
        self.factors: list[object] = []

    def forward(self, w_P: Tensor, place: MinibatchIndex, data_weights: Tensor | None) -> Tensor:
        direction_P, factors, _, _ = self._direction(w_P, place, data_weights, create_graph=False)
        self.factors.append(factors)
        return direction_P


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("engine", ["store", "checkpoint"])
def test_is_exact_for_a_constant_preconditioner(engine: str, momentum: float) -> None:
    task, made = tasks.task(), plan(16, momentum)
    recorded = _Recorded(task)
    LocalJobs(task, made, "none", recorded).run(0, 0, Flat.of(task).flatten(list(task.start.values())))
    found = hypergradient(task, made, engine, gradients=natural_gradients(task, CONFIG))
    assert found.report.preconditioner == "constant" and not found.report.exact
    lr_TG = made.lr_TG.clone().requires_grad_()
    w = list(task.start.values())
    v = [torch.zeros_like(p) for p in w]
    flat = Flat.of(task)
    for step in range(16):
        place = MinibatchIndex(0, 0, step)
        torch.manual_seed(place.seed(task.seed))
        leaves = [p if p.requires_grad else p.clone().requires_grad_() for p in w]
        loss = task.loss(dict(zip(flat.names, leaves, strict=True)), place, None)
        grads = torch.autograd.grad(loss, leaves, create_graph=True)
        direction = flat.unflatten(recorded.applied(recorded.factors[step], flat.flatten(grads)))  # type: ignore[arg-type]
        v = [momentum * old - (1.0 - momentum) * part for old, part in zip(v, direction, strict=True)]
        w = [p + lr_TG[step, index // 2] * part for index, (p, part) in enumerate(zip(leaves, v, strict=True))]
    task.validation(dict(zip(flat.names, w, strict=True))).backward()
    assert lr_TG.grad is not None
    assert float((found.lr_TG - lr_TG.grad).norm() / lr_TG.grad.norm()) < 1e-9


@pytest.mark.slow
def test_engines_agree_through_averaging() -> None:
    task = tasks.task()
    made = replace(plan(12), averaging_ON=torch.ones(3, 2, dtype=torch.float64))
    store, checkpoint = (hypergradient(task, made, engine, gradients=natural_gradients(task, CONFIG))
                         for engine in ("store", "checkpoint"))
    assert torch.allclose(store.lr_TG, checkpoint.lr_TG, rtol=1e-12, atol=0.0)


def test_reversing_is_refused_and_so_are_other_layers() -> None:
    task = tasks.task()
    with pytest.raises(ConfigError, match="engine=checkpoint"):
        hypergradient(task, plan(4, 0.5), "reversible", gradients=natural_gradients(task, CONFIG))
    other = tasks.task(nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)).double())
    with pytest.raises(ConfigError, match="1 is a LayerNorm"):
        natural_gradients(other, CONFIG)
