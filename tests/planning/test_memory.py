"""Predicted memory against tensors that torch counts (MemTracker): state exactly, peak within the
stated tolerance."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from ngsgd import NGSGD
from ngsgd.config import OptimizerConfig, RunConfig, ScheduleConfig
from ngsgd.errors import ConfigError
from ngsgd.ops.kernels import native
from ngsgd.optim import SGD
from ngsgd.planning.memory import optimizer_state_bytes, predict, predict_run
from ngsgd.tasks import DatasetTask
from tests.tasks.blobs import dataset, make_model, mean_loss

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 20)
        ),
        (30,),
    ),
    "tdnn": (
        lambda: nn.Sequential(
            nn.Conv1d(8, 32, 3),
            nn.ReLU(),
            nn.Conv1d(32, 32, 3, dilation=3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 8, 20),
        ),
        (8, 16),
    ),
    "images": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 20)
        ),
        (3, 8, 8),
    ),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "NGSGD": lambda model: NGSGD(model, 1e-3, loss_reduction="mean"),
    "NGSGD with momentum": lambda model: NGSGD(model, 1e-3, loss_reduction="mean", momentum=0.9),
    "SGD": lambda model: SGD(model, 1e-3, fast_gemm=False),
    "SGD with momentum": lambda model: SGD(model, 1e-3, momentum=0.9, fast_gemm=False),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), 1e-3, foreach=True),
}
# of torch's count: temporaries of NG-SGD depend on the layer more than the model predicts
TOLERANCE = {"NGSGD": 0.35, "NGSGD with momentum": 0.35}


def loss(model: nn.Module, data: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data[0]), data[1])


def case(net: str, size: int = 32) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    build, shape = NETS[net]
    return build(), (torch.randn(size, *shape), torch.randint(20, (size,)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> None:
    optimizer.zero_grad()
    loss(model, data).backward()
    optimizer.step()


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Without counters, which are scalars."""
    found = [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.ndim
    ]
    if isinstance(optimizer, NGSGD):
        found += [
            estimate.state.W_RD
            for _, estimate in optimizer.preconditioners()
            if estimate.state is not None
        ]
    return found


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_exact_and_the_peak_within_its_tolerance(net: str, name: str) -> None:
    model, data = case(net)
    optimizer = OPTIMIZERS[name](model)
    predicted = predict(model, optimizer, loss, data)
    # compiled kernels allocate what torch cannot count
    with native.in_torch_operations(), torch.backends.mkldnn.flags(enabled=False):
        for _ in range(3):
            step(model, optimizer, data)
        optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(model, *data, *state_tensors(optimizer))
        with tracker:
            step(model, optimizer, data)
    counted = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert predicted.state == sum(x.numel() * x.element_size() for x in state_tensors(optimizer))
    assert predicted.peak == pytest.approx(counted, rel=TOLERANCE.get(name, 0.25))
    assert (
        predicted.parameters
        == predicted.gradients
        == sum(4 * p.numel() for p in model.parameters())
    )


def test_parameters_without_natural_gradient_have_adamws_moments() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
    optimizer = NGSGD(model, 1e-3, fallback="adamw")
    data = torch.randint(10, (6, 3)), torch.randint(2, (6,))
    step(model, optimizer, data)
    assert optimizer_state_bytes(optimizer) == sum(4 * x.numel() for x in state_tensors(optimizer))


def test_activations_grow_with_the_minibatch_and_the_model_is_left_alone() -> None:
    model, _ = case("mlp", 8)
    before = copy.deepcopy(model.state_dict())
    small, large = (
        predict(model, OPTIMIZERS["SGD"](model), loss, case("mlp", size)[1]) for size in (8, 16)
    )
    # but for a scalar of the loss
    assert large.activations == pytest.approx(2 * small.activations, abs=16)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert next(model.parameters()).device.type == "cpu"


def test_on_a_device_rows_of_ng_sgd_wait_until_the_end_of_the_backward_pass() -> None:
    model, data = case("mlp", 512)
    here = predict(model, OPTIMIZERS["NGSGD"](model), loss, data)
    there = predict(model.to("meta"), OPTIMIZERS["NGSGD"](model), loss, data)
    assert there.state == here.state
    assert there.peak == here.peak + here.activations


def test_an_unpredictable_setting_is_rejected_with_a_way_to_measure_it() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * float(x.sum()))

    model = Reads(3, 2)
    with pytest.raises(ConfigError, match="max_memory_allocated"):
        predict(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss,
            (torch.randn(4, 3), torch.randint(2, (4,))),
        )
    with pytest.raises(ConfigError, match="max_memory_allocated"):
        optimizer_state_bytes(torch.optim.RMSprop(model.parameters()))


def config(**changes: Any) -> RunConfig:
    return RunConfig(
        **{"schedule": ScheduleConfig(minibatch_size=32), "optimizer": OptimizerConfig(), **changes}
    )


def test_a_run_is_predicted_from_its_task() -> None:
    task = DatasetTask(dataset(), make_model, mean_loss)
    own, larger = predict_run(config(), task), predict_run(config(), task, size=64)
    assert 0 < own.state == larger.state < own.peak < larger.peak
    with pytest.raises(ConfigError, match="kfac"):
        predict_run(config(optimizer=OptimizerConfig(kind="kfac")), task)
