"""Diagnostics of a model on fixed subsets, for the right model in every kind of end."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ngsgd.data.reader import EgsReader, Minibatch
from ngsgd.errors import DamagedArchiveError, RunInterrupted
from ngsgd.pipeline.base_run import ClippedUpdates
from ngsgd.tasks.frame_scores import average_posterior, diagnose, score_subset, summed_loss
from ngsgd.training.storage.audit import audit
from tests.launcher.records import outer_iteration
from tests.toy import Run, StopAfter, config

WEIGHTED = Minibatch(torch.randn(50, 7, generator=torch.Generator().manual_seed(1)), torch.arange(50) % 4,
                     torch.rand(50, generator=torch.Generator().manual_seed(2)))


def reference_log_probs(logits_NP: torch.Tensor, pdf_N: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """ln softmax of each frame's class, in float64."""
    logits = logits_NP.detach().double().numpy()
    return np.array([row[pdf] - np.log(np.exp(row).sum()) for row, pdf in zip(logits, pdf_N.tolist(), strict=True)])


def test_weighted_scores_are_those_of_the_float64_reference() -> None:
    model = nn.Linear(7, 4)
    log_prob_N, weight_N = reference_log_probs(model(WEIGHTED.x_ND), WEIGHTED.pdf_N), WEIGHTED.weight_N
    assert weight_N is not None
    weight = weight_N.double().numpy()
    is_right = (model(WEIGHTED.x_ND).argmax(dim=1) == WEIGHTED.pdf_N).numpy()
    score = score_subset(model, WEIGHTED)
    # float32 logits
    assert score.objf == pytest.approx((weight * log_prob_N).sum() / weight.sum(), rel=1e-6)
    assert score.accuracy == pytest.approx((weight * is_right).sum() / weight.sum(), rel=1e-12)


def test_a_weight_of_two_counts_as_the_frame_met_twice() -> None:
    x_ND, pdf_N = WEIGHTED.x_ND.double(), WEIGHTED.pdf_N
    weight_N = (torch.arange(50) % 3).double()
    model = nn.Linear(7, 4).double()
    repeated = torch.repeat_interleave(torch.arange(50), weight_N.long())
    gradients = [torch.autograd.grad(loss, model.weight)[0] for loss in (
        summed_loss(model(x_ND), pdf_N, weight_N), summed_loss(model(x_ND[repeated]), pdf_N[repeated], None))]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)  # float64 sums in another order


@torch.no_grad()
def set_biases(layer: nn.Module, num_dead: int) -> None:
    """The first units never fire, the others always do."""
    assert isinstance(layer.bias, nn.Parameter)
    layer.bias[:num_dead] = -1e6
    layer.bias[num_dead:] = 10.0


def test_units_that_never_fire_are_counted() -> None:
    model = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 4))
    set_biases(model[0], 3)
    found = diagnose(model, WEIGHTED, WEIGHTED, [0, 2])
    assert found.figures["dead_units/1"] == 3 / 8
    recognised = torch.isin(model(WEIGHTED.x_ND).argmax(dim=1), torch.tensor([0, 2])).double().mean()
    assert found.figures["silence/recognised"] == float(recognised)
    assert found.figures["silence/labelled"] == 25 / 50
    assert found.train == score_subset(model, WEIGHTED)


def test_a_channel_is_dead_when_it_is_so_everywhere() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 7)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 4))
    set_biases(model[1], 1)
    assert diagnose(model, WEIGHTED, WEIGHTED).figures == {"dead_units/2": 1 / 4}


def test_every_record_has_the_scores_of_its_own_model(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.store.num_to_keep = 100
    run.train()
    assert [record.outer_iter for record in run.recorder.records] == list(range(run.schedule.num_outer_iters))
    for record in run.recorder.records:
        checkpoint = run.store.load(run.store.directory / f"iter-{record.outer_iter:06d}")
        run.store.layout.load(run.model, checkpoint.parameters)
        assert record.train == score_subset(run.model, run.reader.diagnostic("train"))
        assert record.valid == score_subset(run.model, run.reader.diagnostic("valid"))
        assert record.diagnostics.keys() == {"dead_units/nonlinearity1", "dead_units/nonlinearity2"}


def test_a_stopped_run_has_logged_every_committed_outer_iteration(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(RunInterrupted):
        run.train(stop=StopAfter(3))
    latest, _ = run.store.latest()
    assert latest is not None and latest.progress.outer_iter < run.schedule.num_outer_iters - 1
    assert [record.outer_iter for record in run.recorder.records] == list(range(latest.progress.outer_iter + 1))


def test_the_prior_can_do_without_a_damaged_archive(tmp_path: Path) -> None:
    run = Run(tmp_path)
    expected = average_posterior(run.model, EgsReader(run.egs), 10_000)
    damage(run.egs, 1)
    with pytest.raises(DamagedArchiveError):
        average_posterior(run.model, EgsReader(run.egs), 10_000)
    found = average_posterior(run.model, EgsReader(run.egs), 10_000, skip_damaged=True)
    assert found.sum() == pytest.approx(1.0) and np.allclose(found, expected, atol=0.02)
    for archive in range(run.reader.info.num_archives):
        damage(run.egs, archive)
    with pytest.raises(DamagedArchiveError):
        average_posterior(run.model, EgsReader(run.egs), 10_000, skip_damaged=True)


def damage(egs: Path, archive: int) -> None:
    path = egs / f"egs.{archive:04d}.safetensors"
    path.write_bytes(path.read_bytes()[:-5])


def quarantining(**changes: Any) -> Any:
    return config(egs=dataclasses.replace(config().egs, on_corrupt="quarantine", **changes))


def test_a_run_continues_without_a_damaged_archive_if_configured(tmp_path: Path) -> None:
    run = Run(tmp_path, quarantining())
    damage(run.egs, 1)
    end = run.train()
    assert [incident.what for incident in run.recorder.incidents] == ["archive_quarantined"]
    assert "archive 1" in run.recorder.incidents[0].message
    left_out = sum(run.reader.info.num_rows[1])
    assert end.progress.frames_processed == 3600 - left_out
    assert {piece.shard.archive for piece in end.progress.quarantined} == {1}
    assert audit(run.ledger_path) == []
    assert len(end.progress.quarantined) == 4  # one pass for each frame of its examples


def test_a_damaged_archive_ends_a_run_by_default(tmp_path: Path) -> None:
    run = Run(tmp_path)
    damage(run.egs, 1)
    with pytest.raises(DamagedArchiveError, match=r"egs\.0001\.safetensors"):
        run.train()
    assert run.recorder.incidents == []


@pytest.mark.parametrize(("shares", "num_warnings"), [
    ((1.0, 0.6, 1.0, 0.3), 0), ((0.6, 0.65, 0.5), 0), ((0.5, 1.0, 0.95), 1),
    ((1.0, 1.0, 1.0, 0.2, 1.0, 1.0), 1)])
def test_two_outer_iterations_of_shortened_updates_warn_once(
        shares: tuple[float, ...], num_warnings: int) -> None:
    found: list[str] = []
    tracker = ClippedUpdates(found.append)
    for number, share in enumerate(shares):
        record = outer_iteration(number)
        jobs = tuple(replace(job, max_change_share=share) for job in record.jobs)
        tracker.outer_iteration(replace(record, jobs=jobs))
    assert len(found) == num_warnings
