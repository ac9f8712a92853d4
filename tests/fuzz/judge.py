"""Checks of a run after a fault; each returns a list of problems."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.training.storage.audit import audit
from tests.fuzz.server import Outcome
from tests.fuzz.stage import Stage, digest, read

FINAL = Path("final/model.safetensors")
_UNIQUE = re.compile(r"\.[0-9a-f]{8}\.")   # part of a temporary name
# of an error that a user can act on: settings, data, divergence, cluster, checkpoint
SENTENCE_CODES = range(2, 7)


@dataclass(frozen=True)
class Expected:
    """What the undisturbed run came to."""

    final: str                  # SHA-256 of the final model
    wer: dict[str, Any]         # decode/wer.json
    num_commits: int

    @classmethod
    def of(cls, run: Path) -> Expected:
        wer = json.loads((run / "decode" / "wer.json").read_text())
        return cls(digest(run / FINAL), wer, len(commits(run)))


def finished_run(run: Path, expected: Expected) -> Iterator[str]:
    """Everything that holds for a run that was disturbed, resumed and finished."""
    if digest(run / FINAL) != expected.final:
        yield "the final model differs from the undisturbed run's"
    if _wer(run) != expected.wer:
        yield "decode/wer.json differs from the undisturbed run's"
    yield from (f"audit: {problem}" for problem in audited(run))
    yield from events_once(run, expected.num_commits)
    if (run / "process.json").exists():
        yield "process.json was left"


def audited(run: Path) -> list[str]:
    try:
        return audit(run / "ledger.jsonl")
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def events_once(run: Path, num_commits: int) -> Iterator[str]:
    """events.jsonl has one outer_iteration line per commit."""
    seen = Counter(line["outer_iter"] for line in lines(run / "events.jsonl")
                   if line.get("event") == "outer_iteration")
    for outer_iter in range(num_commits):
        if seen[outer_iter] != 1:
            yield f"events.jsonl has {seen[outer_iter]} lines of outer iteration {outer_iter}"
    finished = [line for line in lines(run / "events.jsonl") if line.get("event") == "finished"]
    if not finished:
        yield "events.jsonl has no finished line"


def garbage(stage: Stage, run: Path) -> Iterator[str]:
    """Temporary files in the run's folder and among the data, which nobody will remove."""
    found = [path for folder in (run, stage.out / "data") for path in sorted(folder.rglob("*"))
             if path.name.endswith(".tmp") or path.name.startswith(".tmp")]
    for path in found:
        if not any(other in path.parents for other in found):
            yield f"{_UNIQUE.sub('.*.', stage.neutral(str(path)))} was left"


def well_told(outcome: Outcome, *, may_fail: bool = True) -> Iterator[str]:
    """A command ends with 0 or with one message and the exit code of its kind."""
    if outcome.hung or outcome.signal:
        yield outcome.ending
        return
    if "Traceback (most recent call last)" in outcome.text:
        yield f"traceback: {_last_line(outcome.err)}"
    if "Run again with --debug" in outcome.text:
        yield f"unclassified error: {_last_line(outcome.err)}"
    elif outcome.code != 0 and not may_fail:
        yield f"{outcome.ending}: {_last_line(outcome.err)}"
    elif outcome.code != 0 and (outcome.code not in SENTENCE_CODES or not outcome.sentences):
        yield f"{outcome.ending} with {len(outcome.sentences)} sentences: {_last_line(outcome.err)}"


def commits(run: Path) -> list[int]:
    """The outer iterations that the ledger calls committed."""
    return sorted({line["outer_iter"] for line in lines(run / "ledger.jsonl")
                   if line.get("event") == "committed"})


def resumed_after(run: Path) -> int:
    """The number of commits that the last start of the run took up."""
    starts = [line["after"] for line in lines(run / "ledger.jsonl") if line.get("event") == "started"]
    return int(starts[-1]) + 1 if starts else 0


def lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file of lines, whatever else is there."""
    found = []
    for line in (read(path) or b"").decode(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _wer(run: Path) -> object:
    try:
        return json.loads(read(run / "decode" / "wer.json") or b"null")
    except ValueError:
        return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing on stderr"])[-1][:200]
