"""Hypergradients against autograd through every step, finite differences, and each engine."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd.errors import ArgumentError, ConfigError, ReversalError
from ngsgd.hypergrad import HyperGrad, HyperparameterPlan, MinibatchIndex, final_value, hypergradient
from ngsgd.hypergrad.gradient import LocalJobs
from ngsgd.hypergrad.job_replay import ENGINES
from ngsgd.hypergrad.training_task import Flat, ModuleTask
from tests.hypergrad import tasks
from tests.reference.hypergrad import unrolled
from tests.wired import Wired


def relative_errors(found: HyperGrad, expected: dict[str, Tensor]) -> dict[str, float]:
    """Norm of the difference over the norm expected.

    Norms of these tasks are above 1e-2 or zero. A zero comes as a sum of numbers near 1 in float64,
    which leaves up to 1e-16 with some orders of summation: the smallest divisor 1e-6 makes 1e-10 of
    that.
    """
    parts = {name: getattr(found, name, None) for name in expected}
    parts |= {name: part for name, part in found.start.items() if name in expected}
    return {name: float((part - expected[name]).norm() / expected[name].norm().clamp(min=1e-6))
            for name, part in parts.items() if part is not None}


CASES: list[dict[str, Any]] = [{"num_steps": 30}, {"num_steps": 30, "limits": True}, {"num_steps": 24, "jobs": 4, "iters": 4},
                               {"num_steps": 24, "jobs": 4, "iters": 3, "limits": True}]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_equals_autograd_through_every_step(case: dict[str, Any], engine: str) -> None:
    task, plan = tasks.task(), tasks.plan(**case)
    value, expected = unrolled(task, plan)
    found = hypergradient(task, plan, engine)
    assert found.report.engine == engine
    assert abs(found.value - float(value)) < 1e-11
    # 1e-9: positions are rounded to 2^-48 and velocities to 2^-44 a step
    assert max(relative_errors(found, expected).values()) < 1e-9


@pytest.mark.parametrize("limits", [False, True])
def test_a_float32_network_agrees_with_float64(limits: bool) -> None:
    plan = tasks.plan(30, limits=limits)
    # no dropout: torch draws other masks for float64
    _, expected = unrolled(tasks.task(tasks.mlp(dropout=0.0)), plan)
    found = hypergradient(tasks.task(tasks.mlp(dropout=0.0, dtype=torch.float32)), plan, "reversible")
    # float32 rounds every gradient to 6e-8
    assert max(relative_errors(found, expected).values()) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_equals_finite_differences(case: dict[str, Any]) -> None:
    task, plan = tasks.task(), tasks.plan(**case)
    found = hypergradient(task, plan, "reversible")
    for name, value in plan.tensors().items():
        direction = torch.randn(value.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        slope = float((getattr(found, name) * direction).sum())

        def along(step: float, name: str = name, value: Tensor = value, direction: Tensor = direction) -> float:
            return final_value(task, replace(plan, **{name: value + step * direction}))
        # narrow, so that no limit on change begins or ends to hold in between; rounding leaves
        # 1e-15 / 1e-5
        assert slope == pytest.approx((along(1e-5) - along(-1e-5)) / 2e-5, rel=1e-6, abs=1e-8), name


def test_all_engines_give_the_same_numbers_in_float32() -> None:
    task, plan = tasks.task(tasks.mlp(nn.ReLU, dtype=torch.float32)), tasks.plan(24, jobs=2, iters=2, limits=True)
    one, other = (hypergradient(task, plan, engine) for engine in ENGINES)
    assert other.value == one.value  # the way there is the same, bitwise
    expected = {name: getattr(one, name) for name in plan.tensors()}
    # velocities are kept in float32 by the other
    assert max(relative_errors(other, expected).values()) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["eager", "auto"])
def test_every_segment_returns_to_the_broadcast_weights(kernels: str) -> None:
    task, plan = tasks.task(tasks.mlp(dtype=torch.float32)), tasks.plan(40, jobs=4, iters=4, limits=True)
    jobs = LocalJobs(task, plan, "reversible", kernels)
    w_P, starts = torch.zeros(Flat.of(task).size, dtype=torch.float64) + 0.1, []
    for outer_iter in range(4):
        starts.append(w_P)
        w_P = torch.stack(jobs.forward(outer_iter, w_P)).mean(dim=0)
    segments = dict(jobs.segments)
    for (outer_iter, _), segment in segments.items():
        segment.reverse(torch.ones_like(w_P))
        assert torch.equal(segment.state.x_P, (starts[outer_iter] * 2.0 ** 48).round().long())
        assert not segment.state.u_P.any()
        assert segment.state.spill_bytes == 0


def test_one_reverse_pass_serves_the_learned_numbers_behind_a_plan() -> None:
    task, base = tasks.task(), tasks.plan(20)

    def made(log_lr: Tensor) -> HyperparameterPlan:
        rates = torch.exp(log_lr[0] + (log_lr[1] - log_lr[0]) * torch.linspace(0, 1, 20, dtype=torch.float64))
        return replace(base, lr_TG=rates[:, None].expand(-1, tasks.LAYERS))
    log_lr = torch.tensor([0.3, 0.05], dtype=torch.float64).log().requires_grad_()
    plan = made(log_lr)
    slope = hypergradient(task, plan).by(plan, log_lr)
    for index in range(2):
        step = torch.zeros(2, dtype=torch.float64)
        step[index] = 1e-5
        difference = final_value(task, made(log_lr.detach() + step)) - final_value(task, made(log_lr.detach() - step))
        assert float(slope[index]) == pytest.approx(difference / 2e-5, rel=1e-6)


def test_agrees_with_torchopt_on_the_learning_rate() -> None:
    torchopt = pytest.importorskip("torchopt", reason="a peer of the dev extra")
    task, num_steps = tasks.task(tasks.mlp(dropout=0.0)), 30
    found = hypergradient(task, HyperparameterPlan.constant(num_steps, tasks.LAYERS, lr=0.4,
                                                            momentum=0.9), "reversible")
    # its velocity takes the complete gradient, ours a tenth
    lr = torch.tensor(0.04, dtype=torch.float64, requires_grad=True)
    optimizer = torchopt.sgd(lr=lambda count: lr, momentum=0.9)
    parameters = tuple(p.clone().requires_grad_() for p in task.start.values())
    state = optimizer.init(parameters)
    for step in range(num_steps):
        loss = task.loss(dict(zip(task.start, parameters, strict=True)),
                         MinibatchIndex(0, 0, step), None)
        grads = torch.autograd.grad(loss, parameters, create_graph=True)
        updates, state = optimizer.update(grads, state, inplace=False)
        parameters = torchopt.apply_updates(parameters, updates, inplace=False)
    (slope,) = torch.autograd.grad(task.validation(dict(zip(task.start, parameters, strict=True))), lr)
    assert float(found.lr_TG.sum()) == pytest.approx(0.1 * float(slope), rel=1e-9)


class _Mutable(ModuleTask):
    """Changes something once the way there is done."""

    def change(self) -> None:
        pass

    def validation(self, parameters: Any) -> Tensor:
        if not hasattr(self, "changed"):
            self.changed = True
            self.change()
        return super().validation(parameters)


def _mutable(num_steps: int = 12) -> tuple[_Mutable, HyperparameterPlan, Any]:
    inner = tasks.task(tasks.mlp(dropout=0.0, width=64, dtype=torch.float32), size=64)
    task = _Mutable(inner.module, inner.batch, inner._loss, inner._validation, inner.seed)
    return task, tasks.plan(num_steps), LocalJobs(task, tasks.plan(num_steps), "reversible")


def _failing_step(task: _Mutable, plan: HyperparameterPlan, jobs: Any) -> int:
    with pytest.raises(ReversalError) as caught:
        hypergradient(task, plan, "reversible", jobs=jobs)
    assert str(caught.value).startswith(f"step {caught.value.step} could not be reversed: in job 0 of outer iteration 0")
    return caught.value.step


@pytest.mark.parametrize("vector", ["x_P", "u_P"])
@pytest.mark.parametrize("bit", [0, 17, 63])
def test_a_flipped_bit_is_reported(vector: str, bit: int) -> None:
    task, plan, jobs = _mutable()

    def flip() -> None:
        getattr(jobs.segments[0, 0].state, vector)[5] ^= (1 << bit) if bit < 63 else -(1 << 63)
    task.change = flip  # type: ignore[method-assign]
    assert _failing_step(task, plan, jobs) == 12


@pytest.mark.parametrize("step", [11, 4, 0])
def test_another_minibatch_is_reported_with_its_step(step: int) -> None:
    task, plan, jobs = _mutable()
    batch = task.batch
    task.change = lambda: setattr(task, "batch", lambda place: batch(place._replace(step=99 if place.step == step else place.step)))  # type: ignore[method-assign]
    assert _failing_step(task, plan, jobs) == step + 1


@pytest.mark.parametrize("dropped", [0, 40])
def test_a_dropped_byte_is_reported(dropped: int) -> None:
    task, plan, jobs = _mutable(60)

    def drop() -> None:
        parts = jobs.segments[0, 0].state._spills[1]
        parts[-1] = torch.cat([parts[-1][:dropped], parts[-1][dropped + 1:], parts[-1].new_zeros(1)])
    task.change = drop  # type: ignore[method-assign]
    with pytest.raises(ReversalError) as caught:
        hypergradient(task, plan, "reversible", jobs=jobs)
    # the last byte of that layer was put aside in the last step in which its scale fell through
    # 2^-52
    assert 0 < caught.value.step <= 60 and caught.value.step == _last_spill(plan, layer=1)


def _last_spill(plan: HyperparameterPlan, layer: int) -> int:
    scale, last = 2.0 ** -44, 0
    for t, gamma in enumerate(plan.momentum_TG[:, layer].tolist()):
        scale *= gamma
        if scale <= 2.0 ** -52:
            scale, last = scale * 256.0, t + 1
    return last


def test_another_number_of_threads_is_reported() -> None:
    generator = torch.Generator().manual_seed(0)
    x_ND, y_N = torch.randn(512, 300, generator=generator), torch.randint(0, 9, (512,), generator=generator)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(300, 700), nn.ReLU(), nn.Linear(700, 9))
    task = _Mutable(module, lambda place: (x_ND, y_N), tasks.weighted_loss, [(x_ND, y_N)])
    plan = HyperparameterPlan.constant(3, 2, lr=0.1)
    jobs = LocalJobs(task, plan, "reversible")
    before = torch.get_num_threads()

    def change() -> None:
        torch.set_num_threads(2)
        # other last digits, as sums in another order have on some processors
        x_ND.mul_(1.0 + 1e-6)
    try:
        torch.set_num_threads(1)
        task.change = change  # type: ignore[method-assign]
        with pytest.raises(ReversalError, match="then: 1, now: 2") as caught:
            hypergradient(task, plan, "reversible", jobs=jobs)
        assert caught.value.step == 3
    finally:
        torch.set_num_threads(before)


def _attention(fused: bool) -> nn.Module:
    """Attention over the classes' dimensions of a task, by torch's kernel or by the formula."""
    def run(model: Any, x_ND: Tensor) -> Any:
        q, k, v = model.inner(x_ND.view(len(x_ND), 1, 3, 2)).chunk(3, dim=-1)
        mixed = (q @ k.mT / 2.0).softmax(dim=-1) @ v
        if fused:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return model.outer(mixed[:, 0].mean(dim=1))
    torch.manual_seed(4)
    return Wired(run, inner=nn.Linear(2, 12), outer=nn.Linear(4, tasks.CLASSES)).double()


@pytest.mark.entry("B9")
@pytest.mark.parametrize("engine", ENGINES)
def test_fused_attention_equals_its_formula(engine: str) -> None:
    plan = HyperparameterPlan.constant(num_steps=5, num_layers=2, lr=0.1, momentum=0.5)
    fused, formula = (hypergradient(tasks.task(_attention(fused)), plan, engine)
                      for fused in (True, False))
    # float64; softmax and products round in another order
    torch.testing.assert_close(fused.lr_TG, formula.lr_TG, rtol=1e-8, atol=1e-10)


@pytest.mark.entry("B9")
def test_an_operation_without_a_second_derivative_is_named() -> None:
    def loss(output: Tensor, batch: tuple[Tensor, ...], weights: Tensor | None) -> Tensor:
        lengths = torch.tensor([len(output)]), torch.tensor([2])
        return nn.functional.ctc_loss(output[:, None].log_softmax(dim=2), torch.tensor([[1, 2]]), *lengths)
    batch = tasks.task().batch
    task = ModuleTask(tasks.mlp(dropout=0.0), batch, loss, [batch(MinibatchIndex(0, 0, 0))])
    with pytest.raises(ConfigError, match="ctc_loss"):
        hypergradient(task,
                      HyperparameterPlan.constant(num_steps=2, num_layers=3, lr=0.1, momentum=0.5))


def test_running_statistics_are_refused_and_statistics_of_the_minibatch_are_not() -> None:
    batch = (torch.randn(8, 3), torch.randn(8, 3))

    def make(**options: bool) -> ModuleTask:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, **options))
        return ModuleTask(module, lambda place: batch, lambda y, b, _: (y - b[1]).square().mean(), [batch])
    with pytest.raises(ConfigError):
        make()
    task = make(track_running_stats=False)
    assert torch.equal(task.validation(task.start), task.loss(task.start, MinibatchIndex(0, 0, 0), None))


@pytest.mark.entry("F16")
@pytest.mark.parametrize("engine", ENGINES)
def test_sparse_gradients_count_as_dense_ones(engine: str) -> None:
    ids, y = torch.arange(16) % 7, torch.arange(16) % 3
    found = []
    for sparse in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(7, 5, sparse=sparse), nn.Tanh(), nn.Linear(5, 3)).double()
        task = ModuleTask(module, lambda place: (ids, y), lambda output, batch, _: nn.functional.cross_entropy(output, batch[1]),
                          [(ids, y)])
        found.append(hypergradient(task, HyperparameterPlan.constant(num_steps=4, num_layers=2, lr=0.1), engine).lr_TG)
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-15)
    assert bool((found[1] != 0.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")   # of torch: complex modules
        module = nn.Linear(5, 3).to(dtype)
    x = torch.ones(4, 5, dtype=dtype)
    task = ModuleTask(module, lambda place: (x,), lambda output, batch, _: output.abs().sum(), [(x,)])
    with pytest.raises(ArgumentError, match=str(dtype)):
        hypergradient(task, HyperparameterPlan.constant(num_steps=4, num_layers=1, lr=0.1))
