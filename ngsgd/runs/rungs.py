"""Rungs of the ladder to good labels: their times and word error rates, next to their files."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ngsgd import files
from ngsgd.word_errors import WordErrors


@dataclass(frozen=True)
class Rung:
    """A finished rung."""

    # model or labels that the rung makes
    name: str
    # time that it took when it was computed
    seconds: float
    # errors on valid; None if they were not measured
    valid: WordErrors | None = None

    def __str__(self) -> str:
        errors = f"; valid {self.valid}" if self.valid else ""
        return f"{self.name}, {self.seconds:.0f} s{errors}"

    @staticmethod
    def of_json(about: Mapping[str, Any]) -> Rung:
        """Read what `asdict` gave; KeyError, TypeError or ValueError if it is something else."""
        return Rung(str(about["name"]), float(about["seconds"]), about["valid"] and WordErrors.of_json(about["valid"]))


def rungs_of(path: Path) -> list[Rung]:
    """Read rungs.json of a run, or the note of one rung; empty if it is missing or damaged."""
    try:
        found = files.read_json(path)
        return [Rung.of_json(about) for about in (found if isinstance(found, list) else [found])]
    except (OSError, ValueError, KeyError, TypeError):
        return []


class Stopwatch:
    """Measures the time of a rung."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = time.monotonic()

    def stored(self, path: Path, valid: WordErrors | None = None) -> Rung:
        """Store the rung that made the file `path`, with its errors on valid."""
        rung = Rung(self._name, round(time.monotonic() - self._begun, 1), valid)
        files.write_text(_note_of(path), json.dumps(asdict(rung), indent=1))
        return rung


def stored(path: Path) -> list[Rung]:
    """The rung that made a file; none if its note cannot be read."""
    return rungs_of(_note_of(path))


def _note_of(path: Path) -> Path:
    return path.with_suffix(".rung.json")
