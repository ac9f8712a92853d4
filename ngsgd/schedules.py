"""Schedules of outer iterations: jobs, shards and learning rates, as numbers.

The formulas are those of Kaldi's `steps/nnet3/train_dnn.py` (libs/nnet3/train/common.py,
frame_level_objf/common.py), section 3 and C.1 of arXiv 1410.7455. An archive of examples with
`frames_per_eg` frames each is read as often per epoch; one reading is called a *pass*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from ngsgd.errors import ConfigError

# For helps and reports; gain is that of the outer optimizer.
JOB_RATE = "a job uses num_jobs / gain times the effective rate"


@dataclass(frozen=True)
class Shard:
    """Data of one job: one frame of every example in one archive."""

    archive: int  # 0-based
    frame: int  # 0-based, within each example


@dataclass(frozen=True)
class OuterIteration:
    """Schedule of one outer iteration, with one shard for each job."""

    outer_iter: int
    shards: tuple[Shard, ...]
    passes_done: int  # before this outer iteration
    effective_lr: float  # per frame; the learning rate of the averaged model
    gain: float = 1.0  # of the outer optimizer: the factor by which it compensates averaging

    @property
    def num_jobs(self) -> int:
        return len(self.shards)

    @property
    def lr_factor(self) -> float:
        """Ratio of the learning rate of a job to the effective one; see `JOB_RATE`."""
        return self.num_jobs / self.gain

    @property
    def lr(self) -> float:
        """Learning rate of each job, per frame."""
        return self.effective_lr * self.lr_factor


@dataclass(frozen=True)
class Schedule:
    """All outer iterations of a run, as a pure function of these numbers."""

    num_archives: int
    frames_per_eg: int
    num_epochs: float
    lr_initial: float        # effective, per frame
    lr_final: float
    num_jobs_initial: int
    num_jobs_final: int
    num_jobs_step: int = 1
    # Factors of exponential rates, equidistant over the data, with geometric interpolation.
    lr_factors: tuple[float, ...] = (1.0,)
    lr_schedule: str = "exponential"  # exponential or cosine
    warm_up: float = 0.0  # fraction of the data over which rates rise linearly

    @property
    def num_passes(self) -> int:
        """Number of archive passes in the run, at least one."""
        return max(1, int(self.num_epochs * self.num_archives * self.frames_per_eg))

    @property
    def num_outer_iters(self) -> int:
        # A run with very little data still needs one outer iteration.
        return max(1, int(2 * self.num_passes / (self.num_jobs_initial + self.num_jobs_final)))

    def num_jobs(self, outer_iter: int) -> int:
        """Return the number of jobs, which grows linearly in multiples of `num_jobs_step`."""
        ideal = self.num_jobs_initial + (self.num_jobs_final - self.num_jobs_initial) * outer_iter / self.num_outer_iters
        if ideal <= self.num_jobs_step:
            return int(0.5 + ideal)
        return int(0.5 + ideal / self.num_jobs_step) * self.num_jobs_step

    def effective_lr(self, outer_iter: int, passes_done: int) -> float:
        """Return the effective learning rate, which depends on the data processed before.

        Exponential decay times `lr_factors`, or a half cosine; both times the warm-up. The last
        outer iteration uses the final values of the first two.
        """
        if outer_iter + 1 >= self.num_outer_iters:
            return self.last_lr
        warm_up = self._warm_up(outer_iter, passes_done)
        if self.lr_schedule == "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * passes_done / self.num_passes))
            return (self.lr_final + (self.lr_initial - self.lr_final) * share) * warm_up
        decay = math.log(self.lr_final / self.lr_initial) / self.num_passes
        # of lr_factors, at this fraction of the processed data
        at = min(max(passes_done / self.num_passes, 0.0), 1.0) * (len(self.lr_factors) - 1)
        left = min(int(at), len(self.lr_factors) - 1)
        ratio = self.lr_factors[min(left + 1, len(self.lr_factors) - 1)] / self.lr_factors[left]
        factor = self.lr_factors[left] * math.exp((at - left) * math.log(ratio))
        return self.lr_initial * math.exp(passes_done * decay) * factor * warm_up

    @property
    def last_lr(self) -> float:
        """Return the effective learning rate of the last outer iteration."""
        last = self.num_outer_iters - 1
        done = sum(self.num_jobs(outer_iter) for outer_iter in range(last)) if self.warm_up else 0
        lr = self.lr_final * (self.lr_factors[-1] if self.lr_schedule == "exponential" else 1.0)
        return lr * self._warm_up(last, done)

    def _warm_up(self, outer_iter: int, passes_done: int) -> float:
        """Return the factor of the warm-up in the middle of an outer iteration; it is above 0."""
        done = (passes_done + 0.5 * self.num_jobs(outer_iter)) / self.num_passes
        return done / self.warm_up if done < self.warm_up and self.warm_up else 1.0

    def shard(self, pass_index: int) -> Shard:
        """Return the shard of a pass of the run; `frames_per_eg` epochs read every frame once."""
        archive = pass_index % self.num_archives
        # Kaldi adds the 1-based archive number; adjacent archives then use different frames in one
        # outer iteration.
        return Shard(archive, (pass_index // self.num_archives + archive + 1) % self.frames_per_eg)

    def outer_iterations(self, first: int = 0) -> Iterator[OuterIteration]:
        """Yield the outer iterations from `first` on."""
        passes_done = 0
        for outer_iter in range(self.num_outer_iters):
            num_jobs = self.num_jobs(outer_iter)
            if outer_iter >= first:
                shards = tuple(self.shard(passes_done + job) for job in range(num_jobs))
                yield OuterIteration(outer_iter, shards, passes_done, self.effective_lr(outer_iter, passes_done))
            passes_done += num_jobs


@dataclass(frozen=True)
class DropoutSchedule:
    """Dropout proportions over a training run, from Kaldi's schedule strings.

    "0,0@0.2,0.5@0.5,0" is piecewise linear in the fraction of the processed data: 0 until 0.2, 0.5
    at 0.5, 0 at the end. "0,0.1,0 lstm*=0,0.3,0" sets a separate schedule for components that match
    a pattern. As in Kaldi, the last match counts, and a schedule without a pattern matches all.

    Example:
        >>> schedule = DropoutSchedule.parse("0,0@0.2,0.5@0.5,0")
        >>> [round(schedule.proportion(fraction), 6) for fraction in (0.1, 0.35, 0.5, 0.75, 1.0)]
        [0.0, 0.25, 0.5, 0.25, 0.0]
    """

    # (pattern, (fraction, proportion) with ascending fractions)
    points: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]

    @classmethod
    def parse(cls, text: str) -> DropoutSchedule:
        """Parse a schedule; raises ConfigError for an invalid one."""
        named = [part.rpartition("=") for part in text.split()]
        if not named:
            raise ConfigError("the dropout schedule is empty; write one such as 0,0@0.2,0.3@0.5,0.")
        return cls(tuple((pattern if sign else "*", _dropout_points(values)) for pattern, sign, values in named))

    def proportion(self, fraction: float, component: str = "") -> float:
        """Return the proportion of a component after a fraction of the data, 0 if none matches."""
        # Kaldi applies all in order, so the last one counts.
        for pattern, points in reversed(self.points):
            if fnmatchcase(component, pattern):
                at = min(max(fraction, 0.0), 1.0)
                left, right = next((a, b) for a, b in pairwise(points) if at <= b[0])
                share = (at - left[0]) / (right[0] - left[0])
                return left[1] + share * (right[1] - left[1])
        return 0.0


def _dropout_points(text: str) -> tuple[tuple[float, float], ...]:
    values = text.split(",")
    points = []
    for index, value in enumerate(values):
        proportion, at, place = value.partition("@")
        # As in Kaldi: the ends are at 0 and 1, a value between them without a fraction at 0.5.
        default = 0.0 if index == 0 else 1.0 if index == len(values) - 1 else 0.5
        try:
            points.append((float(place) if at else default, float(proportion)))
        except ValueError:
            raise ConfigError(f"the dropout schedule {text!r} has {value!r}; write a proportion or "
                              "proportion@fraction.") from None
    fractions = [fraction for fraction, _ in points]
    rises = all(a < b for a, b in pairwise(fractions))
    if len(points) < 2 or fractions[0] != 0.0 or fractions[-1] != 1.0 or not rises or any(not 0.0 <= p < 1.0 for _, p in points):
        raise ConfigError(f"the dropout schedule {text!r} must begin at 0 and end at 1, with at "
                          "least two proportions from 0 to below 1 at ascending fractions.")
    return tuple(points)
