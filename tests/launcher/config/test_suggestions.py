"""A suggested command line composes to the value that the user meant, after a shell split it."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from ngsgd.config.build import flatten
from ngsgd.config.other_names import OTHER_NAMES, SETTINGS_INSTEAD
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import compose, suggestions

TASK = "task._target_=m:f"
# texts as they arrive from a shell that removed the quotes
TEXTS = ["50% of #1", "ckpt/epoch=999-step=8.ckpt", "a=b", "#1", "100%", "me@host", "$HOME", "${seed}", "a${seed}b",
         "\\${x}", "{", "}", "[", "]", "{a", "a}", "[1", "1]", "a,b", "a, b", ",", ":", "a:b", "a: b", "'", '"',
         "it's", 'say "hi"', "'a'", '"a"', "\\", "a\\", "\\a", "\\'", '\\"', " ", " a", "a ", "a b", "größe", "日本",
         "🙂", "-", "-1", "--flag", "-x=1", "", "null", "true", "1", "1e-3", "nan", "0x10", "012", "1_000", "~", "!",
         "!x", "*", "?", "&", "|", ";", "<", ">", "(", ")", "`id`", "$(id)", "a/b c", "%(x)s", "{}", "[]", "a=b,c=d",
         "choice(1,2)", "range(1,3)", "a\tb", "2020-01-01", "a#b", "a;b", "x" * 150]
# a mapping whose texts lack quotes -> its meaning
MAPPINGS = {"{path: ckpt/epoch=999-step=8.ckpt}": {"path": "ckpt/epoch=999-step=8.ckpt"}, "{a: 1, b: x=y}": {"a": 1, "b": "x=y"},
            "{a: [1, b=c], d: {e: '#'}}": {"a": [1, "b=c"], "d": {"e": "#"}}, "{a: it's, b: 1e-3}": {"a": "it's", "b": 1e-3},
            "{a: 50%#1, b: true, c: null}": {"a": "50%#1", "b": True, "c": None}, "{a: '1', b: x=1}": {"a": "1", "b": "x=1"}}


@pytest.fixture(autouse=True, scope="module")
def composed_once() -> Iterator[None]:
    """Hydra composes each command line once."""
    with pytest.MonkeyPatch.context() as patch:
        compose_lines = functools.cache(compose._composed)
        patch.setattr(compose, "_composed", lambda lines, sources, number=None: compose_lines(tuple(lines), sources, number))
        values_of = functools.cache(compose.values_of)
        patch.setattr(compose, "values_of", lambda lines: values_of(tuple(lines)))
        yield


def problem_of(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose.compose(list(words))
    return "\n".join(caught.value.problems)


def suggested_in(message: str) -> list[list[str]]:
    """The words of each suggested command line, as a shell splits them."""
    return [shlex.split(line) for line in re.findall(r"Did you mean (.*?)\?(?: |$)", message, re.MULTILINE) if "=" in line]


def composed(words: list[str]) -> dict[str, Any]:
    config = compose.compose([TASK, *words])
    return {**flatten(config), "task.args": dict(config.task.args or {})}


@pytest.mark.entry("F31", "a value on the command line lacks the quotes of Hydra", "error",
                   "the suggested line is composed before it is suggested, and gives the value that was meant")
@pytest.mark.parametrize(("word", "meant"), [
    ("task.args={path: ckpt/epoch=999-step=8.ckpt}", {"path": "ckpt/epoch=999-step=8.ckpt"}),
    ("task.args.text=50% of #1", {"text": "50% of #1"}), ("task.args.a.b=x=y", {"a": {"b": "x=y"}})])
def test_a_suggested_line_composes_to_what_was_meant(word: str, meant: dict[str, Any]) -> None:
    [words] = suggested_in(problem_of(TASK, word))
    assert composed(words)["task.args"] == meant


@pytest.mark.slow
@pytest.mark.entry("F31")
@pytest.mark.parametrize("text", [*TEXTS[::2], *MAPPINGS])
def test_every_suggestion_composes_to_what_was_meant(text: str) -> None:
    """As a text of a setting, as an entry of a mapping, and under the name of another trainer."""
    def write(key: str) -> list[str]:
        typed = suggestions.assignment(key, text, lambda line: compose.values_of([line]))
        return shlex.split(typed) if "=" in typed else []
    is_read, value = suggestions._read(text)
    meant = value if is_read else MAPPINGS.get(text, text)
    num_suggested = 0
    if words := write("task.args.text"):
        num_suggested += 1
        assert composed(words)["task.args"] in ({"text": meant}, {"text": text})
    for key in ("task.search_path", "data.lm", "model.dropout_schedule"):
        if words := write(key):
            num_suggested += 1
            config = compose.values_of(words)
            section, _, name = key.partition(".")
            assert config[section][name] in (meant, text)
    assert num_suggested or not text.isprintable() or text == ""
    for key in ("task.args", "lr", "exp_dir"):
        for words in suggested_in(str(_message(f"{key}={text}"))):
            assert all(_is_accepted(word) for word in words), (key, words)


def _message(word: str) -> str:
    try:
        compose.compose([TASK, word])
    except ConfigError as error:
        return "\n".join(problem for problem in error.problems if "Did you mean" in problem)
    return ""


def _is_accepted(word: str) -> bool:
    """Whether a suggested word is a setting with a value that it takes."""
    key = word.partition("=")[0]
    if word.partition("=")[2].isupper():
        # a placeholder, such as EPOCHS
        return True
    try:
        compose.compose([TASK, word])
    except ConfigError as error:
        # speech options have no effect with a task, some need other options, and 1 is below another
        others = ("task._target_", "does not use", "no effect", "schedule.lr_initial", "schedule.num_jobs_initial")
        return not any(problem.startswith(f"{key} is") and not any(word in problem for word in others)
                       for problem in error.problems)
    return True


@pytest.mark.slow
@pytest.mark.entry("F31")
# every second: a command line is composed in about half a second
@pytest.mark.parametrize("name", [*OTHER_NAMES, *SETTINGS_INSTEAD][::2])
def test_a_name_of_another_trainer_is_answered_with_a_line_that_composes(name: str) -> None:
    for form in (f"{name}=1", f"--{name.replace('_', '-')}=abc", f"{name}=a b"):
        for words in suggested_in(_message(form)):
            assert all(_is_accepted(word) for word in words if "=" in word), (form, words)


def test_texts_of_lists_and_names_with_dots_are_resolved() -> None:
    assert composed(['task.args={a: ["\\${x}", "${seed}"]}'])["task.args"] == {"a": ["${x}", 0]}
    assert "task.args" in problem_of(TASK, "task.args={a: ['${no.such}']}")
