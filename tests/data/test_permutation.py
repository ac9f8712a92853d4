"""Permutations without memory: each entry once, and no order left of the positions."""

from __future__ import annotations

import numpy as np
import pytest

from ngsgd.tasks.datasets import Permutation


@pytest.mark.parametrize("size", [*range(1, 20), 63, 64, 65, 1000, 4097])
def test_every_entry_appears_once(size: int) -> None:
    assert sorted(Permutation(size, (3, size)).at(0, size).tolist()) == list(range(size))


def test_any_part_is_that_of_all_entries_and_a_trillion_of_them_need_no_memory() -> None:
    permutation = Permutation(1000, (1,))
    entries = permutation.at(0, 1000)
    assert permutation.at(317, 611).tolist() == entries[317:611].tolist()
    assert permutation.of(np.array([5, 999, 5])).tolist() == entries[[5, 999, 5]].tolist()
    entries = Permutation(10**12, (2,)).at(10**11, 10**11 + 1000)
    assert len(set(entries.tolist())) == 1000
    assert entries.min() >= 0 and entries.max() < 10**12


def test_other_seeds_give_other_orders() -> None:
    orders = [Permutation(500, seed).at(0, 500).tolist() for seed in ((0,), (1,), (0, 0), (0, 1))]
    assert all(one != other for index, one in enumerate(orders) for other in orders[:index])


def test_entries_look_random() -> None:
    size, num_seeds = 128, 400
    entries = np.stack([Permutation(size, (seed,)).at(0, size) for seed in range(num_seeds)])
    # chi-squared of where an entry stands, in 8 x 8 cells: 49 degrees of freedom; 100 is exceeded
    # with a probability of 2e-5
    counts = np.zeros((8, 8))
    np.add.at(counts, (np.tile(np.arange(size) // 16, num_seeds), entries.ravel() // 16), 1)
    expected = counts.sum() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 100
    # neighbors are as far apart as two random entries, size / 3 in the mean; the standard error of
    # the mean over 400 permutations is below 0.15
    assert abs(np.abs(np.diff(entries)).mean() - (size + 1) / 3) < 1.0


@pytest.mark.parametrize(("first", "stop"), [(-1, 2), (3, 2), (0, 11)])
def test_positions_outside_are_refused(first: int, stop: int) -> None:
    with pytest.raises(IndexError):
        Permutation(10, (0,)).at(first, stop)
    with pytest.raises(ValueError, match="entry"):
        Permutation(0, (0,))
