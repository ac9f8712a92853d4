"""`cluster.precision`: the format of each computation, and places without effect."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.cluster.fingerprint import Fingerprint
from ngsgd.config import ClusterConfig, OptimizerConfig, RunConfig, check
from ngsgd.errors import ConfigError
from ngsgd.schedules import Shard
from ngsgd.sequence.objectives import SequenceObjective
from ngsgd.tasks.speech import FrameClassification, SpeechTaskSpec
from ngsgd.training.devices import Precision, autocast, set_precision
from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.worker import Worker
from tests import toy
from tests.tasks import test_sequences
from tests.training.test_worker import run

CPU = torch.device("cpu")


def config(precision: Precision, kind: Any = "ngsgd", **changes: Any) -> RunConfig:
    cluster = ClusterConfig(num_workers=2, threads_per_worker=1, precision=precision)
    return toy.config(cluster=cluster, optimizer=OptimizerConfig(kind, **changes))


@pytest.mark.parametrize("kind", ["ngsgd", "sgd", "kfac"])
def test_bf16_computes_in_bfloat16_and_keeps_the_rest_in_float32(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    formats: set[tuple[torch.dtype, torch.dtype]] = set()
    loss = FrameClassification.loss

    def watched(task: FrameClassification, model: torch.nn.Module, data: Any) -> Any:
        formats.add((model(data.x_ND).dtype, loss(task, model, data).total.dtype))
        return loss(task, model, data)
    plain = run(tmp_path, config("float32", kind), keep_fisher=True)
    monkeypatch.setattr(FrameClassification, "loss", watched)
    found = run(tmp_path, config("bf16", kind), keep_fisher=True)
    assert formats == {(torch.bfloat16, torch.float32)}
    assert found.sent.read().dtype == np.float32
    for state in (found.fisher or {}).values():
        assert all(value.dtype in (np.float32, np.float64) for value in state.values()
                   if isinstance(value, np.ndarray) and value.dtype.kind == "f")
    moved = np.linalg.norm(found.sent.read() - plain.sent.read())
    # bfloat16 has 8 bits: some percent of the length of the job's move, and not none
    assert 0.0 < moved < 0.3 * np.linalg.norm(plain.sent.read())
    assert abs(found.objf - plain.objf) < 0.05


@pytest.mark.slow
def test_a_run_in_bf16_learns_what_one_in_float32_does(tmp_path: Path) -> None:
    objf = {}
    for precision in ("float32", "bf16"):
        one = toy.Run(tmp_path / precision, config(precision))
        one.train()
        objf[precision] = one.recorder.records[-1].valid.objf
    assert objf["bf16"] != objf["float32"]
    assert abs(objf["bf16"] - objf["float32"]) < 0.02, objf


def test_the_context_of_float32_and_tf32_does_nothing() -> None:
    x = torch.randn(3, 3)
    for precision in ("float32", "tf32"):
        with autocast(precision, CPU):
            assert (x @ x).dtype == torch.float32


def test_tf32_on_cpus_is_refused_before_a_worker_starts() -> None:
    (problem,) = check(toy.config(cluster=ClusterConfig(device="cpu", precision="tf32")))
    assert "cluster.precision" in problem
    assert check(toy.config(cluster=ClusterConfig(device="cpu", precision="bf16"))) == []


@pytest.mark.parametrize(("changes", "words"), [
    ({"cluster": ClusterConfig(device="cpu", cuda_graphs="on")}, "cluster.device is cpu"),
    ({"cluster": ClusterConfig(ranks_per_worker=2, cuda_graphs="on")}, "ranks_per_worker"),
    ({"cluster": ClusterConfig(cuda_graphs="on"), "optimizer": OptimizerConfig(kind="kfac")}, "kfac")])
def test_cuda_graphs_without_effect_are_refused(changes: dict[str, Any], words: str) -> None:
    (problem,) = check(toy.config(**changes))
    assert "cluster.cuda_graphs" in problem
    assert words in problem
    assert check(toy.config(**{**changes, "cluster": replace(changes["cluster"], cuda_graphs="auto")})) == []


@pytest.mark.parametrize(("settings", "name"), [
    (toy.config(cluster=ClusterConfig(kind="in_process", num_workers=1, cuda_graphs="on")),
     "cluster.cuda_graphs"),
    (config("tf32"), "cluster.precision")])
def test_a_worker_that_finds_no_gpu_refuses_what_needs_one(
        settings: RunConfig, name: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match=re.escape(name)):
        run(tmp_path, settings)


class Gpu:
    """A pretended GPU; notes how torch is set for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
        self.matmul: list[str] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "pretended")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: capability >= (8, 0))
        monkeypatch.setattr(torch, "set_float32_matmul_precision", self.matmul.append)
        # restored at the end
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.mark.parametrize(("precision", "matmul", "allow_tf32"), [
    ("float32", "highest", False), ("tf32", "high", True), ("bf16", "highest", False)])
def test_a_gpu_computes_in_the_configured_precision(monkeypatch: pytest.MonkeyPatch, precision: Precision, matmul: str,
                                             allow_tf32: bool) -> None:
    gpu = Gpu(monkeypatch, (9, 0))
    set_precision(precision, torch.device("cuda", 0))
    assert gpu.matmul == [matmul]
    assert torch.backends.cudnn.allow_tf32 is allow_tf32


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_gpu_without_the_format_is_refused(monkeypatch: pytest.MonkeyPatch, precision: Precision) -> None:
    Gpu(monkeypatch, (7, 5))
    with pytest.raises(ConfigError):
        set_precision(precision, torch.device("cuda", 0))


def test_the_fingerprint_distinguishes_precisions() -> None:
    plain, half = (Fingerprint.of_this_process(1, CPU, precision) for precision in ("float32", "bf16"))
    (line,) = plain.differences(half)
    assert "bf16" in line
    # a run of a version that kept none
    assert replace(plain, precision="").differences(half) == []


def test_sums_over_paths_stay_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = test_sequences.run(tmp_path, "lfmmi", num_jobs=1)
    cluster = replace(training.config.cluster, precision="bf16")
    spec = SpeechTaskSpec(replace(training.config, cluster=cluster), str(training.egs), training.spec.sequences)
    worker = Worker(spec, 0)
    formats: set[tuple[torch.dtype, bool]] = set()
    criterion = SequenceObjective.__call__

    def watched(self: SequenceObjective, logits_NP: torch.Tensor, *arguments: Any) -> torch.Tensor:
        formats.add((logits_NP.dtype, torch.is_autocast_enabled("cpu")))
        return criterion(self, logits_NP, *arguments)
    monkeypatch.setattr(SequenceObjective, "__call__", watched)
    start = worker.layout.flatten(worker.model.state_dict())
    worker.run(Job(0, 0, 1, (WorkItem(Shard(0, 0), 0, 0),), JobInit(LocalRef(start)), 0.001, 1.0))
    assert formats == {(torch.float32, False)}
