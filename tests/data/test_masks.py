"""SpecAugment's masks on the windows of a minibatch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ngsgd.data.reader import MAX_WIDTHS, mask_windows

WIDTH, DIM = 11, 20


def masked(num_rows: int = 500, seed: int = 0, probability: float = 0.5,
           max_widths: tuple[int, int] = MAX_WIDTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, masked rows) as N x W x D; all values differ, so hidden values can be identified."""
    x_ND = torch.randn(num_rows, WIDTH * DIM, generator=torch.Generator().manual_seed(1))
    found = mask_windows(x_ND, WIDTH, np.random.default_rng(seed), probability=probability, max_widths=max_widths)
    return x_ND.view(-1, WIDTH, DIM), found.view(-1, WIDTH, DIM)


def test_masks_cover_contiguous_frames_and_features() -> None:
    x_NWD, found_NWD = masked(probability=1.0)
    for x_WD, found_WD in zip(x_NWD, found_NWD, strict=True):
        hidden_WD = found_WD != x_WD
        frames, features = hidden_WD.all(dim=1), hidden_WD.all(dim=0)
        assert torch.equal(hidden_WD, frames[:, None] | features[None, :])
        for run, widest in ((frames, MAX_WIDTHS[0]), (features, MAX_WIDTHS[1])):
            places = run.nonzero().flatten()
            assert len(places) <= widest
            assert torch.equal(places, torch.arange(len(places)) + (places[0] if len(places) else 0))
        assert (found_WD[hidden_WD] == x_WD.mean()).all()


def test_widths_and_places_are_uniform_and_rows_are_chosen_with_their_probability() -> None:
    """6000 rows, seed 0; each bound is 5 standard deviations of a binomial count."""
    x_NWD, found_NWD = masked(6000, max_widths=(2, 0))
    hidden_NW = (found_NWD != x_NWD).all(dim=2)
    widths = hidden_NW.sum(dim=1)
    expected = {0: 0.5 + 0.5 / 3, 1: 0.5 / 3, 2: 0.5 / 3}
    for width, share in expected.items():
        assert abs(int((widths == width).sum()) - 6000 * share) < 5 * (6000 * share * (1 - share)) ** 0.5
    first = hidden_NW[widths == 2].float().argmax(dim=1)
    counts = torch.bincount(first, minlength=WIDTH - 1)
    share = 1 / (WIDTH - 1)
    assert len(counts) == WIDTH - 1
    assert (abs(counts - len(first) * share) < 5 * (len(first) * share * (1 - share)) ** 0.5).all()


def test_masks_repeat_with_their_seed_and_do_not_change_the_argument() -> None:
    x_NWD, first = masked()
    assert torch.equal(first, masked()[1])
    assert not torch.equal(first, masked(seed=1)[1])
    assert torch.equal(x_NWD.reshape(500, -1), torch.randn(500, WIDTH * DIM, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("max_widths", "probability"), [(MAX_WIDTHS, 0.0), ((0, 0), 0.5)])
def test_no_masks_are_no_change(max_widths: tuple[int, int], probability: float) -> None:
    x_NWD, found_NWD = masked(probability=probability, max_widths=max_widths)
    assert torch.equal(x_NWD, found_NWD)


def test_a_mask_as_wide_as_the_window_fits() -> None:
    x_NWD, found_NWD = masked(probability=1.0, max_widths=(1000, 1000))
    assert ((found_NWD == x_NWD).flatten(1).all(dim=1)).any() and ((found_NWD != x_NWD).flatten(1).all(dim=1)).any()
