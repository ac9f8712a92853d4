"""A check that training changed a model, for tests that a constant would pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def moving(model: nn.Module) -> Iterator[None]:
    """Assert that most matrices of the model change inside, in most of their numbers."""
    before = [p.detach().clone() for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    yield
    after = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    moved = [float((p != old).double().mean()) > 0.5 for p, old in zip(after, before, strict=True)]
    assert sum(moved) > 0.5 * len(moved) or not moved
