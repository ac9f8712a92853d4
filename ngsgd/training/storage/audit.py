"""Audit of the ledger of a run, independent of the coordinator.

    python -m ngsgd.training.storage.audit RUN_FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ngsgd.files import log_lines, parse_json_lines, require_format

_SETTLED = ("accepted", "rejected", "dropped", "deferred", "quarantined")
# (first minibatch, index after the last)
_Span = tuple[float, float]


class _Pass(NamedTuple):
    """One pass over one frame of the examples of an archive, identified by its first plan."""

    archive: int
    frame: int
    outer_iter: int
    job: int


@dataclass
class OuterIterationLines:
    """The ledger lines of one outer iteration, from its last plan."""

    outer_iter: int
    min_accepted_fraction: float
    planned: dict[int, dict[str, Any]] = field(default_factory=dict)
    submitted: set[tuple[int, int]] = field(default_factory=set)      # (job, attempt)
    settled: list[dict[str, Any]] = field(default_factory=list)
    commit: dict[str, Any] = field(default_factory=dict)

    @property
    def ran(self) -> set[int]:
        """Jobs that a worker began."""
        return {job for job, _ in self.submitted}

    @property
    def num_tried(self) -> int:
        """Jobs with a result, and the shards of those that ran and have none."""
        ran, judged = self.ran, ("accepted", "rejected")
        given_up = {tuple(entry["pieces"][0][:2]) for entry in self.settled
                    if entry["event"] not in judged and (entry["event"] != "quarantined" or entry["job"] in ran)}
        return len(given_up) + sum(entry["event"] in judged for entry in self.settled)

    @property
    def has_no_data(self) -> bool:
        """Whether the data of all jobs are in quarantine, so that the model is unchanged."""
        ran = self.ran
        shards = {tuple(piece[:2]) for entry in self.settled if entry["job"] in ran for piece in entry["pieces"][:1]}
        events = {entry["event"] for entry in self.settled}
        return len(shards) <= 1 and "quarantined" in events and not events & {"accepted", "rejected"}

    @property
    def accepted(self) -> list[dict[str, Any]]:
        return [entry for entry in self.settled if entry["event"] == "accepted"]


def read(path: Path) -> list[OuterIterationLines]:
    """Return the committed outer iterations in the order of their commits."""
    return _committed(_checked_lines(path)[0])


def _checked_lines(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the well-formed lines of a ledger, and one finding for each other line."""
    lines: list[dict[str, Any]] = []
    problems: list[str] = []
    for number, text in enumerate(log_lines(path), 1):
        # the last line of a process that was killed now
        if not text or (text.startswith("{") and not text.endswith("}")):
            continue
        found = parse_json_lines(text)
        if not found:
            problems.append(f"line {number} is not a JSON object")
            continue
        problem = _malformed(found[0])
        if problem:
            problems.append(f"line {number}: {problem}")
        else:
            lines.append(found[0])
    return lines, problems


# archive, frame, outer iteration, job, first minibatch, stop
_PIECE_LENGTH = 6
_NUMBER = (int, float)
_JOB: dict[str, tuple[type, ...]] = {"outer_iter": (int,), "job": (int,), "attempt": (int,)}
_WORK = {**_JOB, "pieces": (list,)}
_JUDGED = {**_WORK, "left": (list,), "num_frames": (int,)}
# event -> fields that the audit reads, and their types
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "started": {"after": (int,), "min_accepted_fraction": _NUMBER},
    "planned": {"outer_iter": (int,), "job": (int,), "pieces": (list,), "lr": _NUMBER},
    **dict.fromkeys(("submitted", "failed", "discarded"), _JOB),
    **dict.fromkeys(("accepted", "rejected"), _JUDGED),
    **dict.fromkeys(("dropped", "deferred", "quarantined"), _WORK),
    "repeated": {**_JOB, "repeat": (int,), "worker": (int,)},
    "audited": {**_JOB, "outcome": (str,), "runs": (list,), "faulty": (list,)},
    "rolled_back": {"outer_iter": (int,)},
    "committed": {"outer_iter": (int,), "frames_processed": (int,), "parent": (str,),
                  "model": (str,), "num_accepted": (int,), "numbers": (dict,)},
}


def _malformed(line: dict[str, Any]) -> str:
    """Return the problem of a malformed ledger line; empty if it is well-formed."""
    event = line.get("event")
    wanted = _FIELDS.get(event) if isinstance(event, str) else None
    if wanted is None:
        return f"unknown event {event!r:.60}"
    for name, types in wanted.items():
        if isinstance(line.get(name), bool) or not isinstance(line.get(name), types):
            return f"{event}: {name} is {line.get(name)!r:.60}"
    if event == "started":
        try:
            require_format("ledger", line)
        except ValueError as error:
            return f"{event}: {error}"
    for name in ("pieces", "left"):
        for piece in line.get(name, []):
            if not (isinstance(piece, list) and len(piece) == _PIECE_LENGTH and all(type(number) is int for number in piece[:-1])
                    and (piece[-1] is None or type(piece[-1]) is int)):
                return f"{event}: {name} holds values that are not work items"
    numbers = line.get("numbers", {"lr": 0.0})
    if "lr" not in numbers or not all(isinstance(value, _NUMBER) for value in numbers.values()):
        return f"{event}: numbers is {numbers!r:.60}"
    if type(line.get("fence", 0)) is not int:
        return f"{event}: fence is {line['fence']!r:.60}"
    return ""


def _committed(lines: list[dict[str, Any]]) -> list[OuterIterationLines]:
    under_way: dict[int, OuterIterationLines] = {}
    done: list[OuterIterationLines] = []
    numbers: set[int] = set()
    min_accepted_fraction = 0.0

    def of(outer_iter: int) -> OuterIterationLines:
        return under_way.setdefault(outer_iter, OuterIterationLines(outer_iter, min_accepted_fraction))
    for line in lines:
        outer_iter = line.get("outer_iter", -1)
        match line["event"]:
            case "started":
                # a new process resumes after a certain commit, and repeats later outer iterations
                min_accepted_fraction = line["min_accepted_fraction"]
                done = [one for one in done if one.outer_iter <= line["after"]]
                numbers = {one.outer_iter for one in done}
                under_way = {o: one for o, one in under_way.items() if o <= line["after"]}
            case "planned":
                if line["job"] == 0:
                    under_way.pop(outer_iter, None)
                of(outer_iter).planned[line["job"]] = line
            case "submitted":
                of(outer_iter).submitted.add((line["job"], line["attempt"]))
            case "rolled_back":
                under_way.pop(outer_iter, None)
            case "committed":
                # repeated after a crash between commit and ledger
                if outer_iter not in numbers:
                    numbers.add(outer_iter)
                    done.append(of(outer_iter))
                    done[-1].commit = line
                    del under_way[outer_iter]
            case event if event in _SETTLED:
                of(outer_iter).settled.append(line)
    return done


def audit(path: Path) -> list[str]:
    """Return the findings: none if all work was counted once, or dropped, deferred, quarantined."""
    try:
        lines, problems = _checked_lines(path)
    except OSError as error:
        return [f"{path} cannot be read ({error.strerror})"]
    done = _committed(lines)
    problems += [problem for one in done for problem in _problems_of(one)]
    problems += _fences_out_of_order(lines)
    if [one.outer_iter for one in done] != list(range(len(done))):
        problems.append(f"committed outer iterations are {[one.outer_iter for one in done]}")
    frames, model = 0, ""
    for one in done:
        where = f"outer iteration {one.outer_iter}"
        frames += sum(entry["num_frames"] for entry in one.accepted)
        if frames != one.commit["frames_processed"]:
            problems.append(f"{where}: {frames} frames accepted, {one.commit['frames_processed']} committed")
        if one.commit["parent"] != model:
            problems.append(f"{where}: its parent is {one.commit['parent']!r}, but the previous model is {model!r}")
        model = one.commit["model"]
    return problems + list(_pieces_counted_wrongly(done))


def _fences_out_of_order(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Check that fencing numbers increase, and that no process writes after its successor."""
    holder, resumed_after = 0, -1
    for line in lines:
        fence = line.get("fence", 0)
        if line["event"] == "started":
            if fence and fence <= holder:
                yield f"two processes wrote to the run: fencing number {fence} begins after {holder}"
            holder, resumed_after = max(holder, fence), line["after"]
        # a resumed process repeats the commit that it resumes after
        elif line["event"] == "committed" and fence and fence != holder and line["outer_iter"] != resumed_after:
            yield (f"outer iteration {line['outer_iter']} was committed under fencing number {fence}, while {holder} wrote")


def _problems_of(one: OuterIterationLines) -> Iterator[str]:
    where = f"outer iteration {one.outer_iter}"
    counts = Counter(entry["job"] for entry in one.settled)
    yield from (f"{where}: job {job} was settled {counts[job]} times" for job in one.planned if counts[job] != 1)
    yield from (f"{where}: job {job} was not planned" for job in counts if job not in one.planned)
    for entry in one.settled:
        if entry["event"] in ("accepted", "rejected") and (entry["job"], entry["attempt"]) not in one.submitted:
            yield (f"{where}: job {entry['job']}, attempt {entry['attempt']}, was counted and never submitted")
        latest = max((attempt for job, attempt in one.submitted if job == entry["job"]), default=0)
        if entry["attempt"] < latest:
            yield (f"{where}: job {entry['job']}, attempt {entry['attempt']}, was counted after attempt {latest} had begun")
        if entry["job"] in one.planned and entry["pieces"] != one.planned[entry["job"]]["pieces"]:
            yield f"{where}: job {entry['job']} counted another work item"
    num_accepted, num_jobs = len(one.accepted), len(one.planned)
    fewest = 0.0 if one.has_no_data else max(1.0, one.min_accepted_fraction * one.num_tried)
    if num_accepted != one.commit["num_accepted"] or num_accepted < fewest:
        yield (f"{where}: {num_accepted} results of {num_jobs} accepted, {one.commit['num_accepted']} committed")
    # all jobs have the committed learning rate
    rates, committed = {entry["lr"] for entry in one.planned.values()}, one.commit["numbers"]["lr"]
    if one.planned and rates != {committed}:
        yield f"{where}: learning rates {sorted(rates)} were planned, {committed} committed"
    if not all(math.isfinite(value) for value in one.commit["numbers"].values()):
        yield f"{where}: {one.commit['numbers']} are not all finite"


def _pieces_counted_wrongly(done: list[OuterIterationLines]) -> Iterator[str]:
    """Check that every minibatch is settled once, and that deferred work was deferred before."""
    counted: dict[_Pass, list[_Span]] = {}
    owed: dict[_Pass, list[_Span]] = {}
    for one in done:
        where = f"outer iteration {one.outer_iter}"
        for name, span in (_pass_and_span(piece) for entry in one.planned.values() for piece in entry["pieces"]):
            rest = [span]
            for deferred in owed.get(name, []):
                rest = _without(rest, deferred)
            if name.outer_iter != one.outer_iter and rest:
                yield f"{where}: {_named(name, span)} returns but was never deferred"
            owed[name] = _without(owed.get(name, []), span)
        for entry in one.settled:
            left = [_pass_and_span(piece) for piece in entry.get("left", [])]
            for name, span in left:
                owed.setdefault(name, []).append(span)
            for name, span in map(_pass_and_span, entry["pieces"]):
                if entry["event"] == "deferred":
                    owed.setdefault(name, []).append(span)
                    continue
                rest = [span]
                for other, put_off in left:
                    rest = _without(rest, put_off) if other == name else rest
                before = counted.setdefault(name, [])
                if any(first < stop2 and first2 < stop for first, stop in rest for first2, stop2 in before):
                    yield f"{where}: {_named(name, span)} was counted 2 times"
                before += rest


def _pass_and_span(piece: list[Any]) -> tuple[_Pass, _Span]:
    archive, frame, outer_iter, job, first, stop = piece
    return _Pass(archive, frame, outer_iter, job), (float(first), math.inf if stop is None else float(stop))


def _without(spans: list[_Span], gone: _Span) -> list[_Span]:
    return [(low, high) for first, stop in spans for low, high in ((first, min(stop, gone[0])), (max(first, gone[1]), stop))
            if low < high]


def _named(name: _Pass, span: _Span) -> str:
    part = "" if span == (0.0, math.inf) else f", minibatches {span[0]:g} to {span[1]:g}"
    return (f"archive {name.archive}, frame {name.frame}, planned as job {name.job} of outer iteration {name.outer_iter}{part}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m ngsgd.training.storage.audit", description="Check that a run counted "
                                     "all planned data exactly once; exit code 1: it did not.")
    parser.add_argument("run", metavar="RUN_FOLDER", type=Path, help="run folder with ledger.jsonl")
    parser.add_argument("--json", action="store_true", help="print a JSON list of the problems")
    options = parser.parse_args()
    problems = audit(options.run / "ledger.jsonl")
    if options.json:
        print(json.dumps(problems, indent=1))
    else:
        print("\n".join(problems) or "no findings")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
