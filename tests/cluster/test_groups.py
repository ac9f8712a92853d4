"""Groups of ranks: the numbers of one process with all minibatches, and ranks that die."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ngsgd
from ngsgd.errors import ConfigError
from ngsgd.files import read_json_lines
from ngsgd.pipeline.services import Services
from ngsgd.tasks import DatasetTask
from tests.tiers import HANGS_S

# 8 shards of 64 examples: complete minibatches of 8 and 16
SETTINGS: dict[str, Any] = {"num_epochs": 3, "num_workers": 2, "lr": 0.02, "seed": 3}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_task() -> DatasetTask:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (544,), generator=generator)
    x = torch.randn(544, 6, generator=generator) + 1.5 * nn.functional.one_hot(y, 6)
    return DatasetTask(TensorDataset(x[:512], y[:512]), make_model, loss_fn, valid=TensorDataset(x[512:], y[512:]), shard_size=64)


def train(folder: Path, ranks: int, batch_size: int, **settings: Any) -> Any:
    return ngsgd.train(make_task, output_dir=folder, cluster={"kind": "local", "ranks_per_worker": ranks}, services=Services(),
                       **{**SETTINGS, "batch_size": batch_size, **settings})


def digest(run: Any) -> str:
    return hashlib.sha256((run.folder.final / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("optimizer", ["sgd", "ngsgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_two_ranks_equal_one_process_with_twice_the_minibatch(tmp_path: Path, optimizer: str) -> None:
    settings = {"optimizer": {"kind": optimizer, "max_change": 0.3, "weight_decay": 1e-3}}
    group = train(tmp_path / "group", 2, 8, **settings)
    alone = train(tmp_path / "alone", 1, 16, **settings)
    for name, value in alone.model.state_dict().items():
        # sums of two halves in float32, over 3 x 32 steps
        torch.testing.assert_close(group.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    assert group.metrics["valid/loss"] < 1.0
    jobs = [[(job["num_examples"], job["num_minibatches"]) for line in read_json_lines(run.folder.events)
             if line["event"] == "outer_iteration" for job in line["jobs"]] for run in (group, alone)]
    assert jobs[0] == jobs[1]


@pytest.mark.slow
def test_ngsgd_learns_in_groups_of_three_and_an_uneven_number_of_minibatches(tmp_path: Path) -> None:
    run = train(tmp_path, 3, 16, lr=0.016)
    assert run.metrics["valid/loss"] < 0.8
    again = train(tmp_path / "again", 3, 16, lr=0.016)
    assert digest(again) == digest(run)


def _kill_a_rank(number: int, found: list[int], folder: Path) -> None:
    """A process whose parent was started by a worker, in the first jobs of the run in `folder`."""
    while not any("outer_iteration" in events.read_text() for events in folder.rglob("events.jsonl")):
        time.sleep(0.01)
    me = psutil.Process()
    while not found:
        # one of them may end meanwhile
        with contextlib.suppress(psutil.Error, ValueError):
            ranks = [process for process in me.children(recursive=True) if _depth(process, me.pid) == 4]
            if len(ranks) == 2:
                os.kill(ranks[0].pid, number)
                found.append(ranks[0].pid)
        time.sleep(0.01)


def _depth(process: psutil.Process, ancestor: int) -> int:
    """1 for a child: fork server; 2: worker; 3: its fork server; 4: a rank."""
    return [parent.pid for parent in process.parents()].index(ancestor) + 1


LONG: dict[str, Any] = {"num_epochs": 15, "optimizer": "sgd", "failure": {"hang_timeout_s": 2.0, "max_attempts": 20}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nobody disturbed."""
    return digest(train(tmp_path_factory.mktemp("whole"), 2, 8, **LONG))


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
def test_a_rank_that_dies_costs_its_job_only(tmp_path: Path, whole: str, number: signal.Signals) -> None:
    found: list[int] = []
    thread = threading.Thread(target=_kill_a_rank, args=(number, found, tmp_path), daemon=True)
    thread.start()
    run = train(tmp_path / "killed", 2, 8, **LONG)
    thread.join(HANGS_S)
    assert found and not psutil.pid_exists(found[0])
    assert digest(run) == whole
    incidents = [line for line in read_json_lines(run.folder.events) if line["event"] == "incident"]
    assert incidents


def test_settings_unsupported_by_a_group_are_rejected_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="optimizer=kfac"):
        train(tmp_path, 2, 8, optimizer="kfac")
    with pytest.raises(ConfigError, match="backstitch_scale"):
        train(tmp_path, 2, 8, optimizer={"backstitch_scale": 0.3})
    assert list(tmp_path.iterdir()) == []
