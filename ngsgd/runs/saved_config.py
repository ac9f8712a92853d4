"""The configuration of a run, read from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from ngsgd.config import RunConfig, build, problems_of
from ngsgd.config.build import defaults, leaves, with_defaults
from ngsgd.errors import ConfigError
from ngsgd.runs.yaml_text import load_yaml, read_yaml_text


def read_config(path: Path) -> RunConfig:
    """Read config.yaml of a run folder; options of later versions have their defaults.

    Raises:
        ConfigError: it does not exist, is damaged, or contains wrong values.
    """
    import yaml

    try:
        text = read_yaml_text(path)
        has_end_mark = "..." in text.getvalue().splitlines()
        values = load_yaml(text)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; use a run folder of ngsgd train.") from None
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, path)) from None
    except (OSError, UnicodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; restore it.") from None
    if not values or not isinstance(values, dict):
        raise ConfigError(f"{path} contains no settings; restore it, or train again.")
    settings = cast("dict[str, Any]", values)
    *_, (last, _) = leaves(defaults(), "")
    is_complete = has_end_mark or last in dict(leaves(settings, ""))
    config, wrong = build(with_defaults(settings) if is_complete else settings)
    if problems := problems_of(config, wrong):
        raise ConfigError([f"{path}: {problem.message}" for problem in problems])
    return config


def yaml_problem(error: Any, path: Path) -> str:
    """Describe a YAML error with its line."""
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}:{mark.line + 1}" if mark else str(path)
    said = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{where.strip()}: this is not valid YAML: {said}."
