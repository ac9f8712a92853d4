"""An option of a run: default, help text, unit, range and condition."""

from __future__ import annotations

import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")


@dataclass(frozen=True)
class Problem:
    """Something wrong with a configuration."""

    # the options or sections that it is about, such as ("decode.graph", "data.lm_order")
    options: tuple[str, ...]
    message: str

    def is_about(self, option: str) -> bool:
        """Whether one of its options is this one, or belongs to the same section as a whole."""
        return any(f"{one}.".startswith(f"{option.rstrip('.')}.") or f"{option}.".startswith(f"{one}.") for one in self.options)


def option(default: Value, about: str, *, unit: str = "", low: float | None = None,
           high: float | None = None, above: float | None = None, used: str = "",
           default_of_kind: Mapping[str, Value] | None = None, choices: Mapping[str, str] | None = None) -> Value:
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
        default_of_kind: defaults of single kinds, of its own section by name ("adam") or of another
            one ("optimizer=adam"). `ngsgd.config.build` fills them in; in a section that is built
            directly, those of its own kind.
        choices: descriptions of single choices.

    Returns:
        A dataclass field, typed as its value.
    """
    metadata = {"default": default, "help": about, "unit": unit, "low": low, "high": high,
                "above": above, "used": used, "default_of_kind": default_of_kind or {}, "choices": choices or {}}
    found: Any = field(default=None if default_of_kind else default, metadata=metadata)
    return typing.cast("Value", found)


class Section:
    """Base of the sections that have defaults by kind: one that was not given is filled in."""

    def __post_init__(self) -> None:
        # every section is a dataclass
        for spec in fields(self):  # type: ignore[arg-type]
            if spec.metadata["default_of_kind"] and getattr(self, spec.name) is None:
                object.__setattr__(self, spec.name, default_of(spec, [getattr(self, "kind", "")]))


def default_of(spec: Field[Any], kinds: Iterable[str]) -> Any:
    """Return the default of an option with these kinds, as `option` names them."""
    of_kind = spec.metadata["default_of_kind"]
    return next((of_kind[kind] for kind in kinds if kind in of_kind), spec.metadata["default"])


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


def shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return "''" if value == "" else str(value)
