"""Which cases run: a spread of the matrix with every test run, all of it when asked."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-chaos", action="store_true", help="run every case of the fault matrix, not only the quick ones")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only_when_asked: a case that only --all-chaos runs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the others: a test that is skipped would look like one that is missing."""
    if config.getoption("--all-chaos"):
        return
    later = [item for item in items if "only_when_asked" in item.keywords]
    config.hook.pytest_deselected(items=later)
    items[:] = [item for item in items if item not in later]
