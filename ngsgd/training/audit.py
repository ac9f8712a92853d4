"""Is a run's ledger in order?  A program of its own: it reads files, and knows nothing of the coordinator.

    python -m ngsgd.training.audit RUN_FOLDER
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ngsgd.files import read_json_lines

_SETTLED = ("accepted", "rejected", "dropped", "deferred", "quarantined")
_FIELDS = ("archive", "frame", "outer_iter", "job", "first", "stop")


@dataclass
class OuterIterationLines:
    """What a ledger says of one outer iteration, from its last plan on."""

    outer_iter: int
    min_accepted: float
    planned: dict[int, dict[str, Any]] = field(default_factory=dict)
    submitted: set[tuple[int, int]] = field(default_factory=set)      # (job, attempt)
    settled: list[dict[str, Any]] = field(default_factory=list)
    commit: dict[str, Any] = field(default_factory=dict)

    @property
    def accepted(self) -> list[dict[str, Any]]:
        return [entry for entry in self.settled if entry["event"] == "accepted"]


def read(path: Path) -> list[OuterIterationLines]:
    """The committed outer iterations in the order of their commits; what was begun and never committed does not count."""
    under_way: dict[int, OuterIterationLines] = {}
    done: list[OuterIterationLines] = []
    min_accepted = 0.0
    for line in read_json_lines(path):
        outer_iter = line.get("outer_iter", -1)
        match line["event"]:
            case "started":
                # a new process goes on after a certain commit: what is later, or was under way, is done again
                min_accepted = line["min_accepted"]
                done = [one for one in done if one.outer_iter <= line["after"]]
                under_way = {o: one for o, one in under_way.items() if o <= line["after"]}
            case "planned":
                if line["job"] == 0:
                    under_way[outer_iter] = OuterIterationLines(outer_iter, min_accepted)
                under_way[outer_iter].planned[line["job"]] = line
            case "submitted":
                under_way[outer_iter].submitted.add((line["job"], line["attempt"]))
            case "rolled_back":
                under_way.pop(outer_iter, None)
            case "committed":
                if outer_iter not in [one.outer_iter for one in done]:  # said again after a crash between commit and ledger
                    done.append(under_way.pop(outer_iter, OuterIterationLines(outer_iter, min_accepted)))
                    done[-1].commit = line
            case event if event in _SETTLED:
                under_way.setdefault(outer_iter, OuterIterationLines(outer_iter, min_accepted)).settled.append(line)
    return done


def audit(path: Path) -> list[str]:
    """What is wrong with a ledger; an empty list when all that was planned was counted exactly once, or given up by name."""
    done = read(path)
    problems = [problem for one in done for problem in _problems_of(one)]
    if [one.outer_iter for one in done] != list(range(len(done))):
        problems.append(f"committed outer iterations are {[one.outer_iter for one in done]}")
    frames, model = 0, ""
    for one in done:
        where = f"outer iteration {one.outer_iter}"
        frames += sum(entry["num_frames"] for entry in one.accepted)
        if frames != one.commit["frames_processed"]:
            problems.append(f"{where}: {frames} frames accepted, {one.commit['frames_processed']} committed")
        if one.commit["parent"] != model:
            problems.append(f"{where}: its parent is {one.commit['parent']!r}, the model before was {model!r}")
        model = one.commit["model"]
    return problems + list(_pieces_counted_wrongly(done))


def _problems_of(one: OuterIterationLines) -> Iterator[str]:
    where = f"outer iteration {one.outer_iter}"
    counts = Counter(entry["job"] for entry in one.settled)
    yield from (f"{where}: job {job} was settled {counts[job]} times" for job in one.planned if counts[job] != 1)
    yield from (f"{where}: job {job} was not planned" for job in counts if job not in one.planned)
    for entry in one.settled:
        if entry["event"] in ("accepted", "rejected") and (entry["job"], entry["attempt"]) not in one.submitted:
            yield f"{where}: job {entry['job']}, attempt {entry['attempt']}, was counted and never submitted"
        if entry["job"] in one.planned and entry["pieces"] != one.planned[entry["job"]]["pieces"]:
            yield f"{where}: job {entry['job']} counted another piece"
    num_accepted, num_jobs = len(one.accepted), len(one.planned)
    if num_accepted != one.commit["num_accepted"] or num_accepted < max(1.0, one.min_accepted * num_jobs):
        yield f"{where}: {num_accepted} results of {num_jobs} accepted, {one.commit['num_accepted']} committed"
    if not all(math.isfinite(value) for value in one.commit["numbers"].values()):
        yield f"{where}: {one.commit['numbers']} are not all finite"


def _pieces_counted_wrongly(done: list[OuterIterationLines]) -> Iterator[str]:
    """Every piece is settled once; what was put off comes back, once, in a later plan (or the run is not at its end)."""
    counted: Counter[tuple[Any, ...]] = Counter()
    owed: Counter[tuple[Any, ...]] = Counter()
    for one in done:
        for entry in one.planned.values():
            for piece in map(tuple, entry["pieces"]):
                if owed[piece] > 0:
                    owed[piece] -= 1
                elif piece[2] != one.outer_iter:
                    yield f"outer iteration {one.outer_iter}: {_named(piece)} comes back and was never put off"
        for entry in one.settled:
            if entry["event"] == "deferred":
                owed.update(map(tuple, entry["pieces"]))
            else:
                counted.update(map(tuple, entry["pieces"]))
                owed.update(map(tuple, entry.get("left", [])))
    yield from (f"{_named(piece)} was counted {count} times" for piece, count in counted.items() if count > 1)


def _named(piece: tuple[Any, ...]) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(_FIELDS, piece, strict=True) if value is not None)


def main() -> int:
    problems = audit(Path(sys.argv[1]) / "ledger.jsonl")
    print("\n".join(problems) or "the ledger is in order")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
