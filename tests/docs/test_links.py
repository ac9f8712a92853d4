"""Links lead to files and headings that exist, and every page can be reached."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import FENCE, PAGES, ROOT, anchors, clicks, links, name

MAX_CLICKS = 3
_FOLDERS = "ngsgd|launcher|tests|conf|benchmarks|recipes|examples|docs|docker|tools"
_PATH = re.compile(rf"`((?:{_FOLDERS})/[\w./-]+)(?:::\w+)?`")
# files that a reader makes, and names to fill in
_OF_A_READER = re.compile(r"recipes/mine/|conf/model/cnn\.yaml|NAME|SECTION")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = [f"{name(target) if target.is_relative_to(ROOT) else target}#{anchor}" for target, anchor in links(page)
              if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))]
    assert broken == []


def test_paths_in_the_text_exist() -> None:
    found = [(name(page), path) for page in PAGES if page.name != "CHANGELOG.md"
             for path in _PATH.findall(FENCE.sub("", page.read_text(encoding="utf-8")))]
    assert len(found) > 100
    assert [(page, path) for page, path in found
            if not (ROOT / path).exists() and not _OF_A_READER.search(path)] == []


def test_every_page_is_within_three_clicks_of_readme() -> None:
    found = clicks()
    far = {name(page): found.get(page, "no link") for page in PAGES if found.get(page, MAX_CLICKS + 1) > MAX_CLICKS}
    assert far == {}


def test_the_navigation_lists_every_page_once() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    docs = ROOT / "docs"
    pages = [page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)]
    assert sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE)) == sorted(pages)


def test_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
