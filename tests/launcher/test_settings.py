"""`ngsgd settings`: every option with its default, values and help text."""

from __future__ import annotations

import json

import pytest

from ngsgd.config.build import paths
from ngsgd.errors import ConfigError
from ngsgd.launcher import cli
from ngsgd.launcher.config import describe
from tests.launcher.records import Command


def test_without_a_pattern_all_options_are_listed(command: Command) -> None:
    assert [one["path"] for one in json.loads(command("settings", "--json").out)] == paths()


@pytest.mark.parametrize(("pattern", "found"), [
    ("checkpoint", ["checkpoint.num_to_keep"]),
    ("tune.proxy", ["tune.proxy.steps", "tune.proxy.outer_iters"]),
    ("schedule.lr*", ["schedule.lr_initial", "schedule.lr_final", "schedule.lr_schedule", "schedule.lr_factors"]),
    ("minibatch_size", ["schedule.minibatch_size"]),
    ("Nesterov", ["outer.kind", "outer.momentum"]),
])
def test_a_pattern_selects_a_section_a_name_or_a_word_of_the_help(pattern: str, found: list[str]) -> None:
    assert [one.path for one in describe.matching(pattern)] == found


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_a_description_fits_the_terminal_and_has_its_parts(columns: str, monkeypatch: pytest.MonkeyPatch,
                                                           command: Command) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = command("train", "--help", "optimizer").out
    assert max(map(len, text.splitlines())) <= min(int(columns), 100)
    [damping] = [one for one in describe.options() if one.path == "optimizer.damping"]
    joined = " ".join(text.split())
    for part in (damping.help, damping.default, damping.values, damping.used):
        assert part in joined


def test_a_pattern_without_an_option_is_an_error() -> None:
    assert cli.main(["settings", "no-such-option"]) == ConfigError.exit_code


def test_no_help_text_is_a_sentence_or_missing() -> None:
    """Help texts are noun phrases without a full stop."""
    wrong = [one.path for one in describe.options() if not one.help or one.help.endswith(".")]
    assert wrong == []
