"""The coordinator decides whether a run uses C++ kernels or torch operations, for all processes."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ngsgd
from ngsgd.cluster.fingerprint import NO_KERNEL, Agreement, Fingerprint, kernels
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.errors import FingerprintError, NgsgdWarning, RunInterrupted, WorkerFingerprintError
from ngsgd.ops.kernels import native
from ngsgd.pipeline.services import Services
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.worker import Worker
from tests import compilers, toy
from tests.cluster import ranks
from tests.pipeline.test_task_run import StopAfter
from tests.tasks import blobs

SETTINGS: dict[str, Any] = {"num_epochs": 2, "batch_size": 16, "cluster": "in_process"}


class Lines:
    """Lines of progress and warnings of a run."""

    def __init__(self) -> None:
        self.reported: list[str] = []
        self.warned: list[str] = []

    def services(self, **others: Any) -> Services:
        return Services(report=self.reported.append, warn=self.warned.append, **others)


def _train(folder: Path, lines: Lines, **settings: Any) -> Any:
    return ngsgd.train(blobs.make_task, output_dir=folder, services=lines.services(), **{**SETTINGS, **settings})


def _kernels(folder: Path) -> set[str]:
    """The C++ kernels of the fingerprints of a run."""
    history = json.loads((folder / "fingerprint.json").read_text())["history"]
    return {origin for entry in history for origin in entry["fingerprint"]["kernels"].values()}


def _digest(run: Any) -> str:
    return hashlib.sha256((run.folder.final / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.entry("Nc1", "no C++ compiler, a broken or a slow one", "works",
                   "kernels are compiled once, with a line and without a limit of time; if that fails, all processes of the run "
                   "use torch operations, and the reason is shown")
def test_a_run_without_a_compiler_says_so_once(tmp_path: Path) -> None:
    lines = Lines()
    with compilers.only(compilers.compiler(tmp_path, "fails"), tmp_path):
        run = _train(tmp_path, lines)
        assert native.is_allowed()
    assert lines.reported.count(native.COMPILING) == 1
    assert [line for line in lines.warned if "nonlinearities.cpp" in line and "cxx.sh" in line] == lines.warned
    assert len(lines.warned) == 1 and _kernels(run.folder.path) == {NO_KERNEL}
    assert run.metrics["valid/accuracy"] > 0.7


@pytest.mark.entry("Nc1")
def test_it_continues_without_kernels_where_there_is_a_compiler(tmp_path: Path) -> None:
    if not any(origin != NO_KERNEL for origin in kernels().values()):
        pytest.skip("no C++ compiler here")
    stop = StopAfter()
    with compilers.only(compilers.compiler(tmp_path, "fails"), tmp_path):
        whole = _train(tmp_path / "whole", Lines())
        with pytest.raises(RunInterrupted):
            ngsgd.train(blobs.make_task, output_dir=tmp_path / "part", **SETTINGS,
                        services=Services(stop=stop, make_trackers=stop.trackers))
    (folder,) = (tmp_path / "part").iterdir()
    assert not (folder / "final").exists()
    lines = Lines()
    run = ngsgd.train(blobs.make_task, resume=folder, services=lines.services())
    assert _digest(run) == _digest(whole) and _kernels(folder) == {NO_KERNEL} and len(lines.warned) == 1


@pytest.mark.entry("Nc1")
def test_a_run_with_kernels_is_not_continued_without(tmp_path: Path) -> None:
    if not any(origin != NO_KERNEL for origin in kernels().values()):
        pytest.skip("no C++ compiler here")
    stop = StopAfter()
    with pytest.raises(RunInterrupted):
        ngsgd.train(blobs.make_task, output_dir=tmp_path / "part", **SETTINGS,
                    services=Services(stop=stop, make_trackers=stop.trackers))
    (folder,) = (tmp_path / "part").iterdir()
    with compilers.only(compilers.compiler(tmp_path, "fails"), tmp_path), pytest.raises(FingerprintError, match=r"cxx\.sh"):
        ngsgd.train(blobs.make_task, resume=folder, services=Services())


@pytest.mark.faults
@pytest.mark.entry("Nc1")
def test_workers_use_torch_operations_as_the_coordinator_does(tmp_path: Path) -> None:
    # the fork server has kernels from now on
    _train(tmp_path / "before", Lines(), cluster="local")
    with compilers.only(compilers.compiler(tmp_path, "fails"), tmp_path):
        whole = _train(tmp_path / "whole", Lines())
        run = _train(tmp_path / "workers", Lines(), cluster="local")
    assert _kernels(run.folder.path) == {NO_KERNEL} and _digest(run) == _digest(whole)


@pytest.mark.faults
@pytest.mark.entry("Nc1")
def test_a_fork_server_does_not_compile_what_the_coordinator_could_not(tmp_path: Path) -> None:
    with compilers.only(compilers.compiler(tmp_path, "fails"), tmp_path):
        run = _train(tmp_path / "workers", Lines(), cluster="local")
        calls = compilers.num_calls(tmp_path)
        assert 0 < calls <= len(kernels())
    assert _kernels(run.folder.path) == {NO_KERNEL}
    # the fork server without kernels does not serve a run with kernels
    if any(origin != NO_KERNEL for origin in kernels().values()):
        assert NO_KERNEL not in _kernels(_train(tmp_path / "with", Lines(), cluster="local").folder.path)


class WithoutCompiler(Worker):
    """A worker that finds neither a compiler nor compiled kernels."""

    def __init__(self, spec: SpeechTaskSpec, index: int) -> None:
        super().__init__(spec, index)
        folder = Path(spec.egs_directory).parent / f"worker-{index}"
        folder.mkdir(exist_ok=True)
        # until the process ends
        self.only = compilers.only(compilers.compiler(folder, "fails"), folder)
        self.only.__enter__()


@pytest.mark.faults
@pytest.mark.entry("Nc1")
def test_a_worker_without_the_kernels_of_the_coordinator_is_an_error_with_its_cause(tmp_path: Path) -> None:
    run = toy.Run(tmp_path)
    here = Fingerprint.of_this_process(1)
    if here.is_without_kernels:
        pytest.skip("no C++ compiler here")
    worker: type[Worker] = WithoutCompiler
    for wanted in (here, here.without_machine()):
        pool = ProcessPool(run.spec, 1, 1, run.store.layout.size, make_worker=worker,
                           agreement=Agreement(wanted, has_kernels=True))
        with pytest.raises(WorkerFingerprintError, match=r"worker 0.*cxx\.sh"):
            run.train(pool)


def test_on_another_kind_of_machine_a_worker_needs_its_own_kernels() -> None:
    compiled = Fingerprint(kernels={"a.cpp": "1 GCC"})
    without = Fingerprint(kernels={"a.cpp": NO_KERNEL}, problems={"a.cpp": "g++ was not found"})
    assert "a.cpp" in Agreement(Fingerprint(), has_kernels=True).refusal(without)
    assert Agreement(Fingerprint(), has_kernels=True).refusal(compiled) == ""
    # of the same machine the fingerprint has them; without a coordinator each decides
    assert len(Agreement(compiled, has_kernels=True).refusal(without).split(";")) == 1
    assert Agreement(Fingerprint()).refusal(without) == Agreement(Fingerprint(), has_kernels=False).refusal(without) == ""
    agreement = Agreement(Fingerprint(), has_kernels=True, allow_other_bits=True)
    assert agreement.refusal(without) == "" and "g++" in agreement.accepted()[0]


@pytest.mark.faults
@pytest.mark.entry("Nc1")
def test_a_rank_without_the_kernels_of_its_group_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngsgd.cluster.groups.kernels", lambda: {"nonlinearities.cpp": "other GCC"})
    with pytest.raises(WorkerFingerprintError, match=r"nonlinearities\.cpp.*rank 1"):
        _train(tmp_path, Lines(), cluster={"kind": "in_process", "ranks_per_worker": 2})


@pytest.mark.entry("Nc1")
@pytest.mark.parametrize("reason", ["g++ was not found", ""])
def test_all_ranks_of_local_sgd_use_kernels_or_none_does(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr("ngsgd.cluster.local_sgd.why_no_kernels", lambda _report: reason if dist.get_rank() == 1 else "")
    monkeypatch.setattr("ngsgd.cluster.local_sgd.use_torch_operations", lambda: told.append(dist.get_rank()))

    def trained(_rank: int) -> int:
        model = torch.nn.Linear(3, 2)
        return ngsgd.LocalSGD(model, ngsgd.NGSGD(model, 0.1), sync_every=2).num_ranks
    with pytest.warns(NgsgdWarning, match=r"rank 1: g\+\+") if reason else contextlib.nullcontext():
        assert ranks.results(3, trained) == [3, 3, 3]
    assert sorted(told) == ([0, 1, 2] if reason else [])
