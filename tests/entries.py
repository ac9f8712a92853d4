"""The tables of situations, generated from the tests of each row.

A test carries `@pytest.mark.entry(number, situation, outcome, sentence)`: the number of the entry,
what a user does, one of `OUTCOMES`, and a sentence about the result. Further tests of an entry
carry the number alone. The source is parsed, never imported.

    python -m tests.entries          # rewrites the tables
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUTCOMES = ("works", "error")
# situations of users, and cases of regression tests
PAGE, CASES, HYDRA = "docs/reference/situations.md", "tests/situations.md", "docs/hydra.md"
# heading of a table -> page, and the entries it must list
TABLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "layers": (PAGE, tuple(f"N{n}" for n in (2, *range(8, 13)))),
    "loops": (PAGE, tuple(f"L{n}" for n in range(1, 21))),
    "pytorch": (PAGE, (*(f"A{n}" for n in (1, *range(4, 13))),
                       *(f"B{n}" for n in (1, *range(3, 6), *range(7, 14), *range(15, 18))),
                       *(f"P{n}" for n in (*range(4, 11), *range(12, 15))))),
    "speech": (PAGE, tuple(f"Sp{n}" for n in (*range(1, 4), *range(5, 14), 15))),
    "kaldi": (PAGE, tuple(f"K{n}" for n in (1, *range(4, 9), *range(10, 14), 15))),
    "hydra": (HYDRA, tuple(f"H{n}" for n in range(1, 29))),
    # described on the page of their topic
    "described": (CASES, (*(f"N{n}" for n in (1, 3, 4, 5, 6, 7)), "A2", "A3", "A13", "B2", "B6",
                          "B14", "P1", "P2", "P3", "P11", "Sp4", "Sp14", "Nc4",
                          "Nc5", "Nc9", "Nc10", "K2", "K3", "K9", "K14")),
    "cases": (CASES, (*(f"F{n}" for n in (*range(1, 5), 7, 8, 10, *range(13, 23), 24, 26, 27, 28)),
                      "F30", "F31", *(f"M{n}" for n in range(1, 8)), "D1", "D2", "D3", "C1", "C3")),
    "runs": (CASES, (*(f"At{n}" for n in range(1, 7)), *(f"Lo{n}" for n in range(1, 7)), "C2",
                     "Ra1", *(f"El{n}" for n in range(1, 7)), *(f"Nc{n}" for n in (1, 2, 3, 6, 7, *range(12, 18))))),
    "options": (CASES, ("R3", "R4", "R5", "R6", "S1", "S2", "S3", "Nc8", "Nc11"))}


@dataclass
class Entry:
    number: str
    situation: str = ""
    outcome: str = ""
    sentence: str = ""
    tests: list[str] = field(default_factory=list)


def entries(root: Path = ROOT) -> dict[str, Entry]:
    """All entries by number; the text of an entry stands at one test only."""
    found: dict[str, Entry] = {}
    for path in sorted((root / "tests").rglob("*.py")):
        text = path.read_text()
        if "mark.entry(" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    for decorator in node.decorator_list:
                        _read(decorator, f"{path.relative_to(root).as_posix()}::{node.name}", found)
    if bare := sorted(number for number, entry in found.items() if not entry.sentence):
        raise ValueError(f"no test says what happens for {', '.join(bare)}")
    return found


def _read(decorator: ast.expr, test: str, found: dict[str, Entry]) -> None:
    if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.entry"):
        return
    number, *words = (ast.literal_eval(argument) for argument in decorator.args)
    entry = found.setdefault(number, Entry(number))
    entry.tests.append(test)
    if words:
        if entry.sentence:
            raise ValueError(f"{test}: {entry.tests[0]} already says what happens for {number}")
        entry.situation, entry.outcome, entry.sentence = words
        entry.tests.insert(0, entry.tests.pop())
        if entry.outcome not in OUTCOMES:
            raise ValueError(f"{test}: the outcome of {number} is {entry.outcome!r}, not one of {', '.join(OUTCOMES)}")


def table(name: str, found: dict[str, Entry]) -> str:
    lines = ["| No. | When you | Outcome | Details |", "|---|---|---|---|"]
    for number in TABLES[name][1]:
        if entry := found.get(number):
            lines.append(f"| {number} | {entry.situation} | {entry.outcome} | {entry.sentence} |")
    return "\n".join(lines)


def missing(found: dict[str, Entry]) -> list[str]:
    return [number for _, numbers in TABLES.values() for number in numbers if number not in found]


def with_tables(text: str, page: str, found: dict[str, Entry]) -> str:
    """The page with its tables made again; each stands between two marks."""
    for name in (name for name, (where, _) in TABLES.items() if where == page):
        marks = rf"(<!-- entries: {name} -->\n).*?(<!-- end of entries -->)"
        body = table(name, found).replace("\\", r"\\")
        text, count = re.subn(marks, rf"\g<1>{body}\n\g<2>", text, count=1, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{page} has no place for the table {name}")
    return text


if __name__ == "__main__":
    for page in (PAGE, CASES, HYDRA):
        file = ROOT / page
        file.write_text(with_tables(file.read_text(), page, entries()))
    # tables whose source is imported: cells with networks, and a list of command lines
    from tests.launcher.commands import mistakes
    from tests.preconditioners import support

    support.PAGE.write_text(support.with_table(support.PAGE.read_text()))
    mistakes.PAGE.write_text(mistakes.with_table(mistakes.PAGE.read_text()))
