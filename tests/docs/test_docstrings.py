"""The examples in docstrings print the results shown."""

from __future__ import annotations

import doctest
import glob
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# pytest's own option for this imports every module of every package in every process
FILES = [Path(name) for name in sorted(glob.glob("ngsgd/**/*.py", root_dir=ROOT, recursive=True))
         if ">>> " in (ROOT / name).read_text(encoding="utf-8")]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_an_example_gives_what_it_says(file: Path) -> None:
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0


def test_examples_are_found() -> None:
    assert len(FILES) >= 15
