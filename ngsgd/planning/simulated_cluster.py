"""The cluster of a simulation: speeds, spread, failures and links, and predictions of the formulas.

This module uses no clock, no files and no torch. Seconds are virtual.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ngsgd.config import RunConfig
from ngsgd.planning.planner import Link, Spread, adding_time_s, retry_wait_s, straggler_factor, travel_time_s

_EVEN = Spread(0.0, 0.0)
_GIGABIT = Link(bandwidth=1.25e8, latency_s=2e-4, add_speed=8e9)
# streams of random numbers
_HOSTS, _FAILURES, _JOBS = range(3)


@dataclass(frozen=True)
class SimulatedCluster:
    """Workers with identical parameters; `seed` determines all random numbers."""

    rate: float = 20000.0  # frames per second of an average worker; > 0
    spread: Spread = _EVEN  # of the job time, log-normal with mean 1
    overhead_s: float = 0.0  # of a job before its first minibatch
    failures_per_worker_hour: float = 0.0  # per live worker, busy or idle
    # fraction of failures, 0 to 1, in which the worker hangs instead of dying
    hang_share: float = 0.0
    replace_s: float = 20.0  # from the end of a worker until its replacement is ready
    link: Link = _GIGABIT
    seed: int = 0
    num_arrays: int = 0  # see `ngsgd.planning.planner.num_arrays_of`

    def pace(self, worker: int) -> float:
        """Permanent time factor of a worker relative to the average; also for its replacement."""
        return _log_normal(self.spread.host, self._random(_HOSTS, worker))

    def seconds(self, num_frames: int, num_minibatches: int, identity: tuple[int, int, int], worker: int) -> float:
        """Seconds from the first minibatch of a job to its last."""
        chance = _log_normal(self.spread.step / math.sqrt(max(num_minibatches, 1)), self._random(_JOBS, *identity))
        return num_frames / self.rate * self.pace(worker) * chance

    def failures_of(self, worker: int) -> np.random.Generator:
        """Random number generator of the failure times of a worker."""
        return self._random(_FAILURES, worker)

    def time_to_failure(self, chance: np.random.Generator) -> float:
        """Lifetime of a worker in seconds."""
        return 3600.0 * float(chance.exponential()) / self.failures_per_worker_hour if self.failures_per_worker_hour else math.inf

    def average_s(self, num_jobs: int, num_bytes: float) -> float:
        """Seconds of the exchange between workers on as many machines, and of the sum."""
        # a single worker has nobody to average with
        num_arrays = self.num_arrays if num_jobs > 1 else 0
        return (travel_time_s(num_jobs, num_bytes, self.link, num_arrays)
                + adding_time_s(num_jobs, num_bytes, self.link, num_arrays))

    def _random(self, stream: int, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream, *key])


def _log_normal(sigma: float, chance: np.random.Generator) -> float:
    return math.exp(sigma * float(chance.standard_normal()) - sigma ** 2 / 2) if sigma else 1.0


@dataclass(frozen=True)
class Expected:
    """One outer iteration as predicted by the formulas, in seconds."""

    work_s: float      # K / r
    compute_s: float  # until the slowest job has ended
    average_s: float  # part that the jobs wait for
    failures_s: float  # waiting for repeated jobs

    @property
    def outer_iter_s(self) -> float:
        return self.compute_s + self.average_s + self.failures_s


def expected(cluster: SimulatedCluster, config: RunConfig, *, num_jobs: int, samples: float, model_bytes: float) -> Expected:
    """Predict an outer iteration with one worker per job of `samples` frames by the formulas."""
    schedule, work_s = config.schedule, samples / cluster.rate
    num_minibatches = samples / schedule.minibatch_size
    # with partitioning by speed a slow machine has less to do; only random variation delays its job
    spread = cluster.spread if schedule.load_balancing == "none" else Spread(0.0, cluster.spread.step)
    job_s = schedule.sync_interval_s if schedule.load_balancing == "time" else (
        cluster.overhead_s + work_s * straggler_factor(spread.of_job(num_minibatches), num_jobs))
    fragments = config.outer.num_fragments if config.outer.kind == "streaming" else 1
    # the next jobs hide it for as long as they compute
    average_s = max(0.0, cluster.average_s(num_jobs, model_bytes / fragments) - (work_s if config.outer.overlap else 0.0))
    waits = config.failure.policy == "retry"
    failures_s = retry_wait_s(cluster.failures_per_worker_hour / 3600.0, num_jobs, job_s, cluster.replace_s) if waits else 0.0
    return Expected(work_s, job_s, average_s, failures_s)


@dataclass
class Books:
    """Use of the time of the workers, in worker-seconds; the parts sum to `total_s`."""

    total_s: float = 0.0
    trained_s: float = 0.0  # minibatches of jobs with a result
    overhead_s: float = 0.0    # of those jobs
    broken_s: float = 0.0  # of jobs without a result: training, overhead, hanging
    replaced_s: float = 0.0  # workers that were being replaced
    repeats_s: float = 0.0  # waiting while only repeated jobs ran
    stragglers_s: float = 0.0  # waiting while first attempts ran
    average_s: float = 0.0  # waiting for the average
    num_deaths: int = 0  # including killed hung workers
    num_hangs: int = 0

    def shares(self) -> dict[str, float]:
        """Fractions of the worker time, 0 to 1: `efficiency`, and the losses by cause."""
        total_s = max(self.total_s, 1e-12)
        return {"efficiency": self.trained_s / total_s, "failures": (self.broken_s + self.replaced_s + self.repeats_s)
                / total_s, "stragglers": self.stragglers_s / total_s, "averaging": self.average_s / total_s,
                "overhead": self.overhead_s / total_s}
