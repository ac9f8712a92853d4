"""Nested plain values to `RunConfig` and back, with every mistake reported at once."""

from __future__ import annotations

import difflib
import functools
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from typing import Any

from ngsgd.config.option import Problem, default_of, shown, types_of
from ngsgd.config.other_names import did_you_mean
from ngsgd.config.run import RunConfig

# characters of a value in a message
_LONGEST_SHOWN = 200
# names of a section that are no settings, of which each is searched for a similar one
_MOST_UNKNOWN = 20


def build(values: Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """Return (configuration, all problems) of complete mappings; wrong values get defaults."""
    problems: list[Problem] = []
    return _build_section(RunConfig, _with_unset(values), "", problems), problems


def defaults() -> dict[str, Any]:
    """Return the default of every option; None where it is that of the section's kind."""
    def of(section: Any) -> dict[str, Any]:
        values = {spec: getattr(section, spec.name) for spec in fields(section)}
        return {spec.name: of(value) if is_dataclass(value) else None if spec.metadata["default_of_kind"] else plain(value)
                for spec, value in values.items()}
    return of(RunConfig())


def with_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values completed by the defaults of all other options."""
    return merged(defaults(), values)


def merged(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values; those of `upper` replace those of `lower`."""
    def both(name: str, value: Any) -> Any:
        below = lower.get(name)
        return merged(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return {**lower, **{name: both(name, value) for name, value in upper.items()}}


def flatten(config: RunConfig) -> dict[str, Any]:
    """Return path -> value, in the order of the sections."""
    return dict(leaves(asdict(config), ""))


def leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf of nested dicts."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def plain(node: Any, text: Callable[[str], str] = str) -> Any:
    """Return nested values with lists instead of tuples, which YAML lacks, and `text` of texts."""
    if isinstance(node, dict):
        return {name: plain(value, text) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [plain(value, text) for value in node]
    return text(node) if isinstance(node, str) else node


def paths() -> list[str]:
    """Return the paths of all options, such as schedule.lr_initial."""
    return list(flatten(RunConfig()))


def section_names() -> list[str]:
    """Return the names of all sections."""
    return [spec.name for spec in fields(RunConfig) if is_dataclass(types_of(RunConfig)[spec.name])]


def with_kinds(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a recipe or a caller above the defaults of the kinds that they choose.

    The defaults of a kind replace values that a lower layer, such as a recipe, gave for another
    kind.
    """
    chosen, found = kinds_in(layer), dict[str, Any]()
    for path, defaults_of_path in options_of_kinds().items():
        if kind := next((one for one in chosen if one in defaults_of_path), None):
            section, _, name = path.partition(".")
            found.setdefault(section, {})[name] = plain(defaults_of_path[kind])
    return merged(found, layer)


def default_with(path: str, kinds: Sequence[str]) -> Any:
    """Return the default of an option of a section with these kinds, such as "optimizer=adam"."""
    section, _, name = path.partition(".")
    own = [kind.partition("=")[2] for kind in kinds if kind.startswith(f"{section}=")]
    return default_of(_specs(section)[name], [*own, *kinds])


def kinds_in(values: Mapping[str, Any]) -> list[str]:
    """Return the kinds in nested values, such as "optimizer=adam"; a custom module has none."""
    return [f"{name}={section['kind']}" for name, section in _in_order(values)
            if isinstance(section.get("kind"), str) and not section.get("_target_")]


def _in_order(values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections in the order of `RunConfig`: the first kind with a default decides."""
    for name in section_names():
        if isinstance(section := values.get(name), Mapping):
            yield name, section


@functools.cache
def options_of_kinds() -> dict[str, dict[str, Any]]:
    """Return path -> kind -> default, of the options whose default depends on a kind."""
    return {f"{name}.{spec.name}": {kind if "=" in kind else f"{name}={kind}": value
                                    for kind, value in spec.metadata["default_of_kind"].items()}
            for name in section_names() for spec in _specs(name).values() if spec.metadata.get("default_of_kind")}


@functools.cache
def _specs(section: str) -> dict[str, Field[Any]]:
    return {spec.name: spec for spec in fields(types_of(RunConfig)[section])}


def _with_unset(values: Any) -> Any:
    """Fill in options that hold None, because their default depends on a kind."""
    if not isinstance(values, Mapping):
        return values
    kinds, found = kinds_in(values), dict(values)
    for name, section in _in_order(values):
        unset = [option for option in _specs(name) if f"{name}.{option}" in options_of_kinds() and section.get(option, "") is None]
        found[name] = {**section, **{option: default_with(f"{name}.{option}", kinds) for option in unset}}
    return found


def _build_section(kind: type[Any], values: Any, prefix: str, problems: list[Problem]) -> Any:
    if not isinstance(values, Mapping):
        problems.append(Problem((prefix[:-1],), f"{prefix[:-1]} is {values!r}; it must be a section of settings."))
        return kind()
    known = [spec.name for spec in fields(kind)]
    unknown = [str(name) for name in values if name not in known]
    for name in (one[:_LONGEST_SHOWN] for one in unknown[:_MOST_UNKNOWN]):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {prefix}{near[0]}?" if near else did_you_mean(name, paths(), name)
        path = f"{prefix}{name}"[:_LONGEST_SHOWN]
        problems.append(Problem((path,), f"{path} is not a setting.{hint}"))
    if more := unknown[_MOST_UNKNOWN:]:
        problems.append(Problem((f"{prefix}{more[0]}"[:_LONGEST_SHOWN],), f"{len(more)} more names after these are no settings."))
    # cannot come from the command line, where the schema has every option
    if missing := [f"{prefix}{name}" for name in known if name not in values]:
        problems.append(Problem((missing[0],), f"no value for {', '.join(missing)}; the file is "
                                "damaged or of another version of ngsgd."))
    built = {}
    for spec in fields(kind):
        path, of = f"{prefix}{spec.name}", types_of(kind)[spec.name]
        if spec.name not in values:
            continue
        value = values[spec.name]
        if path == "optimizer.skip" and isinstance(value, (list, tuple)):
            # the library classes take a sequence of names
            value = ",".join(map(str, value))
        if is_dataclass(of) and isinstance(of, type):
            built[spec.name] = _build_section(of, value, f"{path}.", problems)
        elif value is None and spec.metadata["default_of_kind"]:
            built[spec.name] = None
        elif value in ([], ()) and spec.metadata["default"] == ():
            built[spec.name] = ()
        else:
            try:
                built[spec.name] = _convert(value, of)
            except ValueError as error:
                problems.append(Problem((path,), f"{path} is {_shown(value)}; it must be {error}."))
    return kind(**built)


def _convert(value: Any, kind: Any) -> Any:
    """Return the value as `kind`; raises ValueError with the expected type."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        of = typing.get_args(kind)[0]
        try:
            if isinstance(value, (list, tuple)) and value:
                return tuple(_convert(item, of) for item in value)
        except ValueError:
            pass
        raise ValueError("a list of names, such as [one,two]" if of is str else "a list of finite numbers, such as [0.1,0.2]")
    if origin is types.UnionType:
        # a mapping of names that the user chooses, or None
        if value is None or isinstance(value, Mapping):
            return dict(value) if value else None
        raise ValueError("a mapping, such as {width: 64}")
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return value
    if kind is str or origin is typing.Literal:
        if value is None or isinstance(value, (bool, list, dict)):
            raise ValueError("a text")
        return str(value)
    return _number(value, kind)


def _number(value: Any, kind: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("an integer" if kind is int else "a number")
    try:
        if not math.isfinite(value):
            raise ValueError("a finite number")
        if kind is int and value != int(value):
            raise ValueError("an integer")
        return kind(value)
    except OverflowError:
        raise ValueError("a number of at most 300 digits") from None


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return shown(value)
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # Python writes no integer of more than 4300 digits
        return "too long to be shown"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
