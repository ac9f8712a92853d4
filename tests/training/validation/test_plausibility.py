"""Results damaged before their checksum is made are rejected by name, healthy ones are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import ClusterConfig, FailureConfig, ModelConfig, OptimizerConfig, OuterConfig, RunConfig
from ngsgd.errors import DivergenceError
from ngsgd.files import read_json_lines
from ngsgd.optim.outer.rules import Array, Arrays, Average, Numbers
from ngsgd.training.averaging import averaged_model
from ngsgd.training.job import Job, JobResult, Outcome
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.records import Incident
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.checkpoint import Checkpoint
from ngsgd.training.task import TaskSpec
from ngsgd.training.worker import Worker
from tests.toy import Run, config

Damage = Callable[[Vector], None]


def flip_exponent(vector: Vector) -> None:
    vector.view(np.uint32)[len(vector) // 3] ^= np.uint32(1 << 30)


def scale(vector: Vector) -> None:
    vector *= np.float32(2.0**60)


def negate(vector: Vector) -> None:
    np.negative(vector, out=vector)


def add_noise(vector: Vector) -> None:
    vector += np.random.default_rng(0).normal(0.0, 0.3, len(vector)).astype(np.float32)


def clear(vector: Vector) -> None:
    vector[:] = 0.0


DAMAGES = (flip_exponent, scale, negate, add_noise, clear)


class DamagingWorker(Worker):
    """Damages the parameters that one job ended with, before anything is made of them."""

    def __init__(self, spec: TaskSpec, at: tuple[int, int], damage: Damage) -> None:
        super().__init__(spec, 0)
        self.at, self.damage = at, damage

    def _result(self, job: Job, *rest: Any) -> JobResult:
        if (job.outer_iter, job.job) == self.at:
            vector = self.layout.flatten(self.model.state_dict())
            self.damage(vector)
            self.layout.load(self.model, vector)
        return super()._result(job, *rest)


@dataclasses.dataclass(frozen=True)
class Damages:
    """Makes such workers in other processes."""

    at: tuple[int, int]
    damage: Damage

    def __call__(self, spec: TaskSpec, index: int) -> Worker:
        worker = DamagingWorker(spec, self.at, self.damage)
        worker.index = index
        return worker


class Pool(InProcessPool):
    """An in-process pool one of whose results is damaged, or has an objf that is not a number.

    Without `has_deltas` nobody measured the parameter deltas, and only held-out data can show it.
    """

    def __init__(self, run: Run, at: tuple[int, int], damage: Damage | None,
                 has_deltas: bool = True) -> None:
        super().__init__(run.spec, run.config.cluster.num_workers, 1)
        self.at, self.damage, self.has_deltas = at, damage, has_deltas

    def start(self) -> None:
        super().start()
        if self.damage is not None:
            self._worker = DamagingWorker(self.spec, self.at, self.damage)

    def wait(self, timeout_s: float) -> Outcome | None:
        result = super().wait(timeout_s)
        assert isinstance(result, JobResult)
        if self.damage is None and (result.job.outer_iter, result.job.job) == self.at:
            return dataclasses.replace(result, objf=float("nan"))
        return result if self.has_deltas else dataclasses.replace(result, deltas=None,
                                                                  rejection_reason="")


def with_jobs(num_jobs: int, num_outer_iters: int = 2, schedule: dict[str, Any] | None = None,
              **changes: Any) -> RunConfig:
    settings = {"num_jobs_initial": num_jobs, "num_jobs_final": num_jobs,
                "num_epochs": num_jobs * num_outer_iters / 12, **(schedule or {})}
    return config(schedule=dataclasses.replace(config().schedule, **settings),
                  cluster=ClusterConfig(num_workers=num_jobs, threads_per_worker=1), **changes)


def train(folder: Path, run_config: RunConfig, at: tuple[int, int], damage: Damage | None
          ) -> tuple[Run, Checkpoint]:
    run = Run(folder, run_config)
    return run, run.train(Pool(run, at, damage))


def require_named(run: Run, at: tuple[int, int]) -> None:
    (incident,) = run.recorder.incidents
    assert (incident.what, incident.outer_iter, incident.job) == ("job_rejected", *at)
    (line,) = [line for line in read_json_lines(run.ledger_path) if line["event"] == "rejected"]
    assert (line["outer_iter"], line["job"]) == at
    assert line["reason"] in incident.message
    assert audit(run.ledger_path) == []


@pytest.fixture(scope="module")
def without_the_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], str]:
    """The hash of the final model of a run that rejects job 1 for another reason."""
    @cache
    def trained(num_jobs: int, outer_iter: int) -> str:
        folder = tmp_path_factory.mktemp("dropped")
        return train(folder, with_jobs(num_jobs), (outer_iter, 1), None)[1].model_sha256
    return trained


@pytest.mark.slow
@pytest.mark.parametrize(("num_jobs", "outer_iter"), [(2, 0), (4, 1), (24, 1)])
@pytest.mark.parametrize("damage", DAMAGES)
def test_one_damaged_result_is_rejected_by_name_and_the_rest_is_averaged(
        tmp_path: Path, without_the_job: Callable[[int, int], str], damage: Damage, num_jobs: int,
        outer_iter: int) -> None:
    run, end = train(tmp_path, with_jobs(num_jobs), (outer_iter, 1), damage)
    require_named(run, (outer_iter, 1))
    assert end.model_sha256 == without_the_job(num_jobs, outer_iter)


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_damaged_result_of_a_single_job_is_not_committed(
        tmp_path: Path, damage: Damage) -> None:
    run = Run(tmp_path, with_jobs(1, 8))
    with pytest.raises(DivergenceError, match=r"0.*1 jobs.*iteration 5.*0"):
        run.train(Pool(run, (4, 0), damage))
    latest, _ = run.store.latest()
    assert latest is not None and latest.progress.outer_iter == 3
    require_named(run, (4, 0))


@pytest.mark.parametrize("outer_iter", [0, 1])
@pytest.mark.parametrize(
    "outer", [OuterConfig("average", ema_decay=0.5), OuterConfig("bmuf", gain=1.5)],
    ids=["average", "bmuf"])
def test_held_out_frames_alone_find_the_result_and_the_outer_step_is_taken_back(
        tmp_path: Path, outer: OuterConfig, outer_iter: int) -> None:
    at, settings = (outer_iter, 1), with_jobs(2, 3, outer=outer)
    run = Run(tmp_path / "damaged", settings)
    end = run.train(Pool(run, at, scale, has_deltas=False))
    require_named(run, at)
    assert "held-out" in run.recorder.incidents[0].message
    assert end.model_sha256 == train(tmp_path / "dropped", settings, at, None)[1].model_sha256


def test_an_outer_iteration_that_is_rolled_back_after_its_step_begins_with_the_model_before(
        tmp_path: Path) -> None:
    halving = with_jobs(1, 6, outer=OuterConfig("bmuf", gain=1.2),
                        failure=FailureConfig(on_divergence="halve"))
    ends = []
    for name, damage in (("damaged", scale), ("dropped", None)):
        run = Run(tmp_path / name, halving)
        pool = Pool(run, (4, 0), damage, has_deltas=False)
        tell = run.recorder.incident

        def once(incident: Incident, pool: Pool = pool,
                 tell: Callable[[Incident], None] = tell) -> None:
            if incident.what == "rolled_back":
                pool.at = (-1, -1)
                if isinstance(pool._worker, DamagingWorker):
                    pool._worker.at = (-1, -1)
            tell(incident)
        run.recorder.incident = once  # type: ignore[method-assign]
        ends.append(run.train(pool).model_sha256)
        assert [one.what for one in run.recorder.incidents] == ["job_rejected", "rolled_back"]
    assert ends[0] == ends[1]


class Overshoots(Average):
    """Takes a hundred times the step of averaging."""

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        return {"model": mean + 100.0 * (mean - start)}


def test_an_average_that_is_bad_though_each_result_is_good_is_divergence(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaged_model, "make_rule", lambda _: Overshoots())
    run = Run(tmp_path, with_jobs(2, 3))
    with pytest.raises(DivergenceError, match="explains"):
        run.train()
    assert run.recorder.incidents == []


@pytest.mark.parametrize("damage", [negate, scale])
def test_results_that_stay_in_their_workers_are_judged_before_the_mean_is_made(
        tmp_path: Path, damage: Damage) -> None:
    base = with_jobs(3, 3)
    cluster = dataclasses.replace(base.cluster, kind="local", exchange="collective")
    settings = dataclasses.replace(base, cluster=cluster)
    run = Run(tmp_path / "damaged", settings)
    pool = ProcessPool(run.spec, 3, 1, run.store.layout.size, make_worker=Damages((1, 1), damage))
    end = run.train(pool)
    require_named(run, (1, 1))
    assert end.model_sha256 == train(tmp_path / "dropped", settings, (1, 1), None)[1].model_sha256


def ngsgd(**changes: Any) -> dict[str, Any]:
    return {"optimizer": OptimizerConfig(rank_in=4, rank_out=4, **changes)}


HEALTHY = {
    "plain SGD without limits": {
        "optimizer": OptimizerConfig(kind="sgd", max_change=0.0, max_param_change=0.0),
        "schedule": {"lr_initial": 0.002, "lr_final": 0.001}},
    "every step is clipped": ngsgd(max_change=0.05, max_param_change=0.08),
    "momentum and clipping": ngsgd(momentum=0.9, max_param_change=0.1),
    "backstitch and clipping": ngsgd(backstitch_scale=0.5, max_param_change=0.1),
    "minibatches of very different number": {"schedule": {"load_balancing": "time", "sync_interval_s": 0.02}},
    "orthonormal constraint and batch normalization": {
        "model": ModelConfig(kind="tdnnf", normalize="batchnorm", num_layers=2, hidden_dim=16,
                             bottleneck_dim=8, tdnn_offsets="-1,0,1 -1,0"),
        **ngsgd(max_param_change=0.02)},
    "overlap": {"outer": OuterConfig("bmuf", overlap=True)},
    "streaming": {"outer": OuterConfig("streaming", num_fragments=2, overlap=True)}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", HEALTHY.values(), ids=HEALTHY)
def test_no_healthy_result_is_rejected(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = Run(tmp_path, with_jobs(4, 6, **changes))
    run.train()
    assert run.recorder.incidents == []
    assert all(record.num_accepted == record.num_jobs for record in run.recorder.records)


def test_limits_are_tight_where_every_step_is_clipped_in_one_direction(tmp_path: Path) -> None:
    """A bound far above the reached values would find nothing."""
    clipped = OptimizerConfig(kind="sgd", max_change=0.0, max_param_change=0.001)
    rates = {"lr_initial": 1.0, "lr_final": 1.0}
    run = Run(tmp_path, with_jobs(1, 1, optimizer=clipped, schedule=rates))
    pool = Pool(run, (9, 9), None)
    results: list[JobResult] = []
    wait = pool.wait
    pool.wait = lambda timeout_s: results.append(wait(timeout_s)) or results[-1]  # type: ignore
    run.train(pool)
    deltas = results[0].deltas
    assert deltas is not None
    assert 0.5 * deltas.limit < float(np.linalg.norm(deltas.norms_E)) <= deltas.limit
