"""The reference is generated from the code and complete, and examples in docstrings run."""

from __future__ import annotations

import doctest
import glob
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

from ngsgd import errors
from ngsgd.config.build import paths
from ngsgd.launcher.config import describe
from tests.docs.pages import ROOT
from tools import python_reference, reference

REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ["ngsgd", "ngsgd.asr", "ngsgd.asr.corpora.corpus", "ngsgd.config", "ngsgd.curvature", "ngsgd.data.archives",
            "ngsgd.hypergrad", "ngsgd.models", "ngsgd.optim", "ngsgd.optim.layers", "ngsgd.optim.outer", "ngsgd.pipeline",
            "ngsgd.pipeline.combination", "ngsgd.preconditioners", "ngsgd.tasks"]

# pytest's own option for this imports every module of every package in every process
FILES = [Path(name) for name in sorted(glob.glob("ngsgd/**/*.py", root_dir=ROOT, recursive=True))
         if ">>> " in (ROOT / name).read_text(encoding="utf-8")]


def _entries() -> list[str]:
    pages = [*REFERENCE.rglob("python*.md"), *(REFERENCE / "python").glob("*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    return re.findall(r"^### (ngsgd\.\S+)$", text, re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_has_an_entry(package: str) -> None:
    module = importlib.import_module(package)
    overview = (REFERENCE / "python.md").read_text(encoding="utf-8")
    entries = set(_entries())
    missing = [name for name in module.__all__ if f"{package}.{name}" not in entries
               and not (inspect.ismodule(getattr(module, name)) and f"`{package}.{name}`" in overview)]
    assert missing == []


def test_every_error_has_an_entry() -> None:
    entries = set(_entries())
    assert [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.NgsgdError)
            and f"ngsgd.errors.{name}" not in entries] == []


def test_every_entry_exists() -> None:
    """The site fails for a name that does not exist; this fails earlier, and without MkDocs."""
    unknown = []
    for entry in _entries():
        package, _, name = entry.rpartition(".")
        try:
            importlib.import_module(entry)
        except ModuleNotFoundError:
            if not hasattr(importlib.import_module(package), name):
                unknown.append(entry)
    assert unknown == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes the names of options in another form since Python 3.13")
def test_generated_pages_are_current() -> None:
    """The pages freeze the options: `make reference` writes them, and changes are reviewed."""
    for name, text in {**reference.pages(), **python_reference.pages(REFERENCE)}.items():
        kept = (REFERENCE / name).read_text(encoding="utf-8")
        assert kept == text, f"docs/reference/{name}: run make reference"


def test_every_option_is_in_the_reference_with_a_help_text() -> None:
    page = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    assert [path for path in paths() if f"| `{path}` |" not in page] == []
    assert [one.path for one in describe.options()] == paths()
    assert [one.path for one in describe.options() if len(one.help) < 10] == []


@pytest.mark.parametrize("file", FILES, ids=str)
def test_an_example_gives_what_it_says(file: Path) -> None:
    module = importlib.import_module(".".join(file.with_suffix("").parts))
    found = doctest.testmod(module)
    assert found.attempted > 0 and found.failed == 0 and len(FILES) >= 15
