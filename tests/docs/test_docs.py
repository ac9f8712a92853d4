"""Commands in the pages can be given, tables are those of the tests, and the site builds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ngsgd.launcher import reference
from ngsgd.launcher.config import compose
from ngsgd.launcher.help import COMMANDS
from tests import entries
from tests.docs.pages import FENCE, ROOT, name
from tests.docs.pages import PAGES as ALL_PAGES

PAGES = [page for page in ALL_PAGES if page.name not in ("RESULTS.md", "CHANGELOG.md")]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_in_the_pages_can_be_given(page: Path) -> None:
    """Commands and flags exist, and settings compose; run folders need not exist."""
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
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "console", "bash", "sh")]
    blocks.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    command = re.compile(r"^(?:\S+=\S+ )*(?:\.venv/bin/)?ngsgd ([a-z]+(?: .+)?)$")
    found = [match[1] for line in lines if (match := command.match(line.strip()))]
    return [line for line in found if not line.startswith(("[", "|"))]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "settings" / "index.html").is_file()


def test_every_test_named_by_the_fault_tests_page_exists() -> None:
    page = (ROOT / "docs" / "fault-tests.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| [HML]\d+ \|", line)]
    assert [row.split("|")[1].strip() for row in rows] == [
        *(f"H{n}" for n in range(1, 10)), *(f"M{n}" for n in range(1, 14)), *(f"L{n}" for n in range(1, 8))]
    for row in rows:
        path = None
        for cited in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1]):
            if cited.startswith("python"):
                continue
            file, _, test = cited.partition("::") if cited.startswith("tests/") else ("", "", cited)
            path = ROOT / file if file else path
            assert path is not None and path.is_file(), cited
            assert not test or f"def {test}(" in path.read_text(encoding="utf-8"), cited


def test_the_support_tables_match_the_tests() -> None:
    found = entries.entries()
    for page in entries.pages():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert entries.with_tables(text, page, found) == text, f"{page}: run python -m tests.entries"
