"""The rules of the outer optimisers: one step each, as pure functions of float64 arrays.

B broadcast model (jobs start from it), W the model that is evaluated and saved, G mean move of the jobs from B,
D block momentum.  With constant G a rule moves the model by gain * G per outer iteration in the end, and a job's learning
rate is the effective one times num_jobs / gain: averaging divides, gain multiplies.

Sources: Kaldi's nnet3-average; BMUF, Chen and Huo, ICASSP 2016; DiLoCo, arXiv 2311.08105.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ngsgd.config import OuterConfig

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]
Numbers = Mapping[str, float]
# momentum needs this many times its time constant of outer iterations, or it never pays back
_FILL = 5


@dataclass(frozen=True)
class OuterInfo:
    """What a rule may know about the outer iteration that it closes."""

    outer_iter: int
    num_outer_iters: int
    # whose results are in the mean
    num_jobs: int
    # of the jobs, per frame
    lr: float


class OuterRule(Protocol):
    """One way to take the outer step.  `broadcast` and `update` are pure functions of arrays of the same shape.

    A rule that needs more than the jobs' mean, such as a median, also has a method
    `center(vectors: Sequence[Array], shares: Sequence[float], part: slice) -> Array`. For the slice
    `part` of the jobs' vectors it returns, in float64, what `update` gets as `mean`; `shares` are
    the weights of the jobs and sum to 1. The result must be memory of its own, because it is
    changed. Under `ngsgd train` such a rule gets the vectors of all jobs with every exchange;
    `ngsgd.LocalSGD` refuses it.
    """

    @property
    def buffers(self) -> Mapping[str, float]:
        """Names of the arrays kept beside "model", with their start values; no two kinds of momentum share a name."""

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        """Outer iterations' worth of a constant mean move that the model makes in one, once momentum has filled."""

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        """The numbers of this step; they are kept, and given to the next step as `last`."""

    def broadcast(self, arrays: Arrays, last: Numbers) -> Array:
        """B, from the state that a step with coefficients `last` left."""

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        """The new arrays; `start` is B as the jobs received it."""


class _Rule:
    """What most rules have in common: jobs start from the model that is evaluated."""

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
    """W = the mean: Kaldi's averaging."""

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        return {"model": mean}


class _BlockMomentum(_Rule):
    """Blockwise model-update filtering: D = eta D + zeta G; W += D; B = W + eta D, or W without Nesterov's look ahead."""

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
        # without momentum the mean itself: adding a difference back would round
        is_average = not now["eta"] and self.zeta == 1.0 and start is arrays["model"]
        return {"model": mean if is_average else arrays["model"] + momentum, "block_momentum": momentum}


@dataclass(frozen=True)
class BlockMomentum(_BlockMomentum):
    """BMUF with the paper's own two numbers, in Nesterov's form (NBM) or the classical one (CBM).

    NBM's B goes the way of torch's Nesterov SGD on -G with lr zeta and momentum eta, which is DiLoCo; CBM's W that of
    torch's plain momentum.
    """

    # 0 up to, not including, 1; the paper takes 1 - 1/num_jobs
    eta: float = 0.9
    zeta: float = 1.0        # block learning rate
    nesterov: bool = True

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        return self.zeta / (1.0 - self.eta)

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        return {"eta": self.eta}


@dataclass(frozen=True)
class Bmuf(_BlockMomentum):
    """BMUF (NBM, zeta 1) steered by one knob, its gain g: eta = 1 - 1/g.

    g = 1 is averaging bit for bit, g = num_jobs the paper's BMUF; 0 takes sqrt(num_jobs), which shares the num_jobs-fold
    gain evenly between the jobs' learning rate and the momentum.
    """

    fixed_gain: float = 0.0

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        wanted = self.fixed_gain or min(math.sqrt(num_jobs), num_outer_iters / _FILL)
        return min(max(wanted, 1.0), float(num_jobs))

    def coefficients(self, info: OuterInfo, last: Numbers) -> dict[str, float]:
        gain = self.gain(info.num_jobs, info.num_outer_iters)
        if gain > max(1.0, info.num_outer_iters / _FILL):
            # the user wants more than the run has time to fill: momentum grows with what there is
            # to remember
            gain = min(gain, float(info.outer_iter + 1))
        return {"eta": 1.0 - 1.0 / gain}


@dataclass(frozen=True)
class DiLoCo(_Rule):
    """Nesterov's SGD on -G, as torch.optim.SGD takes it: D = mu D + G; W += lr (G + mu D)."""

    lr: float = 0.7
    momentum: float = 0.9

    @property
    def buffers(self) -> Mapping[str, float]:
        return {"nesterov_momentum": 0.0}

    def gain(self, num_jobs: int, num_outer_iters: int) -> float:
        return self.lr / (1.0 - self.momentum)

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        move = mean - start
        momentum = self.momentum * arrays["nesterov_momentum"] + move
        return {"model": arrays["model"] + self.lr * (move + self.momentum * momentum), "nesterov_momentum": momentum}


@dataclass(frozen=True)
class TakeMean(_Rule):
    """For statistics of the data, whatever the run's rule: momentum on a variance could make it negative."""

    buffers_of_run: Mapping[str, float]

    def update(self, arrays: Arrays, start: Array, mean: Array, now: Numbers) -> dict[str, Array]:
        return {"model": mean, **{name: np.full_like(mean, value) for name, value in self.buffers_of_run.items()}}


def make_rule(config: OuterConfig) -> OuterRule:
    """The rule that a run's configuration asks for."""
    makers: dict[str, Callable[[], OuterRule]] = {
        "average": Average,
        "bmuf": lambda: Bmuf(config.gain),
        "diloco": lambda: DiLoCo(config.lr, config.momentum),
        "streaming": lambda: DiLoCo(config.lr, config.momentum),
    }
    return makers[config.kind]()
