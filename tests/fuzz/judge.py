"""Checks of a run after a fault; each returns a list of problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.files import read_json_lines
from tests import judge
from tests.fuzz.server import Outcome
from tests.fuzz.stage import digest, read

# of an error that a user can act on: settings, data, divergence, cluster, checkpoint
SENTENCE_CODES = range(2, 7)


@dataclass(frozen=True)
class Expected:
    """What the undisturbed run came to."""

    final: str                  # SHA-256 of the final model
    wer: dict[str, Any]         # decode/wer.json
    models: list[str]           # digests after each commit

    @classmethod
    def of(cls, run: Path) -> Expected:
        wer = json.loads((run / "decode" / "wer.json").read_text())
        return cls(digest(run / judge.FINAL), wer, judge.committed_models(run))


def finished_run(run: Path, expected: Expected) -> Iterator[str]:
    """Everything that holds for a run that was disturbed, resumed and finished."""
    yield from judge.finished_run(run, models=expected.models)
    if digest(run / judge.FINAL) != expected.final:
        yield "the final model differs from the undisturbed run's"
    if _wer(run) != expected.wer:
        yield "decode/wer.json differs from the undisturbed run's"
    # among the data, which belong to no run
    yield from judge.temporary_files(run.parent / "data")


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
    return sorted({line["outer_iter"] for line in _ledger(run) if line["event"] == "committed"})


def resumed_after(run: Path) -> int:
    """The number of commits that the last start of the run took up."""
    starts = [line["after"] for line in _ledger(run) if line["event"] == "started"]
    return int(starts[-1]) + 1 if starts else 0


def _ledger(run: Path) -> list[dict[str, Any]]:
    path = run / "ledger.jsonl"
    return read_json_lines(path) if path.exists() else []


def _wer(run: Path) -> object:
    try:
        return json.loads(read(run / "decode" / "wer.json") or b"null")
    except ValueError:
        return None


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing on stderr"])[-1][:200]
