"""What `collect` refuses, and in which words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ngsgd
from ngsgd.curvature import collect
from ngsgd.errors import ConfigError, DataError
from ngsgd.preconditioners import KFAC
from tests.curvature.support import close
from tests.curvature.test_collect import CE, Scaled, _net
from tests.wired import Wired


def test_adjacent_rows_of_a_sample_are_declared_by_num_samples() -> None:
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
    if compiled == "wrapped":   # a compiled model supports `collect`
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
        with pytest.raises(ConfigError, match="layer 2"):
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


@pytest.mark.entry("B17")
@pytest.mark.parametrize("quantity", ["batch_grad", "variance", "diag_ggn", "batch_diag_ggn_mc",
                                      "diag_h", "kflr", "kfra", "hmp"])
def test_activation_checkpointing_changes_nothing(quantity: str) -> None:
    found = []
    for is_checkpointed in (False, True):
        model, x, y = _net()
        with collect(model, quantity, loss_fn=CE, generator=torch.Generator().manual_seed(0)) as q:
            run = partial(checkpoint, model, use_reentrant=False) if is_checkpointed else model
            CE(run(x), y).backward()
        value = getattr(q["0.weight"], quantity)
        found.append(value(torch.ones(6, 5).double()) if quantity == "hmp" else value)
    if quantity in ("kflr", "kfra"):
        close(found[1].A_II, found[0].A_II)
        found = [each.B_OO for each in found]
    close(found[1], found[0])


@pytest.mark.entry("B17")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("quantity", ["variance", "diag_ggn"])
def test_reentrant_activation_checkpointing_is_refused(quantity: str, first: int) -> None:
    """Of the complete model, and of the layers after the first."""
    model, x, y = _net()
    assert isinstance(model, nn.Sequential)

    def differentiate() -> None:
        hidden = model[:first](x.requires_grad_())
        CE(checkpoint(model[first:], hidden, use_reentrant=True), y).backward()
    with pytest.raises(ConfigError, match="use_reentrant=False"), \
            collect(model, quantity, loss_fn=CE):
        differentiate()


@pytest.mark.entry("B11")
@pytest.mark.parametrize("quantity", ["batch_grad", "variance", "batch_l2", "diag_ggn"])
def test_batch_normalization_over_the_minibatch_is_refused(quantity: str) -> None:
    """Also together with factors, which do not need samples."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match=r"layer 1 .*eval\(\)"), \
            collect(model, quantity, "kfac", loss_fn=CE, layers=["0"]):
        model(torch.randn(4, 5))


def test_bad_requests_are_all_reported_at_once() -> None:
    model, _, _ = _net()
    with pytest.raises(ConfigError) as error:
        collect(model, "varianz", loss_fn=CE, sharing="none", normalization="no")
    assert len(error.value.problems) == 3
    with pytest.raises(ConfigError, match="L1Loss"):
        collect(model, "diag_ggn", loss_fn=nn.L1Loss())
    with pytest.raises(ConfigError, match=r"mean.*sum"):
        collect(model, "variance")


def test_unrequested_and_unreached_parts_are_reported() -> None:
    model, x, y = _net()
    with collect(model, "variance", loss_fn=CE) as q:
        CE(model(x), y).backward()
    with pytest.raises(AttributeError, match="requested"):
        q["0.weight"].diag_ggn  # noqa: B018
    with pytest.raises(KeyError, match="trainable"):
        q["weight"]
    with collect(model, "variance", loss_fn=CE) as q:
        model(x)
    with pytest.raises(KeyError, match="backward"):
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


def _mixed() -> nn.Module:
    """Layers with and without Kronecker factors."""
    def run(model: Any, index_NT: Tensor) -> Any:
        h = model.rnn(model.norm(model.emb(index_NT)))[0].transpose(1, 2)
        h = model.grouped(model.conv(h)).mean(dim=2)
        return model.out(h) + model.tied(h)[:, :3]
    emb, tied = nn.Embedding(5, 4), nn.Linear(4, 5)
    tied.weight = emb.weight
    return Wired(run, emb=emb, norm=nn.LayerNorm(4), rnn=nn.GRU(4, 4, batch_first=True),
                 conv=nn.Conv1d(4, 4, 1),
                 grouped=nn.Conv1d(4, 4, 1, groups=2), out=nn.Linear(4, 3), tied=tied)


@pytest.mark.entry("P8", "you ask `collect` for Kronecker factors of a model with Embedding, LayerNorm or grouped convolutions",
                   "error", "`ConfigError` before the forward pass lists the layers that have no factors and the `layers=[...]` "
                              "to pass.")
@pytest.mark.parametrize("quantity", ["kfac", "kflr", "kfac_emp", "kfra"])
def test_layers_without_factors_are_listed_with_the_argument_to_pass(quantity: str) -> None:
    model = _mixed()
    with pytest.raises(ConfigError, match=r"\(Embedding\).*\(LayerNorm\).*\(Conv1d\)") as error:
        collect(model, "variance", quantity, loss_fn=CE)
    assert "layers=['rnn', 'conv', 'out']." in str(error.value)
    if quantity != "kfra":   # which takes no recurrent layers
        with collect(model, quantity, loss_fn=CE, layers=["rnn", "conv", "out"]) as q:
            CE(model(torch.randint(5, (4, 6))), torch.arange(4) % 3).backward()
        assert getattr(q["out.weight"], quantity).B_OO.shape == (3, 3)
    with pytest.raises(ConfigError, match="such layer"):
        collect(nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4)), quantity, loss_fn=CE)


@pytest.mark.entry("B11", "a model has a layer whose curvature is not known, or you collect the "
                   "curvature of samples with a BatchNorm in training mode", "error",
                   "`ConfigError` names the argument that skips the layer: `layers=` of "
                   "`collect`, `skip=` of preconditioners. For BatchNorm it names the fix: "
                   "`eval()`, or Kronecker factors alone.")
def test_an_unknown_layer_is_refused_with_the_argument_that_leaves_it_out() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="layers=") as error:
        collect(model, "variance", loss_fn=CE)
    assert "skip" not in str(error.value)
    x, y = torch.randn(4, 5), torch.arange(4) % 3
    preconditioner = KFAC(model)
    with pytest.raises(ConfigError, match="skip=") as error:
        preconditioner.evaluate(lambda: CE(model(x), y))
    assert "layers=" not in str(error.value)
    for skip in (("0",), ("Scaled",)):
        skipping = KFAC(model, skip=skip)
        skipping.evaluate(lambda: CE(model(x), y))
        skipping.step()
