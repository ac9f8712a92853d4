"""NGSGD and SGD as torch optimizers in a custom loop."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from ngsgd import NGSGD
from ngsgd.errors import NgsgdWarning
from ngsgd.optim import SGD, Optimizer
from ngsgd.optim.layers.linear import NaturalGradientLinear
from tests.optim.moved import moving


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.LayerNorm(12), nn.Linear(12, 4))


def minibatch(seed: int, num: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 6, generator=generator)
    return x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long()


def train(model: nn.Module, optimizer: Optimizer, seeds: range) -> float:
    loss = torch.tensor(0.0)
    with moving(model):
        for seed in seeds:
            x, y = minibatch(seed)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            optimizer.step(num_samples=len(y))
    return float(loss.detach()) / 32


def test_it_learns_and_names_what_it_does_to_each_parameter() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01)
    start = train(model, optimizer, range(1))
    assert train(model, optimizer, range(1, 60)) < 0.5 * start
    assert optimizer.preconditioned == ["0", "2", "3"]
    assert optimizer.fallbacks == []


def test_names_in_the_state_dict_stay_and_detach_gives_plain_layers_back() -> None:
    model = network()
    names = list(model.state_dict())
    optimizer = NGSGD(model, lr=0.01)
    assert list(model.state_dict()) == names
    assert isinstance(model[0], NaturalGradientLinear)
    optimizer.detach()
    assert type(model[0]) is nn.Linear


def test_training_resumes_bitwise_identically_from_saved_states() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01, momentum=0.5)
    train(model, optimizer, range(7))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(7, 15))

    resumed = network()
    other = NGSGD(resumed, lr=0.5, momentum=0.5)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, range(7, 15))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True))


def test_a_minibatch_with_a_gradient_that_is_not_finite_is_skipped_and_counted() -> None:
    model = network()
    optimizer = NGSGD(model, lr=0.01, momentum=0.9)
    train(model, optimizer, range(3))
    before = copy.deepcopy(model.state_dict())
    x, y = minibatch(3)
    x[0, 0] = float("nan")
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    with pytest.warns(NgsgdWarning):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.activity().num_skipped == 1
    train(model, optimizer, range(4, 8))
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


@pytest.mark.parametrize("kind", [NGSGD, SGD])
def test_limits_hold_and_are_counted(kind: type[SGD]) -> None:
    model = network()
    optimizer = kind(model, 10.0, max_change=0.1, max_param_change=0.15)
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(1))
    moved = [(p.detach() - q) for p, q in zip(model.parameters(), before, strict=True)]
    total = torch.cat([m.reshape(-1) for m in moved]).norm()
    assert float(total) == pytest.approx(0.15, rel=1e-5)
    activity = optimizer.activity()
    assert activity.model_share == 1.0 and activity.layer_share["0"] == 1.0


def test_sgd_without_limits_is_torchs_sgd() -> None:
    ours, theirs = network(), network()
    optimizer = SGD(ours, 0.01, max_change=0.0, max_param_change=0.0)
    reference = torch.optim.SGD(theirs.parameters(), 0.01)
    for seed in range(5):
        x, y = minibatch(seed)
        for model, opt in ((ours, optimizer), (theirs, reference)):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            opt.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)  # float32 rounding of one product


def test_closure_scheduler_frozen_layer_and_copy() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = NGSGD(model, lr=0.1)
    assert optimizer.preconditioned == ["2", "3"]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    x, y = minibatch(0)

    def closure() -> float:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        loss.backward()
        return float(loss.detach())
    assert optimizer.step(closure) is not None
    scheduler.step()
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))


def test_sequences_of_frames_give_the_same_as_their_rows() -> None:
    flat, sequence = network(), network()
    for model, shape in ((flat, (32, 6)), (sequence, (4, 8, 6))):
        _optimizer = NGSGD(model, lr=0.1)
        x, y = minibatch(0)
        nn.functional.cross_entropy(model(x.reshape(shape)).reshape(32, 4), y, reduction="sum").backward()
    torch.testing.assert_close(flat[0].weight.grad, sequence[0].weight.grad)


def test_parameters_in_place_of_the_module_are_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match="module"):
        NGSGD(network().parameters(), lr=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"lr": float("nan")}, {"momentum": 1.0}, {"max_change": -0.1}, {"rank_in": 0}])
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        NGSGD(network(), **{"lr": 0.1, **wrong})  # type: ignore[arg-type]


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
