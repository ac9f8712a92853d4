"""The average posterior that decoding divides by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ngsgd.schedules import Shard
from ngsgd.tasks import frame_scores as subset_scores
from tests import toy


class Fussy(nn.Linear):
    """Does not take a minibatch without rows, as many a module."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name is torch's
        assert len(input)
        return super().forward(input)


@pytest.mark.parametrize("num_frames", [1, 64, 100, 128, 1000])
def test_priors_are_the_mean_posterior_of_so_many_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_frames: int) -> None:
    monkeypatch.setattr(subset_scores, "_ROWS_AT_ONCE", 64)
    reader = toy.Run(tmp_path).reader
    model = Fussy(reader.info.num_inputs, toy.NUM_CLASSES)
    prior_P = subset_scores.average_posterior(model, reader, num_frames)
    rows = torch.cat([x_ND for archive in range(reader.info.num_archives)
                      for x_ND, *_ in reader.minibatches(Shard(archive, 0), 64, seed=0, outer_iter=0, job=0)])[:num_frames]
    expected = model(rows).softmax(dim=1).double().mean(dim=0).detach().numpy()
    np.testing.assert_allclose(prior_P, expected, rtol=1e-6)  # sums of float32 posteriors
