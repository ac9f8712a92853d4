"""Results of a campaign: one line per failing case and a count of each kind of problem."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

_VARIABLE = re.compile(r"\b[0-9a-f]{8}\b|\d+")   # parts of a message that differ between cases
_BETWEEN_COUNTS = 50
T = TypeVar("T")


@dataclass
class Report:
    """What one campaign found."""

    campaign: str
    reproduce: Callable[[str], str]     # the command that runs the case of a name again
    num_cases: int = 0
    problems: dict[str, list[str]] = field(default_factory=dict)   # by case
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, case: str, problems: Iterable[str], where: str = "") -> None:
        """Counts a case; prints it if something is wrong with it."""
        found = list(problems)
        self.num_cases += 1
        if self.num_cases % _BETWEEN_COUNTS == 0:
            print(f"{self.campaign}: {self.num_cases} cases so far", flush=True)
        if found:
            self.problems[case] = found
            print(f"FAIL {case}  {where}".rstrip())
            for problem in found:
                print(f"     {problem}")
            print(f"     again: {self.reproduce(case)}", flush=True)

    def summary(self) -> list[str]:
        """A count of each kind of problem, the most frequent first."""
        kinds = Counter(_VARIABLE.sub("N", problem) for found in self.problems.values()
                        for problem in set(found))
        lines = [f"{self.campaign}: {self.num_cases} cases, {len(self.problems)} with problems"]
        lines += [f"  {count:5} x {kind}" for kind, count in kinds.most_common(40)]
        return lines + [f"  ({count} x {note})" for note, count in sorted(self.notes.items())]

    def write(self, path: Path) -> None:
        """Adds the result to a JSON file of all campaigns."""
        known = json.loads(path.read_text()) if path.exists() else {}
        known[self.campaign] = {"cases": self.num_cases, "problems": self.problems}
        path.write_text(json.dumps(known, indent=1))


def results_of(words: Sequence[str], folder: Path, **environment: str) -> dict[str, Any]:
    """Run campaigns in another process; by campaign the number of cases, and the problems."""
    path, root = folder / "results.json", Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.fuzz", *words, "--json", str(path)],
                          capture_output=True, text=True, check=False, cwd=root,
                          env={**os.environ, "PYTHONPATH": str(root), **environment})
    assert path.exists(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def chosen(names: Sequence[T], num_cases: int | None, name_of: Callable[[T], str],
           only: str | None) -> list[T]:
    """The cases that match `only`, or `num_cases` of all at even distances."""
    if only is not None:
        return [one for one in names if fnmatch.fnmatch(name_of(one), only)]
    if num_cases is None or num_cases >= len(names):
        return list(names)
    return [names[(at * len(names)) // num_cases] for at in range(num_cases)]
