"""What follows from a failed attempt at a job, by `failure.policy`: a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config import FailureConfig
from ngsgd.counting import counted
from ngsgd.training.job import JobFailure


@dataclass(frozen=True)
class Decision:
    """The next step for the data of a job, and the incident that reports it."""

    what: Literal["retried", "deferred", "dropped", "quarantined", "stop"]
    incident: str
    # end of the message
    consequence: str


def decide(failure: JobFailure, tries: int, hangs: int, policy: FailureConfig) -> Decision:
    """Decide about the data of a failed attempt.

    Args:
        failure: the attempt.
        tries: failed attempts at these data, except `hangs`.
        hangs: attempts that ended because the coordinator killed the worker. They are no evidence
            against the data, and never quarantine them.
        policy: settings.
    """
    shard, stops = failure.job.shard, policy.on_repeated_crash == "stop"
    where = f"archive {shard.archive}, frame {shard.frame}"
    if hangs >= policy.max_attempts:
        # a deadlock in the data, or a broken machine
        if stops:
            return Decision("stop", "", f"{hangs} workers hung on {where} and were killed, and failure.on_repeated_crash is stop: "
                                        "find out why they hang, then resume")
        return Decision("dropped", "job_dropped", f"{where} is skipped in this outer iteration after "
                                                  f"{counted(hangs, 'worker')} hung and were killed")
    if tries >= policy.max_attempts:
        if not failure.worker_died:
            return Decision("dropped", "job_dropped", f"{where} is skipped in this outer iteration after "
                                                      f"{counted(tries, 'attempt')}")
        if stops:
            return Decision("stop", "", f"{where} crashed {tries} workers, and failure.on_repeated_crash is stop: inspect that "
                                        "archive, then resume")
        return Decision("quarantined", "shard_quarantined", f"{where} crashed {counted(tries, 'worker')} and is quarantined for "
                                                            "the rest of this run")
    incident = "worker_died" if failure.worker_died else "job_failed"
    if policy.policy == "retry":
        return Decision("retried", incident, "its shard is retried")
    if policy.policy == "defer":
        return Decision("deferred", incident, "its shard is deferred to the next outer iteration")
    return Decision("dropped", incident, "its shard is skipped, because failure.policy is drop")
