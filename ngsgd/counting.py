"""Numbers with their nouns, for lines that people read."""

from __future__ import annotations


def counted(number: int, one: str, many: str = "") -> str:
    """A number and its noun, which agree; `many` is the plural if that is not `one` with an s.

    Example:
        >>> counted(1, "worker"), counted(2, "worker"), counted(0, "file is", "files are")
        ('1 worker', '2 workers', '0 files are')
    """
    return f"{number} {one}" if number == 1 else f"{number} {many or one + 's'}"
