"""NGSGD and SGD as ordinary optimizers: copies, transforms, param groups, states, warnings."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD, NaturalMuon
from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.optim import SGD
from tests.optim import moved

EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12}  # float64; the order of sums differs
KINDS = pytest.mark.parametrize("kind", [NGSGD, SGD])


def network(width: int = 10) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Tanh(), nn.Flatten(), nn.Linear(16, width), nn.LayerNorm(width),
                         nn.Tanh(), nn.Linear(width, 3)).double()


def minibatch(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * torch.arange(1.0, 7.0)
    return x, (x[:, 0, 0] > 0).long() + (x[:, 1, 1] > 0).long()


def loss_of(model: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    x, y = minibatch(seed)
    return nn.functional.cross_entropy(model(x), y, reduction="sum")


train = partial(moved.train, loss_of=loss_of)


def gradients(model: nn.Module, seed: int) -> list[Tensor]:
    for p in model.parameters():
        p.grad = None
    loss_of(model, seed).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def trained() -> tuple[nn.Sequential, NGSGD]:
    model = network()
    optimizer = NGSGD(model, lr=0.001)
    train(model, optimizer, range(4))
    return model, optimizer


def plain_twin(model: nn.Module) -> nn.Module:
    """Made from the parameters alone."""
    twin = network()
    twin.load_state_dict(model.state_dict())
    return twin


def estimates(optimizer: NGSGD) -> dict[str, Any]:
    return {name: estimate.state_dict() for name, estimate in optimizer.preconditioners()}


def assert_estimates_are(optimizer: NGSGD, before: dict[str, Any]) -> None:
    for name, state in estimates(optimizer).items():
        assert state["t"] == before[name]["t"], name
        assert torch.equal(state["W"], before[name]["W"]), name


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **EXACT)


def messages(caught: list[warnings.WarningMessage], word: str) -> int:
    return sum(word in str(warning.message) for warning in caught)


# --- the model belongs to everybody ---

@pytest.mark.slow
@pytest.mark.entry("L8", "you keep an exponential moving average (`AveragedModel`)", "works",
                   "the average is a plain model with the mean of the weights, and does not feed the estimates")
@pytest.mark.entry("A7", "you copy a model under NGSGD, or drop the optimizer", "works",
                   "copies (`copy.deepcopy`, `AveragedModel`) are plain, and the model is plain once the optimizer is garbage "
                   "collected; a second NGSGD takes the layers over, and the first raises ConfigError at its next step")
@pytest.mark.parametrize("way", ["deepcopy", "averaged", "copied module", "dropped", "detached"])
def test_the_gradients_of_everybody_else_are_plain(way: str) -> None:
    model, optimizer = trained()
    natural = gradients(model, 9)
    if way == "deepcopy":
        other: nn.Module = copy.deepcopy(model)
    elif way == "averaged":
        other = torch.optim.swa_utils.AveragedModel(model).module
    elif way == "copied module":
        other = nn.Sequential(*[copy.copy(layer) for layer in model])
    else:
        other = model
        if way == "detached":
            optimizer.detach()
            with pytest.raises(ConfigError, match="cannot step"):
                optimizer.step()
        del optimizer
        gc.collect()
    plain = gradients(plain_twin(other), 9)
    before = {} if way in ("dropped", "detached") else estimates(optimizer)
    assert_close(gradients(other, 9), plain)
    if before:
        assert_estimates_are(optimizer, before)
    assert not torch.allclose(natural[-2], plain[-2])
    assert [type(layer) for layer in other.children()] == [type(layer) for layer in network()]


@pytest.mark.slow
@pytest.mark.entry("A7")
def test_a_second_optimizer_takes_over_and_the_first_refuses_to_step() -> None:
    model, first = trained()
    before = copy.deepcopy(dict(model.named_parameters()))
    second = NGSGD(model, lr=0.001)
    loss_of(model, 5).backward()
    with pytest.raises(ConfigError, match="another NGSGD"):
        first.step()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    del first
    gc.collect()
    second.step()  # the death of the first leaves the layers of the second
    assert {estimate.num_calls for _, estimate in second.preconditioners()} == {1}


# --- which backward passes count ---

def saliency(model: nn.Module) -> None:
    x, y = minibatch(7)
    x.requires_grad_()
    torch.autograd.grad(nn.functional.cross_entropy(model(x), y, reduction="sum"), x)


def backward_to_inputs_alone(model: nn.Module) -> None:
    x, y = minibatch(7)
    x.requires_grad_()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward(inputs=[x])


def gradients_of_parameters(model: nn.Module) -> None:
    found = torch.autograd.grad(loss_of(model, 7), list(model.parameters()))
    assert_close(list(found), gradients(plain_twin(model), 7))


def other_parameters(model: nn.Module) -> None:
    twin = plain_twin(model)
    others = {name: (2.0 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(others[name])
    loss_of(lambda x: torch.func.functional_call(model, others, (x,)), 7).backward()
    assert_close([p.grad for p in others.values() if p.grad is not None], gradients(twin, 7))


def generator_pass(model: nn.Module) -> None:
    loss_of(model, 7).backward()  # into the gradients of a discriminator, which are then cleared


@pytest.mark.entry("A8", "a backward pass does not train the layers: saliency, FGSM, `torch.autograd.grad`, `functional_call`, "
                         "the generator's pass through a discriminator", "works",
                   "the estimates do not move, and `torch.autograd.grad` returns plain gradients; a pass whose gradients are "
                   "cleared (`zero_grad`) without a step does not count")
@pytest.mark.parametrize("kind_of_pass", [saliency, backward_to_inputs_alone, gradients_of_parameters, other_parameters,
                                          generator_pass])
def test_a_pass_that_does_not_train_leaves_no_trace(kind_of_pass: Callable[[nn.Module], None]) -> None:
    (model, optimizer), (reference, other) = trained(), trained()
    kind_of_pass(model)
    if kind_of_pass is not generator_pass:
        assert_estimates_are(optimizer, estimates(other))
    model.load_state_dict(reference.state_dict())  # statistics of the batch normalization
    train(model, optimizer, range(4, 6))
    train(reference, other, range(4, 6))
    assert_estimates_are(optimizer, estimates(other))
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.entry("A8")
def test_gradients_that_no_backward_pass_has_added_are_warned_of_once() -> None:
    model, optimizer = trained()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            parameters = list(model.parameters())
            for p, grad in zip(parameters, torch.autograd.grad(loss_of(model, seed), parameters), strict=True):
                p.grad = grad
            optimizer.step()
    assert messages(caught, "plain") == 1


# --- transforms and exports ---

@pytest.mark.entry("B12", "you use torch.func, torch.jit, fx or torch.export on a model under NGSGD", "works",
                   "`torch.func.grad`, `vmap`, `torch.jit.trace`, `torch.fx.symbolic_trace` and `torch.export` see torch's "
                   "plain layers; `torch.jit.script` raises ConfigError and names the way out, a copy")
def test_torch_func_uses_a_plain_model() -> None:
    model, optimizer = trained()
    model.eval()
    before = estimates(optimizer)
    twin = plain_twin(model).eval()
    x, y = minibatch(5)
    found = []
    for each in (model, twin):
        parameters = {name: p.detach() for name, p in each.named_parameters()}

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, each: nn.Module = each) -> Tensor:
            logits = torch.func.functional_call(each, parameters, (x[None],))
            return nn.functional.cross_entropy(logits, y[None])
        found.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, x, y))
    assert_close(list(found[0].values()), list(found[1].values()))
    tangents = [torch.func.jvp(each, (x,), (torch.ones_like(x),))[1] for each in (model, twin)]
    torch.testing.assert_close(tangents[0], tangents[1], **EXACT)
    assert_estimates_are(optimizer, before)


@pytest.mark.entry("B12")
@pytest.mark.parametrize("way", ["jit.trace", "fx", "export"])
def test_traced_models_are_plain(way: str) -> None:
    model, optimizer = trained()
    model.eval()
    x, _ = minibatch(5)
    if way == "jit.trace":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that tracing is deprecated
            traced: Any = torch.jit.trace(model, (x,))
        assert "PythonOp" not in str(traced.inlined_graph)
    elif way == "fx":
        traced = torch.fx.symbolic_trace(model)
        assert [node.op for node in traced.graph.nodes].count("call_module") == len(model)
    else:
        exported = torch.export.export(model, (x,))
        assert "ngsgd" not in str(exported.graph)
        traced = exported.module()
    torch.testing.assert_close(traced(x), model(x), **EXACT)
    assert {estimate.num_calls for _, estimate in optimizer.preconditioners()} == {4}


@pytest.mark.entry("B12")
def test_scripting_is_refused_with_the_way_out() -> None:
    model, optimizer = trained()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that scripting is deprecated
        with pytest.raises(ConfigError, match="deepcopy"):
            torch.jit.script(model)
        torch.jit.script(copy.deepcopy(model))
    train(model, optimizer, range(4, 5))


@pytest.mark.slow
@pytest.mark.entry("P7", "you save a complete model under NGSGD with torch.save", "works",
                   "the file holds torch's plain layers and loads without ngsgd")
def test_a_saved_model_loads_without_ngsgd(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save(model, tmp_path / "model.pt")
    code = ("import sys, torch; sys.modules['ngsgd'] = None\n"
            f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
            "print(' '.join(type(layer).__name__ for layer in model))")
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout.split()
    assert names == [type(layer).__name__ for layer in network()]
    assert optimizer.preconditioned == ["0", "1", "4", "5", "7"]


# --- copies of the optimizer ---

@pytest.mark.entry("B6", "you copy or pickle an optimizer", "works",
                   "`SGD` and `ReversibleSGD` are copied and pickled with their model; NGSGD raises ConfigError, since it "
                   "belongs to the layers of its model; all their state_dicts load under torch.load's default weights_only")
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copied_sgd_trains_its_copied_model(way: str) -> None:
    model = network()
    optimizer = SGD(model, lr=0.001, momentum=0.5)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    train(model, optimizer, range(3))
    pair = (model, optimizer)
    twin, other = copy.deepcopy(pair) if way == "deepcopy" else pickle.loads(pickle.dumps(pair))
    for each, one in ((model, optimizer), (twin, other)):
        train(each, one, range(3, 6))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    assert other.activity().num_steps == 6


@pytest.mark.entry("B6")
def test_a_copy_of_ngsgd_is_refused() -> None:
    _, optimizer = trained()
    for way in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(ConfigError, match="state_dict"):
            way(optimizer)


# --- param groups ---

@KINDS
@pytest.mark.entry("L11", "you train a head and unfreeze the rest later", "works",
                   "after `optimizer.add_param_group` the unfrozen layers train, under NGSGD with separate estimates; "
                   "without it a warning names them")
@pytest.mark.entry("B3", "you unfreeze layers and call add_param_group", "works",
                   "the parameters of each layer become a group with the layer's name, and NGSGD preconditions the layer from "
                   "the next forward pass on. A layer that is unfrozen and not added is named in a warning")
def test_unfrozen_layers_that_are_added_train_as_if_they_had_been_there(kind: type[SGD | NGSGD]) -> None:
    model, reference = network(), network()
    for p in model[4].parameters():
        p.requires_grad_(False)
    optimizer = kind(model, 0.001, momentum=0.5)
    train(model, optimizer, range(2))
    for p in model[4].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.0005})
    group = optimizer.param_groups[-1]
    assert (group["name"], group["lr"], group["momentum"], group["max_change"]) == ("4", 0.0005, 0.5, 0.75)
    if isinstance(optimizer, NGSGD):
        assert set(optimizer.preconditioned) == {"0", "1", "4", "5", "7"} and optimizer.fallbacks == []
        reference.load_state_dict(model.state_dict())
        fresh = NGSGD(reference, 0.001)
        # both estimates start from this minibatch
        assert_close([gradients(model, 5)[4]], [gradients(reference, 5)[4]])
        assert fresh.preconditioned == ["0", "1", "4", "5", "7"]
    before = model[4].get_parameter("weight").detach().clone()
    train(model, optimizer, range(5, 7))
    assert not torch.equal(model[4].get_parameter("weight"), before)
    assert set(optimizer.activity().layer_share) == {group["name"] for group in optimizer.param_groups}
    optimizer.load_state_dict(optimizer.state_dict())


@KINDS
@pytest.mark.entry("B3")
def test_a_bias_that_is_added_later_is_a_second_group_of_its_layer(kind: type[SGD | NGSGD]) -> None:
    model = network()
    model[7].get_parameter("bias").requires_grad_(False)
    optimizer = kind(model, 0.001)
    train(model, optimizer, range(2))
    with pytest.raises(ConfigError, match="frozen"):
        optimizer.add_param_group({"params": [model[7].get_parameter("bias")]})
    model[7].get_parameter("bias").requires_grad_(True)
    optimizer.add_param_group({"params": [model[7].get_parameter("bias")]})
    assert optimizer.param_groups[-1]["name"] == "7#2"
    before = model[7].get_parameter("bias").detach().clone()
    train(model, optimizer, range(2, 4))
    assert not torch.equal(model[7].get_parameter("bias"), before)
    with pytest.raises(ValueError, match="one"):
        optimizer.add_param_group({"params": [model[7].get_parameter("bias")]})


@KINDS
@pytest.mark.entry("B3")
def test_layers_that_are_unfrozen_and_not_added_are_warned_of_once(kind: type[SGD | NGSGD]) -> None:
    model = network()
    model[4].requires_grad_(False)
    optimizer = kind(model, 0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, optimizer, range(2))
        assert messages(caught, "unfrozen") == 0
        model[4].requires_grad_(True)
        train(model, optimizer, range(2, 5))
    assert messages(caught, "4.weight, 4.bias were unfrozen") == 1


@KINDS
def test_parameters_that_have_left_the_model_are_refused(kind: type[SGD | NGSGD]) -> None:
    model = network()
    optimizer = kind(model, 0.001)
    train(model, optimizer, range(2))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    before = copy.deepcopy(dict(model.named_parameters()))
    with pytest.raises(ConfigError, match=r"model \(weight"):
        train(model, optimizer, range(2, 3))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


# --- settings ---

@KINDS
@pytest.mark.entry("B4", "you set weight_decay and your loop calls step() without num_samples (Lightning, Accelerate, the HF "
                         "Trainer)", "works",
                   "the loss is taken for a mean over the minibatch: a step takes 2 * weight_decay * lr * p off, and one warning "
                   "reports it. NGSGD with loss_reduction=\"mean\" counts the N rows and takes N times as much")
def test_weight_decay_without_a_number_of_samples_is_that_of_a_mean_loss(kind: type[SGD | NGSGD]) -> None:
    moved = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for decay, num_samples in ((0.0, None), (0.01, None), (0.01, 1)):
            model = network()
            optimizer = kind(model, 0.02, weight_decay=decay, max_change=0.0, max_param_change=0.0)
            for _ in range(2):
                optimizer.zero_grad()
                (loss_of(model, 0) / 24).backward()
                before = model[7].get_parameter("weight").detach().clone()
                optimizer.step(num_samples=num_samples)
            moved.append((model[7].get_parameter("weight").detach() - before, before))
    assert messages(caught, "num_samples") == 1
    torch.testing.assert_close(moved[1][0], moved[2][0], rtol=0, atol=0)
    first = network()[7].get_parameter("weight").detach()
    optimizers = []
    for decay in (0.0, 0.01):  # of one step from the same place
        model = network()
        given: dict[str, Any] = {"loss_reduction": "sum"} if kind is NGSGD else {}
        optimizer = kind(model, 0.02, weight_decay=decay, max_change=0.0, max_param_change=0.0, **given)
        (loss_of(model, 0) / 24).backward()
        optimizer.step(num_samples=1)
        optimizers.append(model[7].get_parameter("weight").detach())
    # rates in float32
    torch.testing.assert_close(optimizers[0] - optimizers[1], 2 * 0.01 * 0.02 * first, rtol=1e-6, atol=1e-9)


@KINDS
@pytest.mark.entry("L10", "you use OneCycleLR with its defaults", "works",
                   "learning rate and momentum of every layer follow the schedule")
@pytest.mark.entry("B5", "you use OneCycleLR or CyclicLR with its defaults", "works",
                   "`momentum` is a key of every param group, and the schedule of the momentum takes effect at the next step")
def test_momentum_of_a_param_group_takes_effect(kind: type[SGD | NGSGD]) -> None:
    model = network()
    optimizer = kind(model, 0.001, momentum=0.9, max_change=0.0, max_param_change=0.0)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.002, total_steps=8)
    velocity: dict[Tensor, Tensor] = {}
    for seed in range(8):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        expected = {}
        for group in optimizer.param_groups:  # Kaldi: v = m v - lr g, w += (1 - m) v
            for p in group["params"]:
                velocity[p] = group["momentum"] * velocity.get(p, torch.zeros_like(p)) - group["lr"] * p.grad
                expected[p] = p.detach() + (1.0 - group["momentum"]) * velocity[p]
        optimizer.step()
        for p, value in expected.items():
            torch.testing.assert_close(p.detach(), value, rtol=1e-6, atol=1e-8)  # rates in float32
        if seed < 7:
            scheduler.step()
    assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.95)


def test_components_may_have_different_momenta() -> None:
    model, reference = network(), network()
    optimizer = SGD(model, 0.001, max_change=0.0, max_param_change=0.0)
    momenta = {name: 0.1 * index for index, name in enumerate(group["name"] for group in optimizer.param_groups)}
    for group in optimizer.param_groups:
        group["momentum"] = momenta[group["name"]]
    other = torch.optim.SGD([{"params": list(layer.parameters()), "momentum": momenta[name], "lr": 0.001 * (1.0 - momenta[name])}
                             for name, layer in reference.named_children() if name in momenta])
    for seed in range(5):
        for each, one in ((model, optimizer), (reference, other)):
            one.zero_grad()
            loss_of(each, seed).backward()
            one.step()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)  # rates in float32


def test_gradients_of_other_layouts_move_the_parameter_all_the_same() -> None:
    dense, sparse, transposed = (nn.Embedding(5, 3, sparse=kind == 1) for kind in range(3))
    for layer in (sparse, transposed):
        layer.load_state_dict(dense.state_dict())
    optimizers = [SGD(layer, 0.1) for layer in (dense, sparse, transposed)]
    for layer in (dense, sparse):
        layer(torch.tensor([1, 1, 4])).square().sum().backward()
    assert sparse.weight.grad is not None and sparse.weight.grad.is_sparse
    assert dense.weight.grad is not None
    transposed.weight.grad = dense.weight.grad.T.contiguous().T
    for optimizer in optimizers:
        optimizer.step()
    assert torch.equal(dense.weight, sparse.weight) and torch.equal(dense.weight, transposed.weight)


# --- states ---

@KINDS
@pytest.mark.entry("P4", "you load a state into an optimizer with other settings", "works",
                   "momentum, max_param_change and on_nonfinite are in the state and are restored; `lr` is torch's lr * (1 - "
                   "momentum), and `weight_decay` takes 2 * num_samples * weight_decay * lr * p off")
def test_a_state_restores_momentum_and_limits(kind: type[SGD | NGSGD]) -> None:
    optimizer = kind(network(), 0.001, momentum=0.9, max_param_change=0.03, on_nonfinite="raise")
    other = kind(network(), 0.5)
    other.load_state_dict(optimizer.state_dict())
    assert (other.momentum, other.max_param_change, other.on_nonfinite) == (0.9, 0.03, "raise")


RESUMED: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "NGSGD": lambda model, lr: NGSGD(model, lr, momentum=0.9),
    "SGD": lambda model, lr: SGD(model, lr, momentum=0.9),
    "NGSGD and AdamW": lambda model, lr: NGSGD(model, lr, layer_options={"4": {"rule": "adamw"}}),
    "AdamW": lambda model, lr: SGD(model, lr, layer_options={"*": {"rule": "adamw"}}),
    "NaturalMuon": NaturalMuon}


@pytest.mark.entry("P4")
@pytest.mark.parametrize("name", RESUMED)
def test_a_loaded_state_continues_bitwise_identically(name: str) -> None:
    model = network()
    optimizer = RESUMED[name](model, 0.001)
    # each of 10 steps updates the estimates, then every fourth
    train(model, optimizer, range(12))
    twin = plain_twin(model)
    other = RESUMED[name](twin, 0.5)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    for each, one in ((model, optimizer), (twin, other)):
        train(each, one, range(12, 18))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


@KINDS
def test_a_state_of_torchs_optimizer_is_refused(kind: type[SGD | NGSGD]) -> None:
    model = network()
    theirs = torch.optim.SGD([{"params": list(layer.parameters())} for layer in model if list(layer.parameters())], 0.1,
                             momentum=0.9)
    train(model, theirs, range(2))
    with pytest.raises(OptimizerStateError, match="state"):
        kind(network(), 0.001).load_state_dict(theirs.state_dict())


def test_a_state_of_an_earlier_version_loads() -> None:
    model, optimizer = trained()
    state = optimizer.state_dict()
    old = {"state": {}, "step_count": state["step_count"], "natural_gradient": state["natural_gradient"],
           "param_groups": [{key: value for key, value in group.items() if key != "momentum"} for group in state["param_groups"]]}
    twin = plain_twin(model)
    other = NGSGD(twin, 0.5)
    other.load_state_dict(old)
    for each, one in ((model, optimizer), (twin, other)):
        train(each, one, range(4, 6))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)


# --- warnings ---

@pytest.mark.entry("P6", "you use a GradScaler and do not give it to NGSGD", "works",
                   "the first `scaler.step(optimizer)` warns that the estimates mix loss scales; give `NGSGD(..., "
                   "grad_scaler=scaler)`")
@pytest.mark.parametrize("given", [False, True])
def test_a_scaler_that_was_not_given_is_warned_of_once(given: bool) -> None:
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = NGSGD(model, lr=0.001, grad_scaler=scaler if given else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, seed)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert messages(caught, "GradScaler") == (not given)


@pytest.mark.entry("L13", "more than 30 % of the parameters have no natural gradient", "works",
                   'AdamW trains them, and one warning gives their share; `fallback="adamw"`, or a '
                   "`rule` in `layer_options`, states that this is intended")
@pytest.mark.parametrize(
    ("num_embeddings", "options", "rule"),
    [
        (2, {}, None),
        (200, {}, "AdamW"),
        (200, {"fallback": "adamw"}, None),
        (200, {"fallback": "sgd"}, "plain SGD"),
        (200, {"layer_options": {"0": {"rule": "adamw"}}}, None),
    ],
)
def test_a_large_share_of_fallbacks_is_warned_of(
    num_embeddings: int, options: dict[str, Any], rule: str | None
) -> None:
    model = nn.Sequential(nn.Embedding(num_embeddings, 8), nn.Linear(8, 20))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        NGSGD(model, lr=0.001, **options)
    assert (
        messages(caught, f"90% of the parameters take {rule}") == len(caught) == (rule is not None)
    )


@KINDS
@pytest.mark.entry("L14", "limits on change shorten most steps", "works",
                   "once, after 64 steps or more, where `max_change` shortened more than half of "
                   "the steps of layers, or `max_param_change` nine tenths of those of the model; "
                   "`activity()` has the shares")
@pytest.mark.parametrize(
    ("options", "is_warned"),
    [
        ({"max_change": 1e-6}, True),
        ({"max_param_change": 1e-6}, True),
        ({"max_change": 0.0, "max_param_change": 0.0}, False),
    ],
)
def test_limits_that_set_the_step_are_warned_of_once(
    kind: type[SGD | NGSGD], options: dict[str, Any], is_warned: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = kind(model, 0.001, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(128):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    assert messages(caught, "max_change") == is_warned


@pytest.mark.entry("L20", "the training loop forgot `optimizer.zero_grad()`", "works",
                   "the warning that limits shortened most steps names it, if a gradient of one step is that of the step "
                   "before with one change")
@KINDS
@pytest.mark.parametrize(("clears", "num_passes", "is_named"), [
    (None, 1, True), (True, 1, False), (False, 1, False), (True, 2, False), (False, 2, False)])
def test_a_loop_that_adds_gradients_up_is_warned_of_that(
        kind: type[SGD | NGSGD], clears: bool | None, num_passes: int, is_named: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = kind(model, 0.001, max_change=1e-6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(64):
            for _ in range(num_passes):
                model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            # a loop may also clear them before the backward pass
            if clears is not None:
                optimizer.zero_grad(set_to_none=clears)
    assert messages(caught, "max_change") == 1
    assert messages(caught, "zero_grad") == is_named


@pytest.mark.entry("L15",
                   "you want Fisher estimates to start again, as after averaging or for a new task",
                   "works",
                   "`optimizer.reset_estimates()`; the next minibatch starts them as those of a "
                   "new NGSGD, and momentum stays")
def test_estimates_that_are_reset_are_those_of_a_new_optimizer() -> None:
    model, optimizer = trained()
    twin = copy.deepcopy(model)
    optimizer.reset_estimates()
    assert all(estimate.state is None and estimate.num_calls == 0
               for _, estimate in optimizer.preconditioners())
    new = NGSGD(twin, lr=optimizer.param_groups[0]["lr"])
    for each, of in ((optimizer, model), (new, twin)):
        each.zero_grad()
        loss_of(of, 5).backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


@pytest.mark.entry("P11", "a monitor plots the learning rate of every param group (Lightning's LearningRateMonitor)", "works",
                   "there is one curve per layer, since every layer is a param group; its name is the layer's")
def test_every_layer_is_a_param_group_with_its_name() -> None:
    _, optimizer = trained()
    assert [group["name"] for group in optimizer.param_groups] == ["0", "1", "4", "5", "7"]
