"""The optimizer track: rule, data, runs and page; and the rates of docs/preconditioners.md."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.learning import Frames
from benchmarks.preconditioner_rates import best, held_out_loss
from benchmarks.track import board, rule
from benchmarks.track.entries import ENTRIES
from benchmarks.track.tasks import MINIBATCH, minibatches
from benchmarks.track.training import SCHEDULES, Entry, make_step
from ngsgd.config import ModelConfig
from ngsgd.models import build_model

ROOT = Path(__file__).parents[2]


def test_a_mean_counts_if_it_is_z_standard_errors_below_the_target() -> None:
    losses = [0.70, 0.72, 0.71, 0.71]
    assert rule.z_of(losses, target=0.72, least=0.0) == pytest.approx(0.01 * 2 / np.std(losses, ddof=1))
    # equal seeds do not prove a small deviation
    assert rule.z_of([0.71] * 4, target=0.72, least=0.01) == pytest.approx(2.0)
    assert rule.p_value(rule.Z) == pytest.approx(0.001, rel=1e-2)
    assert rule.z_of([0.5, math.inf], target=0.72, least=0.01) == -math.inf


def test_a_length_whose_first_seeds_miss_the_target_is_given_up() -> None:
    seen: list[int] = []

    def loss(seed: int) -> float:
        seen.append(seed)
        return 0.8
    assert not rule.counts(loss, target=0.75, least=0.01)
    assert len(seen) == rule.MIN_SEEDS


@pytest.mark.parametrize("best", [0.001, 0.004, 0.0057, 0.03])
def test_the_sweep_finds_the_best_rate_within_its_number_of_runs(best: float) -> None:
    rates: list[float] = []

    def loss(rate: float) -> float:
        rates.append(rate)
        return abs(math.log2(rate / best))
    found = rule.sweep(0.004, loss)
    assert abs(math.log2(found / best)) <= 0.5
    assert len(rates) == len(set(rates)) <= rule.MAX_SWEEP_RUNS


@pytest.mark.parametrize("needed", [0, rule.LENGTHS[0], 700, rule.SWEEP_STEPS, rule.SWEEP_STEPS + 1, 3000, rule.LENGTHS[-1]])
def test_the_search_finds_the_shortest_length(needed: int) -> None:
    wanted = next(steps for steps in rule.LENGTHS if steps >= needed)
    assert rule.shortest(lambda steps: steps >= needed) == wanted
    assert rule.shortest(lambda steps: False) is None


def _frames(num_frames: int = 600) -> Frames:
    random = np.random.default_rng(0)
    features, pdfs = random.standard_normal((num_frames, 3), np.float32), random.integers(0, 5, num_frames)
    return Frames.of(features, pdfs.astype(np.int32), np.array([0, 200, num_frames]), 5, left=1, right=2)


def test_windows_repeat_the_frames_at_the_edges_of_an_utterance() -> None:
    frames = _frames()
    x_NW, pdfs_N = frames.minibatch(torch.tensor([0, 199, 200]))
    plain, _ = frames.minibatch(torch.arange(600))
    own = plain.view(600, 4, 3)[:, 1]
    expected = [[0, 0, 1, 2], [198, 199, 199, 199], [200, 200, 201, 202]]
    torch.testing.assert_close(x_NW.view(3, 4, 3), own[torch.tensor(expected)])
    assert pdfs_N.tolist() == frames.pdfs_T[[0, 199, 200]].tolist()


def test_the_order_of_the_frames_depends_on_the_seed_only() -> None:
    frames = _frames()
    first, again, other = ([pdfs.tolist() for _, pdfs in minibatches(frames, 5, seed)] for seed in (1, 1, 2))
    assert first == again != other
    assert all(len(pdfs) == MINIBATCH for pdfs in first)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_begin_and_end_with_small_rates_or_decay(name: str) -> None:
    rates = [SCHEDULES[name](part) for part in np.linspace(0.0, 1.0, 101)]
    assert max(rates) <= 1.0 + 1e-9
    assert rates[-1] <= 0.1 + 1e-9


def test_names_and_settings_of_entries_are_unique() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert len({(entry.settings, entry.schedule, entry.tail) for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_trains(entry: Entry) -> None:
    model = build_model(ModelConfig(kind="relu", num_layers=2, hidden_dim=16), 12, 5, 0)
    step = make_step(model, entry, 0)
    x_NW, pdfs_N = torch.randn(64, 12, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 5
    losses = [float(step(x_NW, pdfs_N, entry.rate)) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_the_page_matches_the_results(tmp_path: Path) -> None:
    kept = (ROOT / "benchmarks" / "track" / "RESULTS.md").read_text(encoding="utf-8")
    page = tmp_path / "results.md"
    page.write_text(kept, encoding="utf-8")
    board.write(page)
    assert page.read_text(encoding="utf-8") == kept, "benchmarks/track/RESULTS.md: run python -m benchmarks.track board"


def test_the_best_rate_is_one_that_does_not_diverge() -> None:
    small = {"num_steps": 5, "width": 8}
    assert held_out_loss("kfac", 1e6, 0, **small) == float("inf")
    assert best("kfac", rates=(0.001, 1e6), seeds=(0,), **small).startswith("0.001 |")
