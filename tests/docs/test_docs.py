"""Commands in the pages can be given, tables are those of the tests, and the site builds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import entries
from tests.docs.pages import FENCE, ROOT, name
from tests.docs.pages import PAGES as ALL_PAGES
from tests.launcher.commands import mistakes
from tests.suggested import rejection
from tools import reference

# commands of measurements are those of their commit
PAGES = [page for page in ALL_PAGES if page.name not in ("RESULTS.md", "CHANGELOG.md")
         and not page.is_relative_to(ROOT / "benchmarks")]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page != mistakes.PAGE], ids=name)
def test_commands_in_the_pages_can_be_given(page: Path) -> None:
    """The parsers accept them, and settings compose; run folders need not exist."""
    lines = [_until_operator(shlex.split(line, comments=True)) for line in _command_lines(page)]
    assert [f"{shlex.join(words)}: {problem}" for words in lines if (problem := rejection(words))] == []
    for mention in re.findall(r"`ngsgd ([a-z]+ [^`]+)`", FENCE.sub("", page.read_text(encoding="utf-8"))):
        words = mention.split()
        flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
        assert [flag for flag in flags if flag not in reference.help_of(words[0])] == [], mention


def _command_lines(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    blocks = [body for language, body in FENCE.findall(text) if language in ("", "console", "bash", "sh")]
    blocks.append("\n".join(line[4:] for line in text.splitlines() if line.startswith("    ")))
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    command = re.compile(r"^(?:\S+=\S+ |docker .* exec \w+ )*(?:\.venv/bin/)?((?:ngsgd|ray|mlflow) [a-z]+(?: .+)?)$")
    found = [match[1] for line in lines if (match := command.match(line.strip()))]
    return [line for line in found if line.split()[1][0] not in "[|"]


def _until_operator(words: list[str]) -> list[str]:
    """A command without the pipe or the redirection behind it."""
    return words[:next((at for at, word in enumerate(words) if word[0] in "|><&"), len(words))]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "settings" / "index.html").is_file()


def test_every_test_named_by_the_fault_matrix_exists() -> None:
    page = (ROOT / "benchmarks" / "fault-matrix.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("page", [entries.PAGE, entries.CASES, entries.HYDRA])
def test_the_tables_of_situations_match_the_tests(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert entries.with_tables(text, page, entries.entries()) == text, "run python -m tests.entries"
