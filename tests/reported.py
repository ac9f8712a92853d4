"""What a `report` callback receives, without the names of the phases."""

from __future__ import annotations

import pytest

from ngsgd.phase import Phase


class Reported(list[str]):
    """The messages of a run; `append` is the callback."""

    def append(self, message: str) -> None:
        if not isinstance(message, Phase):
            super().append(message)


def nothing(message: str) -> None:
    """A callback that fails with a message other than a phase."""
    if not isinstance(message, Phase):
        pytest.fail(message)


def silent(_line: object) -> None:
    """Report nothing."""
