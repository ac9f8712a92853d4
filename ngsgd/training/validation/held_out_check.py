"""The averaged model on a few held-out frames, before it is committed.

The frames are a fixed part of the held-out diagnostic subset.  One forward pass over 128 frames
costs about a quarter of a training minibatch of 128, so an outer iteration of 125 minibatches
(16000 frames) gets 0.2 to 0.3 % longer (measured for 0.3 and 28 million parameters).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from ngsgd.data.reader import Minibatch
from ngsgd.models.growing import set_stage
from ngsgd.models.growth_stages import Stage
from ngsgd.training.diagnostics.subset_scores import score_subset
from ngsgd.training.parameter_vector import Layout, Vector

NUM_FRAMES = 128
_LOOK_CLOSER = 0.25  # of the tolerance: after such a drop each result is scored, which costs little


class HeldOutCheck:
    """Scores parameters in a model of its own, and remembers the score of the last committed ones.

    With a sequence objective (`is_frame_wise` False) the objf of single frames is not trained.
    Results are still compared with each other by it after a drop beyond the tolerance, but a drop
    of the average is not divergence.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        subset: Minibatch,
        num_classes: int,
        tolerance: float,
        *,
        is_frame_wise: bool,
    ) -> None:
        self.tolerance = tolerance  # nats per frame
        self._model, self._layout = model, layout
        self._subset = _thinned(subset)
        self._guessing = -math.log(num_classes)
        self._is_frame_wise = is_frame_wise
        self._stage: Stage | None = None
        self._before: float | None = None

    def begin(self, committed: Vector, stage: Stage) -> None:
        """Scores the model that an outer iteration began with, unless its score is known."""
        if self._before is None or stage != self._stage:
            self._stage = stage
            self._before = self.score(committed)

    def commit(self, objf: float) -> None:
        """The model of that score is the one to compare with from now on."""
        self._before = objf

    def score(self, parameters: Vector) -> float:
        """Objf per frame; -Inf where it is not finite."""
        assert self._stage is not None
        set_stage(self._model, self._stage)
        self._layout.load(self._model.eval(), parameters)
        objf = score_subset(self._model, self._subset).objf
        return objf if math.isfinite(objf) else -math.inf

    def is_suspect(self, objf: float, *, is_expensive: bool) -> bool:
        """Whether each result should be scored alone; expensive: they lie in the workers."""
        assert self._before is not None
        share = _LOOK_CLOSER if self._is_frame_wise and not is_expensive else 1.0
        return self._before - objf > self.tolerance * share

    def failure(self, objf: float) -> str:
        """Why a model of this score is not committed; empty if it may be.

        A model that is better than guessing by more than the tolerance may not lose more than the
        tolerance in one outer iteration.  Earlier, the first steps may end below guessing, but not
        twice as bad (as for the objf of jobs).
        """
        assert self._before is not None
        if objf == -math.inf:
            return "its held-out objf is not finite"
        if not self._is_frame_wise or self._before - objf <= self.tolerance:
            return ""
        fell = (f"its held-out objf fell from {self._before:.3f} to {objf:.3f}, "
                f"more than {self.tolerance:g}")
        if self._before > self._guessing + self.tolerance:
            return fell
        return (
            f"{fell}, and is more than twice that of guessing, {self._guessing:.3f}"
            if objf < 2.0 * self._guessing
            else ""
        )

    def judge(self, scores: dict[int, float]) -> dict[int, str]:
        """By job: why it is rejected: it fails by itself, or is one of few far below the best."""
        best = max(scores.values())
        low = {
            job: f"its held-out objf {objf:.3f} is more than {self.tolerance:g} below that of the "
            f"best result, {best:.3f}"
            for job, objf in scores.items()
            if best - objf > self.tolerance
        }
        if len(low) * 2 > len(scores):  # most are: then the best is the exception
            low = {}
        return low | {job: reason for job, objf in scores.items() if (reason := self.failure(objf))}


def _thinned(subset: Minibatch) -> Minibatch:
    """At most NUM_FRAMES frames, evenly spaced, since neighbors may be of one utterance."""
    count = len(subset.pdf_N)
    chosen = torch.linspace(0, count - 1, min(count, NUM_FRAMES)).long()
    return Minibatch(
        subset.x_ND[chosen],
        subset.pdf_N[chosen],
        None if subset.weight_N is None else subset.weight_N[chosen],
    )
