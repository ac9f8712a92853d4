"""Files that are complete or absent, and logs without half lines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ngsgd import files
from ngsgd.files import JsonLines, new_directory, new_file, parse_json_lines, read_json_lines, remove_abandoned


def test_temporary_files_of_a_dead_writer_are_removed_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    (tmp_path / ".model.0123abcd.tmp").mkdir()
    (tmp_path / ".model.0123abcd.tmp" / "half").write_text("x")
    (tmp_path / ".data.json.0123abcd.tmp").write_text("x")
    with new_directory(tmp_path / "final") as directory, new_file(tmp_path / "data.json") as file:
        file.write_text("{}")
        remove_abandoned(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([directory.name, file.name])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.json", "final"]


@pytest.mark.parametrize("make", [new_file, new_directory])
@pytest.mark.parametrize("moment", ["removed", "locked"])
def test_a_writer_survives_a_removal_before_it_has_its_lock(make: Callable[[Path], AbstractContextManager[Path]], moment: str,
                                                            tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock, taken = fcntl.flock, list[Path]()

    def after_another(descriptor: int, how: int) -> None:
        (found,) = tmp_path.glob(".*.tmp")
        if not taken:
            taken.append(found)
            if moment == "removed":
                monkeypatch.setattr(fcntl, "flock", flock)
                remove_abandoned(tmp_path)
                monkeypatch.setattr(fcntl, "flock", after_another)
            else:
                # what remove_abandoned holds while it removes
                other = os.open(found, os.O_RDONLY)
                flock(other, fcntl.LOCK_EX)
                found.rmdir() if found.is_dir() else found.unlink()
                try:
                    flock(descriptor, how)
                finally:
                    os.close(other)
        flock(descriptor, how)
    monkeypatch.setattr(fcntl, "flock", after_another)
    with make(tmp_path / "final") as temporary:
        assert temporary.exists() and taken and temporary not in taken
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_a_file_that_could_not_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")

    def interrupted() -> None:
        with new_file(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "old"


@pytest.mark.parametrize("rest", ["", "{\"event\": \"x", "{\"event\": \"" + "y" * 200_000])
def test_a_line_that_a_crash_cut_short_is_removed(tmp_path: Path, rest: str) -> None:
    (tmp_path / "log").write_text('{"n": 1}\n' + rest)
    log = JsonLines(tmp_path / "log")
    log.append({"n": 2})
    log.close()
    assert (tmp_path / "log").read_text() == '{"n": 1}\n{"n": 2}\n'
    # without any end of a line
    (tmp_path / "log").write_text("x" * 70_000)
    JsonLines(tmp_path / "log").close()
    assert (tmp_path / "log").read_text() == ""


def test_a_disk_that_fills_up_in_mid_line_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = JsonLines(tmp_path / "log")
    log.append({"n": 1})
    write, calls = os.write, 0

    def fills_up(descriptor: int, content: bytes) -> int:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content[:5])
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", fills_up)
        with pytest.raises(OSError, match="No space"):
            log.append({"n": 2})
    log.append({"n": 3})
    log.close()
    assert read_json_lines(tmp_path / "log") == [{"n": 1}, {"n": 3}]


@pytest.mark.parametrize("make", [new_file, new_directory])
def test_an_error_of_a_full_disk_names_the_file(make: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path) -> None:
    # write() raises it without a name
    for number, name, expected in ((errno.ENOSPC, None, str(tmp_path / "a")),
                                   (errno.ENOSPC, "other", "other"),
                                   (errno.ECONNREFUSED, None, None)):
        with pytest.raises(OSError, match=os.strerror(number)) as caught, make(tmp_path / "a"):
            raise OSError(number, os.strerror(number), *([name] if name else []))
        assert caught.value.filename == expected


def test_lines_that_are_no_objects_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"n": 1}\n5\nnull\n[]\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"n": 2}\n')
    assert read_json_lines(tmp_path / "log") == [{"n": 1}, {"n": 2}]
    # line separators of Unicode are not ends of lines of a log
    assert parse_json_lines(json.dumps({"n": "a\u2028b"}, ensure_ascii=False)) == [{"n": "a\u2028b"}]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_fifos_devices_and_folders_are_refused_without_blocking(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "data.json")
    with pytest.raises(OSError, match="regular"):
        files.read_regular_text(tmp_path / "data.json")


def test_a_file_beyond_the_limit_and_deep_json_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert files.read_regular_text(tmp_path / "a", 5) == "12345"
    with pytest.raises(OSError, match="larger"):
        files.read_regular_text(tmp_path / "a", 4)
    (tmp_path / "a").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="deep"):
        files.read_json(tmp_path / "a")


def test_index_digest_detects_changed_leaves() -> None:
    index = files.sealed("archives", {"a": 1, "b": {"one": "x", "two": "y"}, "c": (1, 2.5, None), "d": {3: "z"}})
    read = json.loads(json.dumps(index, indent=1))
    assert files.unsealed("archives", read) == {"a": 1, "b": {"one": "x", "two": "y"}, "c": [1, 2.5, None], "d": {"3": "z"}}
    for change in ({"a": 2}, {"a": 1.0}, {"a": True}, {"b": {"one": "y", "two": "x"}}, {"c": [1, 2.5]}, {"e": 0},
                   {files.DIGEST: None}):
        with pytest.raises(ValueError, match="digest"):
            files.unsealed("archives", {**read, **change})
    del read[files.DIGEST]
    with pytest.raises(ValueError, match="no digest"):
        files.unsealed("archives", read)
    with pytest.raises(ValueError, match="object"):
        files.unsealed("archives", [1])


@pytest.mark.parametrize("index", files.FORMATS)
def test_an_index_of_another_format_is_refused(index: str) -> None:
    content = files.sealed(index, {"a": 1})
    assert files.unsealed(index, content) == {"a": 1}
    for found in (files.FORMATS[index] + 1, str(files.FORMATS[index]), True, None):
        other = {name: value for name, value in {**content, files.FORMAT: found}.items() if value is not None}
        with pytest.raises(ValueError, match="format"):
            files.unsealed(index, other)


def test_every_index_is_written_and_read_with_its_format() -> None:
    """Each name of `FORMATS` is in a call that writes and in one that reads."""
    found: dict[str, set[str]] = {"sealed": set(), "unsealed": set(), "require_format": set()}
    product = Path(files.__file__).parent
    for path in [*product.rglob("*.py"), *(product / "launcher").rglob("*.py")]:
        for name, index in re.findall(r'\b(sealed|unsealed|require_format)\(\s*"([^"]+)"', path.read_text()):
            found[name].add(index)
    # the lines of a ledger and the header of arrays have another digest
    assert found["require_format"] == {"arrays", "ledger"}
    assert found["sealed"] == found["unsealed"] == set(files.FORMATS) - found["require_format"]
