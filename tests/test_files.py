"""Files from others: only regular ones of a bounded size are read, and an index is checked against its own digest."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ngsgd import files


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("make", [make_fifo, link_to_a_device, make_folder])
def test_fifos_devices_and_folders_are_refused_without_blocking(tmp_path: Path, make: object) -> None:
    assert callable(make)
    make(tmp_path / "data.json")
    with pytest.raises(OSError, match="not a regular file"):
        files.read_regular_text(tmp_path / "data.json")


def test_a_file_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert files.read_regular_text(tmp_path / "a", 5) == "12345"
    with pytest.raises(OSError, match="larger"):
        files.read_regular_text(tmp_path / "a", 4)


def test_deep_json_is_a_value_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="deep"):
        files.read_json(tmp_path / "a")


def test_index_digest_detects_changed_leaves() -> None:
    index = files.sealed({"a": 1, "b": {"one": "x", "two": "y"}, "c": (1, 2.5, None), "d": {3: "z"}})
    read = json.loads(json.dumps(index, indent=1))
    assert files.unsealed(read) == ({"a": 1, "b": {"one": "x", "two": "y"}, "c": [1, 2.5, None], "d": {"3": "z"}}, True)
    for change in ({"a": 2}, {"a": 1.0}, {"a": True}, {"b": {"one": "y", "two": "x"}}, {"c": [1, 2.5]}, {"e": 0},
                   {files.DIGEST: None}):
        with pytest.raises(ValueError, match="digest"):
            files.unsealed({**read, **change})
    del read[files.DIGEST]
    assert files.unsealed(read)[1] is False
    with pytest.raises(ValueError, match="object"):
        files.unsealed([1])
