"""Settings and faults of a trial, drawn from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ngsgd.config import RunConfig, build
from ngsgd.config.build import defaults, merged
from ngsgd.config.sections.model import FROM_PYTHON
from tests.simulation.durability import KINDS
from tests.simulation.world import Fault

_OUTER: Sequence[dict[str, Any]] = (
    {"kind": "average"}, {"kind": "bmuf"}, {"kind": "bmuf", "gain": 1.5}, {"kind": "diloco"},
    {"kind": "average", "ema_decay": 0.5}, {"kind": "average", "overlap": True}, {"kind": "bmuf", "overlap": True},
    {"kind": "streaming", "num_fragments": 2}, {"kind": "streaming", "num_fragments": 2, "overlap": True})


@dataclass(frozen=True)
class Scenario:
    """A small run."""

    seed: int
    settings: dict[str, Any]
    num_archives: int
    shards_per_archive: int
    num_minibatches: int       # of a shard
    minibatch_s: float
    has_locks: bool = True
    # outer iterations between two checkpoints with the vectors of jobs; a run on Ray has 20, more
    # than a trial has outer iterations
    job_states_interval: int = 1
    # of each worker in an hour; -1: no limit
    max_restarts: int = 60
    # jobs run in production workers
    has_workers: bool = False
    # workers keep their results, and take the outer step among themselves
    has_exchange: bool = False
    # the run is one of several sites
    has_sites: bool = False
    # output directory -> its configuration
    built: dict[str, RunConfig] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, random: random.Random) -> Scenario:
        """Draw the settings of a run."""
        policy = random.choice(("retry", "retry", "retry", "defer", "drop"))
        num_jobs = random.choice((1, 2, 2, 3, 4))
        num_workers = random.choice((num_jobs, num_jobs, max(1, num_jobs - 1), num_jobs + 1))
        outer = dict(random.choice(_OUTER))
        if num_jobs == 1:
            outer.pop("gain", None)
        settings: dict[str, Any] = {
            "seed": random.randrange(1000), "name": "trial",
            "schedule": {"num_epochs": random.choice((1.0, 2.0, 3.0)), "minibatch_size": 4, "lr_initial": 0.02, "lr_final": 0.005,
                         "num_jobs_initial": random.choice((1, num_jobs)), "num_jobs_final": num_jobs,
                         "load_balancing": random.choice(("none",) * 8 + ("speed", "time")), "sync_interval_s": 2.0},
            "outer": outer,
            "optimizer": {"curvature_state": random.choice(("reset", "reset", "keep"))},
            "cluster": {"kind": "local", "num_workers": num_workers, "elastic": random.random() < 0.1,
                        "threads_per_worker": 1, "wait_for_workers_s": 60.0},
            "failure": {"policy": policy, "max_attempts": random.choice((2, 3, 3, 6)),
                        "on_repeated_crash": random.choice(("quarantine", "quarantine", "stop")),
                        "hang_timeout_s": random.choice((2.0, 3.0, 10.0)),
                        # no setting
                        "max_restarts": random.choice((60, 60, 3, -1)),
                        "on_divergence": random.choice(("stop", "halve"))},
            "checkpoint": {"num_to_keep": random.choice((1, 2, 3))},
            "egs": {"on_corrupt": random.choice(("stop", "quarantine"))},
            "combination": {"kind": random.choice(("none", "mean"))},
            "tracking": {"kind": "none"}}
        if settings["schedule"]["load_balancing"] != "time":
            del settings["schedule"]["sync_interval_s"]
        max_restarts = settings["failure"].pop("max_restarts")
        return cls(random.randrange(1 << 16), settings, random.choice((2, 3, 4)), random.choice((1, 2)),
                   random.choice((2, 4, 6)), random.choice((0.05, 0.3)), random.random() < 0.8, max_restarts=max_restarts)

    def config(self, output_dir: str) -> RunConfig:
        """The complete configuration of a run from Python."""
        if output_dir not in self.built:
            settings = {**self.settings, "output_dir": output_dir}
            config, problems = build(merged(defaults(), settings))
            assert not problems, problems
            task = replace(config.task, _target_=FROM_PYTHON + "task")
            self.built[output_dir] = replace(config, task=task)
        return self.built[output_dir]

    def compressed(self, random: random.Random) -> Scenario:
        """Draw the compression of deltas, and how often its state is in a checkpoint."""
        if random.random() >= _COMPRESSED or self.settings["outer"]["kind"] == "streaming":
            return self
        changed = self._with("cluster", compression=random.choice(("int8", "sparse", "sparse")))
        return replace(changed, job_states_interval=random.choice((1, 1, 2, 5)))

    def with_workers(self, random: random.Random) -> Scenario:
        """Draw whether jobs run in production workers, which train with SGD."""
        if random.random() >= _WITH_WORKERS:
            return self
        return replace(self, settings={**self.settings, "optimizer": {"kind": "sgd"}}, built={}, has_workers=True)

    def with_snapshots(self, random: random.Random) -> Scenario:
        """Draw whether jobs in production workers take snapshots."""
        if self.policy != "retry" or random.random() >= _WITH_SNAPSHOTS:
            return self
        changed = replace(self, settings={**self.settings, "optimizer": {"kind": "sgd"}}, has_workers=True)
        return changed._with("failure", snapshots="on", snapshot_interval_s=random.choice((0.0, 0.1, 0.5)), snapshot_cost=1.0)

    def with_exchange(self, random: random.Random) -> Scenario:
        """Draw whether the workers take the outer step."""
        outer = self.settings["outer"]
        has_codec = "compression" in self.settings["cluster"]
        is_possible = not outer.get("overlap") and outer["kind"] != "streaming" and not (has_codec and self.has_workers)
        if not is_possible or random.random() >= _WITH_EXCHANGE:
            return self
        return replace(self._with("cluster", exchange="collective"), has_exchange=True)

    def with_sites(self, random: random.Random) -> Scenario:
        """Draw whether the run is one of two or three sites."""
        if random.random() >= _WITH_SITES:
            return self
        settings, num_jobs = self.settings, self.settings["schedule"]["num_jobs_final"]
        outer = {key: value for key, value in settings["outer"].items() if key in ("kind", "gain")}
        if outer["kind"] == "streaming":
            outer = {"kind": random.choice(("average", "bmuf", "diloco"))}
        jobs = {"a": num_jobs, "b": random.choice((1, 2)), **random.choice(({}, {}, {"c": 1}))}
        sites = {"jobs": jobs, "name": "a", "exchange": "s3://simulated/sites", "period": random.choice((1, 1, 2)),
                 "delay": random.choice((0, 1)), "compression": random.choice(("none", "none", "int8", "sparse")),
                 "wait_s": random.choice((2.0, 10.0))}
        schedule = {name: value for name, value in settings["schedule"].items() if name != "sync_interval_s"}
        total = sum(jobs.values())
        schedule |= {"num_jobs_initial": total, "num_jobs_final": total, "load_balancing": "none",
                     "num_epochs": 3.0 * schedule["num_epochs"],
                     # jobs have the learning rates of a run of this site alone
                     **{name: schedule[name] * num_jobs / total for name in ("lr_initial", "lr_final")}}
        cluster, failure = {**settings["cluster"], "elastic": False}, {**settings["failure"], "policy": "retry"}
        return replace(self, has_locks=True, has_sites=True, settings={
            **settings, "outer": outer, "schedule": schedule, "cluster": cluster, "failure": failure, "sites": sites})

    def with_bad_examples(self, random: random.Random) -> Scenario:
        """Draw whether examples are quarantined; a job that is never counted reports none."""
        if self.has_workers or self.policy != "retry" or random.random() >= _WITH_BAD_EXAMPLES:
            return self
        return self._with("failure", on_bad_batch="quarantine")

    def audited(self, random: random.Random) -> Scenario:
        """Draw whether and how often jobs are audited; other settings stay."""
        return self._with("failure", audit_every=random.choice((1, 1, 2, 5)) if random.random() < _AUDITED else 0)

    def fully_audited(self) -> Scenario:
        """Return a longer run with at least two workers whose jobs are all audited."""
        num_epochs = self.settings["schedule"]["num_epochs"] * _LONGER
        num_workers = max(2, self.settings["cluster"]["num_workers"])
        return (self._with("failure", audit_every=1)._with("schedule", num_epochs=num_epochs)
                ._with("cluster", num_workers=num_workers))

    def _with(self, section: str, **changes: Any) -> Scenario:
        return replace(self, settings={**self.settings, section: {**self.settings[section], **changes}}, built={})

    @property
    def audit_every(self) -> int:
        return int(self.settings["failure"].get("audit_every", 0))

    @property
    def policy(self) -> str:
        return str(self.settings["failure"]["policy"])

    @property
    def jobs_keep_state(self) -> bool:
        """Whether the state of jobs is not in the checkpoint, so that resuming changes the bits."""
        outer = self.settings["outer"]
        return bool(outer.get("overlap")) or outer["kind"] == "streaming" or "compression" in self.settings["cluster"]

    @property
    def depends_on_time(self) -> bool:
        """Whether the numbers depend on the speed or the number of the workers."""
        return bool(self.settings["schedule"]["load_balancing"] != "none" or self.settings["cluster"]["elastic"])


# fraction of the runs in production workers
_WITH_WORKERS = 0.1
# fraction of the runs with retries that take snapshots, and that have a bad example
_WITH_SNAPSHOTS = 0.1
# fraction of the runs that are one of several sites
_WITH_SITES = 0.12
# fraction of the runs whose workers take the outer step, if they can
_WITH_EXCHANGE = 0.12
_WITH_BAD_EXAMPLES = 0.2
# fraction of the runs with compressed deltas
_COMPRESSED = 0.15
# fraction of the runs that are audited, and of these that have a worker with faulty arithmetic
_AUDITED, _FAULTY = 0.3, 0.4
# fraction of the runs with an outer iteration that diverges, and with a shard that kills workers
_DIVERGING, _POISONED = 0.25, 0.3
_DIVERGED = ("diverged", "diverged silently")
# factor of the length of fully audited runs
_LONGER = 4.0
_JOB = (("kill", 6), ("kill after", 2), ("hang", 3), ("slow", 3), ("exception", 2), ("preempt", 2), ("lost", 2),
        ("late", 3), ("duplicate", 3), ("damage", 3), ("not finite", 1), ("damaged archive", 1))
_WAIT = (("kill idle", 2), ("kill all", 2), ("hang idle", 1), ("coordinator stopped", 3), ("machine stopped", 3),
         ("kill", 3), ("stop", 2), ("second coordinator", 2))
_OPERATION = (("kill", 10), ("slow", 1), ("full", 3), ("torn", 3), ("EIO", 3), ("ENOSPC", 2),
              *((f"power cut {kind}", 2) for kind in KINDS))
# fraction of the faults of jobs that the next jobs have, too
_BURSTS = 0.3
# transfers of a step: of the shards, and of the model
_EXCHANGE, _TRANSFERS = ("kill", "silent", "link", "damage", "coordinator"), 2
_REQUEST = ("kill", "kill after", "slow", "lost", "unreachable")
_SYNC = (("kill", 5), ("EIO", 3), ("ENOSPC", 1), ("slow", 1))


def draw_faults(random: random.Random, counts: Counter[str], scenario: Scenario) -> list[Fault]:
    """Draw the faults of a trial; `counts` is how often each point occurs without faults."""
    number = min(40, 1 + int(random.expovariate(1 / random.choice((2, 5, 12)))))
    # results are lost only with workers that keep them, which jobs with state exclude
    of_mean = 0.0 if scenario.jobs_keep_state else 0.5
    places = random.choices(("job", "wait", "operation", "sync", "read", "mean", "start"),
                            (8, 4, 6, 2, 1, of_mean, 1), k=number)
    found = [_fault(random, where, counts, scenario) for where in places]
    # several attempts at a job fail in the same way
    for fault in [one for one in found if one.where == "job" and random.random() < _BURSTS]:
        found += [replace(fault, at=fault.at + number) for number in range(1, random.randrange(2, 5))]
    if not scenario.has_locks:
        # the case that only fencing numbers protect
        found.append(Fault("wait", random.randrange(counts["wait"] + 1), "second coordinator"))
    return found


def draw_faulty_worker(random: random.Random, scenario: Scenario) -> list[Fault]:
    """Draw a worker with faulty arithmetic, in some of the audited runs."""
    num_workers, schedule = scenario.settings["cluster"]["num_workers"], scenario.settings["schedule"]
    if not scenario.audit_every or num_workers < 2 or random.random() >= _FAULTY:
        return []
    # the workers that are left could not begin enough jobs within schedule.sync_interval_s
    if schedule["load_balancing"] == "time" and num_workers <= schedule["num_jobs_final"]:
        return []
    # two workers that agree with themselves end the run
    what = random.choice(("wrong bit", "wrong bits")) if num_workers > 2 else "wrong bits"
    return [Fault("worker", random.randrange(num_workers), what, float(random.randrange(100)))]


def draw_lasting(random: random.Random, counts: Counter[str], scenario: Scenario) -> list[Fault]:
    """Draw results and iterations that diverge, and a shard that kills its workers."""
    found = []
    num_jobs, failure = scenario.settings["schedule"]["num_jobs_final"], scenario.settings["failure"]
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        found.append(Fault("job", random.randrange(counts["job"] + 1), random.choice(_DIVERGED)))
    if random.random() < _DIVERGING:
        # without a roll-back, each needs a new process
        most, outer_iter = 2 if failure["on_divergence"] == "stop" else 3, random.randrange(counts["mean"] + 1)
        found.append(Fault("iteration", outer_iter, random.choice(_DIVERGED), float(random.randint(1, most))))
        # results that arrive again after the roll-back
        for job in range(num_jobs if random.random() < 0.5 else 0):
            at = outer_iter * counts["job"] // max(1, counts["mean"]) + job
            found.append(Fault("job", at, "duplicate", random.choice((0.5, 2.0))))
    for _ in range(random.randrange(4) if "snapshots" in failure else 0):
        found.append(Fault("job", random.randrange(counts["job"] + 1), random.choice(("torn snapshot", "kill", "preempt")),
                           round(random.uniform(0.3, 1.0), 3)))
    if failure.get("on_bad_batch") == "quarantine":
        found.append(Fault("example", random.randrange(scenario.num_archives), "bad example"))
    # enough workers must be left, and other shards in the same outer iteration
    is_possible = scenario.policy != "drop" or scenario.settings["schedule"]["num_jobs_initial"] > 1
    is_possible &= (failure["on_repeated_crash"] == "quarantine" and scenario.max_restarts != 3
                   and num_jobs <= scenario.num_archives and scenario.settings["schedule"]["load_balancing"] == "none")
    if is_possible and random.random() < _POISONED:
        number = random.randrange(num_jobs, max(num_jobs, scenario.num_archives * scenario.shards_per_archive) + 1)
        archive = number % scenario.num_archives
        frame = (number // scenario.num_archives + archive + 1) % scenario.shards_per_archive
        if number < scenario.num_archives * scenario.shards_per_archive:
            found.append(Fault("shard", archive, "poison", float(frame)))
    return found


def draw_exchange(random: random.Random, counts: Counter[str], scenario: Scenario) -> list[Fault]:
    """Draw faults of workers that take the outer step."""
    if not scenario.has_exchange:
        return []
    found = [Fault("exchange", random.randrange(2 * counts["exchange"] + 2), random.choice(_EXCHANGE),
                   float(random.randrange(_TRANSFERS))) for _ in range(random.choice((0, 1, 2, 4)))]
    return [*found, *([Fault("port", random.randrange(counts["port"] + 1), "no port")] if random.random() < 0.2 else [])]


def draw_sites(random: random.Random, counts: Counter[str], scenario: Scenario) -> list[Fault]:
    """Draw faults of the exchange among sites, and of the others."""
    if not scenario.has_sites:
        return []
    # an answer that is lost divides two averages of the last outer iteration, if one is delayed
    kinds = _REQUEST[:3] if scenario.settings["sites"]["delay"] else _REQUEST
    found = [Fault("request", random.randrange(counts["request"] + 1), random.choice(kinds), 20.0)
             for _ in range(random.choice((0, 1, 3)))]
    for what in ("late site", "damaged delta"):
        found += [Fault("site", random.randrange(1, 8), what)] if random.random() < 0.3 else []
    return found


def draw_rare(random: random.Random, phases: Mapping[str, Sequence[str]], counts: Counter[str], scenario: Scenario) -> list[Fault]:
    """Draw faults with equal chances for all phases of the run without faults, however short."""
    found = []
    for _ in range(random.choice((0, 1, 1, 2))):
        where = random.choice([where for where in ("job", "wait", "operation", "sync") if phases.get(where)])
        phase = random.choice(sorted(set(phases[where])))
        at = random.choice([number for number, one in enumerate(phases[where]) if one == phase])
        found.append(replace(_fault(random, where, counts, scenario), at=at))
    return found


def _fault(random: random.Random, where: str, counts: Counter[str], scenario: Scenario) -> Fault:
    at = random.randrange(max(1, int(1.5 * counts[where]) + 2))
    if where == "job":
        what = _chosen(random, _JOB)
        value = {"slow": random.choice((2.0, 20.0)), "late": random.choice((0.1, 5.0, 60.0)),
                 "duplicate": random.choice((0.02, 2.0, 30.0))}.get(what, random.random())
        return Fault(where, at, what, round(value, 3))
    if where == "wait":
        what = _chosen(random, _WAIT)
        value = random.choice((0.5, 30.0, 600.0)) if what in ("coordinator stopped", "machine stopped") else random.randrange(3)
        return Fault(where, at, what, float(value))
    if where == "operation":
        what = _chosen(random, _OPERATION)
        return Fault(where, at, what, {"slow": 20.0, "full": float(random.choice((1, 5, 1000)))}.get(what, 0.0))
    if where == "sync":
        what = _chosen(random, _SYNC)
        return Fault(where, at, what, 30.0 if what == "slow" else 0.0)
    if where == "read":
        return Fault(where, at, "EIO")
    if where == "mean":
        return Fault(where, at, "lose results", round(random.random(), 3))
    return Fault(where, at, "slow start", random.choice((1.0, 10.0, 100.0)))


def _chosen(random: random.Random, weighted: Sequence[tuple[str, int]]) -> str:
    return random.choices([name for name, _ in weighted], [weight for _, weight in weighted])[0]
