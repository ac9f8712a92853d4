"""`optimizer._target_`: any torch optimizer takes the steps that it takes in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ngsgd
from ngsgd.config import OptimizerConfig, RunConfig, TaskConfig
from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.launcher.config import compose
from ngsgd.optim import Optimizer
from ngsgd.pipeline.services import Services
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.build import make_preconditioner
from ngsgd.preconditioners.methods.torch_optimizers import CustomOptimizer, require_optimizer
from ngsgd.runs import trust
from ngsgd.runs.config_file import read_config, to_yaml
from ngsgd.runs.run_folder import RunFolder, with_digest
from ngsgd.training.worker import make_optimizer
from tests.launcher.config.test_compose import problems_of
from tests.tasks import blobs

LRS = (0.01, 0.01, 0.02, 0.005, 0.005)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adagrad": {"lr_decay": 0.1}, "Adam": {"amsgrad": True}, "AdamW": {"weight_decay": 0.1}, "Adamax": {},
    "ASGD": {}, "NAdam": {"foreach": True}, "RAdam": {}, "RMSprop": {"momentum": 0.5, "centered": True}, "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "Adafactor": {}}


class Counting(torch.optim.Optimizer):
    """Has numbers in its state and in its param groups."""

    def __init__(self, params: Any, lr: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "warm": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            group["warm"] = group["k"] < 3
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p.sub_(p.grad * group["lr"] / (state["n"] + group["k"]) * (2.0 if group["warm"] else 1.0))


class Listing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["history"] = [1, 2]


def made(config: OptimizerConfig) -> tuple[nn.Module, Callable[[int], None], Preconditioner]:
    """A model, a function that takes the step of a minibatch, and its preconditioner."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    preconditioner = make_preconditioner(model, config, 0)

    def step(index: int) -> None:
        optimizer: Optimizer = make_optimizer(model, config, LRS[index], 1.0)
        optimizer.zero_grad()
        preconditioner.evaluate_and_step(lambda: loss(model, index), LRS[index])
        optimizer.step()
    return model, step, preconditioner


def loss(model: nn.Module, index: int) -> Tensor:
    x, y = torch.randn(2, 8, 5, generator=torch.Generator().manual_seed(index))
    return nn.functional.cross_entropy(model(x), y[:, :3].argmax(1), reduction="sum")


def config_of(target: str, args: dict[str, Any] | None = None) -> OptimizerConfig:
    return OptimizerConfig(_target_=target, args=args or None, max_change=0.0, max_param_change=0.0)


def values(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.entry("H27", "`optimizer._target_=torch.optim.RMSprop '+optimizer.args.alpha=0.9'`", "works",
                   "any class or function of an installed package or of `optimizer.search_path` that returns a "
                   "torch.optim.Optimizer. Each step is torch's, from the gradient of the summed loss, with the learning rate of "
                   "the job. Then come the limits `max_change` and `max_param_change` (0: none). With "
                   "`optimizer.curvature_state=keep` its state goes from job to job. It is imported by the same permission as "
                   "`model._target_`. LBFGS and SparseAdam are one error")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_torch(name: str) -> None:
    model, step, _ = made(config_of(f"torch.optim.{name}", OPTIMIZERS[name]))
    peer, _, _ = made(config_of(f"torch.optim.{name}"))
    start = values(peer).clone()
    optimizer = getattr(torch.optim, name)(peer.parameters(), lr=LRS[0], **OPTIMIZERS[name])
    for index, lr in enumerate(LRS):
        step(index)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss(peer, index).backward()
        optimizer.step()
    # the update is divided by lr and multiplied by it
    torch.testing.assert_close(values(model), values(peer), rtol=1e-5, atol=1e-6)
    assert float((values(peer) - start).abs().max()) > 1e-4


@pytest.mark.entry("H27")
@pytest.mark.parametrize(("target", "args"), [
    *((f"torch.optim.{name}", args) for name, args in OPTIMIZERS.items()), (f"{__name__}:Counting", {})])
def test_a_saved_state_continues_bitwise(target: str, args: dict[str, Any]) -> None:
    model, step, _ = made(config_of(target, args))
    again, other_step, preconditioner = made(config_of(target, args))
    for index in range(3):
        step(index)
    first, halfway, saved = made(config_of(target, args))
    for index in range(3):
        halfway(index)
    state = saved.state_dict()
    again.load_state_dict(first.state_dict())
    preconditioner.load_state_dict(state)
    for index in (3, 4):
        step(index)
        other_step(index)
    assert torch.equal(values(model), values(again))
    fresh, fresh_step, _ = made(config_of(target, args))
    fresh.load_state_dict(first.state_dict())
    for index in (3, 4):
        fresh_step(index)
    # so the state mattered
    assert not torch.equal(values(model), values(fresh)) or (target.endswith(("SGD", "ASGD")) and not args)
    with pytest.raises(OptimizerStateError):
        preconditioner.load_state_dict({name: entry for name, entry in state.items() if name != "0.weight"})


@pytest.mark.entry("H27")
@pytest.mark.parametrize(("target", "args"), [
    ("torch.optim.LBFGS", {}), ("torch.optim.SparseAdam", {}), ("torch.optim.Adam", {"nothing": 1}), ("torch.optim.Nothing", {}),
    ("no_package.Nothing", {}), ("torch.nn:Linear", {}), ("builtins:dict", {}), (f"{__name__}:Listing", {}), ("Adam", {})])
def test_what_cannot_step_is_one_error_before_data_are_prepared(target: str, args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        require_optimizer(config_of(target, args))
    assert "optimizer._target_" in str(caught.value)


def test_a_gradient_that_is_not_finite_changes_no_state() -> None:
    model, step, preconditioner = made(config_of("torch.optim.Adam"))
    step(0)
    state = preconditioner.state_dict()
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    with pytest.warns(UserWarning, match="excluded"):
        preconditioner.step(0.1)
    assert torch.equal(preconditioner.state_dict()["0.weight"]["statistics.exp_avg"], state["0.weight"]["statistics.exp_avg"])
    assert preconditioner.num_skipped == 1 and isinstance(preconditioner, CustomOptimizer)


@pytest.mark.entry("H27")
def test_settings_of_another_optimizer_are_refused() -> None:
    target = "optimizer._target_=torch.optim.RMSprop"
    assert compose.compose([target, "+optimizer.args.alpha=0.9"]).optimizer.args == {"alpha": 0.9}
    assert problems_of(target, "optimizer=adam")
    for line in ("optimizer.rank_in=40", "optimizer.damping=0.1", "optimizer.curvature_state=average"):
        assert len(problems_of(target, line)) == 1
    assert len(problems_of("optimizer.args={alpha: 0.9}")) == 1
    assert compose.compose([target, "cluster.ranks_per_worker=2"]).optimizer.label == "RMSprop"


@pytest.mark.entry("H27")
@pytest.mark.parametrize("curvature_state", ["reset", "keep"])
def test_a_run_trains_with_it_and_its_name_has_it(tmp_path: Path, curvature_state: str) -> None:
    settings: dict[str, Any] = {"num_epochs": 2, "batch_size": 16, "cluster": "in_process", "output_dir": tmp_path, "lr": 0.003}
    optimizer = {"_target_": "torch.optim.RMSprop", "args": {"alpha": 0.9}, "curvature_state": curvature_state}
    run = ngsgd.train(blobs.make_task, services=Services(), optimizer=optimizer, **settings)
    assert "RMSprop" in run.folder.path.name and run.metrics["valid/accuracy"] > 0.7
    assert read_config(run.folder.config).optimizer.args == {"alpha": 0.9}
    with pytest.raises(ConfigError):
        ngsgd.train(blobs.make_task, services=Services(), optimizer={"_target_": "torch.optim.LBFGS"}, **settings)
    assert len(list(tmp_path.glob("*/config.yaml"))) == 1


@pytest.mark.entry("H27")
def test_it_is_imported_by_permission_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "allowed_modules", set())
    (tmp_path / "theirs.py").write_text("from pathlib import Path\nPath(__file__).with_name('EXECUTED').touch()\n")
    config = replace(RunConfig(), optimizer=OptimizerConfig(_target_="theirs:Made", search_path=str(tmp_path)))
    for received in (config, replace(config, task=TaskConfig(_target_="theirs:task", search_path=str(tmp_path)))):
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir(exist_ok=True)
        folder.config.write_text(with_digest(to_yaml(received)))
        (folder.path / "run_id").write_text("0123")
        with pytest.raises(ConfigError, match="theirs:"):
            trust.require_run(folder, received)
    # its scores need no optimizer
    trust.require_run(folder, config, trains=False)
    trust.remember_or_warn(received, "0123", pytest.fail)
    trust.require_run(folder, received)
    assert not (tmp_path / "EXECUTED").exists()
