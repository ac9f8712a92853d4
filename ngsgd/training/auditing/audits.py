"""The audit during training: which jobs are repeated, where, and what follows.

Every `failure.audit_every`-th job of a worker is repeated on another worker. When the turn of one
worker comes, a job of each worker is audited in the same outer iteration, so that the repetitions
run at the same time and delay the run by one job. A result is held until its audit has ended. The
repetition is never averaged, so without faults no bit of the model changes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from ngsgd.errors import AuditError, FailureKind
from ngsgd.interface import option
from ngsgd.training.auditing.cases import Case, Conclusion, Key, Round, partners, work_done
from ngsgd.training.auditing.comparison import Run, agree, digests_of, is_bitwise, verdict
from ngsgd.training.auditing.pool import AuditablePool
from ngsgd.training.job import Job, JobFailure, JobResult, Outcome, WorkItem
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import Incident
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.validation.checksums import is_damaged
from ngsgd.training.worker_pool import VectorRefcount, WorkerPool

# failed repetitions of a job, after which its audit ends without a verdict; more if results differ
_MAX_FAILED, _MAX_FAILED_IF_DIFFERENT = 3, 10


class Audits:
    """Repeats every `every`-th job of each worker of a dispatcher; 0 disables.

    `refcount` keeps the vectors that a running repetition reads.
    """

    def __init__(self, pool: WorkerPool, ledger: Ledger, layout: FlatLayout, every: int, emit_incident: Callable[[Incident], None],
                 refcount: VectorRefcount, release: Callable[[JobResult], None], clock: Callable[[], float]) -> None:
        self._pool = pool if isinstance(pool, AuditablePool) else None
        self._every = every if self._pool else 0
        self._ledger, self._layout, self._clock = ledger, layout, clock
        self._emit_incident, self._refcount, self._release = emit_incident, refcount, release
        self._agree = partial(agree, layout)
        self._numbers = itertools.count(1)
        self._cases: dict[Key, Case] = {}
        # worker -> jobs since its last audit
        self._since: Counter[int] = Counter()
        # worker -> outer iteration of its last audit that found no fault
        self._agreed: dict[int, int] = {}
        self._quarantined: set[int] = set()
        # plan of the outer iteration in progress, and its running jobs: key -> (job, worker)
        self._plan: object = None
        self._under_way: dict[Key, tuple[Job, int]] = {}
        # outer iteration in which all workers are audited
        self._round: Round | None = None
        self._concluded: list[Conclusion] = []
        # number of a running repetition -> the job as it was submitted
        self._running: dict[int, Job] = {}
        # first work item of a job -> results that were discarded because their worker was at fault
        self.redone: Counter[WorkItem] = Counter()
        # outer iteration -> audits with a verdict
        self.num_audited: Counter[int] = Counter()

    def submitted(self, plan: object, job: Job) -> None:
        """Count a job that was just submitted, and begin its audit if it is its turn."""
        if not self._every or self._pool is None:
            return
        key, worker = (job.outer_iter, job.job), self._pool.worker_of(job)
        self._since[worker] += 1
        if self._plan is not plan:
            self._plan, self._under_way = plan, {}
        self._under_way[key] = job, worker
        if case := self._cases.get(key):
            # a retry; the worker of the failed attempt is audited at its next job
            self._since[case.worker] = self._every - 1
            case.job, case.worker = job, worker
            return
        is_round = self._round is not None and self._round.plan is plan
        if self._since[worker] >= self._every and len(self._pool.workers_alive()) > 1:
            if not is_round:
                self._round = Round(plan, partners({alive: self._pool.identity_of(alive).host
                                                    for alive in self._pool.workers_alive()}))
                # audit a job of each worker: the newest ones, which run
                for other, its_worker in reversed(self._under_way.values()):
                    if its_worker not in self._round.audited:
                        self._open(other, its_worker)
            self._open(job, worker)
        elif self._round is not None and is_round and worker not in self._round.audited:
            self._open(job, worker)

    def hold(self, result: JobResult) -> bool:
        """Keep the result of an audited job until the verdict; return whether it is kept."""
        key = result.job.outer_iter, result.job.job
        self._under_way.pop(key, None)
        case = self._cases.get(key)
        if case is None:
            return False
        case.original, case.worker = result, result.worker
        if result.remainder:
            # compare only the work that the original has done, and ignore running repetitions
            case.pieces = work_done(result.job.pieces, result.remainder)
            case.running.clear()
            for run in list(case.runs):
                self._drop(case, run)
        # a repetition by the same worker, which took over the job in between, shows nothing
        for run in [run for run in case.runs if run.worker == result.worker]:
            self._drop(case, run)
        case.runs.insert(0, self._run(result))
        if case.pieces and not result.continued_at:
            self._judge(case)
        else:
            # nothing to compare, or another worker computed a part of it
            # (`ngsgd.training.snapshots`)
            self._end(case, "skipped")
        return True

    def holds(self, job: Job) -> bool:
        """Whether a result of the job is being audited, or its audit has just ended."""
        key = job.outer_iter, job.job
        case = self._cases.get(key)
        ended = ((one.result.job.outer_iter, one.result.job.job) for one in self._concluded)
        return (case is not None and case.original is not None) or key in ended

    def give_up(self, job: Job) -> None:
        """End the audit of a job that this outer iteration omits."""
        self._under_way.pop((job.outer_iter, job.job), None)
        if case := self._cases.pop((job.outer_iter, job.job), None):
            self._free(case)

    def forget(self, outer_iter: int) -> list[JobResult]:
        """End all audits of an abandoned outer iteration; return the results that were held."""
        cases = [case for case in self._cases.values() if case.job.outer_iter == outer_iter]
        ended = [one for one in self._concluded if one.result.job.outer_iter == outer_iter]
        self._concluded = [one for one in self._concluded if one not in ended]
        for case in cases:
            del self._cases[case.key]
            self._free(case, case.runs[0] if case.original else None)
        return [*(case.original for case in cases if case.original), *(one.result for one in ended)]

    def concluded(self) -> list[Conclusion]:
        """Return the audits that ended since the last call."""
        found, self._concluded = self._concluded, []
        return found

    def feed(self, outer_iter: int, patience_s: float, *, is_stopping: bool) -> None:
        """Give repetitions to idle workers; wait `patience_s` while no suitable one is alive."""
        if not self._cases or self._pool is None:
            return
        cases = [case for case in self._cases.values() if case.job.outer_iter == outer_iter and case.needs_run]
        for case in cases:
            if is_stopping and len(case.runs) < 2:
                self._end_without_verdict(case)
            else:
                self._watch_for_others(case, patience_s)
        waiting = {case.key: case for case in cases if case.key in self._cases}
        by_partner = {case.partner: case for case in waiting.values()}
        for worker in self._pool.idle_workers() if waiting else ():
            # the partner first: otherwise a worker could be left with only its own job
            wanted = by_partner.get(worker)
            choices = [wanted] if wanted and wanted.key in waiting else []
            chosen = next((one for one in itertools.chain(choices, waiting.values()) if one.may_run_on(worker)), None)
            if chosen and worker not in self._quarantined:
                del waiting[chosen.key]
                self._repeat(chosen, worker)

    def are_running(self, outer_iter: int) -> bool:
        """Whether repetitions run that read the model of an outer iteration."""
        return any(job.outer_iter == outer_iter for job in self._running.values())

    def settle(self, outcome: Outcome) -> None:
        """Process the end of a repetition."""
        job = outcome.job
        submitted = self._running.pop(job.repeat, None)
        if submitted is None:
            # duplicate
            return
        # references are counted by identity, and an outcome may hold copies of them
        for ref in (submitted.start.model, submitted.start.own):
            self._refcount.release(ref)
        case = self._cases.get((job.outer_iter, job.job))
        if case is None or case.running.pop(job.repeat, None) is None or job.pieces != case.pieces:
            # the audit ended, or the original was asked to end early
            if isinstance(outcome, JobResult):
                self._release(outcome)
            return
        if isinstance(outcome, JobFailure):
            self._failed(case, outcome, outcome.reason, outcome.kind)
        elif damage := is_damaged(outcome, self._layout):
            self._failed(case, outcome, f"its result arrived damaged: {damage}", FailureKind.DAMAGED_RESULT)
        elif outcome.remainder:
            self._failed(case, outcome, "was asked to end before its job was done", FailureKind.ASKED_TO_END)
        else:
            case.runs.append(self._run(outcome))
            if case.original:
                self._judge(case)

    def _failed(self, case: Case, outcome: Outcome, problem: str, kind: FailureKind) -> None:
        if isinstance(outcome, JobResult):
            self._release(outcome)
        if kind is FailureKind.QUARANTINED:
            return
        case.num_failed += 1
        self._emit_incident(Incident("worker_replaced", f"worker {outcome.worker} failed while it repeated job {case.job.job} of "
                                     f"outer iteration {case.job.outer_iter + 1} for the audit ({problem}); no job is lost.",
                                     case.job.outer_iter, case.job.job, outcome.worker, kind=kind))
        if case.num_failed >= (_MAX_FAILED_IF_DIFFERENT if len(case.runs) > 1 else _MAX_FAILED):
            case.has_no_others = True
            self._end_without_verdict(case)

    def _repeat(self, case: Case, worker: int) -> None:
        assert self._pool
        job = replace(case.job, pieces=case.pieces, repeat=next(self._numbers))
        self._ledger.repeated(job, worker)
        case.running[job.repeat] = worker
        self._running[job.repeat] = job
        # its audit may end before it does, and the next job of the slot then frees these vectors
        for ref in (job.start.model, job.start.own):
            self._refcount.acquire(ref)
        self._pool.submit_to(job, worker)

    def _watch_for_others(self, case: Case, patience_s: float) -> None:
        """Stop waiting for a worker that could repeat the job if none is alive for too long."""
        assert self._pool
        if any(case.may_run_on(worker) and worker not in self._quarantined for worker in self._pool.workers_alive()):
            case.alone_since = math.inf
            return
        case.alone_since = min(case.alone_since, self._clock())
        if self._clock() - case.alone_since < patience_s:
            return
        is_over, case.has_no_others = case.has_no_others or bool(case.again), True
        if is_over:
            self._end_without_verdict(case)
        elif case.original:
            self._judge(case)

    def _judge(self, case: Case) -> None:
        """Compare the runs of a job whose original has ended."""
        found = verdict(case.runs, self._agree, others=not case.has_no_others)
        case.again = found.again
        if found.outcome == "alone":
            self._end(case, "skipped")
        elif found.outcome == "not_reproducible":
            self._end_auditing(case)
        elif found.outcome == "undecided":
            self._end_without_verdict(case)
        elif found.outcome in ("agreed", "decided"):
            for run in found.right:
                self._agreed[run.worker] = case.job.outer_iter
            self._end(case, found.outcome, found.faulty, found.right, is_right=case.runs[0] in found.right)
            for worker in found.faulty:
                self._quarantine(case, worker, found.right)
                for other in list(self._cases.values()):
                    self._distrust(other, worker)

    def _quarantine(self, case: Case, worker: int, right: Sequence[Run]) -> None:
        assert self._pool
        name = next(run.identity.name for run in case.runs if run.worker == worker)
        others = ", ".join(dict.fromkeys(run.identity.name for run in right))
        since = self._agreed.get(worker)
        first, last = 1 if since is None else since + 2, case.job.outer_iter
        suspect = (f"; its results of outer iterations {first} to {last} were averaged and may be wrong" if first <= last else "")
        consequence = ""
        if worker not in self._quarantined:
            self._quarantined.add(worker)
            consequence = self._pool.quarantine(worker)
        self._emit_incident(Incident("worker_quarantined", f"{name} computed a wrong result of job {case.job.job} of outer "
                                     f"iteration {case.job.outer_iter + 1}, according to {others}{_how(case.runs)}. "
                                     f"{consequence}{suspect}.", case.job.outer_iter, case.job.job, worker))

    def _distrust(self, case: Case, worker: int) -> None:
        """Remove the runs of a worker at fault from another audit."""
        if not any(run.worker == worker for run in case.runs):
            return
        if case.original is None or case.original.worker != worker:
            for run in [run for run in case.runs if run.worker == worker]:
                self._drop(case, run)
            if case.original:
                self._judge(case)
            return
        right = [run for run in case.runs if run.worker not in self._quarantined]
        self._end(case, "distrusted", (worker,), right or case.runs[:0], is_right=False)

    def _end_auditing(self, case: Case) -> None:
        """Disable the audit: results of the same job differ on every worker."""
        self._end(case, "not_reproducible")
        for other in list(self._cases.values()):
            if other.original:
                self._end(other, "skipped")
            else:
                self.give_up(other.job)
        self._every = 0
        self._emit_incident(Incident(
            "audit_ended", f"job {case.job.job} of outer iteration {case.job.outer_iter + 1} gives another result each time, on "
            "every worker, so no worker can be audited, and the audit ends. Use random numbers of the job's seed "
            "only, or set failure.audit_every=0.", case.job.outer_iter, case.job.job))

    def _end_without_verdict(self, case: Case) -> None:
        """End an audit that is not possible; raise if its results differ."""
        if not case.original:
            self.give_up(case.job)
            return
        if len(case.runs) < 2:
            self._end(case, "skipped")
            return
        self._write(case, "undecided", ())
        names = " and ".join(dict.fromkeys(run.identity.name for run in case.runs))
        raise AuditError(f"{names} compute different results of job {case.job.job} of outer iteration "
                         f"{case.job.outer_iter + 1}{_how(case.runs)}, and no further worker decides which is right. The last "
                         "checkpoint is complete. Check these machines, then resume with at least three workers "
                         f"({option('workers', '3', 'num_workers')}), or on another machine.")

    def _end(self, case: Case, outcome: str, faulty: tuple[int, ...] = (), right: Sequence[Run] = (), *,
             is_right: bool = True) -> None:
        """End an audit with its original result if `is_right`, else with a run of `right`."""
        if self._cases.pop(case.key, None) is None:
            return
        if outcome != "skipped":
            self.num_audited[case.job.outer_iter] += 1
        self._write(case, outcome, faulty)
        original = chosen = case.runs[0]
        result = original.result
        if not is_right:
            # a result in its worker is known to the pool by the number of the repetition
            chosen = next((run for run in right if run.result.sent.is_here), original)
        if chosen is not original:
            result = replace(chosen.result, job=original.result.job, remainder=original.result.remainder)
        self._concluded.append(Conclusion(result, is_right or chosen is not original, faulty))
        self._free(case, chosen)

    def _write(self, case: Case, outcome: str, faulty: tuple[int, ...]) -> None:
        self._ledger.audited(case.job, outcome, [(run.worker, run.digests[0]) for run in case.runs],
                             faulty, "tolerance" if _how(case.runs) else "bitwise")

    def _open(self, job: Job, worker: int) -> None:
        assert self._round
        self._round.audited.add(worker)
        self._since[worker] = 0
        case = Case(job, worker, job.pieces, partner=self._round.partners.get(worker, -1))
        self._cases.setdefault(case.key, case)

    def _run(self, result: JobResult) -> Run:
        assert self._pool
        return Run(result.worker, self._pool.identity_of(result.worker), result, digests_of(result))

    def _drop(self, case: Case, run: Run) -> None:
        case.runs.remove(run)
        self._release(run.result)

    def _free(self, case: Case, chosen: Run | None = None) -> None:
        """Free all results of a job except the chosen one."""
        for run in case.runs:
            if run is not chosen:
                self._release(run.result)


def _how(runs: Sequence[Run]) -> str:
    if all(is_bitwise(runs[0], run) for run in runs):
        return ""
    return " (compared with a tolerance, because numeric fingerprints differ or a GPU adds in no fixed order)"
