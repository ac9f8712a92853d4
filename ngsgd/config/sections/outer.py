"""Options of the outer optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option

_NESTEROV = "kind=diloco|streaming"


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer: from the average of the jobs to the next model (`ngsgd.optim.outer`)."""

    kind: Literal["average", "bmuf", "diloco", "streaming"] = option(
        "bmuf", "outer optimizer; average: parameter averaging; bmuf: block momentum; diloco: "
        "Nesterov momentum; streaming: diloco by fragments")
    gain: float = option(
        0.0, "total step on a constant pseudo-gradient, up to num_jobs; 1: averaging; 0: square "
        "root of num_jobs if the run is long enough", low=0.0, used="kind=bmuf")
    lr: float = option(0.7, "learning rate of the outer optimizer", above=0.0, used=_NESTEROV)
    momentum: float = option(0.9, "Nesterov momentum of the outer optimizer", low=0.0, high=0.999, used=_NESTEROV)
    num_fragments: int = option(1, "number of groups of layers; each outer iteration averages one "
                                "group", low=1, high=1000, used="kind=streaming")
    overlap: bool = option(False, "overlap of averaging with the next jobs, which start from a "
                           "model one outer iteration old; streaming: a fragment is used one outer "
                           "iteration later, mixed half and half with that of the job")
    ema_decay: float = option(0.0, "decay of the moving average over outer iterations that becomes "
                              "the final model; 0: no average", low=0.0, high=0.9999)

    @property
    def jobs_keep_state(self) -> bool:
        """Whether a job starts from the result of the previous job of its slot, too."""
        return self.overlap or self.kind == "streaming"
