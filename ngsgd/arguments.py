"""Checks of the types of arguments against the annotations of public constructors, and of states.

Ranges and choices are checked by the constructors.
"""

from __future__ import annotations

import functools
import inspect
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

from ngsgd.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")

_SERIES = (tuple, list, Sequence, Iterable)
# Containers whose members can be read more than once.
_READABLE = (tuple, list, set, frozenset)
# By name, because this module does not import torch.
_NAMES = {"float": "a number", "int": "a whole number", "bool": "True or False", "str": "a string", "NoneType": "None",
          "Module": "the module (nn.Module), not its parameters"}


def checks_arguments(elsewhere: Mapping[str, str] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that checks arguments against annotations, and rejects unknown names.

    Args:
        elsewhere: arguments that users expect and that another place sets, with this place.

    Raises:
        ArgumentError: from the decorated function; it lists all problems.

    Example:
        >>> @checks_arguments()
        ... def halved(x: float) -> float:
        ...     return x / 2
        >>> halved(3)
        1.5
    """
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            owner = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
            if unknown := [name for name in kwargs if name not in signature.parameters]:
                known = [name for name in signature.parameters if name not in ("self", "cls")]
                near = {name: get_close_matches(name, known, n=3) for name in unknown}
                raise ArgumentError([f"{owner} has no argument {name}; " + (elsewhere or {}).get(
                    name, f"did you mean {' or '.join(near[name])}?" if near[name] else f"there are {', '.join(known)}.")
                    for name in unknown])
            bound = signature.bind(*args, **kwargs)
            bound.arguments = checked(bound.arguments, hints_of(function), owner)
            return function(*bound.args, **bound.kwargs)

        return call

    return decorate


def checked(values: Mapping[str, Any], hints: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the values, with whole numbers as int; raise ArgumentError if types are wrong.

    Arguments without an annotation in `hints` are not checked. Messages name the `owner`.
    """
    if problems := [f"{owner}: {problem}" for name, value in values.items()
                    for problem in misfits(name, value, hints.get(name, Any))]:
        raise ArgumentError(problems)
    # A file of settings may have 4.0, which no range or shape accepts.
    return {name: int(value) if isinstance(value, float) and hints.get(name) is int else value
            for name, value in values.items()}


def check_fields(instance: Any) -> None:
    """Raise ArgumentError if a field of a dataclass has another type than its annotation."""
    checked({field.name: getattr(instance, field.name) for field in fields(instance)},
            hints_of(type(instance)), type(instance).__name__)


def require_state(state: Any, keys: Sequence[str], owner: str, error: type[Exception]) -> None:
    """Raise an error if `state` is no state of `owner`, and name the entry of it that is one.

    Every state of this kind has these keys. A complete checkpoint is a common mistake.
    """
    if not isinstance(state, Mapping):
        raise error(f"the state of {owner} is of type {type(state).__name__}; load the dict that its state_dict() returned.")
    if missing := [key for key in keys if key not in state]:
        inside = [name for name, part in state.items() if isinstance(part, Mapping) and all(key in part for key in keys)]
        remedy = f"Load its entry {inside[0]!r}" if inside else f"Load the result of state_dict() of a {owner}"
        raise error(f"the state has no {', '.join(map(repr, missing))}, as states of {owner} do; it has "
                    f"{reprlib.repr(list(state))}. {remedy}.")


def hints_of(source: Any) -> Mapping[str, Any]:
    """Return the annotations of a function or class, evaluated."""
    return _evaluated(source)


@functools.cache
def _evaluated(source: Any) -> Mapping[str, Any]:
    return {name: hint for name, hint in typing.get_type_hints(source).items() if name != "return"}


def misfits(name: str, value: Any, hint: Any) -> Iterator[str]:
    """Yield one message for each part of a value that has another type than its annotation."""
    origin = get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        # The message about a member of a container is more exact than that about all alternatives.
        found = [list(misfits(name, value, each)) for each in get_args(hint) if _is_of_kind(value, each)]
        if not found:
            yield _misfit(name, value, hint)
        elif all(found):
            yield from found[0]
    elif not _is_of_kind(value, hint):
        yield _misfit(name, value, hint)
    elif origin in (Mapping, dict):
        for key, each in value.items():
            yield from misfits(f"{name}[{key!r}]", each, get_args(hint)[1])
    elif origin in _SERIES and isinstance(value, _READABLE):
        for index, each in enumerate(value):
            yield from misfits(f"{name}[{index}]", each, get_args(hint)[0])


def _is_of_kind(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an annotation, without the members of containers."""
    kind = get_origin(hint) or hint
    if kind is Callable:
        return callable(value)
    # Any is a class too, and isinstance rejects protocols.
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    is_text = isinstance(value, str | bytes)
    if kind is float:
        # Also numbers of NumPy and tensors with one element.
        return not is_text and hasattr(type(value), "__float__")
    if kind is int:
        return hasattr(type(value), "__index__") or (isinstance(value, float) and value.is_integer())
    if kind is bool:
        return not is_text and value is not None and hasattr(type(value), "__bool__")
    if kind in _SERIES:
        return not is_text and isinstance(value, Iterable)
    return isinstance(value, kind)


def _misfit(name: str, value: Any, hint: Any) -> str:
    kind = type(value).__name__
    given = f"{name} is {'a string, ' if isinstance(value, str) else ''}{reprlib.repr(value)}"
    if not isinstance(value, str | int | float | None):
        given = f"{name} is of type {kind}"
    return f"{given}; give {_described(hint)}."


def _described(hint: Any) -> str:
    kind = get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_described, get_args(hint))))
    if kind in (Mapping, dict):
        return "a dict"
    if kind in _SERIES:
        return "a tuple or list"
    if kind is Callable:
        return "a function"
    name: str = getattr(kind, "__name__", str(kind))
    return _NAMES.get(name, f"an object of the class {name}")
