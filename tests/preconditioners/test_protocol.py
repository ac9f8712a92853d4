"""What all methods share: restart, intervals, averages, limits, loss scales, skipped layers."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.config.sections.optimizer import EVERY_MINIBATCH
from ngsgd.errors import ConfigError, NgsgdWarning, OptimizerStateError
from ngsgd.preconditioners import KFAC, METHODS, GradientMaker, Preconditioner
from tests.preconditioners.problems import close, gradients_of, move, problem

CASES = ("linear", "conv frames")
CE = nn.functional.cross_entropy


def _trained(preconditioner: Preconditioner, name: str, model: nn.Module, steps: range) -> None:
    """Steps of SGD on minibatches that the step's number decides."""
    case = problem(name)
    for step in steps:
        x = case.x + 0.1 * torch.randn(case.x.shape, generator=torch.Generator().manual_seed(step), dtype=case.x.dtype)
        x = x.to(next(model.parameters()).dtype)
        model.zero_grad()
        preconditioner.evaluate(partial(_loss, model, x, case.y))
        preconditioner.step(lr=0.01)
        move(model, 0.01)


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return CE(model(x), y)


def _make(method: str, model: nn.Module, **options: Any) -> Preconditioner:
    if method not in EVERY_MINIBATCH:
        options = {"curvature_interval": 2, "inverse_interval": 4, **options}
    if METHODS[method].traits.fisher == "any":
        options = {"fisher": "mc", **options}
    made: Preconditioner = METHODS[method](model, damping=0.1, **options)
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("method", METHODS)
def test_restart_from_a_state_dict_is_bitwise_equal(method: str, name: str) -> None:
    whole, parted = problem(name).model.float(), problem(name).model.float()
    one = _make(method, whole)
    _trained(one, name, whole, range(9))
    before = _make(method, parted)
    _trained(before, name, parted, range(5))   # between two inverses, so that an old one continues
    after = _make(method, parted)
    # as arrays, which is how states travel and are stored: sorted by name, rows adjacent
    after.load_state_dict({name: {key: np.array(value, order="C") for key, value in sorted(entry.items())}
                           for name, entry in sorted(before.state_dict().items())})
    _trained(after, name, parted, range(5, 9))
    for (key, wanted), found in zip(whole.named_parameters(), parted.parameters(), strict=True):
        assert torch.equal(wanted, found), key
    assert not torch.equal(next(whole.parameters()), next(problem(name).model.float().parameters()))


@pytest.mark.parametrize("method", METHODS)
def test_the_direction_goes_down_hill(method: str) -> None:
    case = problem("conv frames")
    preconditioner = METHODS[method](case.model, damping=0.1)
    # some methods begin with the gradient itself
    _trained(preconditioner, "conv frames", case.model, range(2))
    plain = case.gradients()
    case.model.zero_grad()
    preconditioner.evaluate(lambda: case.loss(case.model(case.x)))
    preconditioner.step(lr=0.01)
    found = gradients_of(case.model)
    assert sum(float((found[name] * g).sum()) for name, g in plain.items()) > 0.0
    assert any(not torch.allclose(found[name], g) for name, g in plain.items())


@pytest.mark.parametrize("method", METHODS)
def test_the_mean_of_workers_states_is_taken_and_used(method: str) -> None:
    models = [problem("linear").model for _ in range(3)]
    workers = [METHODS[method](model, damping=0.1) for model in models]
    for index, (worker, model) in enumerate(zip(workers, models, strict=True)):
        _trained(worker, "linear", model, range(10 * index, 10 * index + 3))
    states = [worker.state_dict() for worker in workers]
    if not METHODS[method].traits.has_mean:
        with pytest.raises(ConfigError, match="mean"):
            workers[0].average(states)
        with pytest.raises(ConfigError, match="mean"):
            METHODS[method](models[0], averaging="average")
        return
    workers[0].average(states)
    _trained(workers[0], "linear", models[0], range(40, 42))
    assert all(bool(p.isfinite().all()) for p in models[0].parameters())
    one, two, three = (state["0.weight"] for state in states)
    key = next(key for key in one if key.startswith("statistics."))
    workers[1].average(states)
    close(workers[1].state_dict()["0.weight"][key], (one[key] + two[key] + three[key]) / 3)


@pytest.mark.parametrize("method", METHODS)
def test_the_maker_gives_the_steps_of_an_own_loop(method: str) -> None:
    """Calls are set up for each minibatch; a second look at one uses its own."""
    own, case = problem("linear"), problem("linear")
    preconditioner, maker = _make(method, own.model), GradientMaker(case.model, _make(method, case.model))
    for step in range(3):
        x = own.x + step
        own.model.zero_grad()
        preconditioner.evaluate(partial(_loss, own.model, x, own.y))
        preconditioner.step(lr=0.01)
        case.model.zero_grad()
        y = maker.setup_model_call(case.model, x)
        maker.setup_loss_call(CE, y.view(-1, y.size(-1)), case.y)
        maker.forward_and_backward(lr=0.01)
        move(own.model, 0.01)
        move(case.model, 0.01)
    for p, wanted in zip(case.model.parameters(), own.model.parameters(), strict=True):
        assert torch.equal(p, wanted)


def _kfac_gradients(loss: Any, **options: Any) -> dict[str, Tensor]:
    case = problem("linear")
    preconditioner = KFAC(case.model, damping=0.1, **options)
    case.model.zero_grad()
    with preconditioner.watch():
        loss(case, case.model)
    preconditioner.step()
    return gradients_of(case.model)


def _mean(case: Any, model: nn.Module) -> None:
    CE(model(case.x), case.y).backward()


def _masked(case: Any, model: nn.Module) -> None:
    x, y = torch.cat([case.x, case.x.flip(0) + 3.0]), torch.cat([case.y, torch.full_like(case.y, -100)])
    CE(model(x), y, reduction="sum").backward()


def _accumulated(case: Any, model: nn.Module) -> None:
    for rows in (slice(0, 4), slice(4, 6)):
        _part_of_loss(model, case.x[rows], case.y[rows]).backward()


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize(("loss", "scale"), [
    (lambda case, model: CE(model(case.x), case.y, reduction="sum").backward(), 6.0),
    (lambda case, model: (CE(model(case.x), case.y) * 1024.0).backward(), 1024.0),
    (lambda c, model: (CE(model(c.x), c.y, reduction="none") * torch.ones(6)).sum().backward(),
     6.0),
    (_accumulated, 1.0)])
def test_the_scale_of_the_loss_scales_the_direction_and_not_the_curvature(loss: Any, scale: float, fisher: str) -> None:
    wanted, found = _kfac_gradients(_mean, fisher=fisher), _kfac_gradients(loss, fisher=fisher)
    for name, value in wanted.items():
        close(found[name], value * scale)


@pytest.mark.parametrize("method", ["kfac", "unit", "smw", "hessian_free", "kbfgs"])
def test_evaluations_before_a_step_are_one_minibatch(method: str) -> None:
    found = []
    for parts in ((slice(0, 6),), (slice(0, 4), slice(4, 6))):
        case = problem("linear")
        model, x = case.model, case.x
        preconditioner = METHODS[method](model, damping=0.1)
        for _ in range(3):   # K-BFGS evaluates the parts again after a step
            model.zero_grad()
            for part in parts:
                preconditioner.evaluate(partial(_part_of_loss, model, x[part], case.y[part]))
            preconditioner.step()
            torch.optim.SGD(model.parameters(), lr=0.05).step()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for one, other in zip(*found, strict=True):
        # conjugate gradients end at a residual of 1e-3
        torch.testing.assert_close(one, other, rtol=1e-7 if method != "hessian_free" else 1e-2, atol=1e-10)


def _part_of_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return CE(model(x), y, reduction="sum") / 6.0


def test_masked_frames_add_nothing_to_the_output_factor() -> None:
    case = problem("linear")
    whole, masked = KFAC(case.model), KFAC(case.model)
    for preconditioner, loss in ((whole, _mean), (masked, _masked)):
        with preconditioner.watch():
            loss(case, case.model)
        preconditioner.step()
    for name in whole.statistics:
        close(masked.mean_statistics(name)["B"], whole.mean_statistics(name)["B"])


def test_factors_are_float32_under_autocast_and_equal_to_those_without() -> None:
    case = problem("linear")
    model = case.model.float()
    found = []
    for enabled in (False, True):
        preconditioner = KFAC(model)
        with preconditioner.watch(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            CE(model(case.x.float()), case.y).backward()
        preconditioner.step()
        found.append(preconditioner.mean_statistics("2.weight"))
    for key, value in found[0].items():
        assert found[1][key].dtype == torch.float32
        # 8 bits of bfloat16
        torch.testing.assert_close(found[1][key], value, rtol=0.05, atol=0.01)


def test_the_moving_average_is_unbiased_from_the_first_minibatch_on() -> None:
    case = problem("linear")
    decayed, single = KFAC(case.model, ema_decay=0.9), KFAC(case.model, ema_decay=0.0)
    case.preconditioned(decayed, steps=3)
    case.preconditioned(single)
    for name in single.statistics:
        for key, value in single.mean_statistics(name).items():
            close(decayed.mean_statistics(name)[key], value)   # the same minibatch thrice


def test_intervals_as_number_schedule_and_function() -> None:
    case = problem("linear")
    for interval, wanted in ((3, [0, 3, 6]), (((0, 1), (3, 2)), [0, 1, 2, 4, 6]),
                             (lambda step: 2 if step < 4 else 1, [0, 2, 4, 5])):
        preconditioner = KFAC(case.model, curvature_interval=interval)
        seen = []
        for step in range(8):
            case.preconditioned(preconditioner)
            if preconditioner.last["curvature"] == step:
                seen.append(step)
        assert seen[:len(wanted)] == wanted


def test_kl_clip_grafting_and_the_limit_on_the_norm() -> None:
    case = problem("linear")
    plain, free = case.gradients(), case.preconditioned(KFAC(case.model, damping=1e-3))
    product = sum(float((free[name] * g).sum()) for name, g in plain.items())
    clipped = case.preconditioned(KFAC(case.model, damping=1e-3, kl_clip=1e-6), lr=0.5)
    scale = (1e-6 / (0.25 * product)) ** 0.5
    for name, value in free.items():
        close(clipped[name], value * scale)
    grafted = case.preconditioned(KFAC(case.model, damping=1e-3, graft="gradient"))
    for layer in ("0", "2"):
        norms = [torch.cat([g[f"{layer}.weight"].flatten(), g[f"{layer}.bias"]]).norm() for g in (grafted, plain)]
        close(norms[0], norms[1])
    with pytest.raises(ConfigError, match=r"step\(lr="):
        case.preconditioned(KFAC(case.model, kl_clip=1e-3))


def test_skipped_layers_keep_their_gradient_and_layers_have_options_of_their_own() -> None:
    case = problem("linear")
    plain, wanted = case.gradients(), case.preconditioned(KFAC(case.model, damping=0.5))
    found = case.preconditioned(KFAC(case.model, damping=0.1, skip=("2",), layer_options={"0": {"damping": 0.5}}))
    close(found["0.weight"], wanted["0.weight"])
    close(found["2.weight"], plain["2.weight"])


def test_a_minibatch_that_is_not_finite_is_counted_and_leaves_no_trace() -> None:
    case = problem("linear")
    preconditioner = KFAC(case.model)
    case.preconditioned(preconditioner)
    before = copy.deepcopy(preconditioner.statistics)
    case.x[0, 0] = float("nan")
    with pytest.warns(NgsgdWarning):
        case.preconditioned(preconditioner)
    assert preconditioner.num_skipped == 1
    for name, known in preconditioner.statistics.items():
        for key, value in known.items():
            assert torch.equal(value, before[name][key])


def test_mistakes_are_reported() -> None:
    case = problem("linear")
    with pytest.raises(ConfigError, match=r"KFAC.*dampin"):
        KFAC(case.model, dampin=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="damping is -1"):
        KFAC(case.model, damping=-1.0)
    with pytest.raises(ConfigError, match="minibatch"):
        KFAC(case.model).step()
    with pytest.raises(OptimizerStateError, match="nobody"):
        KFAC(case.model).load_state_dict({"nobody.weight": {}})
    preconditioner = KFAC(case.model)
    with pytest.raises(ConfigError, match="loss"), preconditioner.watch():
        case.model(case.x).sum().backward()


@pytest.mark.parametrize("method", ["kfac", "diagonal", "unit", "layer"])
def test_statistics_without_history_are_not_stored_twice(method: str) -> None:
    case = problem("linear")
    passed_on = METHODS[method](case.model, damping=0.1, ema_decay=0.0, inverse_interval=2)
    kept = METHODS[method](case.model, damping=0.1, ema_decay=0.0, inverse_interval=2, averaging="average")
    for step in range(4):   # looks with an inverse and looks without
        found, wanted = case.preconditioned(passed_on), case.preconditioned(kept)
        for name, value in wanted.items():
            close(found[name], value)
        case.x.mul_(1.1)
        assert bool(kept.statistics) and bool(passed_on.statistics) == (step % 2 == 1)


@pytest.mark.entry("B8", "you use a preconditioner on a model with bfloat16 or float16 parameters", "works",
                   "estimates are float32, and the direction is rounded to the parameter's type at the end")
@pytest.mark.parametrize(("half", "at_once"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("method", METHODS)
def test_parameters_of_half_precision_have_estimates_in_float32(method: str, half: torch.dtype, at_once: bool) -> None:
    """The direction of float32 parameters of the same values, to the digits of gradients."""
    found = []
    torch.manual_seed(1)
    narrow = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3)).to(half)
    for model in (narrow, copy.deepcopy(narrow).float()):
        dtype = next(model.parameters()).dtype
        preconditioner = METHODS[method](model, damping=0.1)
        generator = torch.Generator().manual_seed(2)
        for _ in range(3):
            x, y = torch.randn(12, 5, generator=generator).to(half), torch.randint(3, (12,), generator=generator)
            model.zero_grad()
            closure = partial(_loss, model, x.to(dtype), y)
            if at_once:
                preconditioner.evaluate_and_step(closure, lr=0.02)
            else:
                preconditioner.evaluate(closure)
                preconditioner.step(lr=0.02)
            grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            torch.optim.SGD(model.parameters(), lr=0.02).step()
        preconditioner.load_state_dict(preconditioner.state_dict())
        assert {g.dtype for g in grads} == {dtype}
        found.append(torch.cat([g.float().flatten() for g in grads]))
        kept = (*preconditioner.statistics.values(), *preconditioner.inverses.values())
        assert all(value.dtype != half for entry in kept for value in entry.values())
    # gradients have 8 bits, and quasi-Newton methods take differences of them; L-BFGS also of
    # parameters, in which a step of 0.02 changes the last bits only
    least = {"kbfgs": 0.9, "lbfgs": 0.2}.get(method, 0.97)
    assert float(torch.cosine_similarity(found[0], found[1], dim=0)) > least


@pytest.mark.parametrize("method", METHODS)
def test_copies_and_pickles_continue_bitwise_identically(method: str) -> None:
    """Also between `evaluate` and `step`, without the minibatch."""
    model = problem("linear").model.float()
    preconditioner = _make(method, model)
    for num_steps in (0, 4):
        _trained(preconditioner, "linear", model, range(num_steps))
        copies = [way(preconditioner) for way in (copy.deepcopy, _pickled)]
        _trained(preconditioner, "linear", model, range(5, 8))
        for each in copies:
            _trained(each, "linear", each.model, range(5, 8))
            for p, wanted in zip(each.model.parameters(), model.parameters(), strict=True):
                assert torch.equal(p, wanted)
    case = problem("linear")
    preconditioner.evaluate(partial(_loss, model, case.x.float(), case.y))
    for way in (copy.deepcopy, _pickled):
        way(preconditioner).load_state_dict(preconditioner.state_dict())


def _pickled(preconditioner: Preconditioner) -> Preconditioner:
    found: Preconditioner = pickle.loads(pickle.dumps(preconditioner))
    return found


class _TwoHeads(nn.Module):
    """A head with a loss that is known, and one with a loss that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 30)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = CE(self.head(self.trunk(x).tanh()), y)
        return loss

    def second(self, x: Tensor) -> Tensor:
        loss: Tensor = self.other(self.trunk(x).tanh()).abs().mean()
        return loss


@pytest.mark.entry("F21")
@pytest.mark.parametrize("fisher", ["exact", "mc"])
def test_another_function_of_the_outputs_has_no_known_curvature(fisher: str) -> None:
    model, x, y = _TwoHeads(), torch.randn(6, 5), torch.arange(6) % 3
    preconditioner = KFAC(model, damping=0.1, fisher=fisher)
    before = [p.detach().clone() for p in model.parameters()]
    for loss in (lambda: model(x, y) + 0.01 * model.second(x), lambda: 0.01 * model.second(x) + model(x, y)):
        with pytest.raises(ConfigError, match="empirical"):
            preconditioner.evaluate(loss)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    # a penalty on weights has no rows
    preconditioner.evaluate(lambda: model(x, y) + model.head.weight.square().sum())
    preconditioner.step()


@pytest.mark.parametrize(("options", "warns"), [({"fisher": "exact"}, True), ({"fisher": "exact", "skip": ("other",)}, False)])
def test_parameters_without_curvature_are_warned_of_once(options: dict[str, Any], warns: bool) -> None:
    torch.manual_seed(0)
    model, x, y = _TwoHeads(), torch.randn(6, 5), torch.arange(6) % 3
    preconditioner = KFAC(model, damping=0.1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model.zero_grad()
            preconditioner.evaluate(partial(model, x, y))
            model.second(x).backward()
            preconditioner.step()
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == warns
    assert all("79 %" in message and "other.weight" in message for message in messages)
