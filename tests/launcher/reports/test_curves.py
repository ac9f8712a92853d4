"""Pictures from the lines of events.jsonl."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ngsgd.launcher.reports.figures import draw
from tests.launcher.records import outer_iteration


def events(count: int) -> list[dict[str, Any]]:
    return [{"event": "outer_iteration", **asdict(record), "max_change_share": 0.1, "max_param_change_share": 0.0}
            for record in map(outer_iteration, range(count))]


@pytest.mark.slow
def test_draw_writes_a_picture_and_leaves_no_draft(tmp_path: Path) -> None:
    draw([*events(5), events(3)[2], {"event": "finished"}], tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_without_outer_iterations_has_no_picture(tmp_path: Path) -> None:
    draw([{"event": "incident"}], tmp_path / "curve.png")
    assert list(tmp_path.iterdir()) == []
