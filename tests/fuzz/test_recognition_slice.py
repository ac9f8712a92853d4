"""A small part of the campaigns of damaged recordings and bundles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.report import results_of


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "cases"), [("audio", 24), ("bundles", 36)])
def test_every_damage_ends_with_words_or_one_message(
        campaign: str, cases: int, tmp_path: Path) -> None:
    found = results_of([campaign, "--cases", str(cases)], tmp_path, OMP_NUM_THREADS="1")[campaign]
    assert found["problems"] == {} and found["cases"] >= cases
