"""Options of the reaction to failures, and of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class FailureConfig:
    """The reaction to failures, and the limits at which a run stops."""

    policy: Literal["retry", "defer", "drop"] = option(
        "retry", "failed jobs: retried at once, moved to the next outer iteration, or dropped")
    max_attempts: int = option(3, "maximum number of attempts at a shard", low=1)
    on_repeated_crash: Literal["quarantine", "stop"] = option(
        "quarantine", "reaction to a shard all of whose attempts ended a worker")
    hang_timeout_s: float = option(
        30.0, "time without a minibatch after which a worker counts as hanging; at least five "
              "times the median time of a minibatch", unit="s", above=0.0)
    max_restarts_per_hour: int = option(
        60, "maximum number of restarts of one worker per hour, after which the run continues "
            "without it; -1: no limit", low=-1)
    max_objf_gap: float = option(
        1.0, "distance below the best job's objective function at which a job is rejected (Kaldi: 1.0); "
             "in a run of task: times the loss of the initial model if that is above 1",
        unit="nats per frame", above=0.0)
    min_accepted_fraction: float = option(
        0.5, "minimum fraction of accepted jobs of an outer iteration", above=0.0, high=1.0)
    on_divergence: Literal["stop", "halve"] = option(
        "stop", "reaction to too few accepted jobs: stop, or restore the last model and halve the "
                "learning rate, three times in a row at most")
    grace_period_s: float = option(
        5.0, "time for the current outer iteration to finish after Ctrl-C or SIGTERM", unit="s",
        low=0.0)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints; one follows every outer iteration."""

    num_to_keep: int = option(3, "number of the newest checkpoints that are kept", low=1)
