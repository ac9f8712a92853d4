"""A disk that is full, fails, is slow, or loses data that it reported as written."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from ngsgd import files
from ngsgd.training.storage import checkpoint

SLOW_S = 1.0
class PowerCut(BaseException):
    """The machine goes off: nothing that was to be cleaned up is."""


class Trouble:
    """Breaks one kind of access to the checkpoint of one outer iteration, once."""

    def __init__(self, when: str, how: str, outer_iter: int) -> None:
        self.when = when
        self.how = how
        self.name = f"iter-{outer_iter:06d}"
        self.happened = False
        self._is_off = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Breaks things while the block runs."""
        places = {"write": (checkpoint, "save_file", 1), "fsync": (files, "fsync", 0), "rename": (Path, "rename", 1),
                  "read": (checkpoint, "load_file", 0)}
        owner, name, position = places[self.when]
        whole, remove = getattr(owner, name), shutil.rmtree

        def broken(*arguments: Any, **named: Any) -> Any:
            path = Path(arguments[position])
            if self.happened or self.name not in str(path):
                return whole(*arguments, **named)
            self.happened = True
            return self._break(lambda: whole(*arguments, **named), path)

        def remove_while_on(*arguments: Any, **named: Any) -> None:
            if not self._is_off:
                remove(*arguments, **named)
        with mock.patch.object(owner, name, broken), mock.patch.object(shutil, "rmtree", remove_while_on):
            yield

    def _break(self, access: Callable[[], Any], path: Path) -> Any:
        if self.how in ("ENOSPC", "EIO"):
            number = getattr(errno, self.how)
            raise OSError(number, os.strerror(number), str(path))
        found = access()
        if self.how == "slow":
            time.sleep(SLOW_S)
            return found
        folder = next(one for one in (path, *path.parents) if self.name in one.name and one.is_dir())
        if self.when == "fsync":   # the name came to the disk before the content did
            folder = Path(shutil.copytree(folder, folder.parent / self.name))
        cut_short(folder)
        self._is_off = True
        raise PowerCut


def cut_short(folder: Path) -> None:
    """Leaves half of a checkpoint's manifest."""
    manifest = folder / "manifest.json"
    text = manifest.read_text() if manifest.exists() else '{"format": 2, "files": {'
    manifest.write_text(text[:len(text) // 2])
