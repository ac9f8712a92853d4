"""Options of the duration, the learning rate and the number of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import Section, option
from ngsgd.config.sections.objective import DISCRIMINATIVE, OF_SEQUENCES
from ngsgd.schedules import JOB_RATE

# Rates of optimizers whose steps have a fixed length; lr_final is a tenth. One worker was best at
# 0.0028 (adam), 0.002 and 0.0028 (adamw), 0.004 (soap), 0.014 and 0.057 (muon; docs/results.md).
_LR_INITIAL = {"adam": 0.001, "adamw": 0.001, "soap": 0.001, "muon": 0.01}
_LR_FINAL = {"adam": 0.0001, "adamw": 0.0001, "soap": 0.0001, "muon": 0.001}


def _of_objectives(discriminative: float, lfmmi: float) -> dict[str, float]:
    return {**{f"objective={kind}": discriminative for kind in DISCRIMINATIVE}, "objective=lfmmi": lfmmi}


def _of_optimizers(rates: dict[str, float]) -> dict[str, float]:
    return {f"optimizer={kind}": rate for kind, rate in rates.items()}


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """Duration, learning rate and number of jobs; the formulas are Kaldi's (`ngsgd.schedules`)."""

    num_epochs: float = option(
        2.5, "duration of training; an epoch is a pass over the training data",
        unit="epochs", above=0.0, high=1000.0, default_of_kind=_of_objectives(1.0, 4.0))
    minibatch_size: int = option(
        128, "minibatch size (C.1: 128 for CPU threads, 512 for GPUs)", unit="frames", low=1,
        # several utterances
        default_of_kind={f"objective={kind}": 2000 for kind in OF_SEQUENCES})
    lr_initial: float = option(
        0.005, f"initial effective learning rate; {JOB_RATE}",
        unit="per frame", above=0.0, default_of_kind={**_of_objectives(0.002, 0.002), **_of_optimizers(_LR_INITIAL)})
    lr_final: float = option(
        0.0003, "final effective learning rate", unit="per frame", above=0.0,
        default_of_kind={**_of_objectives(0.0003, 0.0002), **_of_optimizers(_LR_FINAL)})
    lr_schedule: Literal["exponential", "cosine"] = option(
        "exponential", "decay of the learning rate from lr_initial to lr_final over the run")
    warm_up: float = option(0.0, "fraction of the run over which the learning rate rises linearly "
                            "from 0; 0: none", low=0.0, high=1.0)
    lr_factors: tuple[float, ...] = option(
        (1.0,), "multipliers of the exponential schedule at equal distances over the data, "
        "interpolated geometrically; written by ngsgd tune", used="lr_schedule=exponential")
    num_jobs_initial: int = option(1, "number of parallel jobs of the first outer iteration", low=1, high=100000)
    num_jobs_final: int = option(2, "number of parallel jobs of the last outer iteration", low=1, high=100000)
    load_balancing: Literal["none", "speed", "time"] = option(
        "none", "size of a job; none: one archive; speed: proportional to the speed of its worker; "
        "time: sync_interval_s of training")
    sync_interval_s: float = option(60.0, "duration of an outer iteration", unit="s", above=0.0, used="load_balancing=time")
