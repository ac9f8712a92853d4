"""The cache of compiled libraries: damaged or foreign files are never loaded."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ngsgd.ops.kernels import native

_PAGE = 4096


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small C++ file, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # of this process, and of those that it starts
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    native.library.cache_clear()
    path = tmp_path / "small.cpp"
    # numbers in a section that the loader reads, so that the library has several pages
    path.write_text("static const double table[4096] = {1.0, 2.0};\n"
                    "extern \"C\" int answer(int i) { return 41 + (int)table[i]; }\n")
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        pytest.skip("no C++ compiler here")
    yield path
    native.library.cache_clear()


def _answer(source: Path) -> int:
    """From a library that is looked up again."""
    native.library.cache_clear()
    found = native.library(source)
    assert found is not None
    return int(found.answer(0))


def _kept(cache: Path) -> Path:
    (found,) = cache.rglob("*.so")
    return found


def _zeroed(content: bytes) -> bytes:
    return content[:_PAGE] + bytes(2048) + content[_PAGE + 2048:]


@pytest.mark.parametrize("damage", [
    lambda content: content[:len(content) // 2], lambda content: content[:_PAGE], lambda content: content[:-_PAGE], _zeroed,
    lambda content: b"", lambda content: b"not a library",
    lambda content: content[:100] + bytes([content[100] ^ 1]) + content[101:],
], ids=["half", "a page", "a page less", "2 KB zeroed", "empty", "text", "a bit"])
def test_a_damaged_library_is_built_again(damage: Callable[[bytes], bytes], source: Path, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(source) == 42
    kept = _kept(tmp_path / "cache")
    intact = kept.read_bytes()
    # at another path: what the process has loaded already, the loader would not read again
    other = tmp_path / "other" / kept.relative_to(tmp_path / "cache")
    shutil.copytree(tmp_path / "cache", tmp_path / "other")
    other.write_bytes(damage(intact))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert _answer(source) == 42
    assert other.read_bytes() == intact
    assert [path.name for path in other.parent.iterdir()] == [kept.name]


def test_an_intact_library_is_not_built_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(source) == 42
    monkeypatch.setenv("CXX", "/nonexistent")
    assert _answer(source) == 42


@pytest.mark.parametrize("which", ["folder", "file"])
def test_a_cache_that_others_can_write_to_is_not_loaded(which: str, source: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(source) == 42
    kept = _kept(tmp_path / "cache")
    (kept if which == "file" else kept.parent).chmod(0o777)
    monkeypatch.setenv("CXX", "/nonexistent")
    native.library.cache_clear()
    assert native.library(source) is None


def test_a_cache_of_another_user_is_not_loaded(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _answer(source) == 42
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setenv("CXX", "/nonexistent")
    native.library.cache_clear()
    assert native.library(source) is None


def _shared(cache: Path) -> None:
    (cache / "ngsgd" / "kernels").mkdir(parents=True)
    (cache / "ngsgd" / "kernels").chmod(0o777)


def _in_the_way(cache: Path) -> None:
    cache.mkdir()
    (cache / "ngsgd").write_text("a file")


@pytest.mark.parametrize("spoil", [_shared, _in_the_way])
def test_without_a_private_cache_there_is_one_for_temporary_files(spoil: Callable[[Path], None], source: Path, tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(tmp_path / "cache")
    assert _answer(source) == 42
    assert not list((tmp_path / "cache").rglob("*.so"))
    monkeypatch.setenv("CXX", "/nonexistent")
    assert _answer(source) == 42
    folder = _kept(tmp_path / "temporary").parent
    assert folder.stat().st_mode & 0o777 == 0o700


def test_without_a_home_there_is_a_cache_for_temporary_files(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobodys_home() -> Path:
        raise RuntimeError("Could not determine home directory.")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nobodys_home)
    assert _answer(source) == 42 and _kept(tmp_path / "temporary")


def test_without_any_private_folder_a_process_compiles_for_itself(source: Path, tmp_path: Path) -> None:
    _in_the_way(tmp_path / "cache")
    (tmp_path / "temporary" / f"ngsgd-kernels-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    assert _answer(source) == 42
    assert not list(tmp_path.rglob("*.so"))


def test_the_cache_is_private(source: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert _answer(source) == 42
    finally:
        os.umask(before)
    kept = _kept(tmp_path / "cache")
    assert not (kept.stat().st_mode | kept.parent.stat().st_mode) & 0o022


def test_the_loaded_library_is_the_one_that_was_checked(source: Path, tmp_path: Path) -> None:
    assert _answer(source) == 42
    kept = _kept(tmp_path / "cache")
    # the checksum at its end does not disturb the loader
    assert ctypes.CDLL(str(kept)).answer(1) == 43
