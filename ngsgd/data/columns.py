"""Names, texts and records of N utterances in 8 to 30 bytes of memory each.

A Python string of 14 characters takes 63 bytes and 8 for its place in a list, an object with five
fields 500. The sequences of this module equal tuples of the same items.
"""

from __future__ import annotations

import json
import operator
import os
import tempfile
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

Item = TypeVar("Item")


class Column(Sequence[Item]):
    """A sequence that creates its items when they are read; subclasses implement `_item`."""

    def _item(self, at: int) -> Item:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, index: int | slice) -> Item | tuple[Item, ...]:
        if isinstance(index, slice):
            return tuple(map(self._item, range(*index.indices(len(self)))))
        at = operator.index(index)
        at += len(self) if at < 0 else 0
        if not 0 <= at < len(self):
            raise IndexError(f"{index} of {len(self)} items")
        return self._item(at)

    def __iter__(self) -> Iterator[Item]:
        return map(self._item, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]


class _Parts(Column[Item]):
    """Items of which `_ends` has the places where they end; the first entry is 0."""

    _ends: array[int]

    def __len__(self) -> int:
        return len(self._ends) - 1


class Strings(_Parts[str]):
    """Strings, read once, as bytes in one array."""

    def __init__(self, strings: Iterable[str]) -> None:
        content, self._ends = bytearray(), array("q", [0])
        for one in strings:
            # JSON may hold half of a surrogate pair
            content += one.encode("utf-8", "surrogatepass")
            self._ends.append(len(content))
        self._content = bytes(content)

    def _item(self, at: int) -> str:
        return self._content[self._ends[at]:self._ends[at + 1]].decode("utf-8", "surrogatepass")


class WordLists(_Parts[tuple[str, ...]]):
    """Lists of words, read once, as numbers of a vocabulary."""

    def __init__(self, lists: Iterable[Sequence[str]]) -> None:
        number_of: dict[str, int] = {}
        self._numbers, self._ends = array("i"), array("q", [0])
        for words in lists:
            self._numbers.extend(number_of.setdefault(word, len(number_of)) for word in words)
            self._ends.append(len(self._numbers))
        self._words = tuple(number_of)

    def _item(self, at: int) -> tuple[str, ...]:
        return tuple(self._words[n] for n in self._numbers[self._ends[at]:self._ends[at + 1]])


class Selected(Column[Item]):
    """The items of another sequence with the chosen numbers."""

    def __init__(self, source: Sequence[Item], chosen: Iterable[int]) -> None:
        self._source, self._chosen = source, array("q", chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def _item(self, at: int) -> Item:
        return self._source[self._chosen[at]]


class Spool(_Parts[Item]):
    """Records, read once, in an unnamed file in the folder of temporary files (TMPDIR).

    `decode` makes items of them when they are read.
    """

    def __init__(self, records: Iterable[bytes], decode: Callable[[bytes], Item]) -> None:
        # closed, and therefore removed, with this object
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._ends, self._decode = array("q", [0]), decode
        for record in records:
            self._file.write(record)
            self._ends.append(self._ends[-1] + len(record))
        self._file.flush()

    def _item(self, at: int) -> Item:
        begin = self._ends[at]
        # independent of other threads, which read too
        return self._decode(os.pread(self._file.fileno(), self._ends[at + 1] - begin, begin))


class Index:
    """Positions of keys by their hashes, 12 bytes each; `key_at` returns the key at a position."""

    def __init__(self, hashes: array[int], key_at: Callable[[int], str]) -> None:
        self._key_at = key_at
        hash_N = np.array(hashes, np.int64)
        order_N = np.argsort(hash_N, kind="stable")
        self._sorted_N: npt.NDArray[np.int64] = hash_N[order_N]
        self._order_N = order_N.astype(np.int32)
        self._next = 0

    def find(self, key: str) -> int | None:
        """Return the position of a key, or None. Keys in the order of the positions are fast."""
        # the previous one is often read again
        for at in (self._next, self._next - 1):
            if 0 <= at < len(self._order_N) and self._key_at(at) == key:
                self._next = at + 1
                return at
        first, end = (int(np.searchsorted(self._sorted_N, hash(key), side)) for side in ("left", "right"))
        for at in self._order_N[first:end].tolist():
            if self._key_at(at) == key:
                self._next = at + 1
                return int(at)
        return None

    def duplicate(self) -> tuple[int, int] | None:
        """Return the positions of the earliest repetition: first and second; None without any."""
        same = np.flatnonzero(self._sorted_N[1:] == self._sorted_N[:-1])
        pairs = [(int(self._order_N[i]), int(self._order_N[i + 1])) for i in same.tolist()]
        return min(((first, second) for first, second in pairs if self._key_at(first) == self._key_at(second)),
                   key=operator.itemgetter(1), default=None)


def selected(source: Sequence[Item], chosen: Sequence[int]) -> Sequence[Item]:
    """Return the sequence, or those of its items that are chosen."""
    return source if len(chosen) == len(source) else Selected(source, chosen)


def write_json(file: IO[str], lists: Mapping[str, Iterable[Any]]) -> None:
    """Write an object of lists as `json.dump` writes it, item by item."""
    begin = "{"
    for name, items in lists.items():
        file.write(f"{begin}{json.dumps(name)}: [")
        for number, item in enumerate(items):
            file.write((", " if number else "") + json.dumps(item))
        file.write("]")
        begin = ", "
    file.write("}")


def read_json(text: str) -> Iterator[tuple[str, Iterator[Any]]]:
    """Yield names and items of an object of lists, list by list; ValueError for other text."""
    decode, at = json.JSONDecoder().raw_decode, _after(text, 0, "{")

    def items() -> Iterator[Any]:
        """The items of the list at `at`, which ends behind its bracket."""
        nonlocal at
        is_first = True
        while not text.startswith("]", at):
            at = at if is_first else _after(text, at, ",")
            is_first = False
            item, at = decode(text, at)
            at = _after(text, at)
            yield item
        at = _after(text, at, "]")
    while True:
        name, at = decode(text, at)
        at = _after(text, _after(text, at, ":"), "[")
        yield str(name), (of_list := items())
        # those that were not read
        deque(of_list, maxlen=0)
        if not text.startswith(",", at):
            if _after(text, at, "}") != len(text):
                raise ValueError("there is text after the object")
            return
        at = _after(text, at, ",")


def _after(text: str, at: int, sign: str = "") -> int:
    """Return the position after white space, a sign and white space."""
    for wanted in ("", sign):
        if not text.startswith(wanted, at):
            raise ValueError(f"{sign!r} is missing at character {at}")
        at += len(wanted)
        while text[at:at + 1] in (" ", "\n", "\t", "\r"):
            at += 1
    return at
