"""Options of the outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option

_NESTEROV = "kind=diloco|streaming"


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer: from the average of the jobs to the next model (`ngsgd.optim.outer`)."""

    kind: Literal["average", "bmuf", "diloco", "streaming"] = option("bmuf", "outer optimizer")
    gain: float = option(
        0.0, "total step on a constant pseudo-gradient; 1: averaging, num_jobs: the maximum, "
             "0: the square root of num_jobs if the run is long enough", low=0.0, used="kind=bmuf")
    lr: float = option(0.7, "outer learning rate", above=0.0, used=_NESTEROV)
    momentum: float = option(0.9, "outer Nesterov momentum", low=0.0, high=0.999, used=_NESTEROV)
    num_fragments: int = option(
        1, "groups of layers; each outer iteration averages one of them", low=1, high=1000,
        used="kind=streaming")
    fragment_delay: int = option(
        0, "outer iterations between the averaging of a fragment and its use", low=0, high=1,
        used="kind=streaming")
    fragment_mixing: float = option(
        0.0, "weight of a job's own fragment when it receives the average; 0.5 with delay",
        low=0.0, high=1.0, used="kind=streaming")
    overlap: bool = option(
        False, "next jobs start before averaging ends, on a model one outer iteration old")
    ema_decay: float = option(
        0.0, "decay of the moving average over outer iterations that is the final model; 0: none",
        low=0.0, high=0.9999)

    @property
    def jobs_keep_state(self) -> bool:
        """Whether a job starts from the result of the previous job of its slot, too."""
        return self.overlap or self.kind == "streaming"
