"""`python -m benchmarks.gpu`: operations, statuses, limits, resumption, page, and a dry run."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ngsgd.ops
from benchmarks.gpu import page, runner
from benchmarks.gpu.measurement import Failed, Measurement, Skipped
from benchmarks.gpu.operations import HOST_ONLY, OPERATIONS, THROUGH_CLASSES
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.roofline import OperationCounter, Peaks

ROOT = Path(__file__).parents[2]


def test_every_public_operation_is_compared_or_runs_on_the_host() -> None:
    known = {*OPERATIONS, *HOST_ONLY}
    missing = []
    for module in pkgutil.iter_modules(ngsgd.ops.__path__):
        if module.ispkg or module.name in {*THROUGH_CLASSES, *known}:
            continue
        found = importlib.import_module(f"ngsgd.ops.{module.name}")
        missing += [f"{module.name}.{name}" for name, one in inspect.getmembers(found, inspect.isfunction)
                    if one.__module__ == found.__name__ and not name.startswith("_")]
    assert sorted(set(missing) - known) == []


def fail(message: str) -> None:
    raise Failed(message)


def test_a_failure_is_recorded_at_once_and_the_next_case_runs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    measurement = Measurement(path, dry_run=True)
    with measurement.case("good") as figures:
        figures["step_ms"] = 1.5
    with measurement.case("wrong"):
        fail("differs by 2")
    with measurement.case("broken"):
        torch.ones(2) @ torch.ones(3)
    with measurement.case("elsewhere"):
        measurement.need_gpu("NCCL")
    with measurement.case("without"):
        measurement.need("torch", "no_such_package")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["status"] for row in rows] == ["passed", "failed", "failed", "skipped", "skipped"]
    assert rows[0]["step_ms"] == 1.5
    assert rows[1]["message"] == "differs by 2"
    assert rows[2]["message"].startswith("RuntimeError")
    assert "no_such_package" in rows[4]["message"]
    with pytest.raises(Skipped):
        measurement.need_gpu("NCCL")


def test_the_roofline_counts_products_and_bytes() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 4)
    with OperationCounter(Peaks(float32=48.0, tf32=1.0, bfloat16=1.0, copy=1e9)) as counter:
        a @ b
        a.view(3, 2)
    counts = counter.counts
    assert (counts.num_operations, counts.flops, counts.num_bytes) == (1, 48.0, 4.0 * (6 + 12 + 8))
    assert counts.roofline_s == pytest.approx(1.0)


def kept(folder: Path) -> dict[str, Any]:
    [path] = folder.glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_one_that_passed_is_skipped(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(PARTS, "steps", Part("steps", "Steps", 0.1, dry_limit_s=0.1))
    assert runner.run(["steps", "decoding"], tmp_path, dry_run=True, seconds=600.0) == 1
    first = kept(tmp_path)["parts"]
    assert first["steps"]["status"] == "timed out"
    assert first["decoding"]["status"] == "passed"
    assert runner.is_finished(kept(tmp_path), "decoding")
    capsys.readouterr()
    assert runner.run(["decoding"], tmp_path, dry_run=True, seconds=0.0) == 0
    assert "finished before" in capsys.readouterr().out
    # no time is left, and earlier results are kept
    assert runner.run(["steps", "exchange"], tmp_path, dry_run=True, seconds=0.0) == 1
    parts = kept(tmp_path)["parts"]
    assert parts.pop("exchange")["status"] == "not run" and parts == first


def test_without_a_gpu_it_names_the_next_step(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert runner.run(["steps"], tmp_path, dry_run=False, seconds=1.0) == 2
    assert "--dry-run" in capsys.readouterr().err


# starts Ray
@pytest.mark.services
def test_the_dry_run_passes(tmp_path: Path) -> None:
    words = ["-m", "benchmarks.gpu", "--dry-run", "--output", str(tmp_path), "--minutes", "20"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True,
                          check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    parts = kept(tmp_path)["parts"]
    assert list(PARTS) == sorted(parts, key=list(PARTS).index)
    assert {part["status"] for part in parts.values()} <= {"passed", "skipped"}
    assert {parts[name]["status"] for name in ("correctness", "steps", "exchange")} == {"passed"}


def test_the_page_is_written_from_the_files() -> None:
    kept = page.PAGE.read_text(encoding="utf-8")
    assert kept == page.text(page.read()), "run python -m benchmarks.gpu --page"


def run_on_a_gpu() -> dict[str, Any]:
    step = {"case": "mlp 512 NG-SGD", "status": "passed", "net": "mlp", "batch": 512,
            "optimizer": "NG-SGD", "step_ms": 1.25, "ratio": 1.04, "of_roofline": 0.31}
    failed = {"case": "NCCL", "status": "failed", "message": "a | b"}
    part = {"key": "k", "commit": "abc1234", "date": "2026-12-01", "wall_s": 3.0}
    return {"format": 1, "dry_run": False,
            "machine": {"device": "Some GPU", "torch": "2.13.0", "cuda": "13.0", "cores": 16},
            "parts": {"steps": {**part, "status": "passed", "cases": [step]},
                      "graphs": {**part, "status": "timed out", "message": "took longer than 60 s", "cases": []},
                      "exchange": {**part, "status": "failed", "cases": [failed]}}}


def table(rendered: str, first: str) -> list[list[str]]:
    """Cells of the rows that begin with this cell."""
    lines = [line for line in rendered.splitlines() if line.startswith("| ")]
    return [row for row in (line.strip("| ").split(" | ") for line in lines) if row[0] == first]


def test_the_page_shows_figures_failures_and_skipped_cases() -> None:
    rendered = page.text([run_on_a_gpu()])
    assert table(rendered, "mlp") == [["mlp", "512", "1.25 (1.04; 31 %)"]]
    [run] = table(rendered, "Some GPU")
    assert run[1:7] == ["2.13.0", "13.0", "2026-12-01", "abc1234", "steps", "graphs, exchange"]
    assert set(run[7].split(", ")) == set(PARTS) - {"steps", "graphs", "exchange"}
    # a bar in a message does not end its cell
    [failed] = table(rendered, "NCCL")
    assert failed[1:] == ["failed", r"a \| b"]
