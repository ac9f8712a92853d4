"""A second implementation of the arithmetic of a run: the model after every commit of its ledger.

It shares no code with `ngsgd.training` and `ngsgd.optim`. From the lines of the ledger it computes
which results count, with which weights, from which start and with which state of the outer rule.
That includes rejections, roll-backs at half the rate, partial and deferred work, and resumptions.
The results of single jobs come from a function. Models must be bitwise identical, because sums in
float64 have one order; learning rates may differ by rounding.

Letters: W model that is evaluated, B model that jobs start from, D momentum, G mean delta from B.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from ngsgd.config import RunConfig

# a function of one vector, with a separate reference (tests/reference/compression.py)
from ngsgd.ops.compression import decode, encode

Vector = npt.NDArray[np.float32]
Line = Mapping[str, Any]
# products of a few factors in another order
_RATE_TOLERANCE = 1e-12


class Start(NamedTuple):
    """What a job starts from."""

    # its first parameters; B; the vector that its slot kept
    parameters: Vector
    model: Vector
    own: Vector | None
    fisher: Any
    lr: float
    # fraction of the data that was processed before
    progress: float


class Trained(NamedTuple):
    """The result of a job, and problems of its line in the ledger."""

    sent: Vector
    own: Vector | None = None
    fisher: Any = None
    # the worker found that its parameters are not finite
    is_finite: bool = True
    problems: Sequence[str] = ()


@dataclass(frozen=True)
class State:
    """The run after a commit."""

    W: Vector
    D: Vector
    average: Vector
    eta: float = 0.0
    outer_iter: int = -1
    lr_scale: float = 1.0
    num_passes: int = 0
    # job slot -> (outer iteration, vector), and Fisher estimates
    own: Mapping[int, tuple[int, Vector]] = field(default_factory=dict)
    fisher: Mapping[int, Any] = field(default_factory=dict)
    # B of the jobs that ran ahead of the commit
    ahead: Vector | None = None
    sites: Base | None = None


@dataclass(frozen=True)
class Base:
    """The model of all sites, after a number of rounds."""

    W: Vector
    D: Vector
    eta: float = 0.0
    round: int = 0
    # (parameters, outer iteration) of this site whose average is under way
    ahead: tuple[Vector, int] | None = None


class Round(NamedTuple):
    """A closed round: (weight, delta) of the sites that count, in order."""

    deltas: Sequence[tuple[int, Vector]]
    # delta of this site, and its outer iteration; None: it does not count
    own: tuple[Vector, int] | None
    is_rejected: bool = False


@dataclass
class _Plan:
    B: Vector
    num_passes: int
    jobs: dict[int, Line] = field(default_factory=dict)
    settled: list[Line] = field(default_factory=list)

    def num_fresh(self, outer_iter: int) -> int:
        return len({tuple(piece[:4]) for line in self.jobs.values() for piece in line["pieces"] if piece[2] == outer_iter})


@dataclass
class _Process:
    state: State
    plans: dict[int, _Plan] = field(default_factory=dict)
    is_first: bool = True


class Recomputation:
    """Reads a ledger line by line.

    Args:
        config: of the run.
        num_shards: archives, and frames of an example.
        initial: parameters of the model before training.
        entries: names and shapes of the model, in order.
        job: (settled line, start) -> result.
        round_of: number -> round of the sites, for a run of several sites.
    """

    def __init__(self, config: RunConfig, num_shards: tuple[int, int], initial: Vector,
                 entries: Sequence[tuple[str, tuple[int, ...]]], job: Callable[[Line, Start], Trained],
                 round_of: Callable[[int], Round] | None = None) -> None:
        self.sites, self.round_of = config.sites, round_of
        # a run without faults contributes each delta once
        self.compares_deltas = False
        self.outer, self.schedule, self.codec = config.outer, config.schedule, config.cluster.codec
        self.keeps_fisher = config.optimizer.keeps_curvature
        self.entries, self.job = entries, job
        first, last = config.schedule.num_jobs_initial, config.schedule.num_jobs_final
        self.num_passes = max(1, int(config.schedule.num_epochs * num_shards[0] * num_shards[1]))
        self.num_outer_iters = max(1, int(2 * self.num_passes / (first + last)))
        self.num_planned = [0]
        for number in range(self.num_outer_iters):
            self.num_planned.append(self.num_planned[-1] + int(0.5 + first + (last - first) * number / self.num_outer_iters))
        # after the commit of each outer iteration
        zeros = np.zeros_like(initial)
        self.states = {-1: State(initial, zeros, initial, sites=Base(initial, zeros) if self.sites.jobs else None)}
        # outer iteration -> rounds of the sites that its model contains
        self._rounds: dict[int, int] = {}
        self.problems: list[str] = []
        self._processes: dict[int, _Process] = {}

    def read(self, lines: Iterable[tuple[int, Line]]) -> list[str]:
        """Return the problems of a ledger, as pairs (process, line)."""
        lines = list(lines)
        if self.sites.jobs:
            self._rounds = {line["outer_iter"]: int(line["numbers"]["site.round"]) for _, line in lines
                            if line["event"] == "committed"}
        for number, (process, line) in enumerate(lines, 1):
            try:
                if line["event"] == "started":
                    self._start(process, line["after"])
                elif process in self._processes:
                    self._read(self._processes[process], line)
            except KeyError as error:
                return [*self.problems, f"line {number} of the ledger needs {error}, which no line before it has"]
        return self.problems

    def _start(self, number: int, after: int) -> None:
        for other in reversed(self._processes.values()):
            # the newest one ended between the checkpoint and the line of the commit
            if after not in self.states and other.state.outer_iter == after - 1 and after in other.plans:
                self._commit(other, after)
        if after not in self.states:
            self.problems.append(f"a process continued after outer iteration {after}, which no process completed")
            return
        self._processes.pop(number, None)
        self._processes[number] = _Process(self.states[after])

    def _read(self, process: _Process, line: Line) -> None:
        outer_iter = line.get("outer_iter", -1)
        match line["event"]:
            case "planned":
                self._plan(process, outer_iter, line)
            case "accepted" | "rejected":
                process.plans[outer_iter].settled.append(line)
            case "rolled_back":
                lr_scale = process.state.lr_scale / 2
                if line["lr_scale"] != lr_scale:
                    self.problems.append(f"outer iteration {outer_iter} is repeated with {line['lr_scale']} times the rate, "
                                         f"expected {lr_scale}")
                process.plans.clear()
                process.state = replace(process.state, lr_scale=lr_scale, own={}, fisher={}, ahead=None)
            case "committed":
                if process.state.outer_iter != outer_iter:
                    self._commit(process, outer_iter)
                if line["model"] != self.digest(process.state.W):
                    self.problems.append(f"outer iteration {outer_iter}: its model does not follow from the accepted results")

    def _plan(self, process: _Process, outer_iter: int, line: Line) -> None:
        state = process.state
        if line["job"] == 0:
            ahead = state.ahead if process.is_first else None
            begun = sum(plan.num_fresh(number) for number, plan in process.plans.items() if number < outer_iter)
            process.plans[outer_iter] = _Plan(self._broadcast(state) if ahead is None else ahead, state.num_passes + begun)
            process.is_first = False
        plan = process.plans[outer_iter]
        plan.jobs[line["job"]] = line
        if len(plan.jobs) == line["num_jobs"]:
            num_jobs, num_steps = line["num_jobs"], self.num_outer_iters
            if self.sites.jobs:
                num_jobs, num_steps = sum(self.sites.counts.values()), self.num_rounds
            gain = self._gain(num_jobs, num_steps)
            lr = self._lr(plan, self._num_fresh(plan, outer_iter)) * state.lr_scale * num_jobs / gain
            for job, one in plan.jobs.items():
                if not math.isclose(one["lr"], lr, rel_tol=_RATE_TOLERANCE):
                    self.problems.append(f"job {job} of outer iteration {outer_iter} has the learning rate {one['lr']}, "
                                         f"expected {lr}")

    def _num_fresh(self, plan: _Plan, outer_iter: int) -> int:
        """Passes of all sites that begin in an outer iteration."""
        if not self.sites.jobs:
            return plan.num_fresh(outer_iter)
        return min(sum(self.sites.counts.values()), self.num_planned[-1] - plan.num_passes)

    @property
    def num_rounds(self) -> int:
        return -(-self.num_outer_iters // self.sites.period)

    def _lr(self, plan: _Plan, num_fresh: int) -> float:
        if plan.num_passes + num_fresh >= self.num_planned[-1]:
            return self.schedule.lr_final
        return float(self.schedule.lr_initial * (self.schedule.lr_final / self.schedule.lr_initial)
                     ** (plan.num_passes / self.num_passes))

    def _gain(self, num_jobs: int, num_steps: int) -> float:
        if self.outer.kind == "average":
            return 1.0
        if self.outer.kind != "bmuf":
            return self.outer.lr / (1.0 - self.outer.momentum)
        return min(max(self.outer.gain or min(math.sqrt(num_jobs), num_steps / 5), 1.0), float(num_jobs))

    def _start_of(self, state: State, plan: _Plan, outer_iter: int, job: int) -> Start:
        number, own = state.own.get(job, (-2, None))
        x = plan.B
        if number != outer_iter - 1 or own is None:
            own = None
        elif self.sends_delta:
            x = plan.B + own
        elif self.codec:
            x = plan.B + (own - decode(encode(own, self.codec)))
        else:
            x = own.copy()
            averaged, mix = number - self.outer.overlap, 0.5 if self.outer.overlap else 0.0
            if averaged >= 0:
                part = self.fragment(averaged)
                x[part] = mix * own[part] + (1.0 - mix) * plan.B[part]
        return Start(x, plan.B, own, state.fisher.get(job), plan.jobs[job]["lr"], min(1.0, plan.num_passes / self.num_passes))

    @property
    def sends_delta(self) -> bool:
        return self.outer.overlap and self.outer.kind != "streaming"

    def _commit(self, process: _Process, outer_iter: int) -> None:
        """Compute the state after an outer iteration."""
        if (plan := process.plans.pop(outer_iter, None)) is None:
            self.problems.append(f"outer iteration {outer_iter} was committed without a plan")
            return
        state = process.state
        results = {line["job"]: (line, self.job(line, self._start_of(state, plan, outer_iter, line["job"])))
                   for line in sorted(plan.settled, key=lambda line: int(line["job"]))}
        self.problems += [problem for _, trained in results.values() for problem in trained.problems]
        counted = [(line["num_frames"], trained.sent) for line, trained in results.values() if line["event"] == "accepted"]
        after = self._stepped(state, counted, outer_iter) if counted else state
        following = process.plans.get(outer_iter + 1)
        own, fisher = {}, dict(state.fisher)
        # also jobs that ran ahead of the commit, from a slot that had no result
        for job in (*plan.jobs, *(following.jobs if following else ())):
            line, trained = results.get(job, (None, None))
            # jobs that ran ahead had begun before a result was rejected
            is_kept = line is not None and (line["event"] == "accepted" or following is not None)
            if trained is not None and is_kept and trained.is_finite:
                if trained.own is not None:
                    own[job] = outer_iter, trained.own
                fisher[job] = trained.fisher
            else:
                fisher.pop(job, None)
        if state.sites:
            W, base = self._with_sites(after.W, state.sites, outer_iter, self._rounds.get(outer_iter, state.sites.round))
            after = replace(after, W=W, sites=base)
        process.state = self.states[outer_iter] = replace(
            after, outer_iter=outer_iter, num_passes=plan.num_passes + self._num_fresh(plan, outer_iter), own=own, fisher=fisher,
            ahead=following.B if following else None)

    def _stepped(self, state: State, counted: Sequence[tuple[int, Vector]], outer_iter: int) -> State:
        part = self.fragment(outer_iter)
        # the outer rule of a run of several sites steps the model of all sites
        kind = "average" if self.sites.jobs else self.outer.kind
        eta = self._eta(len(counted), outer_iter, self.num_outer_iters) if kind == "bmuf" else 0.0
        B = self._broadcast(state)[part]
        W, D = self._step(kind, state.W[part], state.D[part], B, counted, (state.eta, eta), is_delta=self.sends_delta)
        new = [state.W.copy(), state.D.copy()]
        new[0][part], new[1][part] = W, D
        decay = min(self.outer.ema_decay, 1.0 - 1.0 / (outer_iter + 1))
        average = decay * state.average.astype(np.float64) + (1.0 - decay) * new[0].astype(np.float64)
        return replace(state, W=new[0], D=new[1], average=average.astype(np.float32), eta=eta)

    def _step(self, kind: str, W: Any, D: Any, B: Any, counted: Sequence[tuple[int, Vector]], eta: tuple[float, float], *,
              is_delta: bool) -> tuple[Any, Any]:
        """Return W and D of the outer rule; `eta` is the one before, and the new one."""
        W, D, B = (vector.astype(np.float64) for vector in (W, D, B))
        total = float(sum(weight for weight, _ in counted))
        mean = np.sum([sent.astype(np.float64) * (weight / total) for weight, sent in counted[:1]], axis=0)
        for weight, sent in counted[1:]:
            mean = mean + sent.astype(np.float64) * (weight / total)
        if is_delta:
            mean = mean + B
        if kind == "average":
            return mean, D
        if kind == "bmuf":
            D = eta[1] * D + (mean - B)
            return (W + D if eta[1] or eta[0] else mean), D
        D = self.outer.momentum * D + (mean - B)
        return W + self.outer.lr * ((mean - B) + self.outer.momentum * D), D

    def _eta(self, num_results: int, number: int, num_steps: int) -> float:
        gain = self._gain(num_results, num_steps)
        if gain > max(1.0, num_steps / 5):
            gain = min(gain, float(number + 1))
        return 1.0 - 1.0 / gain

    def _with_sites(self, W: Vector, base: Base, outer_iter: int, last: int) -> tuple[Vector, Base]:
        """Average with other sites after an outer iteration, up to the round of its commit."""
        x = W.copy()
        if base.ahead is not None:
            snapshot, began = base.ahead
            averaged, base, _ = self._rounds_until(snapshot.copy(), replace(base, ahead=None), began, last)
            x += averaged - snapshot
        is_last = outer_iter + 1 >= self.num_outer_iters
        if is_last or (outer_iter + 1) % self.sites.period == 0:
            if self.sites.delay and not is_last:
                return x, replace(base, ahead=(x.copy(), outer_iter))
            x, base, is_counted = self._rounds_until(x, base, outer_iter, last)
            if is_last and is_counted:
                x = base.W.copy()
        if base.round != last:
            self.problems.append(f"outer iteration {outer_iter}: {base.round} rounds of the sites can be averaged, {last} were")
        return x, base

    def _rounds_until(self, x: Vector, base: Base, outer_iter: int, last: int) -> tuple[Vector, Base, bool]:
        """Compute rounds until the delta of an outer iteration counts, or was rejected."""
        assert self.round_of
        while base.round < last:
            found, before = self.round_of(base.round + 1), self._base_broadcast(base)
            if found.deltas:
                num_jobs = sum(weight for weight, _ in found.deltas)
                eta = self._eta(num_jobs, base.round, self.num_rounds) if self.outer.kind == "bmuf" else 0.0
                W, D = self._step(self.outer.kind, base.W, base.D, before, found.deltas, (base.eta, eta), is_delta=True)
                base = replace(base, W=W.astype(np.float32), D=D.astype(np.float32), eta=eta)
            base = replace(base, round=base.round + 1)
            if found.own and found.own[1] == outer_iter and self.compares_deltas and not np.array_equal(found.own[0], x - before):
                self.problems.append(f"outer iteration {outer_iter}: the site contributed another delta than its own")
            if found.own:
                x = self._base_broadcast(base) + (x - before - found.own[0])
                if found.own[1] == outer_iter:
                    return x, base, True
            if found.is_rejected:
                break
        return x, base, False

    def _base_broadcast(self, base: Base) -> Vector:
        return self._broadcast(State(base.W, base.D, base.W, base.eta))

    def _broadcast(self, state: State) -> Vector:
        return (state.W.astype(np.float64) + state.eta * state.D.astype(np.float64)).astype(np.float32) if state.eta else state.W

    def fragment(self, outer_iter: int) -> Any:
        """Elements that an outer iteration averages: every n-th layer when streaming."""
        sizes = [int(np.prod(shape)) for _, shape in self.entries]
        if self.outer.kind != "streaming":
            return np.arange(sum(sizes))
        layers = [name.rpartition(".")[0] for name, _ in self.entries]
        order = list(dict.fromkeys(layers))
        wanted = order[outer_iter % self.outer.num_fragments::self.outer.num_fragments]
        return np.flatnonzero(np.repeat([layer in wanted for layer in layers], sizes))

    def digest(self, vector: Vector) -> str:
        """SHA-256 of the file of a model."""
        sizes = np.cumsum([int(np.prod(shape)) for _, shape in self.entries])[:-1]
        parts = np.split(vector, sizes)
        return hashlib.sha256(save({name: part.reshape(shape) for (name, shape), part
                                    in zip(self.entries, parts, strict=True)})).hexdigest()

    def finals(self, kept: Sequence[int]) -> Iterator[Vector]:
        """The models that a run may end with: of `kept` outer iterations, the means of the newest.

        Without kept ones it is the moving average, or the last model.
        """
        newest = self.states[max(self.states)]
        if not kept:
            yield newest.average if self.outer.ema_decay else newest.W
        total = np.zeros(len(newest.W))
        for count, outer_iter in enumerate(sorted(kept, reverse=True), 1):
            total = total + self.states[outer_iter].W
            yield (total / count).astype(np.float32)
