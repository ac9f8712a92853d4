"""A bucket of S3, Google Cloud Storage or Azure, with typed errors.

The library obstore takes credentials from the environment or the role of the machine, and repeats
requests that fail for a short time (HTTP 5xx, 429, timeouts, connections).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from ngsgd.errors import ConfigError, ObjectStorageError, reason_of
from ngsgd.object_storage.urls import check_url

RETRY_S = 60.0  # total time in which one request is repeated, before it is an error
_PART_BYTES = 8 << 20
_MAX_CONDITIONAL_BYTES = 64 << 20  # larger files are written in parts
_KEYS_PER_DELETION = 500


@dataclass(frozen=True)
class Version:
    """The state of an object that a conditional write replaces: ETag, and generation on GCS."""

    e_tag: str | None
    version: str | None
    # seconds since 1970 by the clock of the service
    written_s: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, about: Any) -> Version:
        """Take the fields from an answer of obstore."""
        written = about.get("last_modified")
        return cls(about.get("e_tag"), about.get("version"), written.timestamp() if written else 0.0)

    def mode(self) -> dict[str, str]:
        """The `mode` of obstore.put that replaces only this state."""
        fields = {"e_tag": self.e_tag, "version": self.version}
        return {name: value for name, value in fields.items() if value is not None}


class WriteConflictError(Exception):
    """A conditional write was refused: the object exists, or another process replaced it."""


class ObjectStore:
    """The objects below one URL.

    Args:
        url: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. For S3 on other hosts
            set AWS_ENDPOINT_URL.
        retry_s: seconds in which a failing request is repeated.
        timeout_s: maximum seconds of one request; None: half of retry_s.
        store: an obstore store to use instead of that of the URL.

    Raises:
        ConfigError: the URL is not valid, or obstore is not installed.
    """

    def __init__(self, url: str, retry_s: float = RETRY_S, store: Any = None, *, timeout_s: float | None = None) -> None:
        self.url = url.rstrip("/")
        self._store = store
        if store is not None:
            return
        check_url(self.url)
        obstore = _library()
        try:
            # only an explicit http:// is used without TLS
            endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
            self._store = obstore.store.from_url(
                self.url, client_options={"timeout": timedelta(seconds=timeout_s or max(1.0, retry_s / 2)),
                                          "connect_timeout": timedelta(seconds=min(5.0, max(1.0, retry_s / 2))),
                                          "allow_http": endpoint.startswith("http://")},
                retry_config={"max_retries": 10, "retry_timeout": timedelta(seconds=retry_s),
                              "backoff": {"init_backoff": timedelta(milliseconds=100),
                                          "max_backoff": timedelta(seconds=min(15.0, retry_s / 4)), "base": 2}})
        except (ValueError, obstore.exceptions.BaseError) as error:
            raise ConfigError(f"{self.url} cannot be used as object storage ({reason_of(error)}); check the URL and the "
                              "environment variables of the provider.") from error

    @classmethod
    def in_folder(cls, folder: str) -> ObjectStore:
        """Objects that are files below a folder; ObjectStorageError if it cannot be created."""
        # Conditional writes are atomic on local file systems and NFS.
        try:
            return cls(folder, store=_library().store.LocalStore(folder, mkdir=True))
        except (OSError, ValueError, _library().exceptions.BaseError) as error:
            raise ObjectStorageError(f"{folder} cannot be used for objects ({reason_of(error)}); check the path and the "
                                     "permissions.") from error

    def get(self, key: str) -> tuple[bytes, Version] | None:
        """Return an object with its version; None if there is none."""
        with self._typed("read", key):
            try:
                answer = _library().get(self._store, key)
                return bytes(answer.bytes()), Version.of(answer.meta)
            except FileNotFoundError:
                return None

    def create(self, key: str, content: bytes) -> Version:
        """Write an object that does not exist yet; raise WriteConflictError if it exists."""
        return self._conditional(key, content, "create")

    def replace(self, key: str, content: bytes, version: Version) -> Version:
        """Write an object if it still has this version; raise WriteConflictError otherwise."""
        return self._conditional(key, content, version.mode())

    def put(self, key: str, content: bytes) -> None:
        """Write an object, whether it exists or not."""
        with self._typed("written", key):
            _library().put(self._store, key, content)

    def upload(self, key: str, file: Path | BinaryIO) -> None:
        """Write the content of a file, in parts if it is large."""
        with self._typed("written", key):
            _library().put(self._store, key, file, chunk_size=_PART_BYTES, max_concurrency=4)

    def upload_new(self, key: str, path: Path) -> None:
        """Write the content of a file unless the object exists; the key must name the content."""
        if path.stat().st_size > _MAX_CONDITIONAL_BYTES:
            # services have no condition for parts: another process may write the same content, too
            self.upload(key, path)
            return
        with contextlib.suppress(WriteConflictError):
            self.create(key, path.read_bytes())

    def size(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if there is none."""
        with self._typed("read", key):
            try:
                return int(_library().head(self._store, key)["size"])
            except FileNotFoundError:
                return None

    def parts(self, key: str) -> Iterator[bytes]:
        """Yield an object in parts of some megabytes."""
        with self._typed("read", key):
            try:
                answer = _library().get(self._store, key)
            except FileNotFoundError as error:
                raise ObjectStorageError(f"{self.url}/{key} does not exist; another process removed it, or the run is "
                                         "incomplete.") from error
            for part in answer.stream(min_chunk_size=_PART_BYTES):
                yield bytes(part)

    def download(self, key: str, path: Path) -> str:
        """Write an object to a file in constant memory; return its SHA-256."""
        found = hashlib.sha256()
        with path.open("wb") as file:
            for part in self.parts(key):
                found.update(part)
                file.write(part)
        return found.hexdigest()

    def states(self, prefix: str = "") -> dict[str, tuple[int, str]]:
        """Return the size in bytes and the ETag of each object below a prefix, by key."""
        with self._typed("listed", prefix):
            return {one["path"]: (int(one["size"]), str(one.get("e_tag") or ""))
                    for some in _library().list(self._store, prefix or None) for one in some}

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return the size in bytes of each object below a prefix, by key."""
        return {key: size for key, (size, _) in self.states(prefix).items()}

    def keys(self, prefix: str = "") -> Iterator[str]:
        """Yield the keys of all objects below a prefix."""
        yield from self.states(prefix)

    def folders(self) -> list[str]:
        """Names of the folders directly below the URL."""
        with self._typed("listed", ""):
            found = _library().list_with_delimiter(self._store)
            return [path.rsplit("/", 1)[-1] for path in found["common_prefixes"]]

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; those that do not exist are ignored."""
        for start in range(0, len(keys), _KEYS_PER_DELETION):
            some = list(keys[start:start + _KEYS_PER_DELETION])
            with self._typed("removed", some[0]), contextlib.suppress(FileNotFoundError):
                _library().delete(self._store, some)

    def _conditional(self, key: str, content: bytes, mode: str | dict[str, str]) -> Version:
        exceptions = _library().exceptions
        with self._typed("written", key):
            try:
                # conditions hold for a request in one part only
                return Version.of(_library().put(self._store, key, content, mode=mode, use_multipart=False))
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                raise WriteConflictError(f"{self.url}/{key}") from error
            except FileNotFoundError as error:
                if mode != "create":
                    raise WriteConflictError(f"{self.url}/{key}") from error
                raise ObjectStorageError(f"{self.url}/{key} could not be written: the bucket does not exist; create it, or "
                                         "check its name.") from error

    @contextlib.contextmanager
    def _typed(self, done: str, key: str) -> Iterator[None]:
        exceptions = _library().exceptions
        where = f"{self.url}/{key}" if key else self.url
        try:
            yield
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise ObjectStorageError(f"{where} could not be {done}: access was denied ({reason_of(error)}); renew the "
                                     "credentials in the environment, or give the role of this machine access, then "
                                     "continue.", is_denied=True) from error
        except exceptions.NotSupportedError as error:
            raise ObjectStorageError(f"{where} could not be {done}: the service has no conditional writes, which keep two "
                                     "coordinators from writing to one run; use another service.") from error
        except exceptions.BaseError as error:
            raise ObjectStorageError(f"{where} could not be {done} ({reason_of(error)}); check the network and the bucket, "
                                     "then continue.") from error


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise ConfigError("object storage needs the package obstore; install it with: pip install 'ngsgd[store]'") from error
    return obstore
