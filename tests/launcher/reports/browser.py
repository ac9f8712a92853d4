"""A headless Chromium, driven over WebDriver's plain HTTP, for pages that are to be looked at."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.tiers import HANGS_S


def missing() -> str:
    """The missing tool; empty if pages can be opened."""
    return next((f"{tool} is not installed" for tool in ("chromium", "chromedriver") if not shutil.which(tool)), "")


@dataclass
class Browser:
    """One window."""

    session: str   # URL of the WebDriver session

    def open(self, url: str) -> None:
        _call("POST", f"{self.session}/url", {"url": url})

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        body = {"script": f"return {expression}", "args": []}
        return _call("POST", f"{self.session}/execute/sync", body)

    def console(self) -> list[str]:
        """Messages of the page since the last call."""
        found = _call("POST", f"{self.session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in found]


@contextlib.contextmanager
def browser(width: int, height: int, *, is_phone: bool = False) -> Iterator[Browser]:
    """A window of that many CSS pixels; a phone has touch and a mobile viewport."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
    options: dict[str, Any] = {"args": [*flags, f"--window-size={width},{height}"]}
    if is_phone:
        options["mobileEmulation"] = {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}}
    wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}}
    try:
        root = f"http://127.0.0.1:{port}"
        _wait_for(root)
        session = f"{root}/session/{_call('POST', f'{root}/session', wanted)['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _call("DELETE", session)
    finally:
        driver.terminate()
        driver.wait()


def _wait_for(root: str) -> None:
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if _call("GET", f"{root}/status")["ready"]:
                return
        time.sleep(0.1)
    raise AssertionError("chromedriver did not start")


def _call(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=HANGS_S) as answer:
        return json.loads(answer.read())["value"]
