"""A generator with a pool of threads may be closed in any thread, by garbage collection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ngsgd.asr.corpora import digits
from ngsgd.config import DataConfig
from ngsgd.data.reader import ahead

# the work of the second item runs in a thread of the pool
Work = Callable[[], None]


def prefetched(second: Work, _patch: pytest.MonkeyPatch) -> Iterator[Any]:
    def items() -> Iterator[int]:
        yield 1
        second()
        yield 2

    return ahead(items(), 2)


def synthesized(second: Work, patch: pytest.MonkeyPatch) -> Iterator[Any]:
    made: list[int] = []

    def make_shard(_planned: object, _seed: int) -> list[int]:
        made.append(1)
        if len(made) > 1:
            second()
        return [1]

    patch.setattr(digits, "make_shard", make_shard)
    return digits.utterances("train", DataConfig(), minutes=20.0, num_at_once=1)


@pytest.mark.parametrize("make", [prefetched, synthesized])
def test_a_thread_of_the_pool_may_close_the_generator(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first_is_used, is_closed = threading.Event(), threading.Event()
    held: list[Iterator[Any]] = []

    def second() -> None:
        first_is_used.wait()
        # the last reference; an error in its `finally` is an unraisable one, which fails the test
        held.clear()
        is_closed.set()

    held.append(make(second, monkeypatch))
    assert next(held[0]) == 1
    first_is_used.set()
    is_closed.wait()
    assert not held
