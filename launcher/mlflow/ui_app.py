"""MLflow's server behind `ngsgd ui`, closed to pages of other sites that a browser has open.

MLflow refuses foreign origins for its REST interface alone.  Here every request that may change
something, and every GraphQL request, must come from a page of this server, or from no page at all.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

_Send = Callable[[Mapping[str, Any]], Awaitable[None]]
_READING = ("GET", "HEAD", "OPTIONS")
# MLflow's own setting: a list, or * for everybody
_ALLOWED = "MLFLOW_SERVER_CORS_ALLOWED_ORIGINS"
# variable and header by which the command that started this server recognizes it
MARK, MARK_HEADER = "NGSGD_UI_MARK", "x-ngsgd-ui"
_REFUSAL = b"ngsgd ui: this request comes from a page of another site.\n"


class SameOriginOnly:
    """An ASGI application around MLflow's, which is imported when the server starts."""

    def __init__(self, app: Any = None) -> None:
        self._app = app

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: _Send) -> None:
        if scope["type"] in ("http", "websocket") and is_foreign(scope):
            await _refuse(scope, send)
            return
        if self._app is None:
            from mlflow.server.fastapi_app import app
            self._app = app
        await self._app(scope, receive, _marked(send) if scope.get("path") == "/health" else send)


def _marked(send: _Send) -> _Send:
    async def send_marked(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            mark = (MARK_HEADER.encode(), os.environ.get(MARK, "").encode())
            message = {**message, "headers": [*message.get("headers", ()), mark]}
        await send(message)
    return send_marked


def is_foreign(scope: Mapping[str, Any]) -> bool:
    """Whether a page of another origin has a browser send a request that is not plain reading."""
    is_graphql = str(scope.get("path", "")).rstrip("/").endswith("/graphql")
    if scope["type"] == "http" and scope["method"] in _READING and not is_graphql:
        return False
    headers: dict[str, str] = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope.get("headers", ())}
    origin = headers.get("origin", "")
    allowed = [one.strip() for one in os.environ.get(_ALLOWED, "").split(",") if one.strip()]
    if "*" in allowed or origin in allowed:
        return False
    if origin:
        return str(urlsplit(origin).netloc).lower() != headers.get("host", "").lower()
    # browsers name no origin for images and links, but say where they are
    return str(headers.get("sec-fetch-site", "none")) not in ("none", "same-origin")


async def _refuse(scope: Mapping[str, Any], send: _Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
    await send({"type": "http.response.body", "body": _REFUSAL})


app = SameOriginOnly()
