"""Some of the drawn faults of the exchange among workers; all: `tests.chaos.exchange_draws`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.exchange_draws import Draw, problems_of

# an owner killed inside, cut after and stopped before an operation, and a coordinator killed
SEEDS = [2, 15, 8, 13]


@pytest.mark.faults
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_fault_of_the_exchange_changes_no_bit(seed: int, tmp_path: Path) -> None:
    assert problems_of(seed, tmp_path) == []


def test_the_slice_has_every_kind_of_fault() -> None:
    draws = [Draw.of(seed) for seed in SEEDS]
    assert {draw.how for draw in draws} == {"kill", "stop", "cut"}
    assert {draw.when for draw in draws} == {"before", "inside", "after"}
    assert {draw.who for draw in draws} >= {"owner", "coordinator"}
