"""Nested plain values to `RunConfig` and back; what does not fit becomes sentences, all of them at once."""

from __future__ import annotations

import difflib
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

from ngsgd import config as knobs
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.launcher.text import masked

_LONGEST_SHOWN = 200   # characters of a value in a message


def build(values: Mapping[str, Any], given: Given | None = None) -> RunConfig:
    """A RunConfig from nested mappings that hold every key; raises one ConfigError that lists everything wrong.

    Settings without effect are wrong where `given` tells what was given; a run folder may hold them.
    """
    config, problems = build_checked(values, given)
    if problems:
        raise ConfigError(problems)
    return config


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same, and the defaults of all settings that are not in it."""
    return _over(defaults(), values)


def defaults() -> dict[str, Any]:
    """The default of every setting; None where it is that of the section's kind."""
    def of(section: Any) -> dict[str, Any]:
        values = {spec.name: (spec, getattr(section, spec.name)) for spec in fields(section)}
        return {name: of(value) if is_dataclass(value) else None if spec.metadata.get("of_kind") else plain(value)
                for name, (spec, value) in values.items()}
    return of(RunConfig())


def _over(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _over(defaults[name], value) if isinstance(defaults.get(name), dict) and isinstance(value, Mapping) else value
            for name, value in values.items()}
    return {**defaults, **both}


def flatten(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> value, in the order of the dataclasses."""
    return dict(leaves(asdict(config), ""))


def did_you_mean(word: str, known: Sequence[str], last: str) -> str:
    """A question naming the nearest known words; a bare last part such as `max_change` is enough."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    by_last = {path.rpartition(".")[2]: path for path in reversed(known)}
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, n=1, cutoff=0.75)]
    return f" Did you mean {near[0]}?" if near else ""


@dataclass(frozen=True)
class _Wrong:
    """A value that does not fit its key."""

    path: str
    sentence: str


@dataclass(frozen=True)
class Given:
    """What the command line gives."""

    settings: frozenset[str] = frozenset()   # such as outer.gain
    groups: frozenset[str] = frozenset()     # such as outer, in outer=bmuf


_ALSO_SET_BY = {"optimizer": "preconditioner", "combination": "objective"}   # section: the group that chooses its kind, too


def build_checked(values: Mapping[str, Any], given: Given | None = None) -> tuple[RunConfig, list[str]]:
    """The configuration, wrong values replaced by defaults, and a sentence on each wrong value and broken rule."""
    wrong: list[_Wrong] = []
    config = _build_section(RunConfig, values, "", wrong)
    dead = [setting.sentence for setting in knobs.unused(config) if is_refused(setting, given)] if given is not None else []
    # a rule on a value that was replaced would speak of a number nobody wrote
    broken = [said for said in (*knobs.check(config), *dead) if not any(fault.path in said for fault in wrong)]
    return config, [fault.sentence for fault in wrong] + broken


def is_refused(setting: knobs.Unused, given: Given) -> bool:
    """Whether a setting without effect is a mistake.

    It is where the command line gives it (unless it is empty), or where a file sets it for the kind that the file chooses.
    It is none where the command line chooses another kind than the one a recipe was written for.
    """
    if not setting.is_set and setting.value in ("", None):
        return False
    section, _, name = setting.path.rpartition(".")
    if setting.path in given.settings or (name == "kind" and section in given.groups):
        return True
    chosen = section in given.groups or _ALSO_SET_BY.get(section) in given.groups or bool(given.settings & {*setting.switches})
    return setting.is_set and not chosen


def _build_section(kind: type[Any], values: Any, prefix: str, wrong: list[_Wrong]) -> Any:
    if not isinstance(values, Mapping):
        wrong.append(_Wrong(prefix, f"{prefix[:-1]} is {values!r}; it must be a section of settings."))
        return kind()
    hints, known = typing.get_type_hints(kind), [spec.name for spec in fields(kind)]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1) or [""]
            hint = f" Did you mean {prefix}{near[0]}?" if near[0] else did_you_mean(str(name), paths(), str(name))
            wrong.append(_Wrong(f"{prefix}{name}", f"{prefix}{name} is not a setting.{hint}"))
    missing = [f"{prefix}{name}" for name in known if name not in values]
    if missing:  # cannot come from the command line, where the schema has every key
        told = f"no value for {', '.join(missing)}; the file is damaged or of another version of ngsgd."
        wrong.append(_Wrong(missing[0], told))
    built = {}
    for spec in fields(kind):
        path = f"{prefix}{spec.name}"
        if spec.name not in values:
            continue
        if is_dataclass(hints[spec.name]):
            built[spec.name] = _build_section(hints[spec.name], values[spec.name], f"{path}.", wrong)
        else:
            try:
                is_default = values[spec.name] is None and spec.metadata["of_kind"]
                built[spec.name] = None if is_default else _convert(values[spec.name], hints[spec.name])
            except ValueError as error:
                wrong.append(_Wrong(path, f"{path} is {_shown(values[spec.name])}; it must be {error}."))
    return kind(**built)


def _convert(value: Any, kind: Any) -> Any:
    """The value as `kind`; raises ValueError saying what it must be."""
    if isinstance(kind, types.GenericAlias):  # tuple[float, ...] or tuple[str, ...]
        of = typing.get_args(kind)[0]
        try:
            if isinstance(value, (list, tuple)) and value:
                return tuple(_convert(item, of) for item in value)
        except ValueError:
            pass
        raise ValueError("a list of names, such as [one,two]" if of is str else "a list of finite numbers, such as [0.1,0.2]")
    if isinstance(kind, types.UnionType):  # a mapping that is the user's own, or None
        if value is None or isinstance(value, Mapping):
            return dict(value) if value else None
        raise ValueError("a mapping, such as {width: 64}")
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value
    if kind is str:
        if value is None or isinstance(value, (bool, list, dict)):
            raise ValueError("a text")
        return str(value)
    return _number(value, kind)


def _number(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("a whole number" if kind is int else "a number")
    try:
        if not math.isfinite(value):
            raise ValueError("a finite number")
        if kind is int and value != int(value):
            raise ValueError("a whole number")
        return kind(value)
    except OverflowError:
        raise ValueError("a number of at most 300 digits") from None


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else _short(value)


def _short(value: Any) -> str:
    try:
        told = repr(value)
    except (ValueError, RecursionError):  # Python writes no integer of more than 4300 digits
        return "too long to be shown"
    return told if len(told) <= _LONGEST_SHOWN else f"{told[:_LONGEST_SHOWN]}..."


def leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def plain(node: Any) -> Any:
    """The same with lists for tuples: YAML has no other word for a sequence."""
    if isinstance(node, dict):
        return {name: plain(value) for name, value in node.items()}
    return list(node) if isinstance(node, tuple) else node


def without_secrets(node: Any) -> Any:
    """The same with user names, passwords and tokens in its texts masked."""
    if isinstance(node, dict):
        return {name: without_secrets(value) for name, value in node.items()}
    if isinstance(node, list):
        return [without_secrets(value) for value in node]
    return masked(node, known=False) if isinstance(node, str) else node


def paths() -> list[str]:
    return list(flatten(RunConfig()))


def sections() -> list[str]:
    return [name for name, value in asdict(RunConfig()).items() if isinstance(value, dict)]
