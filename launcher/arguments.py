"""The argument parser of all commands: settings among flags, typed errors."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from ngsgd.errors import ConfigError
from ngsgd.launcher import registry
from ngsgd.masking import printable

JSON = "print JSON, and nothing else, on stdout"
TRUST = "import the custom module that the run names (model._target_), even if another user or machine made the run"
RUN = "run folder, or its name under runs/"
CONFIG = {"--config-dir -cd DIR": (Path, "folder of custom YAML files; DIR/recipe/mine.yaml is recipe=mine"),
          "--config-path -cp DIR": (Path, "folder of the primary config, which is config.yaml unless --config-name is given"),
          "--config-name -cn NAME": (str, "primary config, such as mine of DIR/mine.yaml (default: that of ngsgd)")}
_NUMBERS = {"int": "an integer", "float": "a number without a unit"}
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

    def declare(self, table: Mapping[str, str | tuple[Any, str]], title: str = "") -> argparse._ActionsContainer:
        """Add arguments, as a group if there is a title, and return that or the parser.

        Args:
            table: "--flag -f" (a switch), "--flag -f NAME" (with a value) or "NAME" (without a
                flag) -> help text, or (default or type, help text).
            title: heading of the group.
        """
        target = self.add_argument_group(title) if title else self
        for names, entry in table.items():
            given, about = entry if isinstance(entry, tuple) else (None, entry)
            *flags, last = names.split()
            more: dict[str, Any] = {"action": "store_true"} if last[0] == "-" else {"metavar": last}
            flags = [*flags, last] if last[0] == "-" else flags or [last.lower()]
            if isinstance(given, type):
                more["type"] = given
            elif given is not None:
                more |= {"type": type(given), "default": given}
                about += "" if "(default" in about else " (default: %(default)s)"
            target.add_argument(*flags, help=about, **more)
        return target

    def error(self, message: str) -> NoReturn:
        if number := re.match(r"argument (--[\w-]+)[^:]*: invalid (int|float) value", message):
            action = self.flags[number[1]]
            message += f"; give {number[1]} {action.metavar}, {_NUMBERS[number[2]]}: {(action.help or '') % vars(action)}"
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        near = [flag for word in unknown for flag in self._near(word)]
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{message}; see {self.prog} --help.{hint}")

    def parse_with_settings(self, arguments: Sequence[str], about: str = "settings of ngsgd train",
                            metavar: str = "KEY=VALUE") -> argparse.Namespace:
        """Parse flags and KEY=VALUE settings (`overrides`), in any order.

        A flag of another trainer, such as --lr 0.1, becomes the setting "--lr=0.1". Composing
        rejects it together with all other wrong settings.

        Raises:
            ConfigError: all wrong flags and all wrong settings.
        """
        self.add_argument("overrides", nargs="*", metavar=metavar, help=about)
        words, own, foreign = list(arguments), list[str](), list[str]()
        while words:
            word = words.pop(0)
            name = word.partition("=")[0]
            if word == "--":
                own += [word, *words]
                break
            if not re.match(r"--\w", word) or name in self._option_string_actions or self._near(name):
                own.append(word)
            elif "=" in word or not words or words[0].startswith("-") or "=" in words[0]:
                foreign.append(word)
            else:
                foreign.append(f"{word}={words.pop(0)}")
        try:
            options = self.parse_intermixed_args(own)
        except ConfigError as error:
            from ngsgd.launcher.config.compose import wrong_settings
            settings = [word for word in own if "=" in word and not word.startswith("-")]
            raise ConfigError([*error.problems, *wrong_settings([*settings, *foreign])]) from None
        options.overrides += foreign
        return options

    def _near(self, flag: str) -> list[str]:
        """The own flag that an unknown one resembles; none for a name of another trainer."""
        from ngsgd.config.other_names import instead_of
        known = [] if instead_of(flag) else list(self._option_string_actions)
        return difflib.get_close_matches(flag, known, n=1, cutoff=0.8)


def out_of_range(options: argparse.Namespace, least: Mapping[str, float], positive: Sequence[str] = ()) -> list[str]:
    """Return a message per number that is below its `least` value, not positive or not finite."""
    rules = {**{name: (low, f"at least {low:g}") for name, low in least.items()},
             **{name: (math.ulp(0.0), "greater than 0") for name in positive}}
    return [f"--{name.replace('_', '-')} is {value}; it must be {rule}."
            for name, (low, rule) in rules.items() if (value := getattr(options, name)) is not None
            and not (math.isfinite(value) and value >= low)]


# other words and decoding weights than those of a model
WORDS = {
    "--lm ARPA": (Path, "n-gram language model"),
    "--lexicon FILE": (Path, "pronunciations in the phones of the model"),
    "--words FILE": (Path, "vocabulary, one word per line"),
    "--grammar FILE": (Path, "grammar in a subset of JSGF, instead of a language model"),
    "--hotwords FILE": (Path, "phrases to prefer, one per line, each with a bonus in nats (:3) or 3 per word"),
    "--scale X": (float, "acoustic scale (default: that of the model)"),
    "--penalty X": (float, "cost per word (default: that of the model)")}


def words_of(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `ngsgd.asr.bundle.Bundle.with_words` from the options of `WORDS`; warnings
    go to stderr.

    Raises:
        ConfigError: the scale or the penalty is out of range.
    """
    from ngsgd.asr.lang.vocabulary import Vocabulary, weight_problems
    if problems := [f"--{name} {text}" for name, text in weight_problems(options.scale, options.penalty)]:
        raise ConfigError(problems)
    return {"words": Vocabulary(options.lexicon, options.words, options.lm, options.grammar, options.hotwords),
            "scale": options.scale, "penalty": options.penalty,
            "report": lambda line: print(printable(line), file=sys.stderr)}
