"""Pages of the documentation: their links, anchors and code blocks."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").glob("*/*.md")),
         ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`")
_EXPLICIT = re.compile(r'<a (?:id|name)="([^"]+)"|\{ ?#([\w-]+) ?\}')
# MkDocs numbers the second heading of a name _1, GitHub -1; no page may need either
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """The text without code blocks and inline code."""
    return _CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


def links(page: Path) -> list[tuple[Path, str]]:
    """Targets inside of the repository, as (file, anchor or "")."""
    found = []
    for link in _LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        found.append(((page.parent / path).resolve() if path else page, anchor))
    return found


def anchors(page: Path) -> set[str]:
    """Anchors that GitHub and MkDocs both give to the headings of a page."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = {one or other for one, other in _EXPLICIT.findall(text)}
    for heading in _HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
        github = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        mkdocs = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
        found |= {github} & {mkdocs} if page.is_relative_to(ROOT / "docs") else {github}
    return found


def clicks(limit: int = 99) -> dict[Path, int]:
    """The number of links to follow from README to each page."""
    found, queue = {README: 0}, deque([README])
    while queue:
        page = queue.popleft()
        for target, _ in links(page):
            if target.suffix == ".md" and target.is_file() and target not in found and found[page] < limit:
                found[target] = found[page] + 1
                queue.append(target)
    return found
