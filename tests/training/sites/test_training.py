"""Complete runs of two sites, each in a process, with objects in a folder."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("obstore")

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import OuterConfig, SitesConfig
from ngsgd.errors import RunInterrupted
from ngsgd.files import read_json_lines
from ngsgd.schedules import Schedule
from ngsgd.training.coordinator import RunControl
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.settings import EngineSettings
from ngsgd.training.sites.rounds import Rounds, open_exchange
from ngsgd.training.sites.site_average import SiteAverage, SiteClock
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.checkpoint import Checkpoint
from tests.toy import Recorder, StopAfter
from tests.training.test_task import SETTINGS, Regression, train

JOBS = {"east": 2, "west": 1}
Trained = tuple[Checkpoint, Recorder]


class Plain(Regression):
    """Without dropout, because its masks depend on the number of a job at its site."""

    def model(self) -> nn.Module:
        return nn.Sequential(*(module for module in super().model().children() if not isinstance(module, nn.Dropout)))


@dataclass(frozen=True)
class PlainSpec:
    settings: EngineSettings

    def task(self, device: torch.device) -> Plain:
        return Plain()


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    """Threads that restore random states of torch can deadlock (tests/conftest.py)."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        yield pool


def _settings(site: str, exchange: Path, outer: OuterConfig = SETTINGS.outer, **options: Any) -> EngineSettings:
    schedule = replace(SETTINGS.schedule, num_epochs=6.0, num_jobs_initial=3, num_jobs_final=3)
    sites = SitesConfig(jobs=JOBS, name=site, exchange=str(exchange), wait_s=60.0, **options) if site else SitesConfig()
    return replace(SETTINGS, schedule=schedule, outer=outer, sites=sites)


def _train(folder: Path, settings: EngineSettings, control: RunControl | None = None) -> Trained:
    """Train, or continue, the run of a site."""
    def sites(layout: FlatLayout, schedule: Schedule, control: RunControl) -> SiteAverage | None:
        if not settings.sites.jobs:
            return None
        rounds = Rounds(open_exchange(settings.sites.exchange, layout.size))
        return SiteAverage(rounds, settings, layout, schedule.num_outer_iters, folder.name,
                           SiteClock(control.stop))
    return train(folder, Plain(), InProcessPool(PlainSpec(settings), 2, 1), settings, control,
                 sites)


def _both(processes: Executor, folder: Path, **options: Any) -> dict[str, Trained]:
    """Train both sites at the same time."""
    runs: dict[str, Future[Trained]] = {}
    for site in JOBS:
        settings = _settings(site, folder / "exchange", **options)
        runs[site] = processes.submit(_train, folder / f"run-{site}", settings)
    return {site: run.result() for site, run in runs.items()}


@pytest.mark.parametrize("outer", [OuterConfig("average"), OuterConfig("bmuf"), OuterConfig("diloco")])
def test_two_sites_that_exchange_each_time_train_the_model_of_one_site(outer: OuterConfig, tmp_path: Path,
                                                                       processes: Executor) -> None:
    ended = _both(processes, tmp_path, outer=outer, period=1, delay=0, compression="none")
    one, _ = _train(tmp_path / "one", _settings("", tmp_path, outer))
    east, west = (ended[site][0] for site in JOBS)
    assert np.array_equal(east.parameters, west.parameters)
    # sums in another order, rounded to float32 in each of 8 outer iterations
    np.testing.assert_allclose(east.parameters, one.parameters, rtol=0.0, atol=1e-5)
    assert east.progress.frames_processed + west.progress.frames_processed == one.progress.frames_processed
    assert east.progress.frames_processed == 2 * west.progress.frames_processed


def test_the_jobs_of_all_sites_are_those_of_one_site(tmp_path: Path, processes: Executor) -> None:
    _both(processes, tmp_path, period=4)
    _train(tmp_path / "one", _settings("", tmp_path))

    def counted(run: str) -> list[str]:
        assert audit(tmp_path / run / "ledger.jsonl") == []
        lines = read_json_lines(tmp_path / run / "ledger.jsonl")
        return [str((line["outer_iter"], piece)) for line in lines if line["event"] == "planned" for piece in line["pieces"]]
    assert sorted(counted("run-east") + counted("run-west")) == sorted(counted("one"))


@pytest.mark.parametrize("stops", [(2, 9), (3, 1)])
@pytest.mark.parametrize("options", [{"delay": 0, "compression": "none"}, {"compression": "none"}, {"compression": "sparse"},
                                     {"compression": "sparse", "period": 1}])
def test_a_site_that_was_stopped_and_resumed_trains_the_same_model(options: dict[str, Any], stops: tuple[int, int],
                                                                   tmp_path: Path, processes: Executor) -> None:
    options = {"period": 2, **options}
    whole = _both(processes, tmp_path / "whole", **options)
    settings = {site: _settings(site, tmp_path / "again" / "exchange", **options) for site in JOBS}
    folders = {site: tmp_path / "again" / f"run-{site}" for site in JOBS}
    other = processes.submit(_train, folders["west"], settings["west"])
    for number in stops:
        with pytest.raises(RunInterrupted):
            _train(folders["east"], settings["east"], RunControl(StopAfter(number)))
    east, _ = _train(folders["east"], settings["east"])
    other.result()
    assert np.array_equal(east.parameters, whole["east"][0].parameters)


@pytest.mark.parametrize(("delay", "ends"), [(0, [2, 5, 7]), (1, [3, 6, 7])])
def test_records_hold_the_figures_of_each_round(delay: int, ends: list[int], tmp_path: Path, processes: Executor) -> None:
    ended = _both(processes, tmp_path, period=3, delay=delay)
    records = ended["east"][1].records
    assert [record.outer_iter for record in records if record.sites] == ends
    last = records[-1].sites
    assert (last["round"], last["counted"], last["possible"], last["missed"]) == (3, 2, 2, 0)
    assert last["sent_bytes"] > 0 and last["received_bytes"] > 0


@pytest.mark.parametrize("compression", ["none", "sparse"])
def test_with_a_delay_the_sites_have_one_model_at_the_end(compression: Any, tmp_path: Path, processes: Executor) -> None:
    ended = _both(processes, tmp_path, period=1, compression=compression)
    east, west = (ended[site][0] for site in JOBS)
    assert np.array_equal(east.parameters, west.parameters)
    rounds = [record.sites["averages"] for record in ended["east"][1].records if record.sites]
    assert sum(rounds) == len(ended["east"][1].records) and rounds[-1] == 2
