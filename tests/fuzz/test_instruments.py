"""The simulated disk and the damage table do what their names say."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.fuzz.damages import NotApplicable, kinds_for
from tests.fuzz.power import cuts
from tests.simulation.durability import KINDS, Disk, Operation

ROOT = Path("/root-of-the-disk")


def operation(number: int, kind: str, path: str, inode: int = 0, *, data: bytes = b"",
              second: str = "") -> Operation:
    other = f"{ROOT}/{second}" if second else ""
    return Operation(number, kind, inode, 0, data, f"{ROOT}/{path}" if path else str(ROOT), other)


REPLACED = [operation(1, "create", ".a.tmp", 5), operation(2, "write", ".a.tmp", 5, data=b"text"),
            operation(3, "rename", ".a.tmp", 5, second="a")]
SYNCED = [*REPLACED[:2], operation(9, "sync", ".a.tmp", 5), REPLACED[2]]


def state(operations: list[Operation], kind: str) -> dict[str, bytes | None]:
    disk = Disk(ROOT)
    for one in operations:
        disk.apply(one)
    return disk.state(kind)


def test_a_renamed_file_without_fsync_has_no_bytes() -> None:
    assert state(REPLACED, "empty") == {"a": b""}
    assert state(REPLACED, "zeros") == {"a": bytes(4)}
    assert state(REPLACED, "torn") == {"a": b"te"}
    assert state(REPLACED, "strict") == {}


def test_a_name_is_durable_after_fsync_of_its_directory() -> None:
    assert state(SYNCED, "empty") == {"a": b"text"}
    assert state(SYNCED, "journal") == {".a.tmp": b"text"}
    assert state(SYNCED, "strict") == {}
    assert state([*SYNCED, operation(10, "sync", "")], "strict") == {"a": b"text"}


def test_a_rename_past_the_recorder_is_found_by_the_inode() -> None:
    operations = [operation(1, "create", ".tmpX", 5), operation(2, "sync", "b", 5)]
    assert state(operations, "empty") == {"b": b""}


def test_every_state_is_given_once() -> None:
    found = list(cuts(ROOT, REPLACED))
    contents = [tuple(sorted(cut.content.items())) for cut in found]
    assert len(set(contents)) == len(contents)
    assert {cut.kind for cut in found} <= set(KINDS)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "config.yaml", "a.npy", "a.txt"])
def test_every_kind_of_damage_changes_the_file(tmp_path: Path, name: str) -> None:
    content = {".jsonl": '{"a": 1}\n{"b": {"c": "d"}}\n', ".json": '{"model": {"a": 1.5}}',
               ".yaml": "seed: 0\nmodel: {kind: relu}\nname: x\n...\n"}.get(Path(name).suffix, "ab")
    path = tmp_path / name
    for kind, damage in kinds_for(path, tmp_path / "canary").items():
        path.write_text(content)
        try:
            damage(path, random.Random(kind))
        except NotApplicable:
            continue
        assert not path.is_file() or path.is_symlink() or path.read_bytes() != content.encode(), kind
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
