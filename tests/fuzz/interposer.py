"""The library that counts, kills, fails and records the file operations of this process."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.durability import Operation

SOURCE = Path(__file__).with_name("interpose.c")
LIBRARY = "NGSGD_FUZZ_LIBRARY"   # environment variable with the path of the compiled library


class Mode(enum.IntEnum):
    """The fault at the operation with the chosen number; the values are those of interpose.c."""

    COUNT = 1
    KILL = 2         # SIGKILL before it
    FAIL_ONE = 3     # it fails, the next ones do not
    FAIL_REST = 4    # it fails, and so does every later one: a full disk
    HALF = 5         # it writes half of its data, every later one fails
    HOLD = 6         # it waits when its path contains a pattern


@dataclass(frozen=True)
class Arming:
    """How a process is disturbed; `root` limits it to the files of one directory."""

    root: Path
    mode: Mode = Mode.COUNT
    number: int = 0
    error: int = errno.ENOSPC
    record: Path | None = None                   # file that takes the operations with their data
    # part of a path, descriptors to notify and to wait on
    hold: tuple[str, int, int] | None = None

    def apply(self) -> None:
        """Arms the library in this process; only a forked child calls it."""
        library = ctypes.CDLL(None)
        if self.record:
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND
            library.fuzz_record(os.open(self.record, flags, 0o600))
        if self.hold:
            part, notify, release = self.hold
            library.fuzz_hold(part.encode(), notify, release)
        number = ctypes.c_long(self.number)
        library.fuzz_arm(os.fsencode(self.root), int(self.mode), number, self.error)


def compiler() -> str | None:
    """The C compiler of this machine, or None."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


def build(folder: Path) -> Path:
    """Compiles the library into `folder`."""
    path = folder / "interpose.so"
    command = [compiler() or "cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE)]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return path


def operations(record: Path) -> Iterator[Operation]:
    """The operations in a record, in order."""
    with record.open("rb") as file:
        while line := file.readline():
            fields = line.rstrip(b"\n").split(b"\t")
            number, inode, offset, length = (int(fields[at]) for at in (0, 2, 3, 4))
            kind, path, second = (os.fsdecode(fields[at]) for at in (1, 5, 6))
            yield Operation(number, kind, inode, offset, file.read(length), path, second)
