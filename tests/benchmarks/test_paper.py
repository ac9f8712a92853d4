"""benchmarks/paper/RESULTS.md matches the results of the runs, and its commands run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper import frontier, many_jobs, report
from benchmarks.paper.cells import CONTROLS, DILOCO, REMEDIES, TASKS, Cell
from benchmarks.paper.runs import known, run

ROOT = Path(__file__).parents[2]
_SMALL = ("data.train_minutes=1", "data.valid_minutes=0.3", "data.test_minutes=0.3", "schedule.num_epochs=1",
          "egs.samples_per_iter=512", "model.num_layers=2", "model.hidden_dim=64")


@pytest.mark.parametrize("task", list(TASKS))
def test_a_line_of_results_has_the_key_of_its_settings(task: str) -> None:
    """Else the page would show runs of settings that are not those of today's commands."""
    for line in known(task).values():
        assert Cell(**{field.name: line[field.name] for field in fields(Cell)}).key() == line["key"]


@pytest.mark.slow
def test_the_page_matches_the_results(tmp_path: Path) -> None:
    kept = (ROOT / "benchmarks" / "paper" / "RESULTS.md").read_text(encoding="utf-8")
    page = tmp_path / "results.md"
    page.write_text(kept, encoding="utf-8")
    report.write(page, tmp_path)
    assert page.read_text(encoding="utf-8") == kept, "benchmarks/paper/RESULTS.md: run python -m benchmarks.paper report"


@pytest.mark.parametrize("task", ["an4-relu", "digits"])
def test_the_rate_of_a_row_is_the_best_on_validation(task: str) -> None:
    """Of all rates that its optimizer and outer optimizer have run with as many jobs and seed 0."""
    page = (ROOT / "benchmarks" / "paper" / "RESULTS.md").read_text(encoding="utf-8")
    table = page.partition(f"<!-- {task} many jobs -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in table.splitlines()[4:] if line]
    lines = [*known(task).values()]
    assert rows
    for jobs, method, outer, rate, *_ in rows:
        assert float(rate.rstrip("*")) == many_jobs.best_so_far(lines, (method, outer), int(jobs))


def test_a_point_of_the_frontier_has_its_best_rate_and_other_seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: dict[str, dict[str, Any]] = {}
    best = {"adamw-plain": 0.0005, "online-ng": 0.008}

    def run_all(cells: Iterable[Cell], work: Path, source: str) -> None:
        for cell in cells:
            distance = abs(math.log2(cell.rate / best[cell.method]))
            objf = -0.8 + 0.05 * (cell.method == "online-ng") - 0.1 * distance + 0.001 * cell.seed
            found[cell.key()] = {**asdict(cell), "key": cell.key(), "valid_objf": objf, "valid_wer_percent": 11.0,
                                 "wer_percent": 10.0, "outer_iters": 28}
    monkeypatch.setattr(many_jobs, "known", lambda _: found)
    for module in (frontier, many_jobs):
        monkeypatch.setattr(module, "run_all", run_all)
    ours = "NG-SGD + nesterov 0.5"
    frontier.measure([DILOCO, ours], 16, 2048, tmp_path, "")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in
            frontier.table(lambda lines, key, digits: f"{min(line[key] for line in lines):.{digits}f}").splitlines()[2:]]
    assert [row[:5] for row in rows] == [["16", "28", ours, "0.008", "-0.749"], ["16", "28", DILOCO, "0.0005", "-0.799"]]
    assert float(rows[0][6]) < 1e-6
    assert rows[1][6] == ""
    assert {line["seed"] for line in found.values()} == {0, *frontier.SEEDS}


def test_pairs_of_optimizers_get_the_best_rate_for_their_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    best, found = {"online-ng": 0.004, "muon-plain": 0.001}, dict[str, dict[str, Any]]()

    def trained(cell: Cell) -> dict[str, Any]:
        objf = -0.7 - 0.1 * abs(math.log2(cell.rate / best[cell.method])) - 0.05 * (cell.method == "online-ng")
        result = {"diverged": True} if cell.rate > 0.01 else {"valid_objf": objf, "wer_percent": 10.0, "valid_wer_percent": 11.0}
        return found.setdefault(cell.key(), {**asdict(cell), "key": cell.key(), **result})
    monkeypatch.setattr(many_jobs, "known", lambda _: found)
    pairs = [(method, "average") for method in best]
    assert many_jobs.best_rate("an4-relu", pairs[0], 16, many_jobs.stored("an4-relu")) is None
    assert [many_jobs.swept("an4-relu", pair, 16, trained) for pair in pairs] == [0.004, 0.001]
    assert many_jobs.best_pairs("an4-relu", 16) == [(pairs[1], 0.001), (pairs[0], 0.004)]
    rows = many_jobs.table("an4-relu", lambda lines, key, _: f"{lines[0][key]}").splitlines()
    assert rows[2:] == ["| 16 | muon-plain | average | 0.001 | 1 | -0.7 | 11.0 | 10.0 |",
                        "| 16 | online-ng | average | 0.004 | 1 | -0.75 | 11.0 | 10.0 |"]


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
