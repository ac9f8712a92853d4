"""Damage to a file: each kind is a name and a function of the content and a random generator."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.stage import remove

_DEPTH = 100_000      # of nested brackets; far beyond what a recursive parser takes
_NUMBERS: tuple[Callable[[Any], Any], ...] = (
    lambda value: value + 1, lambda value: value - 1, lambda value: -value - 1, lambda _: 10 ** 25,
    lambda value: value * 2 + 3, lambda _: float("nan"), lambda _: float("inf"), lambda _: 0)
_ANY: tuple[Any, ...] = (None, "", "x", [], {}, -1, 0, True, [1], {"a": 1}, "../../x", "\x1b[2J")
Damage = Callable[[Path, random.Random], None]

CANARY_MODULE = "fuzz_canary"


class NotApplicable(Exception):
    """The damage would leave the file as it is."""


def kinds_for(path: Path, canary: Path) -> dict[str, Damage]:
    """All kinds of damage that make sense for the file, by name."""
    found = dict(_ANY_FILE)
    if path.suffix in (".json", ".jsonl", ".yaml", ".txt"):
        found |= _TEXT
    if path.suffix == ".json":
        found |= {f"leaf-{number:02d}": _json_leaf for number in range(12)} | _JSON
    if path.name == "manifest.json":
        found |= {f"progress-{number}": _progress for number in range(6)}
    if path.suffix == ".yaml":
        found |= {f"leaf-{number:02d}": _yaml_leaf for number in range(16)} | _YAML
    if path.suffix == ".jsonl":
        found |= _LINES | {f"line-leaf-{number:02d}": _line_leaf for number in range(8)}
    if path.suffix in (".safetensors", ".npy", ".npz"):
        found["pickle"] = lambda at, _: _write(at, _pickled(canary))
    if path.name in ("config.yaml", "model.json"):
        found["target"] = lambda at, _: _plant_target(at, canary)
    return found


def _bytes(change: Callable[[bytearray, random.Random], bytes | bytearray]) -> Damage:
    """Damage of a regular file's content."""
    def apply(path: Path, rng: random.Random) -> None:
        before = path.read_bytes()
        after = bytes(change(bytearray(before), rng))
        if after == before:
            raise NotApplicable
        _write(path, after)
    return apply


def _flip_bit(data: bytearray, rng: random.Random) -> bytearray:
    data[_at(data, rng)] ^= 1 << rng.randrange(8)
    return data


def _change_byte(data: bytearray, rng: random.Random) -> bytearray:
    data[_at(data, rng)] = rng.randrange(256)
    return data


def _zero(data: bytearray, rng: random.Random) -> bytearray:
    at = _at(data, rng)
    stop = min(len(data), at + rng.randrange(1, 4096))
    data[at:stop] = bytes(stop - at)
    return data


def _insert(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data) + 1)
    data[at:at] = rng.randbytes(rng.randrange(1, 40))
    return data


def _not_utf8(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data) + 1)
    data[at:at] = b"\xff\xfe\x80"
    return data


def _swap_pages(data: bytearray, rng: random.Random) -> bytearray:
    half = len(data) // 2
    return data[half:] + data[:half]


def _at(data: bytearray, rng: random.Random) -> int:
    if not data:
        raise NotApplicable
    return rng.randrange(len(data))


def _instead(make: Callable[[Path], object]) -> Damage:
    def apply(path: Path, _: random.Random) -> None:
        remove(path)
        make(path)
    return apply


_ANY_FILE: dict[str, Damage] = {
    **{f"bit-{number}": _bytes(_flip_bit) for number in range(4)},
    **{f"byte-{number}": _bytes(_change_byte) for number in range(2)},
    "cut": _bytes(lambda data, rng: data[:_at(data, rng)]),
    "half": _bytes(lambda data, _: data[:len(data) // 2]),
    "last-byte-cut": _bytes(lambda data, _: data[:-1]),
    "zeros": _bytes(_zero), "all-zeros": _bytes(lambda data, _: bytes(len(data))),
    "inserted": _bytes(_insert), "empty": _bytes(lambda _data, _rng: b""),
    "halves-swapped": _bytes(_swap_pages), "twice": _bytes(lambda data, _: data + data),
    "missing": _instead(lambda path: None), "directory": _instead(lambda path: path.mkdir()),
    "dev-zero": _instead(lambda path: path.symlink_to("/dev/zero")),
    "dangling": _instead(lambda path: path.symlink_to("nowhere")),
    "loop": _instead(lambda path: path.symlink_to(path.name)),
    "fifo": _instead(os.mkfifo),
}
_TEXT: dict[str, Damage] = {
    "not-utf8": _bytes(_not_utf8),
    "deep": _bytes(lambda _data, _rng: b"[" * _DEPTH + b"]" * _DEPTH),
    "escape": _bytes(lambda data, _: data + b"\x1b[2J\x1b]0;x\x07\n"),
}


def _whole(text: str) -> Damage:
    return _bytes(lambda _data, _rng: text.encode())


def _without_key(data: bytearray, rng: random.Random) -> bytes:
    tree = json.loads(data)
    if not isinstance(tree, dict) or not tree:
        raise NotApplicable
    del tree[rng.choice(sorted(tree))]
    return json.dumps(tree, indent=1).encode()


_JSON: dict[str, Damage] = {
    **{f"whole-{text}": _whole(text) for text in ("null", "5", "[]", "{}", '"text"', "NaN")},
    "deep-object": _bytes(lambda _data, _rng: b'{"a":' * _DEPTH + b"1" + b"}" * _DEPTH),
    "a-key-gone": _bytes(_without_key),
}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values that are no containers."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from leaves(value, (*path, key))
    if not items and path:
        yield path


def changed_leaf(tree: Any, rng: random.Random) -> Any:
    """A copy with another value in one place."""
    found = list(leaves(tree))
    if not found:
        raise NotApplicable
    tree = copy.deepcopy(tree)
    *folders, last = rng.choice(found)
    node = tree
    for key in folders:
        node = node[key]
    node[last] = _other(node[last], rng)
    return tree


def _other(value: Any, rng: random.Random) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)) and rng.random() < 0.8:
        return rng.choice(_NUMBERS)(value)
    if isinstance(value, str) and value and rng.random() < 0.6:
        return value[:-1] + chr(ord(value[-1]) ^ 1)
    return rng.choice([other for other in _ANY if other != value])


def _json_leaf(path: Path, rng: random.Random) -> None:
    _bytes(lambda data, _: json.dumps(changed_leaf(json.loads(data), rng), indent=1).encode())(path, rng)


def _progress(path: Path, rng: random.Random) -> None:
    """One number of a checkpoint's progress, by one or by half: a value that might be true."""
    def change(data: bytearray, _: random.Random) -> bytes:
        tree = json.loads(data)
        fields = tree.get("progress", {})
        numbers = [name for name, value in fields.items() if isinstance(value, (int, float))]
        if not numbers:
            raise NotApplicable
        name = rng.choice(numbers)
        fields[name] = fields[name] + 1 if isinstance(fields[name], int) else fields[name] / 2
        return json.dumps(tree, indent=1).encode()
    _bytes(change)(path, rng)


def _yaml_leaf(path: Path, rng: random.Random) -> None:
    _bytes(lambda data, _: _yaml(data, changed_leaf(yaml.safe_load(bytes(data)), rng)))(path, rng)


def _yaml(before: bytes | bytearray, tree: Any) -> bytes:
    """The tree as text, with what follows the end mark: a digest, which no longer fits."""
    _, mark, rest = bytes(before).partition(b"\n...\n")
    dumped = str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, explicit_end=True))
    return dumped.encode() + (rest if mark else b"")


def _aliases(_data: bytearray, _rng: random.Random) -> bytes:
    """A few hundred bytes that stand for 10^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    return "\n".join([*lines, "..."]).encode()


_YAML: dict[str, Damage] = {
    "aliases": _bytes(_aliases), "deep-flow": _bytes(lambda data, _: b"a: " + b"[" * 2000 + b"]" * 2000 + b"\n" + data),
    "python-tag": _bytes(lambda data, _: data.replace(b"seed: ", b"seed: !!python/object/apply:os.getpid [] #", 1)),
    "interpolation": _bytes(lambda data, _: data.replace(b"\nname: ", b"\nname: ${oc.env:HOME} #", 1)),
    "key-twice": _bytes(lambda data, _: b"seed: 7\n" + data),
    "no-end-mark": _bytes(lambda data, _: data.replace(b"\n...", b"\n")),
}


def _lines(change: Callable[[list[bytes], random.Random], list[bytes]]) -> Damage:
    def apply(data: bytearray, rng: random.Random) -> bytes:
        return b"".join(change(bytes(data).splitlines(keepends=True), rng))
    return _bytes(apply)


def _removed(lines: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(lines))
    return lines[:at] + lines[at + 1:]


def _doubled(lines: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(lines))
    return [*lines[:at], lines[at], *lines[at:]]


def _replaced(text: bytes) -> Damage:
    def change(lines: list[bytes], rng: random.Random) -> list[bytes]:
        at = rng.randrange(len(lines))
        return [*lines[:at], text + b"\n", *lines[at + 1:]]
    return _lines(change)


def _line_leaf(path: Path, rng: random.Random) -> None:
    def change(lines: list[bytes], _: random.Random) -> list[bytes]:
        at = rng.randrange(len(lines))
        value = changed_leaf(json.loads(lines[at]), rng)
        return [*lines[:at], json.dumps(value).encode() + b"\n", *lines[at + 1:]]
    _lines(change)(path, rng)


def _shuffled(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return rng.sample(lines, len(lines))


def _glued(lines: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(lines))
    return [*lines[:at], lines[at][:len(lines[at]) // 2], *lines[at:]]


_LINES: dict[str, Damage] = {
    "line-removed": _lines(_removed), "line-doubled": _lines(_doubled),
    "lines-shuffled": _lines(_shuffled), "line-glued": _lines(_glued),
    **{f"line-{name}": _replaced(text) for name, text in (
        ("number", b"5"), ("null", b"null"), ("object", b"{}"), ("list", b"[]"), ("nan", b"NaN"),
        ("no-utf8", b"\xff\xfe"), ("deep", b"[" * _DEPTH), ("zeros", bytes(300)))},
}


class _Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def _pickled(canary: Path) -> bytes:
    return pickle.dumps(_Canary(canary))


def write_module(folder: Path, canary: Path) -> None:
    """A module that makes the canary when it is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{CANARY_MODULE}.py").write_text(
        f"import os\nos.makedirs({str(canary)!r}, exist_ok=True)\n"
        "from torch.nn import Linear as Net\n")


def _plant_target(path: Path, canary: Path) -> None:
    """The model becomes a class of a module that lies in the run folder."""
    folder = path.parent if path.name == "config.yaml" else path.parent.parent
    write_module(folder, canary)
    is_yaml, before = path.suffix == ".yaml", path.read_bytes()
    tree = yaml.safe_load(before) if is_yaml else json.loads(before)
    tree["model"]["_target_"] = f"{CANARY_MODULE}:Net"
    tree["model"]["search_path"] = str(folder)
    _write(path, _yaml(before, tree) if is_yaml else json.dumps(tree).encode())


def _write(path: Path, data: bytes) -> None:
    """Into a new file: the old one may have other names."""
    remove(path)
    path.write_bytes(data)
