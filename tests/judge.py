"""The judge of a run after faults, for the fault simulation, tests/chaos and tests/fuzz.

Each check returns or yields problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from pathlib import Path

from ngsgd.files import read_json_lines
from ngsgd.training.storage.audit import OuterIterationLines, audit, read

FINAL = Path("final/model.safetensors")
# events of the ledger of work that is not counted in its outer iteration
NOT_COUNTED = ("rejected", "dropped", "quarantined", "deferred")


def finished_run(run: Path, *, models: Sequence[str] | None = None, of_two_processes: bool = False,
                 keeps_temporary: bool = False) -> list[str]:
    """All problems of a run that was disturbed, resumed and finished.

    Args:
        run: its folder.
        models: digests that the model must have after each commit. None: a recomputation of the
            ledger is compared instead (tests/recomputation.py).
        of_two_processes: the ledger may hold lines of two processes for one outer iteration.
        keeps_temporary: a temporary file cannot be removed, or its writer may live.
    """
    try:
        found, done = audit(run / "ledger.jsonl"), read(run / "ledger.jsonl")
    except Exception as error:
        return [f"the ledger cannot be audited: {type(error).__name__}: {error}"]
    if of_two_processes:
        found = []
    found += [*of_events(run / "events.jsonl", done, compares=not of_two_processes)]
    if models is not None:
        found += same_models([str(one.commit["model"]) for one in done], models)
    found += [f"{name} is left" for name in ("process.json", "error.json") if (run / name).exists()]
    return found if keeps_temporary else [*found, *temporary_files(run)]


def committed_models(run: Path) -> list[str]:
    """Digests of the models of all commits."""
    return [str(one.commit["model"]) for one in read(run / "ledger.jsonl")]


def same_models(found: Sequence[str], expected: Sequence[str]) -> list[str]:
    """Compare the models of all commits with those of the run without faults."""
    different = [number for number, (one, other) in enumerate(zip_longest(found, expected)) if one != other]
    return [f"the models of outer iterations {different} of {len(expected)} differ from those without faults"] if different else []


def of_events(path: Path, done: Sequence[OuterIterationLines], *, compares: bool = True) -> Iterator[str]:
    """events.jsonl has exactly one line per commit, with its numbers, and the end of the run."""
    events = read_json_lines(path)
    seen = Counter(event["outer_iter"] for event in events if event["event"] == "outer_iteration")
    for one in done:
        if seen[one.outer_iter] != 1:
            yield f"events.jsonl has {seen[one.outer_iter]} lines of outer iteration {one.outer_iter}"
    for outer_iter in seen.keys() - {one.outer_iter for one in done}:
        yield f"events.jsonl has a line of outer iteration {outer_iter}, which is not committed"
    for event in events:
        if event["event"] == "outer_iteration" and event["outer_iter"] < len(done) and compares:
            one = done[event["outer_iter"]]
            # speech has frames
            processed = event.get("examples_processed", event.get("frames_processed"))
            if (processed, event["num_accepted"]) != (one.commit["frames_processed"], len(one.accepted)):
                yield f"events.jsonl and the ledger differ in outer iteration {one.outer_iter}"
    lines = [event for event in events if event["event"] == "outer_iteration"]
    for before, event in pairwise(lines):
        for name in ("elapsed_s", "epoch", "examples_processed", "frames_processed"):
            # an outer iteration that was repeated after a resumption may take less time
            if compares and event.get(name, 0.0) < before.get(name, 0.0):
                yield (f"{name} is {before[name]} in outer iteration {before['outer_iter']} and {event[name]} in "
                       f"{event['outer_iter']}")
    if not any(event["event"] == "finished" for event in events):
        yield "events.jsonl has no line of the end"


def temporary_files(folder: Path) -> Iterator[str]:
    """Temporary files, which nobody will remove."""
    found = [path for path in sorted(folder.rglob("*")) if path.name.endswith(".tmp") or path.name.startswith(".tmp")]
    for path in found:
        if not any(other in path.parents for other in found):
            yield f"{path.relative_to(folder)} is left"


def not_counted(ledger: Path) -> list[str]:
    return [f"job {line['job']} of outer iteration {line['outer_iter']} was {line['event']}: {line.get('reason', '')}"
            for line in read_json_lines(ledger) if line["event"] in NOT_COUNTED]
