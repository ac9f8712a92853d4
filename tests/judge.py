"""The judge of a run after faults, for the fault simulation, tests/chaos and tests/fuzz.

Each check returns or yields problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from ngsgd.files import read_json_lines
from ngsgd.training.storage.audit import OuterIterationLines, audit, read

FINAL = Path("final/model.safetensors")
# events of the ledger of work that is not counted in its outer iteration
NOT_COUNTED = ("rejected", "dropped", "quarantined", "deferred")


def finished_run(run: Path, *, final: str = "", expected: str = "", of_two_processes: bool = False,
                 keeps_temporary: bool = False) -> list[str]:
    """All problems of a run that was disturbed, resumed and finished.

    Args:
        run: its folder.
        final: digest of its model.
        expected: digest that the model must have. Default: "", any.
        of_two_processes: the ledger may hold lines of two processes for one outer iteration.
        keeps_temporary: a temporary file cannot be removed, or its writer may live.
    """
    try:
        found, done = audit(run / "ledger.jsonl"), read(run / "ledger.jsonl")
    except Exception as error:
        return [f"the ledger cannot be audited: {type(error).__name__}: {error}"]
    if of_two_processes:
        found = []
    found += [*same_model(final, expected), *of_events(run / "events.jsonl", done, compares=not of_two_processes)]
    found += [f"{name} is left" for name in ("process.json", "error.json") if (run / name).exists()]
    return found if keeps_temporary else [*found, *temporary_files(run)]


def same_model(final: str, expected: str) -> list[str]:
    if not expected or final == expected:
        return []
    return [f"the final model is {final[:12]}, without faults it is {expected[:12]}"]


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
