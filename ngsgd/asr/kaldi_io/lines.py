"""The reader of all text files of speech data: tables, dictionaries, manifests, language models.

UTF-8, with or without a byte order mark, CRLF and gzip. Blanks and tabs separate fields; all other
spaces, control and invisible characters are errors: other tools split words there, unseen.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from ngsgd import files
from ngsgd.asr import unpacking
from ngsgd.errors import DataError

MAX_BYTES = 1 << 32
_GZIP = b"\x1f\x8b"
# controls, formats, halves of surrogate pairs, and separators
_ODD_CATEGORIES = ("Cc", "Cf", "Cs", "Zs", "Zl", "Zp")
# characters of other categories that show nothing or a gap
_INVISIBLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# they are part of the spelling between letters of these scripts, from Arabic to Mongolian
_JOINERS, _JOINED_FIRST, _JOINED_LAST = "\u200c\u200d", "\u0600", "\u1cff"
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)


def read(path: Path, *, max_bytes: int = MAX_BYTES) -> Iterator[tuple[str, str]]:
    """Yield (file:line, text) of every nonempty line, without spaces at its ends. Raises DataError
    if the file cannot be read, or a line has a character that the module forbids.
    """
    for number, line in numbered(path, max_bytes=max_bytes):
        yield f"{path}:{number}", line


def numbered(path: Path, *, is_checked: bool = True, max_bytes: int = MAX_BYTES) -> Iterator[tuple[int, str]]:
    """Yield the number and the text of every nonempty line, as `read`; one at a time is in memory.
    Unless `is_checked`, forbidden characters are no errors: JSON lines are parsed first.
    """
    number = 0
    try:
        with files.open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > max_bytes:
                raise OSError(errno.EFBIG, f"larger than the limit of {max_bytes} bytes")
            is_packed = file.peek(2).startswith(_GZIP)
            unpacked = io.BytesIO(unpacking.gunzip(path)) if is_packed else file
            for number, content in enumerate(unpacked, start=1):
                text = content.removeprefix(codecs.BOM_UTF8) if number == 1 else content
                line = text.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8")
                if is_checked:
                    check(line, f"{path}:{number}")
                if stripped := line.strip(" \t"):
                    yield number, stripped
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; create it, or correct its name.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); replace it or fix its permissions.") from error
    except UnicodeError as error:
        raise DataError(f"{path}:{number} is not UTF-8 text ({error}); convert the file.") from error


def check(text: str, where: str) -> str:
    """Return the text; raise DataError for a character that the module forbids."""
    plain = text.replace("\t", " ")
    if plain.isprintable() and (plain.isascii() or not _INVISIBLE.search(plain)):
        return text
    for at, char in enumerate(plain):
        is_odd = char != " " and (unicodedata.category(char) in _ODD_CATEGORIES or _INVISIBLE.match(char))
        # a joiner between letters of a script that needs it
        is_spelling = char in _JOINERS and all(_JOINED_FIRST <= one <= _JOINED_LAST
                                               for one in (plain[at - 1:at], plain[at + 1:at + 2]))
        if is_odd and not is_spelling:
            after = f" after {plain[max(0, at - 20):at]!r}" if at else ""
            raise DataError(f"{where}: there is {named(char)}{after}; only blanks and tabs separate "
                            "words, so write a blank instead, or remove it.")
    return text


def named(char: str) -> str:
    """Return the code point and the name of a character.

    >>> named(chr(0xa0))
    'U+00A0 (NO-BREAK SPACE)'
    """
    return f"U+{ord(char):04X} ({unicodedata.name(char, 'a control character')})"


def as_float(text: str) -> float:
    """Return the number in ASCII digits; raise ValueError for other forms that Python reads.

    >>> as_float("1.5e3")
    1500.0
    """
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a number")
    return float(text)


def as_int(text: str) -> int:
    """Return the integer in ASCII digits; raise ValueError for other forms that Python reads."""
    if not re.fullmatch(r"[-+]?\d{1,18}", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is not an integer")
    return int(text)
