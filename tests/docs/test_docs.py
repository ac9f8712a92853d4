"""The pages: what is made from the code is as the code is, commands can be given, examples run, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ngsgd.config.build import paths
from ngsgd.launcher import reference
from ngsgd.launcher.config import compose, describe
from ngsgd.launcher.help import COMMANDS
from tests import entries

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*/README.md"))]
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def test_the_reference_is_what_the_code_says() -> None:
    """The list of options is frozen by this page: `make reference` writes it anew, and the difference is reviewed."""
    for name, text in reference.pages().items():
        kept = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert kept == text, f"docs/reference/{name}: run make reference"


def test_every_option_is_in_the_reference_with_a_help_text() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert [path for path in paths() if f"| `{path}` |" not in page] == []
    assert [one.path for one in describe.options()] == paths()
    assert [one.path for one in describe.options() if len(one.help) < 10] == []


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_in_the_pages_can_be_given(page: Path) -> None:
    """Commands and flags exist, settings compose; whether the run folders exist is not looked at."""
    problems = []
    for line in _command_lines(page):
        words = shlex.split(line, comments=True)
        if not words or words[0] not in COMMANDS:
            problems.append(f"{line}: no such command")
            continue
        flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--") and len(word) > 2]
        problems += [f"{line}: {flag} is not in its help" for flag in flags if flag not in reference.help_of(words[0])]
        settings = [word for word in words[1:] if re.match(r"^[a-z_]+([./][a-z_]+)*=", word)]
        if words[0] in ("train", "plan", "simulate", "align", "submit") and settings:
            check = compose.check_sweep if "-m" in words else compose.compose
            try:
                check(settings)
            except Exception as error:
                problems.append(f"{line}: {error}")
    assert problems == []


def _command_lines(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, body in _FENCE.findall(text) if language in ("", "console", "bash", "sh")]
    blocks.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    found = [match[1] for line in lines if (match := re.match(r"^(?:\S+=\S+ )*(?:\.venv/bin/)?ngsgd (.+)$", line.strip()))]
    return [line for line in found if not line.startswith("[")]


@pytest.mark.parametrize("page", ["README.md", "docs/averaging.md", "docs/natural-gradient.md"])
def test_python_in_the_pages_runs(page: str) -> None:
    """All blocks of a page, one after another, as a reader would paste them."""
    given = "loader = [(torch.randn(8, 40), torch.randint(10, (8,))) for _ in range(3)]\n"
    torch.manual_seed(0)
    names: dict[str, object] = {"torch": torch}
    exec(given, names)
    for language, body in _FENCE.findall((ROOT / page).read_text(encoding="utf-8")):
        if language == "python":
            exec(compile(body, page, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    links = [link.partition("#")[0] for link in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "settings" / "index.html").is_file()


def test_every_test_that_the_fault_tolerance_page_names_is_there() -> None:
    page = (ROOT / "docs" / "fault-tests.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| [HML]\d+ \|", line)]
    assert [row.split("|")[1].strip() for row in rows] == [
        *(f"H{n}" for n in range(1, 10)), *(f"M{n}" for n in range(1, 14)), *(f"L{n}" for n in range(1, 8))]
    for row in rows:
        path = None
        for name in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]):
            if name.startswith("python"):
                continue
            file, _, test = name.partition("::") if name.startswith("tests/") else ("", "", name)
            path = ROOT / file if file else path
            assert path is not None and path.is_file(), name
            assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), name


def test_the_tables_of_what_happens_are_written_from_the_tests() -> None:
    found = entries.entries()
    for page in entries.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert entries.with_tables(text, page, found) == text, f"{page}: run python -m tests.entries"
