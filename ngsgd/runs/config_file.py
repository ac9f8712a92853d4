"""config.yaml of a run folder: the settings of the run, with masked passwords."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.config.unused import of_speech
from ngsgd.masking import masked
from ngsgd.runs.yaml_text import dump_yaml


def to_yaml(config: RunConfig) -> str:
    """Return the settings as YAML with an end mark, which shows that a file is complete.

    A custom task has no settings of speech.
    """
    settings = _plain(asdict(config))
    if config.task._target_:
        settings = _without_speech(settings, "")
    return dump_yaml(settings, has_end_mark=True)


def _without_speech(settings: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name: _without_speech(value, f"{prefix}{name}.") if isinstance(value, dict) else value
            for name, value in settings.items() if not of_speech(f"{prefix}{name}")}


def _plain(node: Any) -> Any:
    """Convert tuples, which YAML lacks, to lists, and mask secrets."""
    if isinstance(node, dict):
        return {name: _plain(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(value) for value in node]
    return masked(node, known=False) if isinstance(node, str) else node
