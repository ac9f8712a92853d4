"""Speech in object storage: a local copy that follows the list of objects."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto.server")
pytest.importorskip("soundfile")
pytest.importorskip("kaldi_native_fbank")

from ngsgd.config import DataConfig
from ngsgd.errors import DataError, ObjectStorageError
from ngsgd.object_storage.client import ObjectStore
from ngsgd.object_storage.mirror import mirrored
from ngsgd.pipeline.prepare import PreparedData, prepare, with_local_source
from ngsgd.pipeline.recipes import recipe
from tests.asr.made_up_speech import write_data

pytestmark = [pytest.mark.services, pytest.mark.same_process("object storage service")]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def silent(_line: str) -> None:
    pass


def test_only_changed_objects_are_copied(store: ObjectStore) -> None:
    lines: list[str] = []
    for key, content in (("train/text", b"a"), ("train/wav.scp", b"b"), ("words", b"c")):
        store.put(key, content)
    # as consoles do for folders
    store.put("train", b"")
    folder = mirrored(store, lines.append)
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name[0] != "."} == {
        "train/text", "train/wav.scp", "words"}
    times = {path: path.stat().st_ino for path in (folder / "train").iterdir()}
    store.put("train/text", b"x")
    store.delete(["words"])
    (folder / "train" / "wav.scp").write_bytes(b"a longer file")
    assert mirrored(store, lines.append) == folder and len(lines) == 2
    assert (folder / "train/text").read_bytes() == b"x" and (folder / "train/wav.scp").read_bytes() == b"b"
    assert not (folder / "words").exists()
    assert all(path.stat().st_ino != inode for path, inode in times.items())
    mirrored(store, lines.append)
    assert len(lines) == 2


@pytest.mark.entry("At6")
def test_a_copy_that_another_process_reads_does_not_change(store: ObjectStore) -> None:
    store.put("text", b"a")
    code = ("import sys; from ngsgd.object_storage.client import ObjectStore; from ngsgd.object_storage.mirror import mirrored; "
            "print(mirrored(ObjectStore(sys.argv[1]), lambda line: None), flush=True); sys.stdin.read()")
    command = [sys.executable, "-c", code, store.url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        read = Path(reader.stdout.readline().strip())
        assert mirrored(store, silent) == read
        store.put("text", b"changed")
        store.put("more", b"b")
        other = mirrored(store, silent)
        assert other != read and (other / "text").read_bytes() == b"changed" and (other / "more").exists()
        assert (read / "text").read_bytes() == b"a" and not (read / "more").exists()
        reader.communicate("")
    assert mirrored(store, silent) == other and not (read / "text").exists()
    # the next process uses the copy that is there
    done = subprocess.run(command, input="", capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == other


def test_no_objects_and_an_interrupted_copy_are_errors(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError):
        mirrored(store, silent)
    for number in range(3):
        store.put(f"file{number}", b"a" * (number + 1))
    download = ObjectStore.download
    lines: list[str] = []

    def fails(self: ObjectStore, key: str, path: Path) -> str:
        if key == "file1":
            raise ObjectStorageError("no answer")
        return download(self, key, path)
    monkeypatch.setattr(ObjectStore, "download", fails)
    with pytest.raises(ObjectStorageError):
        mirrored(store, lines.append)
    monkeypatch.setattr(ObjectStore, "download", lambda self, key, path: path.write_bytes(b"other size"))
    with pytest.raises(DataError):
        mirrored(store, lines.append)
    monkeypatch.setattr(ObjectStore, "download", download)
    folder = mirrored(store, lines.append)
    assert (folder / "file1").read_bytes() == b"aa"


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/x", "a//b", ".objects.json", ".lock"])
def test_a_key_that_is_no_path_is_an_error(store: ObjectStore, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ObjectStore, "states", lambda self: {key: (1, "")})
    with pytest.raises(DataError):
        mirrored(store, silent)


def test_options_below_the_url_name_files_of_the_copy(store: ObjectStore) -> None:
    store.put("lexicon.txt", b"a A\n")
    given = DataConfig(corpus="kaldi", source=store.url + "/", lexicon=f"{store.url}/lexicon.txt", lm="other/lm.arpa",
                       added_dirs=(f"{store.url}/more", "mine"))
    found = with_local_source(given, silent)
    assert Path(found.lexicon).read_text() == "a A\n" and Path(found.source) == Path(found.lexicon).parent
    assert found.added_dirs == (str(Path(found.source) / "more"), "mine") and found.lm == "other/lm.arpa"
    local = replace(given, source="folder")
    assert with_local_source(local, silent) is local


def test_prepared_data_is_that_of_the_folder(store: ObjectStore, tmp_path: Path) -> None:
    folder = write_data(tmp_path / "mine")
    for path in folder.rglob("*"):
        if path.is_file():
            store.upload(path.relative_to(folder).as_posix(), path)
    found: list[PreparedData] = []
    for source in (str(folder), store.url):
        config = recipe("kaldi", data={"source": source, "cache_dir": str(tmp_path / f"data{len(found)}")},
                        features={"sample_rate_hz": 16000}, output_dir=str(tmp_path))
        found.append(prepare(config, silent))
    assert found[0].corpus.digest == found[1].corpus.digest
    assert found[0].egs_directory.name == found[1].egs_directory.name
