"""The objects that sites exchange, below one URL.

- `settings.json`: what all sites must agree on, of the first site
- `initial.safetensors`: the initial parameters, of the first site
- `sites/NAME.json`: the run of a site
- `rounds/000012/NAME.safetensors`: the contribution of a site to an average
- `rounds/000012/closed.json`: the contributions that the average consists of
- `finished/NAME.json`: a site that makes no more contributions

Each object is written once, by a conditional write. So all sites that read a round average the same
contributions. Sites need no clock in common, and no connection to each other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ngsgd.config import SitesConfig
from ngsgd.errors import ConfigError, ObjectStorageError
from ngsgd.files import parse_json, sealed, unsealed
from ngsgd.object_storage.client import ObjectStore, WriteConflictError
from ngsgd.object_storage.urls import is_url

# seconds in which a request is repeated; then the site continues alone
_RETRY_S = 10.0
# a request must end with this rate, in bytes per second, or in the time below
_LOWEST_RATE, _SHORTEST_S = 1e5, 10.0
_SETTINGS, _INITIAL, _CLOSED = "settings.json", "initial.safetensors", "closed.json"


@dataclass(frozen=True)
class Closed:
    """An average over sites: the SHA-256 of each contribution, by site in order."""

    digests: Mapping[str, str]
    # contribution that cannot be used -> reason
    rejected: Mapping[str, str]


def open_exchange(place: str, size: int) -> ObjectStore:
    """Return the objects below a URL or in a folder, for models of `size` parameters."""
    if not is_url(place):
        return ObjectStore.in_folder(place)
    return ObjectStore(place, retry_s=_RETRY_S, timeout_s=max(_SHORTEST_S, 4 * size / _LOWEST_RATE))


def check_exchange(sites: SitesConfig) -> None:
    """Raise an error if a new run cannot use its exchange, or another run is this site."""
    store = open_exchange(sites.exchange, 0)
    key = f"checks/{os.urandom(8).hex()}"
    store.create(key, b"")
    store.delete([key])
    if found := store.get(f"sites/{sites.name}.json"):
        raise _taken(sites.name, store.url, _checked(found[0], f"{store.url}/sites/{sites.name}.json").get("run"))


class Rounds:
    """The objects of one exchange, and the bytes that this site has sent and received."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.num_sent = self.num_received = 0
        # contributions of the present round, which are never replaced
        self._known: dict[str, bytes] = {}
        self._known_round = 0
        # closed rounds are not replaced, either
        self._closed: tuple[int, Closed] | None = None

    def join(self, site: str, run: str, settings: Mapping[str, Any]) -> None:
        """Register the run of a site; ConfigError for a second run, or another site's settings."""
        first = self._once(f"sites/{site}.json", {"run": run})
        if first.get("run") != run:
            raise _taken(site, self.store.url, first.get("run"))
        agreed = self._once(_SETTINGS, {"settings": settings, "site": site})
        if not isinstance(agreed.get("settings"), dict):
            raise ObjectStorageError(f"{self.store.url}/{_SETTINGS} has no settings; start a new exchange.")
        given = json.loads(json.dumps(settings))
        for name, value in agreed["settings"].items():
            if given.get(name) != value:
                raise ConfigError(f"{name} is {given.get(name)!r} here, but {value!r} at site {agreed.get('site')}; all sites need "
                                  "the same value.")

    def initial(self, content: bytes) -> bytes:
        """Return the initial parameters of the first site; the first one writes its own."""
        return self._read(_INITIAL) or self._write_once(_INITIAL, content)

    def publish(self, number: int, site: str, content: bytes) -> bytes:
        """Write a contribution; return the stored one, perhaps of an earlier process."""
        return self._keep(number, site, self._write_once(_key(number, site), content))

    def contribution(self, number: int, site: str, digest: str = "") -> bytes:
        """Read a contribution; ObjectStorageError if it is missing, or has another digest."""
        key = _key(number, site)
        is_known = number == self._known_round and site in self._known
        content = self._known[site] if is_known else self._read(key)
        if content is None or (digest and digest_of(content) != digest):
            what = "is missing" if content is None else "does not match its digest"
            raise ObjectStorageError(f"{self.store.url}/{key} {what}; sites cannot be averaged any more: restore it, or start a "
                                     "new exchange.")
        return self._keep(number, site, content)

    def state(self, number: int, expected: Collection[str]) -> tuple[set[str], Closed | None]:
        """Return (sites that have written a contribution, the round if it is closed).

        All requests, also for contributions of expected sites, are made at the same time, since
        each one may take a long way.
        """
        unknown = [site for site in expected if number != self._known_round or site not in self._known]
        with ThreadPoolExecutor(2 + len(unknown)) as threads:
            names = threads.submit(lambda: {key.rsplit("/", 1)[-1] for key in self.store.keys(_folder(number))})
            closed = threads.submit(self.store.get, f"{_folder(number)}/{_CLOSED}")
            contents = {site: threads.submit(self.store.get, _key(number, site)) for site in unknown}
        for site, content in contents.items():
            if found := content.result():
                self.num_received += len(found[0])
                self._keep(number, site, found[0])
        there = {name.removesuffix(".safetensors") for name in names.result() if name.endswith(".safetensors")}
        end = closed.result()
        if end:
            self.num_received += len(end[0])
        return there, self._note(number, end[0]) if end else None

    def closed(self, number: int, *, if_known: bool = False) -> Closed | None:
        """Return a round, None while it is open; `if_known` makes no request."""
        if self._closed and self._closed[0] == number:
            return self._closed[1]
        if if_known:
            return None
        content = self._read(f"{_folder(number)}/{_CLOSED}")
        return None if content is None else self._note(number, content)

    def close(self, number: int, digests: Mapping[str, str], rejected: Mapping[str, str]) -> Closed:
        """Close a round with these contributions, unless another site has closed it."""
        tree = {"digests": dict(sorted(digests.items())), "rejected": dict(sorted(rejected.items()))}
        return self._note(number, self._write_once(f"{_folder(number)}/{_CLOSED}", _text(tree)))

    def finish(self, site: str) -> None:
        """Declare that a site makes no more contributions."""
        self._once(f"finished/{site}.json", {})

    def finished(self) -> set[str]:
        """Sites that make no more contributions."""
        return {key.rsplit("/", 1)[-1].removesuffix(".json") for key in self.store.keys("finished")}

    def _once(self, key: str, tree: Mapping[str, Any]) -> dict[str, Any]:
        return _checked(self._write_once(key, _text(tree)), f"{self.store.url}/{key}")

    def _write_once(self, key: str, content: bytes) -> bytes:
        """Write an object that is never replaced; return the stored one."""
        try:
            self.store.create(key, content)
        except WriteConflictError:
            found = self._read(key)
            if found is None:
                raise ObjectStorageError(f"{self.store.url}/{key} cannot be read, although it exists.") from None
            return found
        finally:
            self.num_sent += len(content)
        return content

    def _keep(self, number: int, site: str, content: bytes) -> bytes:
        if number != self._known_round:
            self._known, self._known_round = {}, number
        self._known[site] = content
        return content

    def _note(self, number: int, content: bytes) -> Closed:
        what = f"a closed round in {self.store.url}"
        tree = _checked(content, what)
        digests, rejected = tree.get("digests"), tree.get("rejected")
        if not (isinstance(digests, dict) and isinstance(rejected, dict)
                and all(isinstance(one, str) for one in (*digests.values(), *rejected.values()))):
            raise ObjectStorageError(f"{what} is damaged; start a new exchange.")
        self._closed = number, Closed(digests, rejected)
        return self._closed[1]

    def _read(self, key: str) -> bytes | None:
        found = self.store.get(key)
        if found is None:
            return None
        self.num_received += len(found[0])
        return found[0]


def _taken(site: str, url: str, run: object) -> ConfigError:
    return ConfigError(f"site {site} takes part in {url} with the run {run}; resume that run, or give all sites another "
                       "sites.exchange.")


def digest_of(content: bytes) -> str:
    """SHA-256 of a contribution."""
    return hashlib.sha256(content).hexdigest()


def _folder(number: int) -> str:
    return f"rounds/{number:06d}"


def _key(number: int, site: str) -> str:
    return f"{_folder(number)}/{site}.safetensors"


def _text(tree: Mapping[str, Any]) -> bytes:
    return json.dumps(sealed("site", tree)).encode()


def _checked(content: bytes, what: str) -> dict[str, Any]:
    try:
        return unsealed("site", parse_json(content.decode()))
    except ValueError as error:
        raise ObjectStorageError(f"{what} is damaged ({error}); start a new exchange.") from error
