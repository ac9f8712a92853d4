"""Warnings that name the line of the user's code, and repeat only when their reason has grown."""

from __future__ import annotations

import sys
import warnings

from ngsgd.errors import NgsgdWarning


def warn(message: str) -> None:
    """Warn at the first frame outside of this package and torch."""
    warnings.warn(message, NgsgdWarning, stacklevel=_stack_level())


def has_grown(count: int, reported: int) -> bool:
    """Return whether a count is worth a warning: above 0, and ten times the last one reported.

    Example:
        >>> [has_grown(count, 3) for count in (3, 29, 30)]
        [False, False, True]
    """
    return count >= max(1, 10 * reported)


def _stack_level() -> int:
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("ngsgd", "torch"):
        level, frame = level + 1, frame.f_back
    return level
