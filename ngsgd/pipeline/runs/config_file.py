"""config.yaml of a run folder: every setting of the run, written with passwords masked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.masking import masked


def to_yaml(config: RunConfig) -> str:
    """The settings as YAML, with an end mark that shows whether a file is complete."""
    import yaml

    return str(yaml.safe_dump(_plain(asdict(config)), sort_keys=False, allow_unicode=True, explicit_end=True))


def _plain(node: Any) -> Any:
    """The same with lists for tuples, which YAML does not have, and masked texts."""
    if isinstance(node, dict):
        return {name: _plain(value) for name, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [_plain(value) for value in node]
    return masked(node, known=False) if isinstance(node, str) else node
