"""An option of a run: default, help text, unit, range and condition."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import Field, field
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")


def option(default: Value, about: str, *, unit: str = "", low: float | None = None,
           high: float | None = None, above: float | None = None, used: str = "",
           default_of_kind: Mapping[str, Value] | None = None) -> Value:
    """Define a field of a section of the configuration.

    Args:
        default: the value in a run that does not set the option.
        about: the help text, a noun phrase without a full stop.
        unit: of the value, such as "s", "Hz" or "frames".
        low: smallest allowed number.
        high: largest allowed number.
        above: every allowed number is greater than this one.
        used: the condition under which a run uses the option; empty: always. Terms joined by
            " & ", each "kind=bmuf|diloco" (has one of these values), "noise" (is on, not 0, not
            empty) or "!graph" (the opposite). A name stands for an option of the same section.
        default_of_kind: defaults of single kinds of the section. The field then holds None until
            the section fills in the default of its kind.

    Returns:
        A dataclass field, typed as its value.
    """
    metadata = {"default": default, "help": about, "unit": unit, "low": low, "high": high,
                "above": above, "used": used, "default_of_kind": default_of_kind or {}}
    found: Any = field(default=None if default_of_kind else default, metadata=metadata)
    return typing.cast("Value", found)


def default_of(spec: Field[Any], kind: str) -> Any:
    """Return the default of an option in a section of that kind."""
    return spec.metadata["default_of_kind"].get(kind, spec.metadata["default"])


def types_of(section: type[Any]) -> dict[str, Any]:
    """Return the type of each option of a section by name."""
    if section not in _TYPES:
        _TYPES[section] = typing.get_type_hints(section)
    return _TYPES[section]


# resolving the annotations of a section takes a millisecond
_TYPES: dict[type[Any], dict[str, Any]] = {}


def choices_of(section: type[Any], name: str) -> tuple[str, ...]:
    """Return the values that an option with a fixed choice can have; empty for all others."""
    kind = types_of(section)[name]
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
