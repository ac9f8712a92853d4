"""The examples of docs/curvature.md run, in their order, as one program."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


def test_the_examples_of_the_documentation_run(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "curvature.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 5
    exec("\n".join(examples), {"__name__": "docs"})
    printed = capsys.readouterr().out
    assert "torch.Size([64, 64, 3])" in printed and "torch.Size([192, 192])" in printed
    assert "torch.Size([128, 40]) torch.Size([32, 32])" in printed
