"""The fault matrix: everything that can break, at every point, with real signals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.cases import BEYOND, MATRIX, Case
from tests.chaos.trials import try_case


def _parameters(found: tuple[Case, ...]) -> list[object]:
    return [pytest.param(case, id=str(case), marks=() if case.is_quick else pytest.mark.only_when_asked) for case in found]


@pytest.mark.faults
@pytest.mark.parametrize("case", _parameters(tuple(case for case in (*MATRIX, *BEYOND) if case.who not in ("ray", "service"))))
def test_nothing_is_lost(case: Case, tmp_path: Path) -> None:
    try_case(case, tmp_path)


def test_the_matrix_is_complete_and_every_run_covers_every_row_and_column() -> None:
    assert len(MATRIX) == len({str(case) for case in MATRIX}) == 138
    quick = [case for case in MATRIX if case.is_quick]
    assert len(quick) >= 40
    at_all_times = {case for case in MATRIX if case.who not in ("ray", "combined")}
    assert {(case.who, case.when) for case in quick} >= {(case.who, case.when) for case in at_all_times}
    assert {(case.who, case.how) for case in quick} >= {(case.who, case.how) for case in at_all_times}
