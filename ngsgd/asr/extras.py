"""Optional packages, imported at their first use."""

from __future__ import annotations

import importlib
from typing import Any

from ngsgd.errors import MissingExtraError


def load(module: str, *, extra: str, purpose: str) -> Any:
    """Import a module; raise MissingExtraError with the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.replace("_", "-"), extra, purpose) from error
