"""docs/results.md matches the results of the runs, and its commands run."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks.paper import report
from benchmarks.paper.cells import CONTROLS, REMEDIES, TASKS, Cell
from benchmarks.paper.runs import known, run

ROOT = Path(__file__).parents[2]
_SMALL = ("data.train_minutes=1", "data.valid_minutes=0.3", "data.test_minutes=0.3", "schedule.num_epochs=1",
          "egs.samples_per_iter=512")


@pytest.mark.parametrize("task", list(TASKS))
def test_a_line_of_results_has_the_key_of_its_settings(task: str) -> None:
    """Else the page would show runs of settings that are not those of today's commands."""
    for line in known(task).values():
        assert Cell(**{field.name: line[field.name] for field in fields(Cell)}).key() == line["key"]


@pytest.mark.slow
def test_the_page_matches_the_results(tmp_path: Path) -> None:
    kept = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    page = tmp_path / "results.md"
    page.write_text(kept, encoding="utf-8")
    report.write(page)
    assert page.read_text(encoding="utf-8") == kept, "docs/results.md: run python -m benchmarks.paper report"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "outer"), [("online-ng", next(iter(REMEDIES))), ("adam", next(iter(CONTROLS)))])
def test_a_cell_of_averaging_and_of_synchronous_training_runs(method: str, outer: str,
                                                              tmp_path_factory: pytest.TempPathFactory) -> None:
    """In small; the corpus is made once."""
    work = tmp_path_factory.getbasetemp() / "paper"
    line = run(Cell("digits", method, outer, 4, 0, 0.001), work, "", also=_SMALL)
    assert line["frames"] > 0
    assert line["valid_objf"] < 0
    assert 0 < line["wer_percent"] <= 100


