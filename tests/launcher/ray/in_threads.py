"""Ray's calls that `RayPool` makes, with actors that are threads of this process."""

from __future__ import annotations

import concurrent.futures
import contextlib
import signal
import traceback
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError


class Ref(concurrent.futures.Future[Any]):
    """The reference to an answer."""


class Actor:
    """One thread for jobs, and one for control calls."""

    def __init__(self, made: Any, node_id: str) -> None:
        self.made, self.node_id, self.is_dead = made, node_id, False
        self._threads = {group: concurrent.futures.ThreadPoolExecutor(1) for group in ("", "control")}
        self._refs: list[Ref] = []

    def __getattr__(self, name: str) -> Any:
        def call(num_returns: int, group: str, *arguments: Any, **options: Any) -> Any:
            refs = [Ref() for _ in range(num_returns)]
            self._refs += refs

            def run() -> None:
                if self.is_dead:
                    return
                # killed meanwhile
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    try:
                        given = [one.result() if isinstance(one, Ref) else one for one in arguments]
                        value = getattr(self.made, name)(*given, **options)
                    except Exception as error:
                        refs[0].set_exception(RayTaskError(name, traceback.format_exc(), error))
                        return
                    for ref, one in zip(refs, value if num_returns > 1 else [value], strict=True):
                        ref.set_result(one)
            self._threads[group].submit(run)
            if self.is_dead:
                self.kill()
            return refs if num_returns > 1 else refs[0]

        def options(num_returns: int = 1, concurrency_group: str = "") -> Any:
            return SimpleNamespace(remote=lambda *given, **named: call(num_returns, concurrency_group, *given, **named))
        return SimpleNamespace(remote=options().remote, options=options)

    def kill(self) -> None:
        self.is_dead = True
        for ref in self._refs:
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                ref.set_exception(RayActorError())


class Cluster:
    """Machines n0, n1 and so on, one for each actor; `draining` are reported by the head."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.actors: list[Actor] = []
        # an actor receives SIGTERM in its main thread, which is that of the test here
        patch.setattr(signal, "signal", lambda *_arguments: None)
        self.draining: set[str] = set()
        self.options: list[dict[str, Any]] = []
        here = SimpleNamespace(gcs_address="10.0.0.1:6379", get_node_id=lambda: "ab" * 28)
        for name, value in {"get": self._get, "wait": self._wait, "put": _done, "kill": Actor.kill, "remote": self._remote,
                            "get_runtime_context": lambda: here, "cluster_resources": dict, "nodes": list}.items():
            patch.setattr(ray, name, value)
        patch.setattr("ngsgd.launcher.ray.pool.connect", lambda _config: False)
        patch.setattr("ngsgd.launcher.ray.pool.HeadWatch",
                      lambda address: SimpleNamespace(address=address, check=lambda: None, is_lost=False))
        patch.setattr("ray.autoscaler.v2.sdk.get_cluster_status", lambda _address: self._status())

    def _status(self) -> SimpleNamespace:
        nodes = [SimpleNamespace(node_id=name, node_status="DRAINING") for name in self.draining]
        return SimpleNamespace(active_nodes=nodes, pending_nodes=[], pending_launches=[], failed_launches=[])

    def _remote(self, **options: Any) -> Callable[[type], Any]:
        self.options.append(options)

        def actor_class(kind: type) -> Any:
            def start(*arguments: Any) -> Actor:
                actor = Actor(kind(*arguments), f"n{len(self.actors)}")
                self.actors.append(actor)
                return actor
            return SimpleNamespace(remote=start)
        return actor_class

    def _get(self, ref: Ref, timeout: float | None = None) -> Any:
        try:
            return ref.result(timeout)
        except concurrent.futures.TimeoutError:
            raise GetTimeoutError from None

    def _wait(self, refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True) -> Any:
        when = concurrent.futures.FIRST_COMPLETED if num_returns < len(refs) or len(refs) == 1 else concurrent.futures.ALL_COMPLETED
        concurrent.futures.wait(refs, timeout, when)
        done = [ref for ref in refs if ref.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]


def _done(value: Any) -> Ref:
    ref = Ref()
    ref.set_result(value)
    return ref
