"""NGSGD in the loops that people write: half precision, scaling, padding, schedulers, ties."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from ngsgd import NGSGD
from ngsgd.errors import ConfigError, DivergenceError, NgsgdWarning
from ngsgd.optim import SGD
from tests.optim.moved import gradients_of, moving, parameters_of
from tests.wired import Wired

NUM_IN, NUM_CLASSES = 6, 4


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(OrderedDict([("hidden", nn.Linear(NUM_IN, 12)), ("tanh", nn.Tanh()), ("norm", nn.LayerNorm(12)),
                                      ("middle", nn.Linear(12, 10)), ("relu", nn.ReLU()), ("output", nn.Linear(10, NUM_CLASSES))]))


def minibatch(seed: int, num: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, NUM_IN, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    x, y = minibatch(seed)
    return nn.functional.cross_entropy(model(x.to(next(model.parameters()))), y, reduction="sum")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: Iterable[int]) -> list[float]:
    losses = []
    # a schedule may be at 0
    with moving(model) if any(group["lr"] for group in optimizer.param_groups) else contextlib.nullcontext():
        for seed in seeds:
            optimizer.zero_grad()
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses


def states(optimizer: NGSGD) -> dict[str, dict[str, Any]]:
    return {name: preconditioner.state_dict() for name, preconditioner in optimizer.preconditioners()}


def relative(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, Frobenius norms."""
    return float((a - b).double().norm() / b.double().norm())


def assert_same_estimates(ours: dict[str, dict[str, Any]], theirs: dict[str, dict[str, Any]], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, state in ours.items():
        other = theirs[name]
        assert state["t"] == other["t"]
        if "W" in state:
            # rows of W may change sign or turn among equal eigenvalues; W^T W does not
            assert relative(state["W"].T @ state["W"], other["W"].T @ other["W"]) <= tolerance, name
            assert relative(state["d"], other["d"]) <= tolerance, name


# --- half precision ---

def bfloat16_gradients(backward_inside: bool, num: int = 14) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    model = network()
    optimizer = NGSGD(model, lr=0.0)
    for seed in range(num):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(model, seed)
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
    return gradients_of(model), states(optimizer)


@pytest.mark.entry("L18", "you train under `torch.autocast` in bfloat16", "works",
                   "rows are preconditioned and estimates kept in float32; `backward` inside or "
                   "outside of autocast is the same")
def test_autocast_gives_float32_gradients_and_estimates_within_bfloat16_rounding() -> None:
    exact_model = network()
    exact = NGSGD(exact_model, lr=0.0)
    train(exact_model, exact, range(14))
    gradients, estimates = bfloat16_gradients(backward_inside=False)
    inside, inside_estimates = bfloat16_gradients(backward_inside=True)
    assert torch.equal(gradients, inside)
    for name, state in estimates.items():
        assert torch.equal(state["W"], inside_estimates[name]["W"])
        assert (state["W"].dtype, state["d"].dtype) == (torch.float32, torch.float64), name
    # bfloat16 keeps 8 bits: each rounding is up to 2^-9 = 0.2 %. Three layers forward and backward
    # make six in a row
    assert relative(gradients, gradients_of(exact_model)) < 0.012
    for name, state in estimates.items():
        other = states(exact)[name]
        # second moments: twice that
        assert relative(state["W"].T @ state["W"], other["W"].T @ other["W"]) < 0.02, name


def test_estimates_of_a_bfloat16_model_stay_in_float32_and_resume_bitwise() -> None:
    model = network().bfloat16()
    optimizer = NGSGD(model, lr=0.01, momentum=0.5)
    train(model, optimizer, range(7))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for name, state in optimizer.state_dict()["natural_gradient"].items():
        assert (state["W"].dtype, state["d"].dtype, state["rho"].dtype) == (torch.float32, torch.float64, torch.float64), name
    start = parameters_of(model)
    losses = train(model, optimizer, range(7, 16))
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert (parameters_of(model) != start).double().mean() > 0.5

    resumed = network(seed=1).bfloat16()
    other = NGSGD(resumed, lr=0.5, momentum=0.5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    assert train(resumed, other, range(7, 16)) == losses
    assert torch.equal(parameters_of(resumed), parameters_of(model))
    for name, state in states(other).items():
        assert torch.equal(state["W"], states(optimizer)[name]["W"]) and state["W"].dtype == torch.float32


def test_a_state_that_was_loaded_is_not_shared_with_where_it_came_from() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01)
    train(model, optimizer, range(3))
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved["natural_gradient"])
    other_model = copy.deepcopy(model)
    other = NGSGD(other_model, lr=0.01)
    other.load_state_dict(saved)
    train(other_model, other, range(3, 6))
    train(model, optimizer, range(3, 6))
    assert all(torch.equal(saved["natural_gradient"][name]["W"], state["W"]) for name, state in before.items())


# --- loss scaling ---

def train_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler,
                 seeds: Iterable[int]) -> list[float]:
    """Returns the scale in each minibatch."""
    scales = []
    for seed in seeds:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, seed)).backward()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    return scales


def changing_scaler() -> torch.amp.GradScaler:
    # not powers of 2: those would change no digit
    return torch.amp.GradScaler("cpu", init_scale=1000.0, growth_factor=3.0, growth_interval=2)


@pytest.mark.entry("L9", "you scale the loss with a GradScaler", "works",
                   "with `NGSGD(..., grad_scaler=scaler)` the run is that without a scaler; without it there is one warning")
def test_a_changing_loss_scale_changes_neither_estimates_nor_parameters() -> None:
    plain, scaled = network(), network()
    optimizer = NGSGD(plain, lr=0.005)
    train(plain, optimizer, range(16))
    scaler = changing_scaler()
    optimizer_scaled = NGSGD(scaled, lr=0.005, grad_scaler=scaler)
    scales = train_scaled(scaled, optimizer_scaled, scaler, range(16))
    assert scales[-1] > 100.0 * scales[0]
    # float32 rounding of 6e-8 in each of 16 minibatches; the estimates hold squares
    assert_same_estimates(states(optimizer_scaled), states(optimizer), 1e-5)
    moved = parameters_of(plain) - parameters_of(network())
    assert float((parameters_of(scaled) - parameters_of(plain)).norm()) < 1e-5 * float(moved.norm())


def test_a_loss_scale_that_overflows_moves_neither_parameters_nor_estimates_of_derivatives() -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = NGSGD(model, lr=0.005, grad_scaler=scaler)
    train_scaled(model, optimizer, scaler, range(5))
    parameters, before = parameters_of(model), states(optimizer)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 5) * 1e37).backward()  # 1024 times that is beyond float32
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert torch.equal(parameters_of(model), parameters)
    for name, state in states(optimizer).items():
        if name.endswith("input"):  # those rows were good
            assert state["W"].isfinite().all() and state["d"].isfinite().all()
        else:
            assert torch.equal(state["W"], before[name]["W"]) and torch.equal(state["d"], before[name]["d"]), name
    train_scaled(model, optimizer, scaler, range(6, 12))
    assert parameters_of(model).isfinite().all() and not torch.equal(parameters_of(model), parameters)


def test_the_first_loss_scale_may_overflow() -> None:
    """As it mostly does in float16: the scale starts high and backs off."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-30)
    optimizer = NGSGD(model, lr=0.005, grad_scaler=scaler)
    start = parameters_of(model)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0) * 1e3).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == pytest.approx(1e8) and torch.equal(parameters_of(model), start)
    # not one of these overflowed
    assert train_scaled(model, optimizer, scaler, range(1, 6))[-1] == pytest.approx(1e8)
    assert parameters_of(model).isfinite().all() and not torch.equal(parameters_of(model), start)
    assert all(state["d"].isfinite().all() for state in states(optimizer).values())


def test_a_scaler_that_is_switched_off_is_as_none() -> None:
    """GradScaler(enabled=use_amp) is how scripts are written."""
    plain, scaled = network(), network()
    train(plain, NGSGD(plain, lr=0.005), range(3))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    train_scaled(scaled, NGSGD(scaled, lr=0.005, grad_scaler=scaler), scaler, range(3))
    assert torch.equal(parameters_of(plain), parameters_of(scaled))


# --- padding and masks ---

def padded_minibatch(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x B x T x F, labels B x T, weights B x T) of sequences that are filled up with rubbish."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(6, 9, NUM_IN, generator=generator, dtype=torch.float64)
    lengths = torch.randint(3, 10, (6, 1), generator=generator)
    weights = (torch.arange(9) < lengths).double()
    x = torch.where(weights[..., None] > 0, x, 50.0 * x)
    return x, (x[..., 0] > 0).long(), weights


def masked_gradients(*, ignore_zero_rows: bool, padded: bool, num: int = 16) -> tuple[Tensor, dict[str, dict[str, Any]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(NUM_IN, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 20), nn.Tanh(),
                          nn.Linear(20, NUM_CLASSES)).double()
    optimizer = NGSGD(model, lr=0.002, ignore_zero_rows=ignore_zero_rows)
    for seed in range(num):
        x, labels, weights = padded_minibatch(seed)
        if not padded:
            x, labels, weights = (values[weights > 0] for values in (x, labels, weights))
        optimizer.zero_grad()
        per_frame = nn.functional.cross_entropy(model(x).flatten(0, -2), labels.flatten(), reduction="none")
        (per_frame * weights.flatten()).sum().backward()
        optimizer.step()
    return gradients_of(model), states(optimizer)


def test_padding_counts_unless_rows_without_derivative_are_ignored() -> None:
    (ignored, ignored_states), (counted, counted_states), (packed, packed_states) = (
        masked_gradients(ignore_zero_rows=ignores, padded=padded)
        for ignores, padded in ((True, True), (False, True), (False, False)))
    # float64 on both sides; the order of sums differs, and the squared condition number of the
    # estimates (at most 2000^2) amplifies that over 16 minibatches
    assert relative(ignored, packed) < 1e-8
    assert_same_estimates(ignored_states, packed_states, 1e-7)
    assert relative(counted, packed) > 1e-2
    assert relative(counted_states["0.input"]["d"], packed_states["0.input"]["d"]) > 1e-2


def two_heads() -> Wired:
    def run(model: Any, x: Tensor) -> Any:
        h = torch.tanh(model.body(x))
        return model.left(h), model.right(h)

    torch.manual_seed(0)
    return Wired(run, body=nn.Linear(NUM_IN, 8), left=nn.Linear(8, 3), right=nn.Linear(8, 3))


@pytest.mark.parametrize("max_change_per_sample", [0.0, 0.075])
@pytest.mark.parametrize("first_masked", [0, 3])
def test_a_head_masked_for_a_minibatch_is_kept_and_the_others_train(max_change_per_sample: float,
                                                                                first_masked: int) -> None:
    model = two_heads()
    optimizer = NGSGD(model, lr=0.01, loss_reduction="sum", ignore_zero_rows=True, max_change_per_sample=max_change_per_sample)
    for seed in range(8):
        x, _ = minibatch(seed)
        left, right = model(x)
        is_masked = first_masked <= seed < first_masked + 2
        before = copy.deepcopy(model.state_dict())
        fisher = states(optimizer)["right.output"]
        optimizer.zero_grad()
        ((left - x[:, :3]).square().sum() + (0.0 if is_masked else 1.0) * (right - x[:, 3:]).square().sum()).backward()
        optimizer.step()
        assert torch.equal(model.right.weight.detach(), before["right.weight"]) == is_masked
        assert not torch.equal(model.left.weight.detach(), before["left.weight"])
        if is_masked and "d" in fisher:
            assert torch.equal(states(optimizer)["right.output"]["d"], fisher["d"])
    assert optimizer.activity().num_skipped == 0


def test_an_estimate_starts_from_the_first_minibatch_that_has_rows_that_count() -> None:
    """Masked minibatches before it leave no trace."""
    gradients = []
    for masked in (0, 2):
        model = network().double()
        optimizer = NGSGD(model, lr=0.0, ignore_zero_rows=True)
        for seed in range(masked):
            (0.0 * loss_of(model, 100 + seed)).backward()
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
        gradients.append(gradients_of(model))
    # the same arithmetic on the same numbers in float64; the start is made of three passes that
    # amplify rounding
    assert relative(gradients[1], gradients[0]) < 1e-8


# --- settings of single layers ---

def test_layer_options_reach_the_layers_they_name_and_later_entries_win() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01, rank_in=4, layer_options={
        "*": {"alpha": 2.0}, "hid*": {"rank_in": 2, "update_period": 7}, "output": {"alpha": 8.0, "rank_out": 1}})
    train(model, optimizer, range(2))
    estimates = dict(optimizer.preconditioners())
    ranks = {name: len(state["W"]) for name, state in states(optimizer).items()}
    assert ranks == {"hidden.input": 2, "hidden.output": 6, "norm.scale": 4, "norm.offset": 4, "middle.input": 4,
                     "middle.output": 5, "output.input": 4, "output.output": 1}
    assert {name: estimate.smoothing.alpha for name, estimate in estimates.items() if "input" in name} == {
        "hidden.input": 2.0, "middle.input": 2.0, "output.input": 8.0}
    assert estimates["hidden.output"].update_period == 7 and estimates["output.output"].update_period == 4


@pytest.mark.parametrize("kind", [NGSGD, SGD])
def test_options_of_a_layer_are_those_of_its_param_group(kind: type[SGD]) -> None:
    """Their effect is tested with all layers."""
    options = {"lr_factor": 0.25, "max_change": 0.05, "weight_decay": 0.01,
               "orthonormal_constraint": -1.0}
    for group in kind(network(), 0.1, layer_options={"mid*": options}).param_groups:
        assert (group.items() >= options.items()) == (group["name"] == "middle")


@pytest.mark.parametrize("kind", [NGSGD, SGD])
@pytest.mark.parametrize(("options", "named"), [({"output": {"max_chnage": 1.0}}, "max_chnage"), ({"outptu": {}}, "outptu"),
                                                ({"output": {"lr": 1.0}}, "lr"), ({"out*": {"lr_factor": -1.0}}, "lr_factor")])
def test_wrong_layer_options_are_refused_by_name(kind: type[SGD], options: dict[str, dict[str, float]], named: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid.*{named}"):
        kind(network(), 0.1, layer_options=options)


def test_plain_sgd_has_no_ranks_to_set() -> None:
    with pytest.raises(ValueError, match="rank_in"):
        SGD(network(), 0.1, layer_options={"output": {"rank_in": 3}})


def test_alpha_changed_in_a_param_group_holds_from_the_next_minibatch_on() -> None:
    model = network().double()
    optimizer = NGSGD(model, lr=0.01)
    train(model, optimizer, range(5))
    changed = copy.deepcopy(model)
    other = NGSGD(changed, lr=0.01)
    other.load_state_dict(optimizer.state_dict())
    for _, estimate in other.preconditioners():
        estimate.set_alpha(0.5)
    for group in optimizer.param_groups:
        group["alpha"] = 0.5
    optimizer.zero_grad()
    changed.zero_grad()
    loss_of(model, 5).backward()
    loss_of(changed, 5).backward()
    assert {estimate.smoothing.alpha for _, estimate in optimizer.preconditioners()} == {0.5}
    assert torch.equal(gradients_of(model), gradients_of(changed))


def test_the_update_period_changed_in_a_param_group_holds_from_the_next_minibatch_on() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01)
    train(model, optimizer, range(11))  # all of these update; then every fourth would
    moved = []
    for seed in range(11, 14):
        for group in optimizer.param_groups:
            group["update_period"] = 1
        before = states(optimizer)["output.input"]["W"]
        train(model, optimizer, [seed])
        moved.append(not torch.equal(states(optimizer)["output.input"]["W"], before))
    assert moved == [True, True, True]


# --- what gets plain steps ---

@pytest.mark.entry("N8", "an Embedding and the output layer share a weight", "works",
                   "AdamW trains it by the sum of both plain gradients")
@pytest.mark.parametrize("bias", [True, False])
def test_weights_tied_between_embedding_and_output_fall_back_by_name_to_their_plain_gradient(bias: bool) -> None:
    torch.manual_seed(0)
    model = Wired(lambda m, tokens: m.output(torch.tanh(m.hidden(m.embedding(tokens)))),
                  embedding=nn.Embedding(7, 5), hidden=nn.Linear(5, 5),
                  output=nn.Linear(5, 7, bias=bias))
    model.output.weight = model.embedding.weight
    plain = copy.deepcopy(model)
    with pytest.warns(NgsgdWarning):
        optimizer = NGSGD(model, lr=0.01)
    assert optimizer.preconditioned == ["hidden"]
    assert optimizer.fallbacks == ["embedding.weight", *(["output.bias"] if bias else [])]
    tokens = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(0))
    for each in (model, plain):
        nn.functional.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    # float32 rounding
    torch.testing.assert_close(model.embedding.weight.grad, plain.embedding.weight.grad)
    before = model.embedding.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model.embedding.weight, before)
    assert model.output.weight is model.embedding.weight


@pytest.mark.entry("N9", "two Linear layers share a weight", "works",
                   "each has separate estimates, and the gradient is the sum of two natural "
                   "gradients")
@pytest.mark.parametrize("bias", [True, False])
def test_weights_tied_between_two_linear_layers_get_the_sum_of_two_natural_gradients(bias: bool) -> None:
    torch.manual_seed(0)
    tied = nn.Sequential(nn.Linear(5, 5, bias=bias), nn.Tanh(), nn.Linear(5, 5, bias=bias)).double()
    tied[2].weight = tied[0].weight
    apart = nn.Sequential(copy.deepcopy(tied[0]), nn.Tanh(), copy.deepcopy(tied[2]))
    optimizer, _other = NGSGD(tied, lr=0.0), NGSGD(apart, lr=0.0)
    assert optimizer.preconditioned == ["0", "2"] and optimizer.fallbacks == []
    for seed in range(3):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for model in (tied, apart):
            model.zero_grad()
            (model(x) - x.flip(1)).square().sum().backward()
        first, second = (apart.get_parameter(name).grad for name in ("0.weight", "2.weight"))
        assert first is not None and second is not None
        # one sum in float64
        torch.testing.assert_close(tied.get_parameter("0.weight").grad, first + second)


def mixed() -> Wired:
    def run(model: Any, tokens: Tensor) -> Any:
        h, _ = model.lstm(model.embedding(tokens))
        return model.output(model.attention(h, h, h)[0] * model.scale)

    torch.manual_seed(0)
    model = Wired(run, embedding=nn.Embedding(9, 8), lstm=nn.LSTM(8, 8, batch_first=True),
                  attention=nn.MultiheadAttention(8, 2, batch_first=True), output=nn.Linear(8, 9))
    model.register_parameter("scale", nn.Parameter(torch.ones(8)))
    return model


@pytest.mark.entry("N7", "the model has an Embedding, LSTM, GRU, transposed convolution or direct "
                         "parameters", "works",
                   "AdamW trains them at 1/8 of lr; `optimizer.fallbacks` names them, and a "
                   "warning gives their share above 30 %")
def test_other_parameters_are_named_as_fallbacks_and_still_train(caplog: pytest.LogCaptureFixture,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    # making MLflow's tables, in another test of this session, switches off every logger that exists
    monkeypatch.setattr(logging.getLogger("ngsgd.optim.ngsgd"), "disabled", False)
    model = mixed()
    with caplog.at_level("INFO", logger="ngsgd"), pytest.warns(NgsgdWarning):
        optimizer = NGSGD(model, lr=0.005)
    assert optimizer.preconditioned == ["attention", "attention.out_proj", "output"]
    expected = [
        name for name, _ in model.named_parameters() if not name.startswith(("output", "attention"))
    ]
    assert sorted(optimizer.fallbacks) == sorted(expected)
    assert "lstm.weight_ih_l0" in caplog.text and "scale" in caplog.text
    before = copy.deepcopy(model.state_dict())
    tokens = torch.randint(9, (8, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- numbers that are not finite ---

@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", [SGD, NGSGD])
def test_a_step_raises_and_names_the_layer(kind: type[SGD], bad: float) -> None:
    model = network()
    optimizer = kind(model, 0.1, on_nonfinite="raise")
    loss_of(model, 0).backward()
    gradient = model.get_parameter("middle.weight").grad
    assert gradient is not None
    gradient[0, 0] = bad
    before = parameters_of(model)
    with pytest.warns(NgsgdWarning), pytest.raises(DivergenceError, match="middle") as caught:
        optimizer.step()
    assert "output" not in str(caught.value)
    assert torch.equal(parameters_of(model), before)


def test_ngsgd_raises_and_names_the_layer_in_backward() -> None:
    model = network()
    optimizer = NGSGD(model, 0.1, on_nonfinite="raise")
    train(model, optimizer, range(2))
    x, y = minibatch(2)
    x[0, 0] = float("nan")
    with pytest.raises(DivergenceError, match="output"):  # backward reaches this layer first
        nn.functional.cross_entropy(model(x), y, reduction="sum").backward()


# --- loops ---

def test_a_closure_is_the_same_as_the_explicit_loop() -> None:
    explicit, by_closure = network(), network()
    losses = train(explicit, NGSGD(explicit, lr=0.01), range(4))
    optimizer = NGSGD(by_closure, lr=0.01)
    returned = []
    for seed in range(4):
        def closure(seed: int = seed) -> float:
            optimizer.zero_grad()
            loss = loss_of(by_closure, seed)
            loss.backward()
            return float(loss.detach())
        with torch.no_grad():  # step turns gradients on for the closure, as torch's optimizers do
            returned.append(optimizer.step(closure))
    assert returned == losses
    assert torch.equal(parameters_of(explicit), parameters_of(by_closure))


@pytest.mark.parametrize("name", ["exponential", "one_cycle", "plateau", "lambda"])
def test_learning_rate_schedulers(name: str) -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.02, layer_options={"output": {"lr_factor": 0.5}})
    schedulers: dict[str, Callable[[], Any]] = {
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "one_cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=10, cycle_momentum=False),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0 / step),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns where it does not see the optimizer's steps
        scheduler = schedulers[name]()
        losses, rates = [], []
        for seed in range(10):
            rates.append(optimizer.param_groups[0]["lr"])
            before = parameters_of(model)
            loss, = train(model, optimizer, [seed])
            losses.append(loss)
            assert torch.equal(parameters_of(model), before) == (rates[-1] == 0.0)
            if name == "plateau":
                scheduler.step(loss)
            elif seed < 9:
                scheduler.step()
    assert len(set(rates)) > 3 and losses[-1] < losses[0]
    assert len({group["lr"] for group in optimizer.param_groups}) == 1


def test_a_second_optimizer_on_a_model_starts_again() -> None:
    model = network()
    first = NGSGD(model, lr=0.01)
    train(model, first, range(5))
    fresh = network()
    fresh.load_state_dict(model.state_dict())
    second = NGSGD(model, lr=0.02, rank_in=3)
    assert {preconditioner.num_calls for _, preconditioner in second.preconditioners()} == {0}
    assert second.preconditioned == first.preconditioned
    train(model, second, range(5, 9))
    train(fresh, NGSGD(fresh, lr=0.02, rank_in=3), range(5, 9))
    assert torch.equal(parameters_of(model), parameters_of(fresh))
    assert {preconditioner.num_calls for _, preconditioner in first.preconditioners()} == {5}


def test_a_model_that_is_one_layer_keeps_the_name_of_its_estimates_with_a_second_optimizer() -> None:
    """Or a state of the first could not be loaded."""
    model = nn.Linear(4, 3)
    first = NGSGD(model, lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    second = NGSGD(model, lr=0.1)
    second.load_state_dict(first.state_dict())
    assert second.preconditioned == first.preconditioned == ["Linear"]


@pytest.mark.entry("L17", "you use activation checkpointing", "works",
                   "gradients are bitwise those without it, and a minibatch counts once, reentrant "
                   "or not")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients_and_counts_once(use_reentrant: bool) -> None:
    plain, checkpointed = network(), network()
    optimizers = NGSGD(plain, lr=0.01), NGSGD(checkpointed, lr=0.01)
    for seed in range(13):
        x, y = minibatch(seed)
        for model, optimizer in zip((plain, checkpointed), optimizers, strict=True):
            optimizer.zero_grad()
            if model is checkpointed:
                h = checkpoint(model[:3], x.clone().requires_grad_(), use_reentrant=use_reentrant)
                logits = checkpoint(model[3:], h, use_reentrant=use_reentrant)
            else:
                logits = model(x)
            nn.functional.cross_entropy(logits, y, reduction="sum").backward()
            optimizer.step()
        assert torch.equal(gradients_of(plain), gradients_of(checkpointed))
    assert {preconditioner.num_calls for _, preconditioner in optimizers[1].preconditioners()} == {13}


@pytest.mark.entry("N11", "a layer is parametrized (`parametrizations.weight_norm`, "
                          "`spectral_norm`) or pruned (`prune`)", "works",
                   "AdamW trains the parameters of the parametrization; to parametrize a layer "
                   "that has natural gradient raises ConfigError at the next step, so make NGSGD "
                   "after that")
@pytest.mark.parametrize("parametrize", [nn.utils.parametrizations.weight_norm,
                                         nn.utils.parametrizations.spectral_norm,
                                         lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
def test_parametrized_layers_are_trained_by_adamw(
    parametrize: Callable[[nn.Module], nn.Module],
) -> None:
    model = network()
    parametrize(model.get_submodule("hidden"))
    optimizer = NGSGD(model, lr=0.01, fallback="adamw")
    assert "hidden" not in optimizer.preconditioned and "hidden.bias" in optimizer.fallbacks
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2))
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    parametrize(model.get_submodule("middle"))
    with pytest.raises(ConfigError):
        optimizer.step()


@pytest.mark.entry("N12", "a layer is lazy (`nn.LazyLinear`)", "error",
                   "ConfigError at construction until the model has run once, which makes its "
                   "parameters")
def test_lazy_layers_are_refused_until_they_are_made() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(ConfigError):
        NGSGD(model, lr=0.01)
    model(torch.ones(2, 4))
    assert NGSGD(model, lr=0.01).preconditioned == ["0"]


def test_evaluation_between_minibatches_leaves_no_trace() -> None:
    evaluated, plain = network(), network()
    evaluating, optimizer = NGSGD(evaluated, lr=0.01), NGSGD(plain, lr=0.01)
    for seed in range(6):
        train(evaluated, evaluating, [seed])
        train(plain, optimizer, [seed])
        evaluated.eval()
        with torch.no_grad():
            without = evaluated(minibatch(100)[0])
        with torch.inference_mode():
            assert torch.equal(evaluated(minibatch(100)[0]), without)
        evaluated.train()
        # float32, perhaps another kernel
        torch.testing.assert_close(without, plain(minibatch(100)[0]).detach())
    assert torch.equal(parameters_of(evaluated), parameters_of(plain))
    assert all(torch.equal(state["W"], states(optimizer)[name]["W"]) for name, state in states(evaluating).items())


@pytest.mark.entry("L19", "you clip gradients between `backward` and `step`", "works",
                   "the norm is that of the natural gradient; the limits on change come after it")
def test_clipping_gradients_between_backward_and_step_acts_on_the_natural_gradient() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.1, max_change=0.0, max_param_change=0.0)
    train(model, optimizer, range(3))
    before = parameters_of(model)
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert float(norm) > 1.0
    optimizer.step()
    # lr times the norm that was left; float32 differences of parameters
    assert float((parameters_of(model) - before).norm()) == pytest.approx(0.05, rel=1e-4)


def test_gradients_that_are_zeroed_in_place_are_as_those_that_are_dropped() -> None:
    dropped, zeroed = network(), network()
    train(dropped, NGSGD(dropped, lr=0.01), range(4))
    optimizer = NGSGD(zeroed, lr=0.01)
    for seed in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss_of(zeroed, seed).backward()
        optimizer.step()
    assert torch.equal(parameters_of(dropped), parameters_of(zeroed))


def test_parameters_without_gradients_are_left_alone() -> None:
    model = two_heads()
    optimizer = NGSGD(model, lr=0.01)
    for seed in range(3):
        optimizer.zero_grad()
        before = copy.deepcopy(model.state_dict())
        model(minibatch(seed)[0])[0].square().sum().backward()
        optimizer.step()
        assert torch.equal(model.right.weight, before["right.weight"])
        assert not torch.equal(model.left.weight, before["left.weight"])
    optimizer.zero_grad()
    optimizer.step()  # nothing to do


def test_a_saved_model_does_not_grow_with_the_minibatch() -> None:
    """Rows that the backward pass has worked on are no part of it."""
    sizes = []
    for num in (8, 2048):
        model = network()
        optimizer = NGSGD(model, lr=0.001)
        for seed in range(2):
            optimizer.zero_grad()
            x, y = minibatch(seed, num)
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            optimizer.step()
        file = io.BytesIO()
        torch.save(model, file)
        sizes.append(file.tell())
    # one more row of floats per frame would be several times this
    assert sizes[1] < 1.05 * sizes[0]


def test_autocast_leaves_a_double_precision_model_alone() -> None:
    plain, cast = network().double(), network().double()
    for model, enabled in ((plain, False), (cast, True)):
        _optimizer = NGSGD(model, lr=0.01)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = model(minibatch(0)[0].double())
        y.square().sum().backward()
    assert torch.equal(gradients_of(plain), gradients_of(cast))
