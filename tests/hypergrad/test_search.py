"""Spaces of hyperparameters, and the search through them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ngsgd import hypergrad
from ngsgd.errors import ConfigError, DivergenceError
from ngsgd.hypergrad import BaseHyperparameters, HyperparameterPlan, HyperSpace, final_value
from ngsgd.hypergrad.search import PARTS, interpolation, random_seeder
from tests.hypergrad import tasks

SETTINGS = BaseHyperparameters(lr_initial=0.4, lr_final=0.1, momentum=0.8, l2=1e-3, max_change=0.1,
                               max_param_change=0.2)


def space(**changes: Any) -> HyperSpace:
    return HyperSpace(**{"settings": SETTINGS, "layers": ("0", "3", "5"), "num_steps": 16, "parts": PARTS, "knots": 4, **changes})


def test_the_centre_is_the_plan_of_the_settings() -> None:
    made = space()
    plan, plain = made.build(made.center()), space(parts=("schedule",)).build(space(parts=("schedule",)).center())
    for name, value in plan.tensors().items():
        assert torch.allclose(value, plain.tensors()[name], rtol=1e-12), name
    assert plan.lr_TG[:, 0].tolist() == pytest.approx([0.4 * 0.25 ** (t / 15) for t in range(16)])
    assert len(made.names()) == made.size == 4 + 3 + 3 + 1 + 3 + 3


def test_every_tuned_number_moves_the_plan_and_has_a_derivative() -> None:
    made = space()
    theta_D = made.center().requires_grad_()
    plan = made.build(theta_D)
    total = sum((value.log().sum() for value in plan.tensors().values() if value.requires_grad), torch.zeros(()))
    (slope_D,) = torch.autograd.grad(total, theta_D)
    assert bool((slope_D != 0.0).all())


@pytest.mark.slow
def test_hypergradients_reach_theta() -> None:
    task, made = tasks.task(), space(parts=("schedule", "layer_lr", "l2", "momentum", "init_scale"))
    theta_D = made.center().requires_grad_()
    plan = made.build(theta_D)
    slope_D = hypergrad.evaluate_hyperparameters(task, plan).gradient().by(plan, theta_D)
    for index in range(made.size):
        step_D = torch.zeros(made.size, dtype=torch.float64)
        step_D[index] = 1e-5
        ends = [final_value(task, made.build(theta_D.detach() + sign * step_D)) for sign in (1, -1)]
        assert float(slope_D[index]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5, abs=1e-8), made.names()[index]


def test_interpolation_passes_through_its_knots() -> None:
    matrix_TK = interpolation(9, 3)
    assert torch.equal(matrix_TK[[0, 4, 8]], torch.eye(3, dtype=torch.float64))
    assert torch.allclose(matrix_TK.sum(dim=1), torch.ones(9, dtype=torch.float64))


def test_a_stretched_schedule_goes_with_the_share_of_the_run() -> None:
    made = space()
    long = replace(made, num_steps=31)
    short_T, long_T = made.build(made.center()).lr_TG[:, 0], long.build(made.center()).lr_TG[:, 0]
    assert torch.allclose(short_T, long_T[::2])


def test_the_box_holds() -> None:
    made = space()
    far_D = made.clamp(made.center() + 100.0)
    assert float(made.build(far_D).momentum_TG.min()) >= 0.1 - 1e-12
    assert float(made.build(far_D).lr_TG.max()) <= 0.4 * 30.0 * 10.0 + 1e-9


@pytest.mark.parametrize("wrong", [{"parts": ("schedule", "dropout")}, {"parts": ()}, {"knots": 1},
                                   {"settings": BaseHyperparameters(0.1, 0.1),
                                    "parts": ("max_change",)}])
def test_spaces_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="tune"):
        space(**wrong)


def bowl(made: HyperSpace, target_D: Tensor, calls: list[str]) -> Any:
    """A known loss: squared distance of log rates and log l2 from a target, with derivatives."""
    def of(plan: HyperparameterPlan) -> Any:
        calls.append("forward")
        goal = made.build(target_D)
        ratio_TG, ratio_G = (plan.lr_TG / goal.lr_TG).log(), (plan.l2_G / goal.l2_G).log()

        def gradient() -> Any:
            calls.append("reverse")
            found = {name: torch.zeros_like(value) for name, value in plan.tensors().items()}
            found |= {"lr_TG": 2.0 * ratio_TG / plan.lr_TG / 16, "l2_G": 0.02 * ratio_G / plan.l2_G}
            whole = SimpleNamespace(**found, value=value, report=SimpleNamespace(trusted=True))
            whole.by = lambda other, theta: torch.autograd.grad(
                [other.lr_TG, other.l2_G], theta, grad_outputs=[found["lr_TG"], found["l2_G"]])[0]
            return whole
        value = float(ratio_TG.square().sum() / 16 + 0.01 * ratio_G.square().sum())
        return SimpleNamespace(value=value, gradient=gradient)
    return of


@pytest.mark.parametrize("seed_share", [0.0, 0.25])
def test_descends_to_a_known_minimum_and_keeps_its_budget(seed_share: float) -> None:
    made = space(parts=("schedule", "l2"))
    target_D = made.center() + torch.tensor([1.5, -1.0, 0.5, 0.0, 2.0, -2.0, 1.0],
                                            dtype=torch.float64)
    calls: list[str] = []
    search = hypergrad.tune_hyperparameters(bowl(made, target_D, calls), made, budget=120,
                                  seed_share=seed_share)
    assert search.best.value < 0.02 * search.trials[0].value
    assert search.spent <= 120.0
    assert search.spent == pytest.approx(calls.count("forward") + 3.2 * calls.count("reverse"))
    assert sum(trial.report is not None for trial in search.trials) == calls.count("reverse")


def test_runs_that_diverge_are_never_accepted() -> None:
    made = space(parts=("schedule", "l2"))

    def of(plan: HyperparameterPlan) -> Any:
        if float(plan.lr_TG.max()) > 1.0:
            raise DivergenceError("too fast")
        return bowl(made, made.center() + 5.0, [])(plan)
    search = hypergrad.tune_hyperparameters(of, made, budget=40, seed_share=0.3)
    assert math.isfinite(search.best.value)
    assert any(math.isinf(trial.value) for trial in search.trials)


@pytest.mark.slow
def test_tuning_a_real_task_lowers_its_loss() -> None:
    task, made = tasks.task(tasks.mlp(dtype=torch.float32)), space(parts=("schedule", "layer_lr", "l2", "momentum"))
    search = hypergrad.tune_hyperparameters(lambda plan: hypergrad.evaluate_hyperparameters(task, plan), made,
                                  budget=40, seed_share=0.25, seeder=random_seeder)
    assert search.best.value < final_value(task, made.build(made.center())) - 0.05
    assert final_value(task, made.build(made.clamp(torch.tensor(search.best.theta, dtype=torch.float64)))) == search.best.value
