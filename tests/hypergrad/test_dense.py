"""K-FAC-style factors: undone with everything else, and differentiated through or held constant."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from ngsgd.hypergrad import HyperparameterPlan, MinibatchIndex, hypergradient
from ngsgd.hypergrad.dense import DenseGradients
from ngsgd.hypergrad.gradient import LocalJobs
from ngsgd.hypergrad.training_task import Flat, ModuleTask
from tests.hypergrad import tasks


def plan(num_steps: int = 10, jobs: int = 1, iters: int = 1) -> HyperparameterPlan:
    made = tasks.plan(num_steps, jobs=jobs, iters=iters, weights=False)
    return replace(made, lr_TG=made.lr_TG * 0.05, init_scale_G=torch.ones_like(made.init_scale_G))


def unrolled(task: ModuleTask, made: HyperparameterPlan, decay: float, damping: float) -> dict[str, Tensor]:
    """One job, written out: everything is differentiated, the factors too."""
    hyper = {name: value.clone().requires_grad_() for name, value in made.tensors().items()}
    w = [p.clone().requires_grad_() for p in task.start.values()]
    v = [torch.zeros_like(p) for p in w]
    linears = [module for module in task.module if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]
    averages: list[list[Tensor | float]] = [[0.0, 0.0] for _ in linears]
    for step in range(made.num_steps):
        place = MinibatchIndex(0, 0, step)
        x_ND, y_N = task.batch(place)
        torch.manual_seed(place.seed(task.seed))
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []
        h = x_ND
        for module in task.module:  # type: ignore[attr-defined]
            if isinstance(module, nn.Linear):
                index = len(inputs)
                inputs.append(torch.cat([h, h.new_ones(len(h), 1)], dim=1))
                h = h @ w[2 * index].T + w[2 * index + 1]
                outputs.append(h)
            else:
                h = module(h)
        loss = tasks.weighted_loss(h, (x_ND, y_N), None)
        found = torch.autograd.grad(loss, [*w, *outputs], create_graph=True)
        for index, (X_NI, Y_NO) in enumerate(zip(inputs, found[len(w):], strict=True)):
            statistics = (X_NI.T @ X_NI / len(X_NI), Y_NO.T @ Y_NO * len(Y_NO))
            averages[index] = [decay * old + (1 - decay) * new for old, new in zip(averages[index], statistics, strict=True)]
            A_II, S_OO = (one / (1 - decay ** (step + 1)) + damping * torch.eye(len(one), dtype=torch.float64)
                          for one in averages[index] if isinstance(one, Tensor))
            G_OI = torch.cat([found[2 * index], found[2 * index + 1][:, None]], dim=1)
            D_OI = torch.linalg.inv(S_OO) @ G_OI @ torch.linalg.inv(A_II)
            for part, D in ((2 * index, D_OI[:, :-1]), (2 * index + 1, D_OI[:, -1])):
                gamma, lr, l2 = hyper["momentum_TG"][step, index], hyper["lr_TG"][step, index], hyper["l2_G"][index]
                v[part] = gamma * v[part] - (1 - gamma) * (D + l2 * w[part])
                w[part] = w[part] + lr * v[part]
    task.validation(dict(zip(task.start, w, strict=True))).backward()
    return {name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in hyper.items()}


@pytest.mark.parametrize("engine", ["reversible", "store", "checkpoint"])
def test_the_derivative_through_the_factors_is_exact(engine: str) -> None:
    task, made = tasks.task(), plan()
    expected = unrolled(task, made, 0.9, 0.2)
    found = hypergradient(task, made, engine, gradients=DenseGradients(task, Flat.of(task), decay=0.9, damping=0.2))
    assert found.report.preconditioner == "exact" and found.report.exact
    for name in ("lr_TG", "momentum_TG", "l2_G"):
        ours, theirs = getattr(found, name), expected[name]
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-8, name  # solves of both condition numbers


def test_held_constant_it_points_the_same_way_and_says_that_it_is_approximate() -> None:
    task, made = tasks.task(), plan()
    exact = hypergradient(task, made, gradients=DenseGradients(task, Flat.of(task)))
    constant = hypergradient(task, made, gradients=DenseGradients(task, Flat.of(task), through=False))
    assert constant.report.preconditioner == "constant" and not constant.report.exact
    cosine = torch.nn.functional.cosine_similarity(exact.lr_TG.reshape(-1), constant.lr_TG.reshape(-1), dim=0)
    assert 0.9 < float(cosine) < 1.0 - 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_velocities_and_factors_are_undone_to_the_bit(dtype: torch.dtype) -> None:
    task, made = tasks.task(tasks.mlp(dtype=dtype)), plan(200)
    gradients = DenseGradients(task, Flat.of(task), through=False)
    jobs = LocalJobs(task, made, "reversible", gradients)
    jobs.run(0, 0, jobs.flat.flatten(list(task.start.values())).double())
    segment = jobs.segments[0, 0]
    assert segment._carried.spill_bytes > 0
    segment.reverse(torch.ones(jobs.flat.size, dtype=torch.float64))
    assert torch.equal(segment.state.weights(), jobs.flat.flatten(list(task.start.values())))
    assert not segment.state.u_P.any() and not gradients._state.u_P.any() and gradients._state.spill_bytes == 0


def test_engines_agree_through_averaging() -> None:
    task, made = tasks.task(), plan(12, jobs=2, iters=3)
    found = [hypergradient(task, made, engine, gradients=DenseGradients(task, Flat.of(task)))
             for engine in ("reversible", "checkpoint")]
    assert torch.allclose(found[0].lr_TG, found[1].lr_TG, rtol=1e-9, atol=1e-15)
