"""Ray workers that do not see the folder of prepared data, and fetch it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import ClusterConfig, DataConfig
from ngsgd.data.fetching.files import Offer, RemoteData, publish
from ngsgd.data.fetching.source import FetchError
from ngsgd.data.reader import EgsReader
from ngsgd.errors import ClusterError, DamagedArchiveError, NodeCacheError
from ngsgd.launcher.ray.pool import RayPool
from ngsgd.tasks.speech import SpeechTaskSpec
from tests.toy import Run, config, require_undisturbed

pytestmark = [pytest.mark.services, pytest.mark.same_process("ray"), pytest.mark.usefixtures("ray_session")]


@dataclass(frozen=True)
class Elsewhere(SpeechTaskSpec):
    """A run whose workers see only `egs_directory`, which does not exist."""

    real: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # of the worker processes

    def offers(self) -> list[Offer]:
        offer = EgsReader(Path(self.real)).offer()
        return [replace(offer, folder=replace(offer.folder, path=self.egs_directory))]

    def fetching(self, remote: RemoteData) -> SpeechTaskSpec:
        if "UNREACHABLE" in self.environment:
            raise FetchError("no answer.")
        os.environ.update(self.environment)
        return super().fetching(remote)


def pool_of(run: Run, lines: list[str] | None = None, **environment: str) -> RayPool:
    folder = str(run.folder / "elsewhere")
    environment = {"XDG_CACHE_HOME": str(run.folder / "cache"), **environment}
    spec = Elsewhere(run.config, folder, real=str(run.egs), environment=environment)
    return RayPool(spec, 1, run.store.layout.size, report=(lines if lines is not None else []).append, folders=[folder])


def cached(run: Run) -> set[str]:
    return {path.name for path in (run.folder / "cache/ngsgd/archives").iterdir() if path.name != ".lock"}


def test_workers_fetch_from_the_coordinator_and_give_the_bits_of_one_process(tmp_path: Path) -> None:
    run = Run(tmp_path)
    lines: list[str] = []
    require_undisturbed(run, pool_of(run, lines))
    assert run.recorder.incidents == []
    assert sum(str(run.folder / "elsewhere") in line for line in lines) == 1
    archives = {digest for name, digest in run.reader.info.sha256.items() if name.startswith("egs.")}
    assert archives < cached(run)
    assert len(cached(run)) == len(archives) + 1


def test_a_damaged_archive_of_the_coordinator_is_one_error(tmp_path: Path) -> None:
    run = Run(tmp_path)
    path = run.egs / "egs.0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedArchiveError):
        run.train(pool_of(run))


def test_a_node_that_cannot_reach_the_data_is_named_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ClusterError) as caught:
        run.train(pool_of(run, UNREACHABLE="1"))
    assert os.uname().nodename in str(caught.value) and str(run.folder / "elsewhere") in str(caught.value)
    assert run.recorder.records == []


def test_a_cache_that_is_too_small_is_one_error(tmp_path: Path) -> None:
    cluster = ClusterConfig(num_workers=2, threads_per_worker=1)
    run = Run(tmp_path, config(cluster=cluster, data=DataConfig(node_cache_gb=2e-5)))
    with pytest.raises(NodeCacheError):
        run.train(pool_of(run))


def test_ranks_of_a_group_do_not_fetch_from_the_coordinator(tmp_path: Path) -> None:
    cluster = ClusterConfig(num_workers=1, ranks_per_worker=2, threads_per_worker=1)
    run = Run(tmp_path, config(cluster=cluster))
    with pytest.raises(ClusterError) as caught:
        run.train(pool_of(run))
    assert str(run.folder / "elsewhere") in str(caught.value)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_workers_fetch_from_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    from ngsgd.object_storage.client import ObjectStore
    from tests.object_storage.service import BUCKET, running

    url = f"s3://{BUCKET}/data"
    cluster: dict[str, Any] = {"num_workers": 3 - num_ranks, "ranks_per_worker": num_ranks, "threads_per_worker": 1}
    run = Run(tmp_path, config(cluster=ClusterConfig(**cluster), data=DataConfig(store=url)))
    lines: list[str] = []
    with running(monkeypatch.setenv) as service:
        publish(run.spec.offers(), ObjectStore(url), lines.append)
        require_undisturbed(run, pool_of(run, lines, **service.environment()),
                            replace(run.config, data=DataConfig()))
    assert any(url in line and "elsewhere" in line for line in lines)
