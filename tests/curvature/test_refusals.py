"""What `collect` refuses, and in which words."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import ngsgd
from ngsgd.curvature import collect
from ngsgd.errors import ConfigError, DataError
from tests.curvature.support import close
from tests.curvature.test_collect import CE, _net


def test_rows_of_a_sample_side_by_side_are_told_by_num_samples() -> None:
    torch.manual_seed(0)
    conv, output = nn.Conv1d(4, 6, 3).double(), nn.Linear(6, 3).double()
    model = nn.ModuleList([conv, output])
    x, y = torch.randn(2, 4, 7).double(), torch.arange(10) % 3

    def loss() -> Tensor:
        value: Tensor = CE(output(conv(x).relu().transpose(1, 2).flatten(0, 1)), y)
        return value

    with pytest.raises(DataError, match="num_samples"), collect(model, "variance", loss_fn=CE):
        loss().backward()
    with collect(model, "batch_grad", "diag_ggn", loss_fn=CE, num_samples=2) as q:
        loss().backward()
    assert q["1.weight"].batch_grad.shape == (2, 3, 6) and q["0.weight"].batch_grad.shape == (2, 6, 4, 3)
    model.zero_grad()
    loss().backward()
    assert conv.weight.grad is not None
    close(q["0.weight"].batch_grad.sum(dim=0), conv.weight.grad)


def test_it_works_with_natural_gradient_layers_and_refuses_to_send_vectors_through_them() -> None:
    model, x, y = _net()
    with collect(model, "variance", loss_fn=CE) as plain:
        CE(model(x), y).backward()
    optimizer = ngsgd.NGSGD(model, lr=0.1)
    with collect(model, "variance", loss_fn=CE) as natural:
        CE(model(x), y).backward()
    for name in plain:
        close(natural[name].variance, plain[name].variance)
    with pytest.raises(ConfigError, match="detach"), collect(model, "diag_ggn", loss_fn=CE):
        CE(model(x), y).backward()
    optimizer.detach()


@pytest.mark.parametrize("compiled", ["wrapped", "in place"])
def test_a_compiled_model_is_refused(compiled: str) -> None:
    model, x, y = _net()
    whole: nn.Module = torch.compile(model, backend="eager") if compiled == "wrapped" else model  # type: ignore[assignment]
    if compiled == "in place":
        model.compile(backend="eager")
    with pytest.raises(ConfigError, match=r"torch\.compile"):
        collect(whole, "variance", loss_fn=CE)
    if compiled == "wrapped":   # what was compiled can be collected on
        with collect(model, "variance", loss_fn=CE) as q:
            CE(model(x), y).backward()
        assert q["0.weight"].variance.shape == (6, 5)


def test_a_layer_inside_of_a_transform_is_refused() -> None:
    model, x, _ = _net()
    with pytest.raises(ConfigError, match=r"torch\.func"), collect(model, "variance", loss_fn=CE):
        torch.func.vmap(model)(x)


@pytest.mark.parametrize("quantity", ["variance", "diag_ggn", "kfra"])
def test_a_second_backward_pass_over_one_forward_pass_is_refused(quantity: str) -> None:
    model, x, y = _net()
    with collect(model, quantity, loss_fn=CE) as q:
        loss = CE(model(x), y)
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigError, match="layer 2 was differentiated twice"):
            loss.backward(retain_graph=True)
    loss.backward()  # nobody counts any more
    assert set(q) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_gradients_of_gradients_are_refused() -> None:
    model, x, y = _net()

    def penalised() -> Tensor:
        loss: Tensor = CE(model(x), y)
        slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        return loss + torch.stack([slope.square().sum() for slope in slopes]).sum()

    with pytest.raises(ConfigError, match="twice"), collect(model, "variance", loss_fn=CE):
        penalised().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_refused(reentrant: bool) -> None:
    model, x, y = _net()
    with pytest.raises(ConfigError, match="checkpointing"), collect(model, "variance", loss_fn=CE):
        CE(torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=reentrant), y).backward()


def test_batch_normalisation_over_the_minibatch_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match="layer 1"), collect(model, "variance", loss_fn=CE):
        model(torch.randn(4, 5))


def test_bad_requests_are_all_told_at_once() -> None:
    model, _, _ = _net()
    with pytest.raises(ConfigError) as error:
        collect(model, "varianz", loss_fn=CE, sharing="none", normalization="no")
    assert len(error.value.problems) == 3
    with pytest.raises(ConfigError, match="L1Loss"):
        collect(model, "diag_ggn", loss_fn=nn.L1Loss())
    with pytest.raises(ConfigError, match="mean or a sum"):
        collect(model, "variance")


def test_what_was_not_asked_for_or_not_reached_is_told() -> None:
    model, x, y = _net()
    with collect(model, "variance", loss_fn=CE) as q:
        CE(model(x), y).backward()
    with pytest.raises(AttributeError, match="not asked for"):
        q["0.weight"].diag_ggn  # noqa: B018
    with pytest.raises(KeyError, match="no trainable parameter"):
        q["weight"]
    with collect(model, "variance", loss_fn=CE) as q:
        model(x)
    with pytest.raises(KeyError, match="no backward pass"):
        q["0.weight"]


def test_an_input_changed_in_place_is_refused() -> None:
    table = nn.Embedding(5, 3)
    index = torch.arange(4)

    def change_and_differentiate() -> None:
        y = table(index)
        index.add_(1).remainder_(5)
        CE(y, torch.arange(4) % 3).backward()

    with collect(table, "variance", loss_fn=CE), pytest.raises(DataError, match="in place"):
        change_and_differentiate()
