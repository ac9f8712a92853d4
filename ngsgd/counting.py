"""Numbers with their nouns, and durations, for lines that people read."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """A number and its noun, which agree; `many` is the plural if that is not `one` with an s.

    Example:
        >>> counted(1, "worker"), counted(2, "worker"), counted(0, "file is", "files are")
        ('1 worker', '2 workers', '0 files are')
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds as 45s, 1m20s or 3h05m."""
    if not 0 <= seconds < 1e9:
        return "?"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
