"""The examples of docs/preconditioners.md run, in their order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "preconditioners.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    # a loop, without a closure, ASDL's interface, its five cases, several processes
    assert len(examples) == 5
    exec("\n".join(examples), {"__name__": "docs"})
    assert float(capsys.readouterr().out) < 1.4   # log 5 = 1.6 at the start
