"""Other sites of a trial, and the objects that they exchange with its run, on its clock.

The run of site "a" is production code with its averages over sites. The other sites only write
deltas and close rounds. They act when the run makes a request or waits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from ngsgd.config import RunConfig
from ngsgd.errors import ObjectStorageError
from ngsgd.ops.compression import Codec
from ngsgd.pipeline import base_run
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.sites import rounds, site_average
from ngsgd.training.sites.contribution import About, from_bytes, to_bytes
from ngsgd.training.sites.rounds import digest_of
from tests.simulation.stored import Inline, SimulatedStore
from tests.simulation.world import Killed, World

_REQUEST_S = 0.01
_OWN = "a"
_T = TypeVar("_T")


class SiteStore(SimulatedStore):
    """The exchange of a trial, with the other sites."""

    def __init__(self, world: World, config: RunConfig, layout: FlatLayout, num_outer_iters: int) -> None:
        super().__init__(SimpleNamespace(sleep=world.advance), random.Random(), 0.0)  # type: ignore[arg-type]
        self.world, self.layout, self.sites = world, layout, config.sites
        self.num_rounds = -(-num_outer_iters // self.sites.period)
        self._others = sorted(self.sites.counts.keys() - {_OWN})
        self._round, self._opened_s = 1, 0.0

    def _request(self, effect: Callable[[], _T]) -> _T:
        faults = {fault.what: fault for fault in self.world.due("request")}
        if self.world.is_dead:
            raise Killed
        if "kill" in faults:
            self.world.kill()
        self.world.advance(faults["slow"].value if "slow" in faults else _REQUEST_S)
        self._act()
        if "unreachable" in faults:
            raise ObjectStorageError("the exchange is unreachable; wait, and resume")
        found = effect()
        if "kill after" in faults:
            self.world.kill()
        if "lost" in faults:
            raise ObjectStorageError("the answer of the exchange was lost; wait, and resume")
        return found

    def _act(self) -> None:
        """Let the other sites do their work until now."""
        while self._round <= self.num_rounds and "settings.json" in self.objects and self._close():
            self._round += 1
        for site in self._others if self._round > self.num_rounds else ():
            self._put(f"finished/{site}.json", rounds._text({}))

    def _close(self) -> bool:
        """Write deltas that are due, and close the round if it is time; whether it is closed."""
        number, folder, now = self._round, f"rounds/{self._round:06d}", self.world.now
        faults = {fault.what: fault for fault in self.world.lasting("site") if fault.at == number}
        arrivals = {site: self._opened_s + random.Random(f"{site} {number}").choice((0.1, 1.0, 4.0)) for site in self._others}
        if "late site" in faults:
            arrivals[self._others[-1]] += 1000.0
        keys = {site: f"{folder}/{site}.safetensors" for site in self.sites.counts}
        for site in [site for site, at in arrivals.items() if at <= now]:
            self._put(keys[site], self._delta(site, number, is_damaged="damaged delta" in faults))
            for fault in faults.values():
                self.world.occur(fault)
        there = {site: self.objects[key][0] for site, key in keys.items() if key in self.objects}
        first, last = min(arrivals.values()), max(arrivals.values())
        # the first of the others waits for all
        ends = last if len(there) == len(self.sites.counts) else first + self.sites.wait_s
        if f"{folder}/closed.json" not in self.objects:
            if now < ends or not there.keys() - {_OWN}:
                return False
            good = {site: digest_of(content) for site, content in there.items() if self._is_good(content)}
            rejected = dict.fromkeys(sorted(there.keys() - good.keys()), "damaged")
            self._put(f"{folder}/closed.json", rounds._text({"digests": good, "rejected": rejected}))
        self._opened_s = max(self._opened_s, min(ends, now))
        return True

    def _put(self, key: str, content: bytes) -> None:
        if key not in self.objects:
            self._write(key, content, is_allowed=True)

    def _delta(self, site: str, number: int, *, is_damaged: bool) -> bytes:
        chance = np.random.default_rng([number, ord(site)])
        move = (0.02 * chance.standard_normal(self.layout.size)).astype(np.float32)
        codec: Codec | None = None if self.sites.compression == "none" else self.sites.compression
        content = to_bytes(move, About(site, f"run-{site}", number, number * self.sites.period - 1), codec, self.layout)
        return content[:-1] if is_damaged else content

    def _is_good(self, content: bytes) -> bool:
        try:
            from_bytes(content, self.layout)
        except ValueError:
            return False
        return True


class _LateThread:
    """A thread whose work is done when it is waited for."""

    def __init__(self, target: Callable[[], object], **_more: object) -> None:
        self._target: Callable[[], object] | None = target

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        target, self._target = self._target, None
        if target:
            target()
        return False


@contextmanager
def simulated(store: SiteStore) -> Iterator[None]:
    """Give the run of the trial this exchange, and the clock of the trial."""
    def opened(_place: str, _size: int) -> SiteStore:
        return store
    clock = site_average.SiteClock

    def clock_of(stop: Any, now: Callable[[], float]) -> Any:
        return clock(stop, now, store.world.advance)
    with patch.object(rounds, "open_exchange", opened), patch.object(base_run, "open_exchange", opened), \
            patch.object(rounds, "ThreadPoolExecutor", Inline), patch.object(base_run, "SiteClock", clock_of), \
            patch.object(site_average, "threading", SimpleNamespace(Thread=_LateThread)):
        yield
