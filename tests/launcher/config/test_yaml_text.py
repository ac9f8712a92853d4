"""YAML of received files: aliases, depth and kind of file are bounded, and errors name the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import tuned_file
from ngsgd.pipeline.runs import config_file
from ngsgd.pipeline.runs.saved_config import read_config


def expand_aliases(path: Path) -> None:
    """A billion values in half a page."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    path.write_text("\n".join(lines) + "\n...\n")


def loop(path: Path) -> None:
    path.write_text("a: &a [*a]\n...\n")


def nest(path: Path) -> None:
    path.write_text("a: " + "[" * 5_000)


def nest_mappings(path: Path) -> None:
    path.write_text("{a: " * 5_000)


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def fill(path: Path) -> None:
    path.write_text("a: " + "x" * (2 << 20))


def write_a_tag(path: Path) -> None:
    path.write_text("a: !!python/object/apply:os.mkdir [canary]\n...\n")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [expand_aliases, loop, nest, nest_mappings, make_fifo, fill, write_a_tag])
def test_hostile_yaml_is_refused_by_name(tmp_path: Path, damage: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    damage(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        tuned_file.expanded([f"tuned={tmp_path / 'config.yaml'}"])
    assert not (tmp_path / "canary").exists()


def test_a_configuration_comes_back_and_a_few_aliases_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(config_file.to_yaml(RunConfig()))
    assert read_config(tmp_path / "config.yaml") == RunConfig()
    text = (tmp_path / "config.yaml").read_text().replace("seed: 0", "seed: &seed 0", 1)
    assert "&seed" in text
    (tmp_path / "config.yaml").write_text(text)
    assert read_config(tmp_path / "config.yaml") == RunConfig()
