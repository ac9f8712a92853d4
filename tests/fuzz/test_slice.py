"""A small part of every campaign of `make fuzz`, in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz import interposer
from tests.fuzz.report import results_of

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(interposer.compiler() is None,
                       reason="no C compiler: the library that injects faults cannot be built"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By campaign: the number of cases, and the problems of each."""
    return results_of(["slice"], tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("campaign", ["crash (kill)", "damage", "power cut", "two resumes"])
def test_nothing_is_lost_or_wrong(results: dict[str, Any], campaign: str) -> None:
    assert results[campaign]["cases"] > 0
    assert results[campaign]["problems"] == {}
