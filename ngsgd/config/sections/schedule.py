"""Options of the duration, the learning rate and the number of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option


@dataclass(frozen=True)
class ScheduleConfig:
    """Duration, learning rate and number of jobs; the formulas are Kaldi's (`ngsgd.schedules`)."""

    num_epochs: float = option(
        2.5, "duration of training; an epoch is a pass over the training data",
        unit="epochs", above=0.0, high=1000.0)
    minibatch_size: int = option(
        128, "minibatch size (C.1: 128 for CPU threads, 512 for GPUs)",
        unit="frames", low=1)
    lr_initial: float = option(
        0.005, "initial effective learning rate; a job uses num_jobs times this rate",
        unit="per frame", above=0.0)
    lr_final: float = option(0.0003, "final effective learning rate", unit="per frame", above=0.0)
    lr_factors: tuple[float, ...] = option(
        (1.0,),
        "multipliers of the exponential schedule at equal distances over the data, interpolated "
        "geometrically; written by ngsgd tune")
    num_jobs_initial: int = option(
        1, "number of parallel jobs of the first outer iteration",
        low=1, high=100000)
    num_jobs_final: int = option(
        2, "number of parallel jobs of the last outer iteration",
        low=1, high=100000)
    num_jobs_step: int = option(
        1, "step of the number of jobs between the first and the last outer iteration",
        low=1, high=100000)
    load_balancing: Literal["none", "speed", "time"] = option(
        "none",
        "size of a job; none: one archive; speed: proportional to the speed of its worker; time: "
        "sync_interval_s of training")
    sync_interval_s: float = option(
        60.0, "duration of an outer iteration",
        unit="s", above=0.0, used="load_balancing=time")
    early_rules: Literal["none", "kaldi"] = option(
        "none",
        "rules for the first outer iteration and for those with a new layer; kaldi: half the "
        "minibatch, lower max_change, best job instead of the average")
