"""Archives in object storage: published once, by content, and fetched by digest."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto.server")

from ngsgd.data.fetching.files import publish
from ngsgd.data.fetching.node_cache import NodeCache
from ngsgd.data.fetching.source import PREFIX, StoreSource, UnsoundFileError
from ngsgd.errors import DataError
from ngsgd.object_storage.client import ObjectStore
from tests.object_storage.service import Service
from tests.toy import Run

pytestmark = [pytest.mark.services, pytest.mark.same_process("object storage service")]


def test_files_are_written_once_and_by_their_content(tmp_path: Path, store: ObjectStore, service: Service) -> None:
    run, lines = Run(tmp_path), list[str]()
    offers = run.spec.offers()
    paths = {digest: path for offer in offers for digest, path in offer.paths.items()}
    assert publish(offers, store, lines.append) == len(paths) and len(lines) == 1
    assert store.sizes(PREFIX) == {PREFIX + digest: path.stat().st_size for digest, path in paths.items()}
    num_writes = service.faults.num_writes
    assert publish(offers, store, lines.append) == 0 and len(lines) == 1
    assert service.faults.num_writes == num_writes
    cache = NodeCache(tmp_path / "cache", 1 << 30)
    for digest, path in paths.items():
        found = cache.fetch(digest, StoreSource(store.url), lambda: None)
        assert found.read_bytes() == path.read_bytes()


def test_large_files_are_written_in_parts(tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ngsgd.object_storage.client._MAX_CONDITIONAL_BYTES", 100)
    run = Run(tmp_path)
    publish(run.spec.offers(), store, lambda _: None)
    digest = run.reader.info.sha256["egs.0000.safetensors"]
    assert store.size(PREFIX + digest) == (run.egs / "egs.0000.safetensors").stat().st_size


def test_an_object_of_another_size_is_replaced_and_a_changed_one_is_an_error(tmp_path: Path, store: ObjectStore) -> None:
    run = Run(tmp_path)
    offers = run.spec.offers()
    publish(offers, store, lambda _: None)
    digest = run.reader.info.sha256["egs.0001.safetensors"]
    store.put(PREFIX + digest, b"short")
    assert publish(offers, store, lambda _: None) == 1
    size = store.size(PREFIX + digest)
    assert size and store.size("none") is None
    with pytest.raises(UnsoundFileError):
        NodeCache(tmp_path, 1 << 30).fetch("0" * 64, StoreSource(store.url), lambda: None)
    store.put(PREFIX + digest, b"x" * size)
    with pytest.raises(UnsoundFileError):
        NodeCache(tmp_path / "cache", 1 << 30).fetch(digest, StoreSource(store.url), lambda: None)


def test_a_damaged_file_is_not_published(tmp_path: Path, store: ObjectStore) -> None:
    run = Run(tmp_path)
    (run.egs / "egs.0001.safetensors").write_bytes(b"damaged")
    with pytest.raises(DataError):
        publish(run.spec.offers(), store, lambda _: None)
    assert PREFIX + run.reader.info.sha256["egs.0001.safetensors"] not in store.sizes(PREFIX)
