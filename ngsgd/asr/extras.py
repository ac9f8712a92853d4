"""Optional packages, imported where they are first needed."""

from __future__ import annotations

import importlib
from typing import Any

from ngsgd.errors import MissingExtraError


def load(module: str, *, extra: str, purpose: str) -> Any:
    """The imported module, or one sentence that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.replace("_", "-"), extra, purpose) from error
