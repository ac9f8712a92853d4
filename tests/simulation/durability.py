"""Power cuts: the states of the disk that a crash of the machine may leave, made from a record.

Nothing is durable before it is synced: the content of a file by fsync of the file, a name by fsync
of its directory. POSIX allows every state in between; these extremes are made:

- `strict`: only synced content and synced names
- `journal`: names as at the last sync of anything (ext4, XFS), content only where it was synced
- `empty`: all names, content only where it was synced; a new file has no bytes
- `zeros`: as `empty`, but files have their length, and bytes that were not synced are 0
- `torn`: as `empty`, and half of the bytes that were not synced
- `mixed`: one of these for each file and for each directory
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

KINDS = ("strict", "journal", "empty", "zeros", "torn", "mixed")
Content = dict[str, bytes | None]     # of a directory tree: None stands for a directory


@dataclass(frozen=True)
class Operation:
    """One recorded call that changed something."""

    number: int
    # create, write, truncate, extend, sync, rename, link, unlink, mkdir, rmdir, ...
    kind: str
    inode: int
    # of a write; the new length of a truncate or extend
    offset: int
    data: bytes
    path: str
    # new name of a rename or link
    second: str


@dataclass(eq=False)
class Node:
    """A file or a directory, as the system sees it and as the disk has it."""

    is_directory: bool
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    names: dict[str, Node] = field(default_factory=dict)
    durable_names: dict[str, Node] = field(default_factory=dict)
    journaled_names: dict[str, Node] = field(default_factory=dict)

    def content(self, kind: str, name: str) -> bytes:
        """Of the file after a power cut of that kind."""
        kind = _one_of(kind, name)
        missing = len(self.data) - len(self.durable)
        if kind == "zeros" and missing > 0:
            return self.durable + bytes(missing)
        if kind == "torn" and missing > 0:
            return self.durable + self.data[len(self.durable):len(self.durable) + missing // 2]
        return self.durable

    def entries(self, kind: str, name: str) -> dict[str, Node]:
        """Of the directory after a power cut of that kind."""
        kind = _one_of(kind, name)
        if kind == "strict":
            return self.durable_names
        return self.journaled_names if kind == "journal" else self.names


class Disk:
    """Applies recorded operations to an empty directory that is durable itself."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Node(is_directory=True)
        self._by_inode: dict[int, Node] = {}
        # path -> contents with which it got its name
        self._placed: dict[str, set[bytes]] = {}

    @classmethod
    def of(cls, root: Path) -> Disk:
        """A disk with the present content of a directory, all of which is durable."""
        disk = cls(root)
        disk._adopt(root, disk.top)
        return disk

    def _adopt(self, path: Path, folder: Node) -> None:
        for one in path.iterdir():
            node = Node(is_directory=one.is_dir())
            folder.names[one.name] = node
            if node.is_directory:
                self._adopt(one, node)
                continue
            node.durable = one.read_bytes()
            node.data = bytearray(node.durable)
            self._by_inode[one.stat().st_ino] = node
            self._placed[one.relative_to(self.root).as_posix()] = {node.durable}
        folder.durable_names = dict(folder.names)
        folder.journaled_names = dict(folder.names)

    def apply(self, operation: Operation) -> None:
        """One operation."""
        handler = getattr(self, f"_{operation.kind}", None)
        if handler:
            if operation.kind in ("write", "truncate", "extend"):
                # it is changed in place, as a log is
                self._placed.pop(Path(operation.path).relative_to(self.root).as_posix(), None)
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
        """Applies a rename that was not recorded, as by another system call of safetensors."""
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
        target.names[new] = node = folder.names.pop(name)
        path = Path(operation.second).relative_to(self.root).as_posix()
        placed = _nodes(node, f"{path}/") if node.is_directory else [(path, node)]
        for place, one in placed:
            if not one.is_directory:
                self._placed.setdefault(place, set()).add(bytes(one.data))

    def incomplete(self, content: Content) -> list[str]:
        """Files that were complete when they got their names, and are not after a power cut."""
        return [name for name, data in content.items() if data is not None and data not in self._placed.get(name, {data})]

    def _link(self, operation: Operation) -> None:
        target, new = self._place(operation.second)
        target.names[new] = self._node(operation.path)

    def _unlink(self, operation: Operation) -> None:
        folder, name = self._place(operation.path)
        del folder.names[name]

    _rmdir = _unlink


def _one_of(kind: str, name: str) -> str:
    return KINDS[zlib.crc32(name.encode()) % (len(KINDS) - 1)] if kind == "mixed" else kind


def _nodes(folder: Node, prefix: str) -> Iterator[tuple[str, Node]]:
    for name, node in folder.names.items():
        yield prefix + name, node
        if node.is_directory:
            yield from _nodes(node, f"{prefix}{name}/")


def _walk(folder: Node, kind: str, prefix: str) -> Iterator[tuple[str, bytes | None]]:
    for name, node in folder.entries(kind, prefix).items():
        yield prefix + name, None if node.is_directory else node.content(kind, prefix + name)
        if node.is_directory:
            yield from _walk(node, kind, f"{prefix}{name}/")
