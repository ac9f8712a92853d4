"""A step on two ranks of DistributedDataParallel is that of one process with the rows of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ngsgd import NGSGD, NaturalMuon
from ngsgd.errors import DivergenceError
from ngsgd.optim.layers import common
from ngsgd.optim.layers.attach import NATURAL_GRADIENT_CLASSES
from tests.optim.loops.test_ranks import on_two_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")]

NUM_CLASSES, DIM, SIZE, STEPS = 4, 12, 16, 14
# Both sum the same float64 numbers in another order; 14 steps multiply the rounding.
EQUAL = 1e-9
# NaturalMuon orthogonalizes in float32.
EQUAL_MUON = 1e-5


class Attention(nn.Module):
    """An attention layer whose input is B x DIM."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x.unflatten(1, (4, 3))
        z: Tensor = self.attention(y, y, y)[0]
        return z.flatten(1)


def _frozen_bias(layer: nn.Module) -> nn.Module:
    layer.get_parameter("bias").requires_grad_(False)
    return layer


# by the class whose natural gradient they need
LAYERS: dict[type[nn.Module], Callable[[], nn.Module]] = {
    nn.Linear: lambda: nn.Linear(DIM, DIM, bias=False),
    nn.Conv1d: lambda: nn.Sequential(nn.Unflatten(1, (3, 4)), nn.Conv1d(3, 4, 2), nn.Flatten()),
    nn.Conv2d: lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4)), nn.Conv2d(1, 6, 2), nn.Flatten()),
    nn.Conv3d: lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 2, 3)), nn.Conv3d(1, 6, 2), nn.Flatten()),
    nn.LayerNorm: lambda: nn.LayerNorm(DIM), nn.RMSNorm: lambda: nn.RMSNorm(DIM), nn.GroupNorm: lambda: nn.GroupNorm(3, DIM),
    # with statistics of no minibatch, which would be that of a rank
    nn.BatchNorm1d: lambda: nn.BatchNorm1d(DIM).eval(),
    nn.BatchNorm2d: lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.BatchNorm2d(3).eval(), nn.Flatten()),
    nn.BatchNorm3d: lambda: nn.Sequential(nn.Unflatten(1, (3, 2, 2, 1)), nn.BatchNorm3d(3).eval(), nn.Flatten()),
    nn.MultiheadAttention: Attention,
    nn.modules.linear.NonDynamicallyQuantizableLinear: lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(DIM, DIM),
}
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "frozen bias": lambda: _frozen_bias(nn.Linear(DIM, DIM)),
    "frozen bias of filters": lambda: nn.Sequential(nn.Unflatten(1, (1, 3, 4)), _frozen_bias(nn.Conv2d(1, 6, 2)), nn.Flatten()),
    "groups": lambda: nn.Sequential(nn.Unflatten(1, (4, 3)), nn.Conv1d(4, 4, 2, groups=2), nn.Flatten()),
    "frozen offset": lambda: _frozen_bias(nn.LayerNorm(DIM))}
OPTIMIZERS: dict[str, Callable[[nn.Module, int], NGSGD]] = {
    "sum": lambda model, num_ranks: NGSGD(model, 0.01 * num_ranks, loss_reduction="sum"),
    "mean": lambda model, num_ranks: NGSGD(model, 0.01 * num_ranks, loss_reduction="mean", momentum=0.5),
    "max_change_per_sample": lambda model, num_ranks: NGSGD(model, 0.01 * num_ranks, loss_reduction="mean",
                                                            max_change_per_sample=3e-4),
    "many rows": lambda model, num_ranks: NGSGD(model, 0.01 * num_ranks, loss_reduction="mean"),
    "polar": lambda model, num_ranks: NGSGD(model, 0.01 * num_ranks, loss_reduction="mean", update="polar"),
    "ignore_zero_rows": lambda model, num_ranks: NGSGD(model, 0.01 * num_ranks, loss_reduction="sum", ignore_zero_rows=True),
    "NaturalMuon": lambda model, num_ranks: NaturalMuon(model, 0.01)}


def network(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    first = make()
    num_inputs = first(torch.zeros(2, DIM)).shape[1]
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(num_inputs, 8), nn.Tanh(), nn.Linear(8, NUM_CLASSES)).double()
    for layer in model.modules():
        # the running statistics of a batch normalization stay as they are
        layer.training = not isinstance(layer, nn.modules.batchnorm._BatchNorm)
    return model


def minibatches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        y = torch.randint(NUM_CLASSES, (SIZE,), generator=generator)
        yield torch.randn(SIZE, DIM, generator=generator, dtype=torch.float64) + y[:, None], y


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def trained(model: nn.Module, wrapped: nn.Module, name: str, num_ranks: int,
            rows: Callable[[Tensor], list[Tensor]]) -> Tensor:
    """Train on some rows of each minibatch, a backward pass for each part."""
    monkeypatch = pytest.MonkeyPatch()
    if name == "many rows":
        # all minibatches precondition the plain gradient
        monkeypatch.setattr(common, "_MIN_PRODUCTS", 0)
        monkeypatch.setattr(common, "_MIN_SAVING", 0.0)
    optimizer = OPTIMIZERS[name](model, num_ranks)
    reduction = "sum" if name in ("sum", "ignore_zero_rows") else "mean"
    for x, y in minibatches():
        optimizer.zero_grad()
        for part in rows(torch.arange(SIZE)):
            losses = nn.functional.cross_entropy(wrapped(x[part]), y[part], reduction="none")
            if name == "ignore_zero_rows":
                losses = losses * (x[part, 0] > 0.0)
            (losses.mean() if reduction == "mean" else losses.sum()).backward()
        optimizer.step()
    monkeypatch.undo()
    return parameters(model)


def _cases() -> Iterator[tuple[str, Callable[[], nn.Module], str]]:
    for kind, make in LAYERS.items():
        yield kind.__name__, make, "mean"
    for name, make in OTHERS.items():
        yield name, make, "sum"
    for name in OPTIMIZERS:
        yield "Conv1d", LAYERS[nn.Conv1d], name
        yield "Conv2d", LAYERS[nn.Conv2d], name
        yield "LayerNorm", LAYERS[nn.LayerNorm], name


def _every_layer(rank: int) -> None:
    assert LAYERS.keys() == NATURAL_GRADIENT_CLASSES.keys()
    wrong = []
    for layer, make, name in _cases():
        model = network(make)
        start = parameters(model)
        ours = trained(model, DistributedDataParallel(model), name, 2, lambda rows: [rows[rank::2]])
        both = [torch.empty_like(ours) for _ in range(2)]
        dist.all_gather(both, ours)
        alone = network(make)
        theirs = trained(alone, alone, name, 1, lambda rows: [rows])
        error = float((ours - theirs).norm() / (theirs - start).norm())
        limit = EQUAL_MUON if name == "NaturalMuon" else EQUAL
        if not (torch.equal(*both) and error < limit and float((theirs - start).norm()) > 0.01):
            wrong.append((layer, name, torch.equal(*both), error))
    assert not wrong, wrong


@pytest.mark.entry("L4", "you train with DistributedDataParallel", "works",
                   "a step is that of one process with the rows of all ranks, up to rounding, with NGSGD made before or after the "
                   "wrap; multiply `lr` by the number of ranks, since DDP averages. Until `step`, `p.grad` is the plain mean. "
                   "Replicas stay bitwise identical, and a checkpoint of any rank is that of all. The uses of a layer in a "
                   "step, also in several passes, count as one minibatch. Layers that share a weight have estimates of each rank")
def test_two_ranks_equal_one_process_in_every_layer(tmp_path: Path) -> None:
    on_two_ranks(_every_layer, tmp_path)


def _unequal_rows(rank: int) -> None:
    """Ranks with 4 and 12 rows, then two backward passes for one step."""
    for split in (lambda rows: [rows[4:] if rank else rows[:4]], lambda rows: [rows[rank::4], rows[rank + 2::4]]):
        model, alone = network(LAYERS[nn.Linear]), network(LAYERS[nn.Linear])
        ours = trained(model, DistributedDataParallel(model), "sum", 2, split)
        theirs = trained(alone, alone, "sum", 1, lambda rows: [rows])
        assert float((ours - theirs).norm()) < EQUAL < 0.01 < float((theirs - parameters(network(LAYERS[nn.Linear]))).norm())


@pytest.mark.entry("L4")
def test_unequal_ranks_and_accumulated_passes_equal_one_process(tmp_path: Path) -> None:
    on_two_ranks(_unequal_rows, tmp_path)


class Branches(nn.Module):
    """A network of which a rank may use one branch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(DIM, NUM_CLASSES) for _ in range(2))

    def forward(self, x: Tensor, first: int, last: int) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches[first:last]])


def _branches(rank: int) -> None:
    models = []
    for num_ranks in (2, 1):
        torch.manual_seed(0)
        model = Branches().double()
        wrapped = DistributedDataParallel(model, find_unused_parameters=True) if num_ranks == 2 else model
        optimizer = NGSGD(model, 0.01 * num_ranks, loss_reduction="sum")
        for x, y in minibatches():
            optimizer.zero_grad()
            chosen = (rank, rank + 1) if num_ranks == 2 else (0, 2)
            nn.functional.cross_entropy(wrapped(x, *chosen), y.repeat(chosen[1] - chosen[0]), reduction="sum").backward()
            optimizer.step()
        models.append(parameters(model))
    torch.manual_seed(0)
    assert float((models[0] - models[1]).norm()) < EQUAL < 0.01 < float((models[1] - parameters(Branches().double())).norm())


@pytest.mark.entry("L4")
def test_a_layer_that_one_rank_uses_alone_equals_one_process(tmp_path: Path) -> None:
    on_two_ranks(_branches, tmp_path)


def _rest_of_a_run(rank: int) -> None:
    model = network(LAYERS[nn.Conv2d])
    wrapped = DistributedDataParallel(model)
    trained(model, wrapped, "mean", 2, lambda rows: [rows[rank::2]])
    optimizer = NGSGD(model, 0.02, loss_reduction="mean", on_nonfinite="raise")
    for x, y in minibatches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x[rank::2]), y[rank::2]).backward()
        optimizer.step()
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, optimizer.state_dict()["natural_gradient"])
    for name, state in of_ranks[0].items():
        assert state.keys() == of_ranks[1][name].keys() and state["t"] == STEPS
        assert all(torch.equal(state[key], of_ranks[1][name][key]) for key in ("W", "d", "rho"))
    before = parameters(model)
    optimizer.zero_grad()
    (wrapped(x[rank::2]) * (torch.inf if rank else 1.0)).sum().backward()
    with pytest.raises(DivergenceError, match="not finite"):
        optimizer.step()
    assert torch.equal(parameters(model), before)


@pytest.mark.entry("L4")
def test_estimates_of_ranks_are_equal_and_all_ranks_refuse_rows_that_are_not_finite(tmp_path: Path) -> None:
    on_two_ranks(_rest_of_a_run, tmp_path)


class Checkpointed(nn.Module):
    """Activations of the first layers are computed again in the backward pass."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.model[:3], x, use_reentrant=False)
        y: Tensor = self.model[3:](hidden)
        return y


# a loop and the largest difference: rounding; under autocast of the plain gradient to bfloat16
LOOPS = {"plain": 1e-5, "checkpoint": 1e-5, "gradient_as_bucket_view": 1e-5, "static_graph": 1e-5, "GradScaler": 1e-5,
         "set_to_none": 1e-5, "cosines": 1e-5, "compile": 1e-5, "autocast": 0.3}


def _looped(name: str, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Return the parameters before and after a loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES))
    start = parameters(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if name == "GradScaler" else None
    optimizer = NGSGD(model, 0.01 * num_ranks, loss_reduction="mean", grad_scaler=scaler, cosine_period=2 * (name == "cosines"))
    wrapped: Any = Checkpointed(model) if name == "checkpoint" else model
    if num_ranks == 2:
        wrapped = DistributedDataParallel(wrapped, gradient_as_bucket_view=name == "gradient_as_bucket_view",
                                          static_graph=name == "static_graph")
    wrapped = torch.compile(wrapped, backend="aot_eager") if name == "compile" else wrapped
    for x, y in minibatches():
        optimizer.zero_grad(set_to_none=name != "set_to_none")
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            loss = nn.functional.cross_entropy(wrapped(x[rank::num_ranks].float()).float(), y[rank::num_ranks])
        if scaler is None:
            loss.backward()
            optimizer.step(num_samples=len(y) // num_ranks)
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return start, parameters(model)


def _every_loop(rank: int) -> None:
    wrong = []
    for name, limit in LOOPS.items():
        start, ours = _looped(name, rank, 2)
        _, theirs = _looped(name, 0, 1)
        moved = float((theirs - start).norm())
        error = float((ours - theirs).norm()) / moved
        if not (error < limit and moved > 0.01):
            wrong.append((name, error, moved))
    assert not wrong, wrong


@pytest.mark.entry("L4")
def test_two_ranks_equal_one_process_in_every_loop(tmp_path: Path) -> None:
    on_two_ranks(_every_loop, tmp_path)
