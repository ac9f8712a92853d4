"""A changed bit, byte or leaf of an index is an error or harmless, and it is written again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.config import EgsConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.reader import EgsReader
from ngsgd.errors import DataError
from ngsgd.sequence.archives import SequenceReader, prepare_sequences
from ngsgd.sequence.ngram import state_ngram
from tests.reported import Reported
from tests.toy import NUM_CLASSES, frame_set

CONFIG = EgsConfig(left_context=2, right_context=1, frames_per_eg=4, samples_per_iter=100, num_diagnostic_frames=50)
TRAIN = frame_set(1000, 1)


def prepare(folder: Path, report: Callable[[str], None] = print) -> Path:
    return prepare_archives(TRAIN, frame_set(300, 2), CONFIG, num_classes=NUM_CLASSES, digest="toy", cache_root=folder,
                            report=report)


def prepare_whole(folder: Path, report: Callable[[str], None] = print) -> Path:
    labels = [TRAIN.pdf_T[begin:end] for begin, end in zip(TRAIN.offsets[:-1], TRAIN.offsets[1:], strict=True)]
    return prepare_sequences(TRAIN, state_ngram(labels, order=3), samples_per_iter=300, chunk_frames=0, digest="toy",
                             cache_root=folder, report=report)


def read_whole(directory: Path) -> object:
    return SequenceReader(directory, EgsReader(next(directory.parent.glob("egs-*")))).index


KINDS: dict[str, tuple[Callable[..., Path], Callable[[Path], object], str]] = {
    "examples": (prepare, lambda directory: EgsReader(directory).info, "info.json"),
    "sequences": (prepare_whole, read_whole, "sequences.json")}


def changed_leaves(tree: Any) -> Iterator[Any]:
    """The tree with one leaf changed, removed or doubled, for every leaf."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield {name: part for name, part in tree.items() if name != key}
            yield from ({**tree, key: part} for part in changed_leaves(value))
    elif isinstance(tree, list):
        for at, value in enumerate(tree):
            yield tree[:at] + tree[at + 1:]
            yield tree[:at] + tree[at:at + 1] + tree[at:]
            yield from ([*tree[:at], part, *tree[at + 1:]] for part in changed_leaves(value))
    elif isinstance(tree, bool):
        yield not tree
    elif tree is None:
        yield 0
    elif isinstance(tree, (int, float)):
        yield from (tree + 1, tree - 1, -tree - 1, tree + 0.5, str(tree), None, 10**30)
    else:
        yield from (tree[1:], "1" if tree.startswith("0") else f"0{tree[1:]}", None, 0)


def changed_bytes(content: bytes) -> Iterator[bytes]:
    """The content with one bit flipped, or one byte removed or doubled, at 300 random places."""
    random = np.random.default_rng(0)
    for _ in range(300):
        at, how = int(random.integers(len(content))), random.integers(3)
        byte = content[at:at + 1]
        yield content[:at] + [bytes([byte[0] ^ 1 << int(random.integers(8))]), b"", byte * 2][how] + content[at + 1:]


@pytest.mark.parametrize("changes", [
    changed_bytes, lambda content: (json.dumps(tree).encode() for tree in changed_leaves(json.loads(content)))],
    ids=["bytes", "leaves"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_index_is_refused_or_harmless(
        tmp_path: Path, kind: str, changes: Callable[[bytes], Iterator[bytes]]) -> None:
    prepare(tmp_path)
    make, read, name = KINDS[kind]
    directory = make(tmp_path)
    expected, num_refused = read(directory), 0
    for changed in changes((directory / name).read_bytes()):
        (directory / name).write_bytes(changed)
        try:
            assert read(directory) == expected
        except DataError:
            num_refused += 1
    assert num_refused > 20


def lose_an_archive(path: Path) -> None:
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "num_archives": index.get("num_archives", 0) - 1}))


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-7]),
                                    lose_an_archive, make_fifo,
                                    lambda path: path.write_text("[" * 100_000)],
                         ids=["cut", "archive", "fifo", "nested"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_directory_with_a_damaged_index_is_written_again_with_one_line(
        tmp_path: Path, kind: str, damage: Callable[[Path], None]) -> None:
    prepare(tmp_path)
    make, read, name = KINDS[kind]
    directory = make(tmp_path)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    damage(directory / name)
    with pytest.raises(DataError):
        read(directory)
    reports = Reported()
    assert make(tmp_path, reports.append) == directory
    assert len(reports) == 1 and name in reports[0]
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
