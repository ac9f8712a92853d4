"""Side effects of collecting: hooks, passes, precision, and errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ngsgd.curvature import Capture, collect
from ngsgd.errors import ConfigError
from tests.curvature.problems import N, problem
from tests.curvature.support import close
from tests.gloo import gloo_group
from tests.wired import Wired

CE = nn.CrossEntropyLoss()
ALL = ("batch_grad", "batch_l2", "variance", "diag_ggn", "batch_diag_ggn", "sqrt_ggn", "kflr", "diag_h", "kfac_emp")


def _net() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, torch.randn(8, 5).double(), torch.arange(8) % 3


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_is_left_on_the_model_after_the_context_or_an_error() -> None:
    model, x, y = _net()
    before = [dict(vars(m)) for m in model.modules()]
    with collect(model, *ALL, loss_fn=CE):
        assert _hooks(model)
        CE(model(x), y).backward()
    assert not _hooks(model) and not CE._forward_hooks
    assert [set(vars(m)) for m in model.modules()] == [set(old) for old in before]
    assert all(set(vars(p)) == set() for p in model.parameters())
    with pytest.raises(IndexError), collect(model, *ALL, loss_fn=CE):
        CE(model(x), y + 5).backward()
    assert not _hooks(model) and not CE._forward_hooks


def test_gradients_are_bitwise_those_of_a_plain_backward_pass() -> None:
    model, x, y = _net()
    CE(model(x), y).backward()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    with collect(model, *ALL, loss_fn=CE):
        CE(model(x), y).backward()
    for p, gradient in zip(model.parameters(), plain, strict=True):
        assert p.grad is not None and gradient is not None and torch.equal(p.grad, gradient)


def test_the_graph_of_a_pass_is_freed() -> None:
    model, x, y = _net()
    gc.collect()
    gc.disable()
    try:
        with collect(model, *ALL, loss_fn=CE) as q:
            output = model(x)
            CE(output, y).backward()
        seen = weakref.ref(output)
        del output
        assert seen() is None
        assert q["0.weight"].variance.shape == (6, 5)
    finally:
        gc.enable()


@pytest.mark.parametrize("loss_fn", [CE, nn.functional.cross_entropy])
def test_results_go_with_their_last_user(loss_fn: Callable[..., Tensor]) -> None:
    model, x, y = _net()
    gc.collect()
    gc.disable()
    try:
        with collect(model, *ALL, "kfac", loss_fn=loss_fn) as q:
            loss_fn(model(x), y).backward()
        seen = [weakref.ref(q["0.weight"].kfac.A_II), weakref.ref(q["2.weight"].kflr.B_OO)]
        assert all(reference() is not None for reference in seen)
        del q
        assert all(reference() is None for reference in seen)
    finally:
        gc.enable()


def test_inputs_of_layers_go_when_they_have_been_used() -> None:
    model, x, y = _net()
    _, activation, _ = model.children()
    seen: list[weakref.ref[torch.UntypedStorage]] = []
    alive: list[bool] = []
    with collect(model, "kfac_emp", "variance", loss_fn=CE):
        activation.register_forward_hook(lambda *given: seen.append(weakref.ref(given[2].untyped_storage())))
        output = model(x)
        model.get_parameter("0.weight").register_hook(lambda _: alive.append(seen[0]() is not None))
        CE(output, y).backward()
    assert alive == [False]


def test_accumulated_minibatches_count_as_one() -> None:
    model, x, y = _net()
    with collect(model, *ALL, loss_fn=CE) as whole:
        CE(model(x), y).backward()
    with collect(model, *ALL, loss_fn=CE) as parts:
        for half in (slice(0, 4), slice(4, 8)):
            (CE(model(x[half]), y[half]) / 2).backward()
    for name in whole:
        for quantity in ("batch_grad", "batch_l2", "variance", "diag_ggn", "batch_diag_ggn", "sqrt_ggn", "diag_h"):
            close(getattr(parts[name], quantity), getattr(whole[name], quantity))
        for quantity in ("kflr", "kfac_emp"):
            close(getattr(parts[name], quantity).B_OO, getattr(whole[name], quantity).B_OO)
    close(parts["0.weight"].kflr.A_II, whole["0.weight"].kflr.A_II)


def test_losses_as_functions_and_frame_weights() -> None:
    model, x, y = _net()
    weight_N = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 0.0, 1.0, 3.0]).double()
    with collect(model, "diag_ggn", "batch_grad", loss_fn=nn.functional.cross_entropy, reduction="sum") as q:
        (nn.functional.cross_entropy(model(x), y, reduction="none") * weight_N).sum().backward()
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    with collect(model, "batch_diag_ggn", "batch_grad", loss_fn=loss_fn) as plain:
        loss_fn(model(x), y).backward()
    close(q["0.weight"].diag_ggn, (plain["0.weight"].batch_diag_ggn * weight_N[:, None, None]).sum(dim=0))
    close(q["0.weight"].batch_grad, plain["0.weight"].batch_grad * weight_N[:, None, None])


def test_masked_frames_have_no_curvature() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x_NTD, y_NT = torch.randn(2, 7, 5).double(), torch.arange(14).view(2, 7) % 3
    y_NT[0, 4:] = -100
    loss_fn = nn.CrossEntropyLoss()
    with collect(model, "diag_ggn", loss_fn=loss_fn) as padded:
        loss_fn(model(x_NTD).transpose(1, 2), y_NT).backward()
    model.zero_grad()
    kept = y_NT.flatten() != -100
    # for frames that do not see each other, frames are samples too
    with collect(model, "diag_ggn", loss_fn=loss_fn) as alone:
        loss_fn(model(x_NTD.flatten(0, 1)[kept]), y_NT.flatten()[kept]).backward()
    x_changed = x_NTD.clone()
    x_changed[0, 4:] += 1.0
    with collect(model, "diag_ggn", loss_fn=loss_fn) as changed:
        loss_fn(model(x_changed).transpose(1, 2), y_NT).backward()
    close(changed["0.weight"].diag_ggn, padded["0.weight"].diag_ggn)
    assert alone["0.weight"].diag_ggn.sum() > 0


def test_chosen_samples_alone() -> None:
    model, x, y = _net()
    with collect(model, "batch_grad", "sqrt_ggn", loss_fn=CE) as every:
        CE(model(x), y).backward()
    with collect(model, "batch_grad", "sqrt_ggn", loss_fn=CE, samples=[5, 2]) as some:
        CE(model(x), y).backward()
    close(some["0.weight"].batch_grad, every["0.weight"].batch_grad[[5, 2]])
    close(some["0.weight"].sqrt_ggn, every["0.weight"].sqrt_ggn[:, [5, 2]])


class Scaled(nn.Module):
    """A direct parameter in addition to a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * self.scale)
        return y


def test_chosen_layers_alone_also_with_unknown_ones() -> None:
    model = Scaled()
    with pytest.raises(ConfigError, match="Scaled"):
        collect(model, "variance", loss_fn=CE)
    with collect(model, "variance", loss_fn=CE, layers=["inner"]) as q:
        CE(model(torch.randn(4, 5)), torch.arange(4) % 3).backward()
    assert set(q) == {"inner.weight", "inner.bias"}


def test_both_normalizations() -> None:
    model, x, y = _net()
    with collect(model, "variance", "second_moment", loss_fn=CE) as paper:
        CE(model(x), y).backward()
    with collect(model, "variance", "second_moment", loss_fn=CE, normalization="backpack") as backpack:
        CE(model(x), y).backward()
    close(paper["0.weight"].variance, backpack["0.weight"].variance * 64)
    close(paper["0.weight"].second_moment, backpack["0.weight"].second_moment * 64)


def test_autocast_gives_float32_close_to_that_without() -> None:
    model, x, y = _net()
    model, x = model.float(), x.float()
    with collect(model, "variance", "diag_ggn", "kflr", loss_fn=CE) as exact:
        CE(model(x), y).backward()
    with collect(model, "variance", "diag_ggn", "kflr", loss_fn=CE) as half, torch.autocast("cpu", torch.bfloat16):
        CE(model(x), y).backward()
    for name in exact:
        for quantity in ("variance", "diag_ggn"):
            found, expected = getattr(half[name], quantity), getattr(exact[name], quantity)
            assert found.dtype == torch.float32
            # bfloat16 has 8 bits: a percent for a square, of the largest
            torch.testing.assert_close(found, expected, rtol=0.1, atol=0.05 * float(expected.max()))


@pytest.mark.parametrize("inside", [True, False])
def test_a_replica_of_distributed_data_parallel(tmp_path: Path, inside: bool) -> None:
    """Of the process's own samples, by the inner module's names or the wrapper's."""
    model, x, y = _net()
    with collect(model, "variance", "diag_ggn", "kflr", loss_fn=CE) as plain:
        CE(model(x), y).backward()
    model.zero_grad()
    with gloo_group(tmp_path):
        replica = nn.parallel.DistributedDataParallel(model)
        with collect(model if inside else replica, "variance", "diag_ggn", "kflr", loss_fn=CE) as q:
            CE(replica(x), y).backward()
        del replica
    for name in plain:
        of = q[name if inside else f"module.{name}"]
        close(of.variance, plain[name].variance)
        close(of.diag_ggn, plain[name].diag_ggn)
        close(of.kflr.B_OO, plain[name].kflr.B_OO)


def test_a_model_that_transforms_functions_between_its_layers() -> None:
    def gradient(model: Any, x: Tensor) -> Tensor:
        """Of a function of the activations, for each sample."""
        slope = torch.func.grad(lambda z: (z.square().sum() + z.sum()) / 2)
        slope_NC: Tensor = torch.func.vmap(slope)(model.inner(x))
        return slope_NC
    model, x, y = _net()
    found = []
    for run in (gradient, lambda m, x: m.inner(x) + 0.5):
        whole = Wired(run, inner=model)
        with collect(whole, "variance", "diag_ggn", "kflr", loss_fn=CE) as q:
            CE(whole(x), y).backward()
        found.append(q)
    for name in found[1]:
        close(found[0][name].variance, found[1][name].variance)
        close(found[0][name].diag_ggn, found[1][name].diag_ggn)
        close(found[0][name].kflr.B_OO, found[1][name].kflr.B_OO)


def test_records_of_a_layer_used_twice() -> None:
    model, x, _ = problem("functional")
    with Capture(model) as capture:
        CE(model(x), torch.arange(N) % 3).backward()
    shared = [record for record in capture.records if record.layer == "shared"]
    assert [record.call.number for record in shared] == [1, 0]  # in the order of the backward pass
    gradient = torch.zeros(6, 6).double()
    for record in shared:
        gradient += record.derivative_rows()[0, :, 0].T @ record.input_rows()[:, 0]
    expected = model.get_parameter("shared.weight").grad
    assert expected is not None
    close(gradient, expected)


def test_values_read_between_passes_do_not_change() -> None:
    model, x, y = _net()
    with collect(model, "kflr", "kfac_emp", "variance", "diag_ggn", loss_fn=CE) as q:
        CE(model(x), y).backward()
        of = q["0.weight"]
        read = [*of.kflr, of.kfac_emp.B_OO, of.variance, of.diag_ggn]
        copies = [value.clone() for value in read]
        CE(model(2.0 * x), y).backward()
    with collect(model, "kflr", "kfac_emp", "variance", "diag_ggn", loss_fn=CE) as alone:
        CE(model(x), y).backward()
    of = alone["0.weight"]
    for value, copy, expected in zip(read, copies, [*of.kflr, of.kfac_emp.B_OO, of.variance, of.diag_ggn], strict=True):
        assert torch.equal(value, copy)
        close(value, expected)
    assert not torch.equal(q["0.weight"].kflr.B_OO, read[0])
