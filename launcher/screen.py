"""The terminal of this process: permanent lines, and below them one status line.

Without a terminal there is no control code, and every phase is a plain line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

from ngsgd.counting import duration
from ngsgd.masking import masked, printable

# a phase that took less leaves no line on a terminal
_LONG_S = 2.0
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAMES_PER_S = 8
# columns of a line that no terminal wraps, in logs
_LOG_WIDTH = 100

# the text of the status line that fits into a number of columns
Status = Callable[[int], str]
T = TypeVar("T")


def is_terminal(stream: TextIO) -> bool:
    """Whether a status line can be shown; a log and a notebook would keep each frame."""
    try:
        return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and "JPY_PARENT_PID" not in os.environ
    except ValueError:
        # closed
        return False


def say(line: str) -> None:
    """Print a line on stderr, with control characters escaped."""
    print(printable(line), file=sys.stderr)


def with_progress(items: Iterable[T], total: int, about: str) -> Iterator[T]:
    """Yield the items, with a progress bar on stderr if it is a terminal and there are several."""
    # rich belongs to the extra [service], which recognition does not need
    if total < 2 or not is_terminal(sys.stderr) or importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.console import Console
    from rich.progress import Progress
    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(items, total=total, description=about)


class Screen:
    """Writes to one stream, by default to whatever sys.stdout is at that time."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._given = stream
        # rich.live.Live, while there is a status line
        self._live: Any = None
        self._status: Status | None = None
        self._phase = ""
        self._began = 0.0
        self._is_gone = False
        # a signal handler may write while this thread writes
        self._lock = threading.RLock()

    @property
    def is_terminal(self) -> bool:
        return is_terminal(self._stream)

    @property
    def width(self) -> int:
        return int(_console(self._stream).width) if self.is_terminal else _LOG_WIDTH

    def line(self, text: str, style: str = "", *, wraps: bool = True) -> None:
        """Write a permanent line; control characters are escaped and passwords masked."""
        text = printable(masked(text))
        if self.is_terminal:
            from rich.text import Text

            def write() -> None:
                console = self._live.console if self._live else _console(self._stream)
                # a path too long for a line is left to the terminal, to copy it in one piece
                console.print(Text(text, style, overflow="ignore", no_wrap=not wraps), crop=False)
            self._safely(write)
        else:
            self._safely(lambda: print(text, file=self._stream, flush=True))

    def rule(self, title: str = "") -> None:
        if self.is_terminal:
            dash, width = "─" if self._has_unicode else "-", min(self.width, 80)
            head = f"{2 * dash} {title} " if title else ""
            self.line((head + width * dash)[:width], "green")

    def phase(self, name: str) -> None:
        """Begin a named phase, which ends the one before."""
        self.end_phase()
        if not self.is_terminal:
            self.line(f"{name} ...")
            return
        self._phase, self._began = printable(masked(name)), time.monotonic()
        self._show(lambda _width: f"{self._phase}  {duration(time.monotonic() - self._began)}")

    def end_phase(self) -> None:
        """Leave a line with the time that the phase took, if it was long."""
        seconds, name, self._phase = time.monotonic() - self._began, self._phase, ""
        if name and seconds >= _LONG_S:
            self.line(f"{name}: {duration(seconds)}", "dim")

    def status(self, status: Status) -> None:
        """Show a status line on a terminal until `close`; it replaces the phase."""
        self.end_phase()
        if self.is_terminal:
            self._show(status)

    def close(self) -> None:
        """Remove the status line and give the terminal back."""
        self._phase, self._status = "", None
        live, self._live = self._live, None
        if live is not None:
            self._safely(live.stop)

    # Parts ----------------------------------------------------------------------------------------

    @property
    def _stream(self) -> TextIO:
        return self._given or sys.stdout

    @property
    def _has_unicode(self) -> bool:
        return "utf" in (getattr(self._stream, "encoding", None) or "utf-8").lower()

    def _safely(self, write: Callable[[], object]) -> None:
        """Write, unless nobody reads any more (`| head`): training continues."""
        with self._lock:
            try:
                if not self._is_gone:
                    write()
            except (OSError, ValueError):
                self._is_gone = True

    def _show(self, status: Status) -> None:
        from rich.live import Live
        self._status = status
        with self._lock:
            if self._live is None:
                self._live = Live(console=_console(self._stream), get_renderable=self._renderable, transient=True,
                                  refresh_per_second=_FRAMES_PER_S)
                self._safely(self._live.start)
        # at once, and not with the next frame
        self._safely(self._live.refresh)

    def _renderable(self) -> Any:
        from rich.text import Text
        status = self._status
        if status is None or self._live is None:
            return Text("")
        frames = _FRAMES if self._has_unicode else "-\\|/"
        frame = frames[int(time.monotonic() * _FRAMES_PER_S) % len(frames)]
        # one column stays free, since some terminals wrap when the last one is written
        room = max(int(self._live.console.width) - len(frame) - 2, 10)
        return Text.assemble((frame, "cyan"), " ", status(room)[:room], no_wrap=True, overflow="crop")


def _console(stream: TextIO) -> Any:
    """rich reads NO_COLOR and the width of the terminal."""
    from rich.console import Console
    return Console(file=stream, force_terminal=True, markup=False, highlight=False)


# the one of this process
SCREEN = Screen()


@contextlib.contextmanager
def loading(about: str = "") -> Iterator[None]:
    """Show on stderr that a command waits, until it writes its first line.

    `about` names the wait, such as that for a server. Imports, without it, show on terminals alone.
    """
    screen = Screen(sys.stderr)
    # a terminal without rich has no status line
    if importlib.util.find_spec("rich") if screen.is_terminal else about:
        screen.phase(about or "loading ngsgd")
    try:
        yield
    finally:
        screen.close()
