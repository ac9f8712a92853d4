"""config.yaml of a run folder: the settings of the run, written with masked passwords, and read."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

from ngsgd.config import RunConfig, build, problems_of
from ngsgd.config.build import plain, with_defaults
from ngsgd.config.unused import of_speech
from ngsgd.errors import ConfigError
from ngsgd.masking import masked
from ngsgd.yaml_text import dump_yaml, load_yaml, read_yaml_text


def to_yaml(config: RunConfig) -> str:
    """Return the settings as YAML, for a custom task without speech, with an end mark."""
    settings = plain(asdict(config), partial(masked, known=False))
    if config.task._target_:
        settings = _without_speech(settings, "")
    return dump_yaml(settings, has_end_mark=True)


def _without_speech(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: _without_speech(value, f"{prefix}{name}.") if isinstance(value, dict) else value
            for name, value in settings.items() if not of_speech(f"{prefix}{name}")}


def read_config(path: Path) -> RunConfig:
    """Read config.yaml of a run folder; ConfigError if it is missing, damaged or wrong."""
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
    # a custom task has no settings of speech; a file that was cut short has errors
    config, wrong = build(with_defaults(settings) if has_end_mark else settings)
    if problems := problems_of(config, wrong):
        raise ConfigError([f"{path}: {problem.message}" for problem in problems])
    return config


def yaml_problem(error: Any, path: Path) -> str:
    """Describe a YAML error with its line."""
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}:{mark.line + 1}" if mark else str(path)
    said = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return f"{where.strip()}: this is not valid YAML: {said}."
