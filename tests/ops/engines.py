"""Our C++ as each kind of processor runs it, and torch operations in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ngsgd.ops.kernels import native

# what this processor can run; "none" is code for any processor of its family
_RUNS = {"AVX512": ("AVX512", "AVX2", "none"), "AVX2": ("AVX2", "none")}.get(native.capability(), ("none",))


def running(engine: str, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None],
            is_built: Callable[[], bool]) -> Iterator[str]:
    """For a fixture: `engine` makes the numbers, "torch" or what to compile for; `forget` empties
    what keeps compiled code.
    """
    if engine == "torch":
        with native.in_torch_operations():
            yield engine
        return
    if engine not in _RUNS:
        pytest.skip(f"this processor has no {engine}")
    monkeypatch.setattr(native, "capability", lambda: engine)
    forget()
    if not is_built():
        pytest.skip("no C++ compiler here: torch operations make all numbers")
    yield engine
    forget()
