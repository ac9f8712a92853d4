"""All cases of the fault matrix, as data: the component, the time and the kind of each fault.

The cases of every test run cover each row and each column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

WORKER_WHEN = ("start", "model received", "first minibatch", "mid shard", "last minibatch", "result built", "mid upload",
               "after ack", "idle")
WORKER_HOW = ("SIGKILL", "SIGSTOP", "exception", "exit 0", "deadlock", "MemoryError", "slow", "SIGTERM")
RESULT_HOW = ("NaN", "Inf", "truncated", "bit flip", "wrong shape", "wrong outer iteration", "duplicate", "after abandonment")
COORDINATOR_WHEN = ("plan", "dispatch", "waiting", "first result in", "averaging", "outer step", "before tmp", "in tmp",
                    "before rename", "before ledger line", "broadcast", "final combine")
COORDINATOR_HOW = ("SIGKILL", "SIGTERM")
STORAGE_WHEN = ("write", "fsync", "rename", "read")
STORAGE_HOW = ("ENOSPC", "EIO", "slow", "half-written manifest")
RAY_WHEN = ("mid outer iteration", "idle")
RAY_HOW = ("kill raylet", "object store full", "head restart")
MACHINE_HOW = ("freeze of all", "freeze of coordinator", "freeze of workers")
FORK_SERVER = (("mid shard", "SIGSTOP"), ("mid shard", "SIGKILL"), ("start of a worker", "coordinator SIGKILL"))
COMBINED_HOW = ("all workers", "all workers but one", "killed again in each retry", "replacement killed while it starts",
                "worker and coordinator", "churn")

# Ways to average, and what to do with a failed job, that a handful of worker faults are repeated
# with.
OUTER = ("overlap", "bmuf", "streaming")
POLICIES = ("defer", "drop")
_REPEATED = (("mid shard", "SIGKILL"), ("mid upload", "SIGSTOP"), ("result built", "exception"), ("idle", "SIGTERM"))


@dataclass(frozen=True)
class Case:
    """One thing that breaks, once."""

    # worker | result | coordinator | storage | ray | combined | machine | fork server | service
    who: str
    when: str
    how: str
    is_quick: bool       # every test run does it; the others are for `make chaos`
    setting: str = ""    # other than the defaults: one of OUTER or POLICIES

    def __str__(self) -> str:
        return "-".join(filter(None, (self.who, self.when, self.how, self.setting))).replace(" ", "_")


@dataclass(frozen=True)
class Seen:
    """The outcome of a case; a case that fails raises AssertionError."""

    outcome: str                    # in words
    is_equal: bool  # whether the final model is bitwise that of the run without faults
    # from the fault to the next try, or until a resumed run works again; None: nothing waited
    recovery_s: float | None = None


def _product(who: str, whens: tuple[str, ...], hows: tuple[str, ...], every: int) -> Iterator[Case]:
    """All combinations, with a diagonal for every test run."""
    for (row, when), (column, how) in product(enumerate(whens), enumerate(hows)):
        yield Case(who, when, how, (row + column) % every == 0)


MATRIX = (
    *_product("worker", WORKER_WHEN, WORKER_HOW, 4),
    *(Case("result", "arriving", how, True) for how in RESULT_HOW),
    *_product("coordinator", COORDINATOR_WHEN, COORDINATOR_HOW, 2),
    *_product("storage", STORAGE_WHEN, STORAGE_HOW, 3),
    *(Case("ray", when, how, False) for when, how in product(RAY_WHEN, RAY_HOW)),
    *(Case("combined", "mid shard", how, how != "churn") for how in COMBINED_HOW),
    *(Case("machine", "mid shard", how, True) for how in MACHINE_HOW),
    *(Case("fork server", when, how, True) for when, how in FORK_SERVER))
BEYOND = (
    *(Case("worker", when, how, (when, how) == _REPEATED[0], setting)
      for setting, (when, how) in product((*OUTER, *POLICIES), _REPEATED)),
    # the same through the command `ngsgd train cluster=local`
    *(Case("service", when, how, False) for when, how in (
        ("waiting", "SIGTERM"), ("before rename", "SIGKILL"), ("final combine", "SIGKILL"))))
