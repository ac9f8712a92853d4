"""Suggested settings: each line is split as a shell does and composed before it is suggested."""

from __future__ import annotations

import contextlib
import re
import shlex
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ngsgd.config import RunConfig, build, problems_of, types_of
from ngsgd.config.build import flatten, leaves, paths
from ngsgd.errors import ConfigError

# characters of a value that is repeated in a message
_LONGEST = 200
# texts that Hydra reads as themselves, unless they are one of the words below
_PLAIN = re.compile(r"[A-Za-z][\w/.-]*", re.ASCII)
_NOT_TEXT = ("null", "true", "false", "nan", "inf")
# composes a line, without messages
Compose = Callable[[str], Mapping[str, Any]]


def assignment(key: str, text: str, compose: Compose) -> str:
    """Return KEY=VALUE as it is typed in a shell; KEY alone where no line composes to the value.

    The key may be a name below a mapping, such as task.args.path; the text may lack the quotes that
    Hydra needs.
    """
    option = mapping_of(key)
    for value, line in _candidates(key, option, text):
        typed = f"{line.partition('=')[0]}={shlex.quote(line.partition('=')[2])}"
        if shlex.split(typed) == [line] and _composes(line, value, compose):
            return typed
    return option or key


def mapping_of(key: str) -> str:
    """Return the setting of free names to which a key belongs, such as task.args; else ""."""
    for path in paths():
        if key.startswith(f"{path}."):
            kind: Any = RunConfig
            for name in path.split("."):
                kind = types_of(kind)[name]
            if any(typing.get_origin(one) is Mapping for one in typing.get_args(kind)):
                return path
    return ""


def _candidates(key: str, option: str, text: str) -> Iterator[tuple[Any, str]]:
    """Yield the values that a text may mean, the likeliest first, each with its line."""
    if not text.isprintable() or len(text) > _LONGEST:
        return
    names = key.removeprefix(f"{option}.").split(".") if option else []
    for found, line in _meanings(text):
        value, written = found, line
        for name in reversed(names):
            value, written = {name: value}, f"{{{name}:{written}}}"
        yield value, f"{option or key}={written}"


def _meanings(text: str) -> Iterator[tuple[Any, str]]:
    is_read, value = _read(text)
    if is_read:
        yield value, text
    if text[:1] in ("{", "[") and not is_read:
        import yaml
        # a mapping or a list whose texts lack the quotes that Hydra needs
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            value = _value_of(yaml.compose(text, yaml.SafeLoader))
            yield value, in_notation(value)
    yield text, in_notation(text)


def _read(text: str) -> tuple[bool, Any]:
    """Whether Hydra reads the text of one value, and the value."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    try:
        [override] = OverridesParser.create().parse_overrides([f"key={text}"])
        if override.is_sweep_override():
            return False, None
        return True, OmegaConf.to_container(OmegaConf.create({"key": override.value()}), resolve=True)["key"]  # type: ignore[call-overload, index]
    except (OverrideParseException, OmegaConfBaseException, ValueError, RecursionError):
        return False, None


def _value_of(node: Any) -> Any:
    import yaml
    if isinstance(node, yaml.MappingNode):
        return {str(_value_of(key)): _value_of(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_value_of(one) for one in node.value]
    if node is None:
        raise ValueError("no value")
    is_read, value = _read(node.value) if node.style is None else (False, None)
    return value if is_read else node.value


def in_notation(value: Any) -> str:
    """Return a value in Hydra's notation."""
    from hydra.core.override_parser.types import Quote, QuotedString
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_notation(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_notation, value)) + "]"
    if not isinstance(value, str):
        return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    # OmegaConf reads ${ as a reference, unless a backslash precedes it
    escaped = re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", value)
    return str(QuotedString(escaped, Quote.double).with_quotes())


def _composes(line: str, value: Any, compose: Compose) -> bool:
    key = line.partition("=")[0]
    try:
        values = compose(line)
    except ConfigError:
        return False
    config, wrong = build(values)
    if any(one.options == (key,) for one in problems_of(config, wrong)):
        return False
    if key not in paths():
        # a group: its kind, or a file of settings
        return isinstance(value, str)
    section: Any = values
    for name in key.split("."):
        section = section[name]
    found = flatten(config).get(key, dict(leaves(values, "")).get(key))
    return value in (section, found)
