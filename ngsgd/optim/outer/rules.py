"""Rules of the outer optimizers: one step each, as pure functions of float64 arrays.

B broadcast model (jobs start from it), W the model that is evaluated and saved, G mean parameter
delta of the jobs from B (pseudo-gradient), D block momentum. With constant G, a rule finally moves
the model by gain * G per outer iteration. The learning rate of a job is the effective one times
num_jobs / gain: averaging divides, gain multiplies.

Sources: Kaldi's nnet3-average; BMUF, Chen and Huo, ICASSP 2016; DiLoCo, arXiv 2311.08105.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ngsgd.arguments import check_fields
from ngsgd.config import OuterConfig

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Numbers = Mapping[str, float]
# Momentum pays off only after this many time constants, in outer iterations.
_FILL = 5


@dataclass(frozen=True)
class OuterInfo:
    """The outer iteration that a rule closes."""

    outer_iter: int
    num_outer_iters: int
    # number of results in the mean
    num_jobs: int
    # learning rate of the jobs, per frame
    lr: float


class OuterRule(Protocol):
    """Interface of an outer rule.

    `broadcast` and `update` are pure functions of arrays of equal shape. A rule that needs more
    than the mean of the jobs, such as a median, also has a method `center`:

        center(vectors: Sequence[Array], shares: Sequence[float], part: slice) -> Array

    It receives the slice `part` of the vectors of the jobs and their weights `shares`, which sum to
    1. It returns the argument `mean` of `update` in float64. The returned array must be newly
    allocated, because `update` changes it. `ngsgd train` passes the vectors of all jobs to such a
    rule with every exchange; `ngsgd.LocalSGD` rejects it.
    """

    @property
    def buffers(self) -> Mapping[str, float]:
        """Return names, one for each kind of momentum, and start values of the arrays."""

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        """Return the factor by which momentum, once filled, multiplies a constant mean delta."""

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        """Return the numbers of this step, which are stored, and are `last` of the next step."""

    def broadcast(self, arrays: Arrays, last: Numbers) -> Array:
        """Return B from the state after a step with coefficients `last`."""

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        """Return the new arrays; `start` is B as the jobs received it."""


class _Rule:
    """Base class of rules whose jobs start from the model that is evaluated."""

    def __post_init__(self) -> None:
        # Called for dataclasses, which have settings.
        check_fields(self)

    @property
    def buffers(self) -> Mapping[str, float]:
        return {}

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        return 1.0

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        return {}

    def broadcast(self, arrays: Arrays, last: Numbers) -> Array:
        return arrays["model"]


class Average(_Rule):
    """Set W to the mean: Kaldi's averaging."""

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        r"""Return the mean."""
        return {"model": mean}


class _BlockMomentum(_Rule):
    """Blockwise model-update filtering: D = eta D + zeta G; W += D; B = W (+ eta D: Nesterov)."""

    zeta: float = 1.0
    nesterov: bool = True

    @property
    def buffers(self) -> Mapping[str, float]:
        return {"block_momentum": 0.0}

    def broadcast(self, arrays: Arrays, last: Numbers) -> Array:
        eta = last.get("eta", 0.0) if self.nesterov else 0.0
        return arrays["model"] + eta * arrays["block_momentum"] if eta else arrays["model"]

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        momentum = now["eta"] * arrays["block_momentum"] + self.zeta * (mean - start)
        # Without momentum return the mean itself; adding a difference to B would round.
        is_average = not now["eta"] and self.zeta == 1.0 and start is arrays["model"]
        return {"model": mean if is_average else arrays["model"] + momentum, "block_momentum": momentum}


@dataclass(frozen=True)
class BlockMomentum(_BlockMomentum):
    """BMUF with the two parameters of the paper, in Nesterov's (NBM) or the classical form (CBM).

    B of NBM follows Nesterov SGD of torch on -G with lr zeta and momentum eta, which is DiLoCo. W
    of CBM follows plain momentum of torch.
    """

    # block momentum, in [0, 1); the paper uses 1 - 1/num_jobs
    eta: float = 0.9
    zeta: float = 1.0        # block learning rate
    nesterov: bool = True

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        r"""Return zeta / (1 - eta)."""
        return self.zeta / (1.0 - self.eta)

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        r"""Return eta."""
        return {"eta": self.eta}


@dataclass(frozen=True)
class Bmuf(_BlockMomentum):
    """BMUF (NBM, zeta 1) with one parameter, the gain g: eta = 1 - 1/g.

    g = 1 is bitwise identical to averaging, g = num_jobs is the BMUF of the paper. g = 0 selects
    sqrt(num_jobs), which divides the num_jobs-fold gain evenly between the learning rate of the
    jobs and the momentum.
    """

    fixed_gain: float = 0.0

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        """Return the gain, between 1 and num_jobs."""
        wanted = self.fixed_gain or min(math.sqrt(num_jobs), num_outer_iters / _FILL)
        return min(max(wanted, 1.0), float(num_jobs))

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        """Return eta for the current iteration."""
        gain = self.gain(info.num_jobs, info.num_outer_iters)
        if gain > max(1.0, info.num_outer_iters / _FILL):
            # The requested gain is larger than the run can fill: momentum grows with its history.
            gain = min(gain, float(info.outer_iter + 1))
        return {"eta": 1.0 - 1.0 / gain}


@dataclass(frozen=True)
class DiLoCo(_Rule):
    """Nesterov SGD on -G, as in torch.optim.SGD: D = mu D + G; W += lr (G + mu D)."""

    lr: float = 0.7
    momentum: float = 0.9

    @property
    def buffers(self) -> Mapping[str, float]:
        r"""Return the momentum buffer D."""
        return {"nesterov_momentum": 0.0}

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        r"""Return lr / (1 - mu)."""
        return self.lr / (1.0 - self.momentum)

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        """Return W and D after the step."""
        move = mean - start
        momentum = self.momentum * arrays["nesterov_momentum"] + move
        return {"model": arrays["model"] + self.lr * (move + self.momentum * momentum), "nesterov_momentum": momentum}


@dataclass(frozen=True)
class TakeMean(_Rule):
    """Take the mean of data statistics: momentum could make a variance negative."""

    buffers_of_run: Mapping[str, float]

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        r"""Return the mean."""
        return {"model": mean, **{name: np.full_like(mean, value) for name, value in self.buffers_of_run.items()}}


def make_rule(config: OuterConfig) -> OuterRule:
    """Create the rule of a configuration."""
    if config.kind == "average":
        return Average()
    return Bmuf(config.gain) if config.kind == "bmuf" else DiLoCo(config.lr, config.momentum)
