"""YAML of received files: aliases, depth and kind of file are bounded, and errors name the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import compose
from ngsgd.runs import config_file
from ngsgd.runs.config_file import read_config
from ngsgd.yaml_text import dump_yaml, load_yaml

HOSTILE = {
    # a billion values in half a page
    "aliases": "".join([f"a0: &a0 [{', '.join('x' * 9)}]\n"] + [
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)]) + "...\n",
    "loop": "a: &a [*a]\n...\n", "lists": "a: " + "[" * 5_000, "mappings": "{a: " * 5_000,
    "long": "a: " + "x" * (2 << 20), "tag": "a: !!python/object/apply:os.mkdir [canary]\n...\n", "fifo": ""}


@pytest.mark.slow
@pytest.mark.parametrize("damage", HOSTILE)
def test_hostile_yaml_is_refused_by_name(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if damage == "fifo":
        os.mkfifo(tmp_path / "config.yaml")
    else:
        (tmp_path / "config.yaml").write_text(HOSTILE[damage])
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        read_config(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        compose.compose([f"tuned={tmp_path / 'config.yaml'}"])
    assert not (tmp_path / "canary").exists()


def test_a_configuration_comes_back_and_a_few_aliases_are_read(tmp_path: Path) -> None:
    for config in (RunConfig(name="yes", seed=3), RunConfig()):
        (tmp_path / "config.yaml").write_text(config_file.to_yaml(config))
        assert read_config(tmp_path / "config.yaml") == config
    text = (tmp_path / "config.yaml").read_text().replace("seed: 0", "seed: &seed 0", 1)
    assert "&seed" in text
    (tmp_path / "config.yaml").write_text(text)
    assert read_config(tmp_path / "config.yaml") == RunConfig()


@pytest.mark.entry("At4", "read a `config.yaml` with values that only YAML 1.1 has (`seed: 1:59`, `0777`, `yes`, dates), or with "
                   "10,000 unknown names", "error",
                   "Values are read by YAML 1.2, so these are texts, and `ConfigError` names the option; the time grows with the "
                   "size.")
@pytest.mark.parametrize("line", [
    "seed: 1:59", "seed: 0777", "seed: 1_000", "seed: 0b11", "seed: 0x1F", "seed: 2026-01-01", "seed: yes", "seed: !!int 1:59",
    "seed: !!int '0777'", "seed: !!timestamp 2026-01-01", "seed: 1:59:59.5", "seed: " + "1:" * 1000 + "1", "seed: " + "9" * 5000,
    "seed: !!binary aGVsbG8=", "seed: !!float 1:30.5"])
def test_values_of_an_earlier_yaml_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(config_file.to_yaml(RunConfig()).replace("seed: 0", line, 1))
    with pytest.raises(ConfigError, match=r"config\.yaml") as error:
        read_config(path)
    assert "seed" in str(error.value) or "YAML" in str(error.value)


@pytest.mark.parametrize(("text", "value"), [
    ("1", 1), ("-12", -12), ("0", 0), ("1e-3", 1e-3), ("1.0e-05", 1e-5), (".5", 0.5), ("3.", 3.0), ("+1.5E+3", 1500.0),
    ("true", True), ("False", False), ("null", None), ("~", None), ("", None), (".inf", float("inf")), ("yes", "yes"),
    ("on", "on"), ("1:59", "1:59"),
    ("0777", "0777"), ("1_000", "1_000"), ("2026-01-01", "2026-01-01"), ("'1'", "1"), ("trueish", "trueish"), ("nullx", "nullx"),
    ("=", "="), ("1e5x", "1e5x")])
def test_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    assert load_yaml(f"a: {text}\n") == {"a": value}


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("a: 1\nb:\n  c: 1\n  c: 2\n...\n")
    with pytest.raises(ConfigError, match="duplicate key c"):
        read_config(tmp_path / "config.yaml")


@pytest.mark.entry("At4")
def test_many_unknown_names_give_a_short_error(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("".join(f"some_name_{number}: 1\n" for number in range(500)) + "...\n")
    with pytest.raises(ConfigError, match="480 more names") as error:
        read_config(path)
    assert len(error.value.problems) < 40


@pytest.mark.entry("At4")
@pytest.mark.parametrize("text", ["1e5", "012", "yes", "1:59", "0x1F", "2026-01-01", "null", "~", "", ".5", "1.", "-1", "nan",
                                  ".nan", "true"])
def test_a_text_that_looks_like_another_value_is_read_as_it_was_written(text: str) -> None:
    tree = {"name": text, "list": [text, 1, 0.5, None, True], text: "key"}
    assert load_yaml(dump_yaml(tree)) == tree
