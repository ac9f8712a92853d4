"""The argument parser of all commands: settings among flags, typed errors."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from ngsgd.errors import ConfigError
from ngsgd.launcher import registry
from ngsgd.launcher.text import printable

JSON = "print JSON, and nothing else, on stdout"
TRUST = "import the custom module that the run names (model._target_), even if another user or machine made the run"
OTHER_BITS = "accept other processors, versions or kernels; results then agree up to rounding"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors."""

    # that of the command that began last, whose flags completion reads
    newest: ClassVar[Parser]

    def __init__(self, command: str, *, epilog: str | None = None) -> None:
        about = registry.find(command).about
        super().__init__(prog=f"ngsgd {command}", description=about, allow_abbrev=False, epilog=epilog)
        Parser.newest = self

    @property
    def flags(self) -> dict[str, argparse.Action]:
        """The actions by flag, such as --quiet."""
        return dict(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        near = [flag for word in unknown for flag in self._near(word)]
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{message}; see {self.prog} --help.{hint}")

    def parse_with_settings(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse flags and KEY=VALUE settings, in any order.

        A flag of another trainer, such as --lr 0.1, becomes the setting "--lr=0.1". Composing
        rejects it together with all other wrong settings.

        Raises:
            ConfigError: all wrong flags and all wrong settings.
        """
        own, foreign = self._split(list(arguments))
        try:
            options = self.parse_intermixed_args(own)
        except ConfigError as error:
            from ngsgd.launcher.config.compose import wrong_settings

            settings = [word for word in own if "=" in word and not word.startswith("-")]
            raise ConfigError([*error.problems, *wrong_settings([*settings, *foreign])]) from None
        options.overrides += foreign
        return options

    def _split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Own words, and flags of other trainers with their values as one word each."""
        own: list[str] = []
        foreign: list[str] = []
        while words:
            word = words.pop(0)
            name = word.partition("=")[0]
            if word == "--":
                return [*own, word, *words], foreign
            if not re.match(r"--\w", word) or name in self._option_string_actions or self._near(name):
                own.append(word)
            elif "=" in word or not words or words[0].startswith("-") or "=" in words[0]:
                foreign.append(word)
            else:
                foreign.append(f"{word}={words.pop(0)}")
        return own, foreign

    def _near(self, flag: str) -> list[str]:
        """The own flag that an unknown one resembles; none for a name of another trainer."""
        from ngsgd.config.other_names import instead_of

        known = [] if instead_of(flag) else list(self._option_string_actions)
        return difflib.get_close_matches(flag, known, n=1, cutoff=0.8)


def add_words(group: argparse._ArgumentGroup) -> None:
    """Add the options of `words_of`: other words and decoding weights than those of a model."""
    for flag, metavar, about in (
            ("--lm", "ARPA", "n-gram language model"),
            ("--lexicon", "FILE", "pronunciations in the phones of the model"),
            ("--words", "FILE", "vocabulary, one word per line"),
            ("--grammar", "FILE", "grammar in a subset of JSGF, instead of a language model")):
        group.add_argument(flag, metavar=metavar, type=Path, help=about)
    group.add_argument("--scale", metavar="X", type=float, help="acoustic scale (default: that of the model)")
    group.add_argument("--penalty", metavar="X", type=float, help="cost per word (default: that of the model)")


def words_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `ngsgd.asr.bundle.Bundle.with_words`, with its warnings on stderr.

    Raises:
        ConfigError: the scale or the penalty is out of range.
    """
    from ngsgd.asr.lang.vocabulary import Vocabulary, weight_problems

    if problems := [f"--{name} {text}" for name, text in weight_problems(options.scale, options.penalty)]:
        raise ConfigError(problems)
    return {"words": Vocabulary(options.lexicon, options.words, options.lm, options.grammar),
            "scale": options.scale, "penalty": options.penalty,
            "report": lambda line: print(printable(line), file=sys.stderr)}
