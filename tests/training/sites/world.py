"""Sites of a test, which share objects in memory, one thread, and a clock that waits advance."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import obstore
from torch import nn

from ngsgd.config import OuterConfig, SitesConfig
from ngsgd.errors import ObjectStorageError
from ngsgd.object_storage.client import ObjectStore, Version
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.settings import EngineSettings
from ngsgd.training.sites.rounds import Rounds
from ngsgd.training.sites.site_average import SiteAverage, SiteClock
from ngsgd.training.storage.checkpoint import Checkpoint, first_checkpoint, with_sites

Vector = npt.NDArray[np.float32]
LAYOUT = FlatLayout.of(nn.Sequential(nn.Linear(40, 60), nn.BatchNorm1d(60), nn.Linear(60, 5)))


class Link(ObjectStore):
    """The connection of a site to the objects: it may be cut, and may fail once at a write."""

    def __init__(self, memory: Any) -> None:
        super().__init__("s3://tests/exchange", store=memory)
        self.is_cut = False
        # called with each key before and after its write
        self.at_write: Callable[[str, str], None] = lambda when, key: None

    def get(self, key: str) -> tuple[bytes, Version] | None:
        self._check()
        return super().get(key)

    def create(self, key: str, content: bytes) -> Version:
        self._check()
        self.at_write("before", key)
        version = super().create(key, content)
        self.at_write("after", key)
        return version

    def keys(self, prefix: str = "") -> Any:
        self._check()
        return super().keys(prefix)

    def _check(self) -> None:
        if self.is_cut:
            raise ObjectStorageError("the network is unreachable")


class Stop:
    """A request to stop that a test makes."""

    def __init__(self) -> None:
        self.is_requested = False

    def requested(self) -> bool:
        return self.is_requested

    def expired(self) -> bool:
        return False


class Site:
    """One site: parameters that a test changes instead of training."""

    def __init__(self, world: World, name: str, run: str) -> None:
        self.world, self.name = world, name
        self.link, self.stop = Link(world.memory), Stop()
        self.settings = replace(world.settings, sites=replace(world.settings.sites, name=name))
        self.outer_iter = -1
        self.run = run
        self.figures: dict[str, float] = {}

    def begin(self, start: Checkpoint | None = None) -> None:
        """Start the run of the site, or continue from a checkpoint."""
        clock = SiteClock(self.stop, lambda: self.world.now_s, self.world.sleep)
        self.average_ = SiteAverage(Rounds(self.link), self.settings, LAYOUT, self.world.num_outer_iters, self.run, clock)
        self.messages: list[tuple[str, str]] = []
        self.average_.report = self.messages.append
        start = self.average_.begin(start or first_checkpoint(self.world.initial.copy()))
        self.outer_iter = start.progress.outer_iter
        self.parameters = start.parameters.copy()

    def train(self, delta: Vector, seconds: float = 10.0) -> None:
        self.world.now_s += seconds
        self.parameters += delta
        self.outer_iter += 1

    def average(self) -> None:
        self.figures = self.average_.average(self.parameters, self.outer_iter, lr=0.1)

    def checkpoint(self) -> Checkpoint:
        """The state that a killed process left."""
        state = with_sites({"arrays": {}, "numbers": {}}, self.average_.state_dict())
        progress = replace(first_checkpoint(self.parameters).progress, outer_iter=self.outer_iter)
        arrays = {name: array.copy() for name, array in state["arrays"].items()}
        return Checkpoint(progress, self.parameters.copy(), "digest", arrays, dict(state["numbers"]))

    def events(self) -> list[str]:
        return [what for what, _ in self.messages if what != "site_awaited"]


class World:
    """Objects in memory, sites and time."""

    def __init__(self, *names: str, period: int = 1, compression: Any = "none", delay: int = 0, num_outer_iters: int = 100,
                 wait_s: float = 5.0, outer: OuterConfig | None = None) -> None:
        self.memory = obstore.store.MemoryStore()
        self.now_s = 0.0
        self.num_outer_iters = num_outer_iters
        self.initial = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
        jobs = {name: 1 + index for index, name in enumerate(names)}
        self.settings = EngineSettings(outer=outer or OuterConfig("average"), sites=SitesConfig(
            jobs=jobs, name=names[0], exchange="s3://tests/exchange", period=period, delay=delay, compression=compression,
            wait_s=wait_s))
        self._runs = itertools.count()
        self.during_wait: Callable[[], None] = lambda: None
        self.sites = {name: self.site(name) for name in names}
        for site in self.sites.values():
            site.begin()

    def site(self, name: str) -> Site:
        return Site(self, name, f"run-{name}-{next(self._runs)}")

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.during_wait()

    def train(self, number: int) -> None:
        """Train each site for an outer iteration, with other deltas for each number."""
        for index, site in enumerate(self.sites.values()):
            site.train(delta(2 * number + index))

    def average(self, *names: str) -> None:
        """Average these sites: the first one waits while the others arrive one by one."""
        rest = list(names[1:])

        def arrive() -> None:
            if rest:
                self.sites[rest.pop(0)].average()
        self.during_wait = arrive
        self.sites[names[0]].average()
        self.during_wait = lambda: None
        assert not rest


def of_two(**options: Any) -> tuple[World, Site, Site]:
    """A world of two sites, "a" and "b"."""
    world = World("a", "b", **options)
    return world, world.sites["a"], world.sites["b"]


def delta(seed: int) -> Vector:
    """A parameter delta; running variances stay positive."""
    return (0.1 * np.abs(np.random.default_rng(seed).standard_normal(LAYOUT.size))).astype(np.float32)
