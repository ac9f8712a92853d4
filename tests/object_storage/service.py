"""An S3 service on this machine that injects faults: moto behind a layer that counts requests."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import urlsplit

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug import serving, wrappers

BUCKET = "bucket"
# what a fault does to one request; "stop" stops the process, as a long pause of its machine does;
# "stale_lists" kills it before the request, and later lists do not have the last objects
FAULTS = ("kill_before", "kill_after", "lost_answer", "error_500", "slow_down", "timeout", "expired", "stale_lists")
_NUM_STALE = 8  # objects that a stale list does not have
_KEY = re.compile(rb"<Contents><Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
_EXPIRED = (b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code>'
            b"<Message>The provided token has expired.</Message></Error>")


@dataclass
class Fault:
    """The failure of request `number` (from 1) and of the `length - 1` requests after it."""

    kind: str
    number: int
    length: int = 1


@dataclass
class Faults:
    """The requests of one case that change something: they are counted, and some of them fail."""

    fault: Fault | None = None
    victim: int = 0  # the process to kill
    num_writes: int = 0
    num_faults: int = 0
    # keys that were written last before the fault
    written: deque[str] = field(default_factory=lambda: deque(maxlen=_NUM_STALE))
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def lists_are_stale(self) -> bool:
        return self.fault is not None and self.fault.kind == "stale_lists" and self.num_faults > 0

    def write(self, key: str) -> None:
        """Record an object that stale lists do not have."""
        if not self.num_faults:
            self.written.append(key)

    def of_this_write(self) -> str:
        """Count a write; return the fault it gets, empty for none."""
        with self.lock:
            self.num_writes += 1
            fault = self.fault
            if fault is None or not fault.number <= self.num_writes < fault.number + fault.length:
                return ""
            self.num_faults += 1
            return fault.kind


class Service:
    """The server; `faults` is replaced before each case.

    With `NGSGD_TEST_S3=URL` requests go to another implementation of S3 at that URL.
    """

    def __init__(self, address: str = "127.0.0.1", port: int = 0) -> None:
        self.faults = Faults()
        other = os.environ.get("NGSGD_TEST_S3")
        self._app: Any = functools.partial(_forward, other) if other else DomainDispatcherApplication(create_backend_app)
        self._server = serving.make_server(address, port, self._answer, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://{address}:{self._server.port}"

    def environment(self) -> dict[str, str]:
        """Environment variables of a process that uses the service."""
        return self.environment_of(self.url)

    @staticmethod
    def environment_of(url: str) -> dict[str, str]:
        """The same for the service at a URL."""
        return {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}

    def make_bucket(self) -> None:
        # some services recognize requests to S3 by their signature, which none of them checks here
        signature = "AWS4-HMAC-SHA256 Credential=test/20261127/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        request = urllib.request.Request(f"{self.url}/{BUCKET}", method="PUT", headers={"Authorization": signature})
        urllib.request.urlopen(request).close()

    def wait(self) -> None:
        """Serve until the process ends."""
        self._thread.join()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        writes = environ["REQUEST_METHOD"] in ("PUT", "POST", "DELETE")
        kind = self.faults.of_this_write() if writes else ""
        if environ["REQUEST_METHOD"] == "PUT":
            self.faults.write(environ["PATH_INFO"].removeprefix(f"/{BUCKET}/"))
        if self.faults.lists_are_stale and "list-type=2" in environ["QUERY_STRING"] and "delimiter" not in environ["QUERY_STRING"]:
            return self._stale_list(environ, start_response)
        if kind in ("kill_before", "stale_lists"):
            os.kill(self.faults.victim, signal.SIGKILL)
            _no_answer(environ)
        if kind in ("error_500", "slow_down"):
            start_response("500 Internal Server Error" if kind == "error_500" else "503 Slow Down", [("Content-Length", "0")])
            return [b""]
        if kind == "expired":
            start_response("403 Forbidden", [("Content-Type", "application/xml"), ("Content-Length", str(len(_EXPIRED)))])
            return [_EXPIRED]
        if kind == "stop":
            os.kill(self.faults.victim, signal.SIGSTOP)
        if kind not in ("", "stop"):
            # moto changes its state while the answer is read
            list(self._app(environ, lambda *_status: None))
            if kind == "kill_after":
                os.kill(self.faults.victim, signal.SIGKILL)
            if kind == "timeout":
                time.sleep(3)
            _no_answer(environ)
        answer: Iterable[bytes] = self._app(environ, start_response)
        return answer

    def _stale_list(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer with a list of an earlier time, without the last objects."""
        text = b"".join(self._app(environ, lambda *_status: None))
        text = _KEY.sub(lambda one: b"" if one[1].decode() in self.faults.written else one[0], text)
        start_response("200 OK", [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]


def _forward(url: str, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Send a request to another service, and return its answer."""
    request = wrappers.Request(environ)
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request(request.method, environ["REQUEST_URI"], request.get_data(), dict(request.headers))
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in ("transfer-encoding", "connection")]
    if request.method != "HEAD":
        headers = [one for one in headers if one[0].lower() != "content-length"] + [("Content-Length", str(len(content)))]
    start_response(f"{answer.status} {answer.reason}", headers)
    return [content]


def _no_answer(environ: dict[str, Any]) -> NoReturn:
    """Close the connection of a request."""
    with contextlib.suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError


class _Quiet(serving.WSGIRequestHandler):
    def log(self, *_args: Any) -> None:
        """Nothing."""

    def log_error(self, *_args: Any) -> None:
        """Nothing: closed connections are intended."""


@contextlib.contextmanager
def running(environment: Callable[[str, str], None]) -> Iterator[Service]:
    """A service with an empty bucket, whose variables are set with `environment`."""
    service = Service()
    for name, value in service.environment().items():
        environment(name, value)
    try:
        service.make_bucket()
        yield service
    finally:
        service.close()


def main(address: str, port: str) -> None:
    """Serve a bucket on an address of a test network."""
    service = Service(address, int(port))
    service.make_bucket()
    print("ready", flush=True)
    service.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
