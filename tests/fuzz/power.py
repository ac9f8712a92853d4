"""Power cuts: the states of the disk (`tests.simulation.durability`) that a crash may leave."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import crash, judge
from tests.fuzz.judge import Expected
from tests.fuzz.report import Report, chosen
from tests.fuzz.stage import Stage, remove, tree
from tests.simulation.durability import KINDS, Content, Disk, Operation


@dataclass(frozen=True)
class Cut:
    """A state of the disk, and the output of the run until then."""

    kind: str
    operation: Operation       # the last one before the cut
    content: Content
    num_reported: int          # commits that the ledger had

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.operation.number:04d}"


def cuts(root: Path, operations: Iterable[Operation]) -> Iterator[Cut]:
    """All different states."""
    disk, seen, num_reported = Disk(root), set(), 0
    for operation in operations:
        disk.apply(operation)
        if operation.path.endswith("/ledger.jsonl"):
            num_reported += operation.data.count(b'"event": "committed"')
        for kind in KINDS:
            content = disk.state(kind)
            key = hash((num_reported, *sorted(content.items(), key=lambda item: item[0])))
            if key not in seen:
                seen.add(key)
                yield Cut(kind, operation, content, num_reported)


def campaign(stage: Stage, num_cases: int | None, only: str | None) -> Report:
    """Cuts the power at many points of a run and resumes it."""
    operations = stage.finish()
    expected = Expected.of(stage.run)
    report = Report("power cut", lambda case: f"python -m tests.fuzz power --only {case}")
    check_record(stage, operations)
    states = list(cuts(stage.out, operations))
    report.notes["states in all"] = len(states)
    for cut in chosen(states, num_cases, lambda cut: cut.name, only):
        where = f"after {cut.operation.kind} of {stage.neutral(cut.operation.path)}"
        report.add(cut.name, _try(stage, cut, expected), where)
    return report


def check_record(stage: Stage, operations: Iterable[Operation]) -> None:
    """Raises RuntimeError if something was written past the recorder (mmap, a system call)."""
    disk = Disk(stage.out)
    for operation in operations:
        disk.apply(operation)
    if (found := disk.now()) != (there := tree(stage.out)):
        wrong = sorted(name for name in found.keys() | there.keys() if found.get(name) != there.get(name))
        raise RuntimeError(f"the record is not complete; these files differ: {', '.join(wrong)}")


def make(content: Content, folder: Path) -> None:
    """Writes a tree into `folder`, which it replaces."""
    remove(folder)
    folder.mkdir()
    for name in sorted(content):
        data = content[name]
        if data is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(data)


def _try(stage: Stage, cut: Cut, expected: Expected) -> Iterator[str]:
    make(cut.content, stage.out)
    if cut.num_reported and not stage.runs():
        yield f"the run is lost after {cut.num_reported} commits"
    yield from crash.recover(stage, expected, must_resume=cut.num_reported > 0)
    if cut.num_reported and stage.runs():
        taken_up = judge.resumed_after(stage.run)
        if taken_up < cut.num_reported:
            yield f"resumed after {taken_up} of {cut.num_reported} commits"
