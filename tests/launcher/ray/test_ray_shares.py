"""How GPUs are divided among the workers of a Ray cluster."""

from __future__ import annotations

import pytest

from ngsgd.launcher.ray.cluster import gpu_share


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("num_workers", [1, 2, 7, 8, 16, 48, 100])
def test_all_workers_find_room_and_no_gpu_has_more_than_its_part(num_gpus: int, num_workers: int) -> None:
    """As Ray counts: in ten-thousandths, and a share never spans two GPUs."""
    units = round(1e4 * gpu_share(num_gpus, num_workers))
    room_on_one = 10_000 // units
    assert num_gpus * room_on_one >= num_workers, "somebody would wait for ever"
    assert room_on_one == -(-num_workers // num_gpus), "more than the even part would fit onto one"


def test_without_gpus_none_is_asked_for() -> None:
    assert gpu_share(0.0, 4) == 0.0
