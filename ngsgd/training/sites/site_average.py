"""The average over sites, each of which averages the jobs of its workers.

B is the model of all sites after their last common average (a round). A site trains on from B with
its own jobs for `sites.period` outer iterations. Then it writes its parameter delta from B in code.
The outer optimizer steps B with the mean of these deltas, weighted by the numbers of jobs. The site
continues from the new B plus the part of its delta that the code does not contain, and with
`sites.delay` plus its training in the meantime.

A site that missed rounds keeps its parameters. When it is back it computes these rounds, which
changes B, and contributes its complete difference from the new B. So the parameters are averaged,
and no delta is lost or counted twice.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from ngsgd.errors import DataError, ObjectStorageError, RunInterrupted, RunLockedError
from ngsgd.files import digest_of_json
from ngsgd.ops.compression import Codec
from ngsgd.optim.outer import OuterInfo, OuterOptimizer, make_rule
from ngsgd.training.dispatcher import NeverStop, StopSignal
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.settings import EngineSettings
from ngsgd.training.sites.contribution import About, from_bytes, to_bytes
from ngsgd.training.sites.rounds import Closed, Rounds, digest_of
from ngsgd.training.storage.checkpoint import Checkpoint

_RETRY_S = 1.0
# polls of the contributions of other sites, and of messages from the thread of an exchange
_FIRST_POLL_S, _LAST_POLL_S, _MESSAGE_POLL_S = 0.05, 1.0, 0.02
# numbers of a checkpoint
_ROUND, _AHEAD = "round", "ahead"
# no outer iteration
_NONE = -1


@dataclass(frozen=True)
class SiteClock:
    """Time of a site, and the request to stop its run."""

    stop: StopSignal = field(default_factory=NeverStop)
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Event(NamedTuple):
    """A change of the sites that are averaged, for people."""

    # site_awaited | site_absent | site_returned | site_alone | site_rejected
    what: str
    message: str


class Ahead:
    """An exchange in a thread, without the average; `exchange` gets a receiver of messages."""

    def __init__(self, snapshot: Vector, outer_iter: int, max_wait_s: float,
                 exchange: Callable[[Callable[[str], None]], None]) -> None:
        self.snapshot, self.outer_iter, self.max_wait_s = snapshot, outer_iter, max_wait_s
        self._messages: SimpleQueue[str] = SimpleQueue()
        self._error: Exception | None = None

        def run() -> None:
            try:
                exchange(self._messages.put)
            except Exception as error:  # raised by `wait`
                self._error = error
        self._thread = threading.Thread(target=run, name="ngsgd-sites", daemon=True)
        self._thread.start()

    def wait(self, report: Callable[[str], None]) -> None:
        """Wait for the end, report messages in this thread, and raise the error of the exchange."""
        is_alive = True
        while is_alive:
            is_alive = self._thread.is_alive()
            try:
                report(self._messages.get(timeout=_MESSAGE_POLL_S) if is_alive else self._messages.get_nowait())
                is_alive = True
            except Empty:
                pass
        if self._error is not None:
            raise self._error


class SiteAverage:
    """The part of one site in the averages over sites; no other run has the name `run`."""

    def __init__(self, rounds: Rounds, settings: EngineSettings, layout: FlatLayout, num_outer_iters: int, run: str,
                 clock: SiteClock | None = None) -> None:
        self.rounds, self.layout, self.run = rounds, layout, run
        self.settings, self.sites = settings, settings.sites
        self.num_outer_iters = num_outer_iters
        self.clock = clock or SiteClock()
        # receives events while they happen
        self.report: Callable[[Event], None] = lambda event: None
        # the last round that B contains
        self.round = 0
        # sites of that round; None after a resumption
        self._counted: set[str] | None = set(self.sites.counts)
        self._ahead: Ahead | None = None
        # bytes sent and received in figures
        self._told = (0, 0)

    @property
    def gain(self) -> float:
        """Gain of the outer rule, which steps once per round."""
        return make_rule(self.settings.outer).gain(sum(self.sites.counts.values()), self.num_rounds)

    @property
    def num_rounds(self) -> int:
        """Rounds of a run without faults."""
        return -(-self.num_outer_iters // self.sites.period)

    def is_due(self, outer_iter: int) -> bool:
        """Whether a round follows an outer iteration."""
        return (outer_iter + 1) % self.sites.period == 0 or self._is_last(outer_iter)

    def begin(self, start: Checkpoint) -> Checkpoint:
        """Return the checkpoint to start from, for a new run with the first site's parameters.

        Raises ConfigError if another site has other settings, or another run is this site.
        """
        self._since = self.clock.now()
        if not start.model_sha256:
            self.rounds.join(self.sites.name, self.run, self._agreed())
            about = About(self.sites.name, self.run, 0, -1)
            stored = self.rounds.initial(to_bytes(start.parameters, about, None, self.layout))
            try:
                initial, _ = from_bytes(stored, self.layout)
            except ValueError as error:
                raise ObjectStorageError(f"the initial parameters in {self.rounds.store.url} cannot be used: {error}; start a new "
                                         "exchange with another sites.exchange.") from error
            start = Checkpoint(start.progress, initial, "")
        self._base = OuterOptimizer(make_rule(self.settings.outer), start.parameters,
                                    num_threads=self.settings.num_averaging_threads)
        if start.model_sha256:
            state = start.site_state()
            self.round, ahead = (int(state["numbers"].pop(name)) for name in (_ROUND, _AHEAD))
            self._base.load_state_dict(state)
            self._counted = None
            if ahead != _NONE:
                self._start(start.parameters.copy(), ahead)
        return start

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint: B, buffers, the round, and the exchange under way."""
        state, ahead = self._base.state_dict(), self._ahead.outer_iter if self._ahead else _NONE
        return {"arrays": state["arrays"], "numbers": {**state["numbers"], _ROUND: float(self.round), _AHEAD: float(ahead)}}

    def average(self, parameters: Vector, outer_iter: int, lr: float) -> dict[str, float]:
        """Average with the other sites if it is time; changes `parameters` of this site.

        Returns figures for the record, empty if no average has ended. Raises RunInterrupted if a
        stop was requested before the round was closed; a resumed run repeats the outer iteration.
        """
        figures: dict[str, float] = {}
        if self._ahead is not None:
            figures = self._end(self._ahead, parameters, lr)
        if not self.is_due(outer_iter):
            return figures
        if self.sites.delay and not self._is_last(outer_iter):
            self._start(parameters.copy(), outer_iter)
            return figures
        now = self._average_now(parameters, outer_iter, lr)
        # sums of two averages of one outer iteration
        return {**{name: figures.get(name, 0) + value for name, value in now.items()}, "round": self.round}

    def _start(self, snapshot: Vector, outer_iter: int) -> None:
        number, max_wait_s = self.round + 1, self._max_wait_s()

        def exchange(on_wait: Callable[[str], None]) -> None:
            closed = self._exchange(number, snapshot, outer_iter, max_wait_s, on_wait)
            for site, digest in closed.digests.items():
                self.rounds.contribution(number, site, digest)
        self._ahead = Ahead(snapshot, outer_iter, max_wait_s, exchange)

    def _end(self, ahead: Ahead, parameters: Vector, lr: float) -> dict[str, float]:
        """Compute the average whose exchange was started; training since then is kept."""
        began, first, counted = self.clock.now(), self.round, 0
        sites = ahead.snapshot.copy()
        try:
            ahead.wait(self._report_wait)
            counted = self._average(sites, ahead.outer_iter, lr, ahead.max_wait_s)
        except ObjectStorageError as error:
            self._report_alone(error)
        self._ahead = None
        parameters += sites - ahead.snapshot
        return self._figures(began, first, counted)

    def _average_now(self, parameters: Vector, outer_iter: int, lr: float) -> dict[str, float]:
        began, first, counted = self.clock.now(), self.round, 0
        is_last, max_wait_s = self._is_last(outer_iter), self._max_wait_s()
        while True:
            try:
                counted = self._average(parameters, outer_iter, lr, max_wait_s)
                break
            except ObjectStorageError as error:
                # the last round makes the final model
                if not is_last or self.clock.now() - began > max_wait_s:
                    self._report_alone(error)
                    break
                self._check_stop(outer_iter)
                self.clock.sleep(_RETRY_S)
        if is_last and counted:
            # equal at all sites; B of a rule with a look-ahead is no model to evaluate
            parameters[:] = self._base.eval_model()
            try:
                self.rounds.finish(self.sites.name)
            except ObjectStorageError as error:
                self.report(Event("site_alone", f"the other sites will wait for {self.sites.name}, although it has finished: "
                                                f"{error}"))
        return self._figures(began, first, counted)

    def _max_wait_s(self) -> float:
        """Time to wait for other sites: as long as this one has worked since its last exchange."""
        now = self.clock.now()
        worked_s, self._since = now - self._since, now
        return max(self.sites.wait_s, worked_s)

    def _figures(self, began: float, first: int, counted: int) -> dict[str, float]:
        sent, received = self.rounds.num_sent, self.rounds.num_received
        before, self._told = self._told, (sent, received)
        return {"round": self.round, "averages": 1, "counted": counted, "possible": len(self.sites.counts),
                "missed": self.round - first - bool(counted), "wait_s": self.clock.now() - began,
                "sent_bytes": sent - before[0], "received_bytes": received - before[1]}

    def _average(self, parameters: Vector, outer_iter: int, lr: float, max_wait_s: float) -> int:
        """Compute all closed rounds, then one with the present delta; return its site count."""
        while True:
            closed = self._exchange(self.round + 1, parameters, outer_iter, max_wait_s, self._report_wait)
            ended_at = self._step(closed, parameters, lr)
            if ended_at == outer_iter:
                return len(closed.digests)
            if self.sites.name in closed.rejected:
                return 0

    def _exchange(self, number: int, parameters: Vector, outer_iter: int, max_wait_s: float,
                  on_wait: Callable[[str], None]) -> Closed:
        """Return a round; writes the delta of this site unless the round is closed."""
        # the next round of a site that was counted is open, as a rule
        closed = self.rounds.closed(number, if_known=self.sites.name in (self._counted or ()))
        if closed is not None:
            return closed
        self._publish(number, parameters, outer_iter)
        before = self._counted
        if before is None:
            last = self.rounds.closed(number - 1) if number > 1 else None
            before = set(last.digests if last else self.sites.counts)
        return self._closed(number, before, outer_iter, max_wait_s, on_wait)

    def _closed(self, number: int, required: set[str], outer_iter: int, max_wait_s: float,
                on_wait: Callable[[str], None]) -> Closed:
        """Wait until this or another site has closed a round.

        A round waits for the sites of the round before it, except those that have finished. Other
        sites are part of it if their contributions are there in time.
        """
        began, delay, is_told = self.clock.now(), _FIRST_POLL_S, False
        while True:
            there, closed = self.rounds.state(number, required)
            if closed is not None:
                return closed
            absent = required - there
            if absent and delay > _FIRST_POLL_S:
                absent -= self.rounds.finished()
            if not absent or self.clock.now() - began > max_wait_s:
                break
            self._check_stop(outer_iter)
            if not is_told and self.clock.now() - began > max_wait_s / 2:
                is_told = True
                on_wait(f"round {number} of the sites has waited {max_wait_s / 2:.0f} s for "
                        f"{', '.join(sorted(absent))}, and waits up to {max_wait_s / 2:.0f} s more")
            self.clock.sleep(delay)
            delay = min(1.5 * delay, _LAST_POLL_S)
        digests, rejected = {}, {}
        for site in there & set(self.sites.counts):
            content = self.rounds.contribution(number, site)
            try:
                _, about = from_bytes(content, self.layout)
                if (about.site, about.round) != (site, number):
                    raise ValueError(f"it is of site {about.site} and round {about.round}")
                digests[site] = digest_of(content)
            except ValueError as error:
                rejected[site] = str(error)
        return self.rounds.close(number, digests, rejected)

    def _check_stop(self, outer_iter: int) -> None:
        if self.clock.stop.requested():
            raise RunInterrupted(f"stopped before outer iteration {outer_iter + 1} was averaged with the other sites")

    def _publish(self, number: int, parameters: Vector, outer_iter: int) -> None:
        codec: Codec | None = None
        if self.sites.compression != "none":
            # the last delta is complete up to rounding, because no other one follows
            codec = "int8" if self._is_last(outer_iter) else self.sites.compression
        delta = np.subtract(parameters, self._base.broadcast())
        about = About(self.sites.name, self.run, number, outer_iter)
        stored = self.rounds.publish(number, self.sites.name, to_bytes(delta, about, codec, self.layout))
        # a process that was killed may have written it; one that cannot be used is skipped later
        with contextlib.suppress(ValueError):
            found = from_bytes(stored, self.layout)[1]
            about = found if (found.site, found.round) == (about.site, number) else about
        if about.run != self.run:
            raise RunLockedError(f"site {self.sites.name} in {self.rounds.store.url} is the run {about.run:.200}; end one of the "
                                 "two runs, and give the other one another sites.exchange.")

    def _step(self, closed: Closed, parameters: Vector, lr: float) -> int | None:
        """Step B; return the outer iteration of this site's delta, None if it is not counted."""
        number, ended_at, own = self.round + 1, None, None
        deltas, weights = [], []
        for site, digest in closed.digests.items():
            try:
                delta, about = from_bytes(self.rounds.contribution(number, site, digest), self.layout)
                weights.append(float(self.sites.counts[site]))
            except (ValueError, KeyError) as error:
                # a closed round is never changed
                raise DataError(f"round {number} of the sites in {self.rounds.store.url} is closed with a delta of site {site} "
                                f"that cannot be used ({error}); start a new exchange with another sites.exchange.") from error
            deltas.append(delta)
            if site == self.sites.name:
                own, ended_at = delta, about.outer_iter
        before = self._base.broadcast()
        if deltas:
            info = OuterInfo(self.round, self.num_rounds, int(sum(weights)), lr)
            self._base.step(deltas, weights, info, statistics=self.layout.statistics(), returns="move")
        if own is not None:
            # the rest of the delta, and training since then
            rest = parameters - before - own
            np.add(self._base.broadcast(), rest, out=parameters)
        self._note(closed, number)
        self.round = number
        return ended_at

    def _note(self, closed: Closed, number: int) -> None:
        """Record which sites are missing or there again."""
        here = set(closed.digests)
        for site, reason in closed.rejected.items():
            self.report(Event("site_rejected", f"the delta of site {site} was skipped in round {number}: {reason}"))
        before = here if self._counted is None else self._counted
        for site in sorted(before - here - set(closed.rejected)):
            self.report(Event("site_absent", f"round {number} of the sites was closed without {site}, which had written no "
                                                    "delta in time"))
        for site in sorted(here - before):
            self.report(Event("site_returned", f"site {site} is part of the averages over sites again, in round {number}"))
        self._counted = here

    def _report_wait(self, message: str) -> None:
        self.report(Event("site_awaited", message))

    def _report_alone(self, error: ObjectStorageError) -> None:
        self.report(Event("site_alone", f"site {self.sites.name} continues alone: {error}"))

    def _is_last(self, outer_iter: int) -> bool:
        return outer_iter + 1 >= self.num_outer_iters

    def _agreed(self) -> dict[str, Any]:
        """Settings that must be equal at all sites, by name."""
        settings, sites = self.settings, self.sites
        options = {f"schedule.{name}": value for name, value in asdict(settings.schedule).items()}
        options |= {f"outer.{name}": value for name, value in asdict(settings.outer).items()}
        return {**options, "seed": settings.seed, "sites.jobs": sites.counts, "sites.period": sites.period,
                "sites.compression": sites.compression, "number of outer iterations": self.num_outer_iters,
                "SHA-256 of the layers": digest_of_json([self.layout.names, self.layout.shapes])}
