"""Power cuts: the states of the disk that a crash of the machine may leave, made from a record.

Nothing is durable before it is synced: the content of a file by fsync of the file, a name by fsync
of its directory.  POSIX allows every state in between; these extremes are made:

    strict   only what was synced, names too
    journal  names as at the last sync of anything (ext4, XFS), content only where it was synced
    empty    all names, content only where it was synced: a new file has no bytes
    zeros    as `empty`, but files have their length; bytes that were not synced are 0
    torn     as `empty`, and half of the bytes that were not synced
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz import crash, judge
from tests.fuzz.interposer import Operation
from tests.fuzz.judge import Expected
from tests.fuzz.report import Report, chosen
from tests.fuzz.stage import Stage, remove, tree

KINDS = ("strict", "journal", "empty", "zeros", "torn")
Content = dict[str, bytes | None]     # of a directory tree: None stands for a directory


@dataclass(eq=False)
class Node:
    """A file or a directory, as the system sees it and as the disk has it."""

    is_directory: bool
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    durable_names: dict[str, Node] = field(default_factory=dict)
    journaled_names: dict[str, Node] = field(default_factory=dict)

    def content(self, kind: str) -> bytes:
        """Of the file after a power cut of that kind."""
        missing = len(self.data) - len(self.durable)
        if kind == "zeros" and missing > 0:
            return self.durable + bytes(missing)
        if kind == "torn" and missing > 0:
            return self.durable + self.data[len(self.durable):len(self.durable) + missing // 2]
        return self.durable

    def entries(self, kind: str) -> dict[str, Node]:
        """Of the directory after a power cut of that kind."""
        if kind == "strict":
            return self.durable_names
        return self.journaled_names if kind == "journal" else self.names


class Disk:
    """Applies recorded operations to an empty directory that is durable itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Node(is_directory=True)
        self._by_inode: dict[int, Node] = {}

    def apply(self, operation: Operation) -> None:
        """One operation."""
        handler = getattr(self, f"_{operation.kind}", None)
        if handler:
            self._find_renamed(operation)
            handler(operation)

    def state(self, kind: str) -> Content:
        """The directory tree after a power cut."""
        return dict(_walk(self.top, kind, ""))

    def now(self) -> Content:
        """The directory tree as a process sees it."""
        return {name: None if node.is_directory else bytes(node.data)
                for name, node in _nodes(self.top, "")}

    def _place(self, path: str) -> tuple[Node, str]:
        *folders, name = Path(path).relative_to(self.root).parts
        node = self.top
        for folder in folders:
            node = node.names[folder]
        return node, name

    def _node(self, path: str) -> Node:
        if Path(path) == self.root:
            return self.top
        folder, name = self._place(path)
        return folder.names[name]

    def _find_renamed(self, operation: Operation) -> None:
        """Applies a rename that was not recorded: safetensors renames by another system call.
        """
        node = self._by_inode.get(operation.inode)
        if node is None or operation.kind in ("create", "mkdir"):
            return
        folder, name = self._place(operation.path)
        old = [other for other, found in folder.names.items() if found is node]
        if name not in folder.names and old:
            folder.names[name] = folder.names.pop(old[0])

    def _create(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        folder.names[name] = self._by_inode[operation.inode] = Node(is_directory=False)

    def _mkdir(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        self._by_inode.pop(operation.inode, None)
        folder.names[name] = Node(is_directory=True)

    def _write(self, operation: Operation) -> None:
        data = self._by_inode[operation.inode].data
        data.extend(bytes(max(0, operation.offset - len(data))))
        data[operation.offset:operation.offset + len(operation.data)] = operation.data

    def _truncate(self, operation: Operation) -> None:
        node = self._by_inode[operation.inode]
        node.data.extend(bytes(max(0, operation.offset - len(node.data))))
        del node.data[operation.offset:]
        # the length is part of the inode, which is written with the names
        node.durable = node.durable[:operation.offset]

    def _extend(self, operation: Operation) -> None:
        data = self._by_inode[operation.inode].data
        data.extend(bytes(max(0, operation.offset - len(data))))

    def _sync(self, operation: Operation) -> None:
        node = self._node(operation.path)
        if node.is_directory:
            node.durable_names = dict(node.names)
        else:
            node.durable = bytes(node.data)
        for one in (self.top, *(found for _, found in _nodes(self.top, "")), node):
            one.journaled_names = dict(one.names)

    def _rename(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        target, new = self._place(operation.second)
        target.names[new] = folder.names.pop(name)

    def _link(self, operation: Operation) -> None:
        target, new = self._place(operation.second)
        target.names[new] = self._node(operation.path)

    def _unlink(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        del folder.names[name]

    _rmdir = _unlink


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


def _nodes(folder: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    for name, node in folder.names.items():
        yield prefix + name, node
        if node.is_directory:
            yield from _nodes(node, f"{prefix}{name}/")


def _walk(folder: Node, kind: str, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folder.entries(kind).items():
        yield prefix + name, None if node.is_directory else node.content(kind)
        if node.is_directory:
            yield from _walk(node, kind, f"{prefix}{name}/")
