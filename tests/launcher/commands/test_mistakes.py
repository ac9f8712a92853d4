"""Wrong command lines end with their exit code, and with a message that holds the right key or
command.
"""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from ngsgd.launcher import cli
from tests.launcher.commands.mistakes import MISTAKES, PAGE, Mistake, with_table


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.line)
def test_a_mistake_has_its_exit_code_and_names_the_next_step(
        mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    if mistake.missing:
        monkeypatch.setitem(sys.modules, mistake.missing, None)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as used:
        line = mistake.line.replace("5000", str(used.getsockname()[1]))
        assert cli.main(shlex.split(line)[1:]) == mistake.exit_code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [word for word in mistake.suggested if word not in printed.err] == []
    # one message: every line of it is marked, and none is a traceback; a wait may come before it
    assert all(line.startswith("ngsgd: ") for line in printed.err.splitlines() if not line.endswith(" ..."))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mlflow.db", "runs"]


def test_the_page_lists_these_mistakes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m tests.entries"
