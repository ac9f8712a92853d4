"""Which jobs each outer iteration runs, on which data, at which learning rate.  Numbers only.

The formulas are those of Kaldi's `steps/nnet3/train_dnn.py` (libs/nnet3/train/common.py,
frame_level_objf/common.py);
the learning-rate and job rules are section 3 and C.1 of arXiv 1410.7455.  An archive of examples
that hold `frames_per_eg` frames each is read `frames_per_eg` times in an epoch, one frame of every
example at a time; one such reading is called a *pass*.  Dropout schedules are written as in Kaldi.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise

from ngsgd.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """What one job reads: one frame of every example in one archive."""

    archive: int  # 0-based
    # 0-based, within each example
    frame: int


@dataclass(frozen=True)
class OuterIteration:
    """The plan of one outer iteration: one shard for each job."""

    outer_iter: int
    shards: tuple[Shard, ...]
    # before this outer iteration
    passes_done: int
    # per frame; what the averaged model moves by
    effective_lr: float
    # of the outer optimiser: how much of the dilution by averaging it makes good itself
    gain: float = 1.0

    @property
    def num_jobs(self) -> int:
        return len(self.shards)

    @property
    def lr_factor(self) -> float:
        """A job's learning rate over the effective one: averaging dilutes its step num_jobs-fold,
        gain makes good a part.
        """
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
    # on these rates, at even distances over the data, geometric between
    lr_factors: tuple[float, ...] = (1.0,)

    @property
    def num_passes(self) -> int:
        """Archive passes in the complete run; one where `num_epochs` is less than that."""
        return max(1, int(self.num_epochs * self.num_archives * self.frames_per_eg))

    @property
    def num_outer_iters(self) -> int:
        # a run of very little data still needs one outer iteration
        return max(1, int(2 * self.num_passes / (self.num_jobs_initial + self.num_jobs_final)))

    def num_jobs(self, outer_iter: int) -> int:
        """Jobs grow linearly from initial to final over the run, rounded to multiples of
        `num_jobs_step`.
        """
        ideal = self.num_jobs_initial + (self.num_jobs_final - self.num_jobs_initial) * outer_iter / self.num_outer_iters
        if ideal <= self.num_jobs_step:
            return int(0.5 + ideal)
        return int(0.5 + ideal / self.num_jobs_step) * self.num_jobs_step

    def effective_lr(self, outer_iter: int, passes_done: int) -> float:
        """Exponential decay in the amount of data processed, times `lr_factors`; the last outer
        iteration has the end of both.
        """
        if outer_iter + 1 >= self.num_outer_iters:
            return self.last_lr
        decay = math.log(self.lr_final / self.lr_initial) / self.num_passes
        return self.lr_initial * math.exp(passes_done * decay) * self._lr_factor(passes_done / self.num_passes)

    @property
    def last_lr(self) -> float:
        """The effective learning rate of the last outer iteration."""
        return self.lr_final * self.lr_factors[-1]

    def _lr_factor(self, fraction: float) -> float:
        """What `lr_factors` say when `fraction` of the data has been processed."""
        at = min(max(fraction, 0.0), 1.0) * (len(self.lr_factors) - 1)
        left = min(int(at), len(self.lr_factors) - 1)
        right = min(left + 1, len(self.lr_factors) - 1)
        ratio = self.lr_factors[right] / self.lr_factors[left]
        return self.lr_factors[left] * math.exp((at - left) * math.log(ratio))

    def shard(self, pass_index: int) -> Shard:
        """The shard of the run's pass number `pass_index`; `frames_per_eg` epochs of archives meet
        every frame once.
        """
        archive = pass_index % self.num_archives
        # Kaldi adds the 1-based archive number: neighbouring archives then show different frames in
        # one outer iteration
        return Shard(archive, (pass_index // self.num_archives + archive + 1) % self.frames_per_eg)

    def outer_iterations(self, first: int = 0) -> Iterator[OuterIteration]:
        """The plans from outer iteration `first` on."""
        passes_done = 0
        for outer_iter in range(self.num_outer_iters):
            num_jobs = self.num_jobs(outer_iter)
            if outer_iter >= first:
                shards = tuple(self.shard(passes_done + job) for job in range(num_jobs))
                yield OuterIteration(outer_iter, shards, passes_done,
                                     self.effective_lr(outer_iter, passes_done))
            passes_done += num_jobs


@dataclass(frozen=True)
class DropoutSchedule:
    """Dropout proportions over a training run, from Kaldi's schedule strings.

    "0,0@0.2,0.5@0.5,0" is piecewise linear in the fraction of the data that has been processed: 0
    until 0.2, up to 0.5 at 0.5, down to 0 at the end.  The first and the last value stand at 0 and
    1; a single value between them without @ stands at 0.5.  "0,0.1,0 lstm*=0,0.3,0" gives the
    components whose name fits a pattern a schedule of their own; the last pattern that fits is
    used, as in Kaldi, and a schedule without a pattern fits all.

    >>> schedule = DropoutSchedule.parse("0,0@0.2,0.5@0.5,0")
    >>> [round(schedule.proportion(fraction), 6) for fraction in (0.1, 0.35, 0.5, 0.75, 1.0)]
    [0.0, 0.25, 0.5, 0.25, 0.0]
    """

    # (pattern, (fraction, proportion) rising in fraction)
    points: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]

    @classmethod
    def parse(cls, text: str) -> DropoutSchedule:
        """Raises ConfigError for what is no schedule."""
        named = [part.rpartition("=") for part in text.split()]
        if not named:
            raise ConfigError("the dropout schedule is empty; write one such as 0,0@0.2,0.3@0.5,0.")
        return cls(tuple((pattern if sign else "*", _dropout_points(values))
                         for pattern, sign, values in named))

    def proportion(self, fraction: float, component: str = "") -> float:
        """The proportion of `component` when `fraction` (0 to 1) of the data has been processed; 0
        if no pattern fits.
        """
        # Kaldi carries all out in order, so the last one stands
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
        # as in Kaldi: ends stand at 0 and 1; between them a value without a place stands at 0.5
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
                          "least two proportions from 0 to below 1 at rising fractions.")
    return tuple(points)
