"""The settings learned by `ngsgd tune`, for `ngsgd train +tuned=FILE`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd.errors import ConfigError
from ngsgd.files import write_text
from ngsgd.runs.yaml_text import dump_yaml, load_yaml, read_yaml_text

_WORDS = ("+tuned=", "tuned=")


def write(path: Path, settings: Mapping[str, Any], comments: Sequence[str]) -> None:
    text = "".join(f"# {line}\n" for line in comments) + dump_yaml(dict(settings))
    write_text(path, text)


def expanded(overrides: Sequence[str]) -> list[str]:
    """Return overrides with tuned files replaced by their settings."""
    return [line for override in overrides for line in (_read(override) if override.startswith(_WORDS) else [override])]


def _read(override: str) -> list[str]:
    import yaml

    path = Path(override.partition("=")[2])
    try:
        content = load_yaml(read_yaml_text(path))
    except OSError as error:
        raise ConfigError(f"{override}: {path} cannot be read ({error.strerror}); give the "
                          "tuned.yaml written by ngsgd tune.") from None
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError):
        raise ConfigError(f"{override}: {path} is not valid YAML; tune again, or restore it.") from None
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        raise ConfigError(f"{override}: {path} holds no settings; give the tuned.yaml written by "
                          "ngsgd tune.")
    if wrong := [name for name in ("_target_", "search_path", "args") if name in content.get("model", {})]:
        raise ConfigError(f"{override}: {path} sets model.{wrong[0]}, which ngsgd tune never "
                          "writes, and which names code to run; give it on the command line.")
    return [f"{section}.{key}={_shown(value)}" for section, part in content.items() for key, value in part.items()]


def _shown(value: Any) -> str:
    """The value in Hydra's notation."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_shown, value)) + "]"
    return repr(value) if isinstance(value, float) else str(value)
