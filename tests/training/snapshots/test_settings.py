"""Combinations of settings that have no snapshots are rejected before a run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ngsgd.config import FailureConfig
from ngsgd.config.rules import check
from ngsgd.training.settings import EngineSettings
from ngsgd.training.snapshots.book import takes_snapshots
from tests import toy

UNSUPPORTED: dict[str, dict[str, dict[str, Any]]] = {
    "one process": {"cluster": {"kind": "in_process"}},
    "defer": {"failure": {"policy": "defer"}}, "groups": {"cluster": {"ranks_per_worker": 2}}}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_snapshots_on_is_an_error_where_there_are_none(name: str) -> None:
    config = toy.config(failure=FailureConfig(snapshots="on"), cluster=replace(toy.config().cluster, kind="local"))
    assert check(config) == []
    for section, changes in UNSUPPORTED[name].items():
        config = replace(config, **{section: replace(getattr(config, section), **changes)})
    assert any("failure.snapshots" in message for message in check(config))


@pytest.mark.parametrize(("failure", "expected"), [
    (FailureConfig(), True), (FailureConfig(snapshots="off"), False), (FailureConfig(policy="drop"), False)])
def test_snapshots_depend_on_the_policy(failure: FailureConfig, expected: bool) -> None:
    assert takes_snapshots(EngineSettings.of(toy.config(failure=failure))) is expected
