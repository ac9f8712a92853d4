"""A command line of `ngsgd`, run in this process."""

from __future__ import annotations

import pytest

from ngsgd.launcher import cli
from tests.launcher.records import Command, Printed


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run a command line, which must end with `code`; return everything that was printed."""
    def run(*words: str, code: int = 0) -> Printed:
        assert cli.main(list(words)) == code
        return Printed(*capsys.readouterr())

    return run
