"""Options of the reaction to failures, and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import Section, option
from ngsgd.config.sections.objective import DISCRIMINATIVE


@dataclass(frozen=True)
class FailureConfig(Section):
    """The reaction to failures, and the limits at which a run stops."""

    policy: Literal["retry", "defer", "drop"] = option(
        "retry", "reaction to a failed job; retry: new attempt at once; defer: attempt in the next "
        "outer iteration; drop: no attempt; with too few other jobs both retry")
    max_attempts: int = option(3, "maximum number of attempts at a shard", low=1)
    on_repeated_crash: Literal["quarantine", "stop"] = option(
        "quarantine", "reaction to a shard all of whose attempts crashed a worker; quarantine: "
        "training without it; stop: end of the run")
    hang_timeout_s: float = option(30.0, "hang timeout: maximum time without a minibatch, at least "
                                   "five times the median time of a minibatch", unit="s", above=0.0)
    max_objf_gap: float = option(
        1.0, "maximum distance of a job's objective below the best job's, beyond which the job is "
        "rejected (Kaldi: 1.0); with a custom task multiplied by the loss of the initial model if that is above 1",
        unit="nats per frame", above=0.0,
        # objf moves by hundredths
        default_of_kind={f"objective={kind}": 0.3 for kind in DISCRIMINATIVE})
    on_divergence: Literal["stop", "halve"] = option(
        "stop", "reaction to too few accepted jobs; stop: end of the run; halve: last model again "
        "with half the learning rate, at most three times in a row")
    on_bad_batch: Literal["skip", "quarantine", "stop"] = option(
        "skip", "reaction to a minibatch with a non-finite loss or gradient, whose examples are "
        "named; skip: no update; quarantine: no update, and later outer iterations without these "
        "examples; stop: end of the run")
    audit_every: int = option(0, "audit of silent data corruption: every so many jobs of a worker, "
                              "one is repeated on another worker and the results are compared; 100 "
                              "costs about 1 % of the run; 0 disables", unit="jobs", low=0)
    snapshots: Literal["auto", "on", "off"] = option(
        "auto", "snapshots of running jobs, from which a retry continues; auto: where the task, "
        "the workers and the memory permit; on: an error where they do not; off: retries from the beginning of a job")
    snapshot_interval_s: float = option(
        5.0, "minimum time between two snapshots of a job; shorter jobs have none", unit="s", low=0.0,
        used="snapshots=auto|on")
    snapshot_cost: float = option(0.005, "maximum fraction of the time of a job for its snapshots",
                                  above=0.0, high=1.0, used="snapshots=auto|on")
    grace_period_s: float = option(5.0, "maximum time to finish the outer iteration after Ctrl-C "
                                   "or SIGTERM", unit="s", low=0.0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints; one follows every outer iteration."""

    num_to_keep: int = option(3, "number of checkpoints that are kept, the newest ones", low=1)
