"""The bytes of parameters that real workers on Ray get and send."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import ClusterConfig
from ngsgd.launcher.ray import metrics
from tests.toy import Run, config

pytestmark = [pytest.mark.services, pytest.mark.same_process("ray"), pytest.mark.usefixtures("ray_session")]


@pytest.mark.entry("Nc17")
@pytest.mark.parametrize(("exchange", "compression", "way"), [
    ("auto", "none", "shared_memory"), ("object_store", "none", "network"), ("object_store", "int8", "network"),
    ("collective", "none", "shared_memory")])
def test_bytes_are_those_of_the_vectors(exchange: Any, compression: Any, way: str, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    found: Counter[tuple[str, ...]] = Counter()

    class Recorded:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert tag_keys == ("run", "direction", "way")

        def inc(self, value: float, tags: dict[str, str]) -> None:
            found[*tags.values()] += int(value)

    monkeypatch.setattr(metrics, "Counter", Recorded)
    cluster = ClusterConfig("ray", num_workers=2, threads_per_worker=1, exchange=exchange, compression=compression)
    run = Run(tmp_path, config(cluster=cluster))
    pool = metrics.MeteredRayPool(run.spec, 1, run.store.layout.size)
    pool.run = "night"
    run.train(pool)
    num_jobs = sum(record.num_jobs for record in run.recorder.records)
    model = 4 * run.store.layout.size
    sent, received = found["night", "sent", way], found["night", "received", way]
    assert {key[2] for key in found} == {way} and num_jobs > 2
    if exchange == "collective":
        assert (sent, received) == (2 * model, 0), "the workers average, and gather all models but the first"
    elif compression == "none":
        assert (sent, received) == (num_jobs * model, num_jobs * model)
    else:
        # from its second outer iteration a job also gets its previous vector, which stays with Ray
        assert num_jobs * model < sent < 2 * num_jobs * model
        assert num_jobs * model / 4 < received < num_jobs * model / 3, "int8 codes and a peak per row"
