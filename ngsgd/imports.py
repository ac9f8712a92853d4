"""Import of custom classes and functions by name from a folder, and of optional packages."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ngsgd.errors import ConfigError, MissingExtraError


def find(target: str, search_path: str, option: str, returns: str) -> Callable[..., Any]:
    """Import `package.module:Name` from a folder (empty: the current one) or installed packages.

    ConfigErrors name the section `option`, which has `_target_` and `search_path`, and what the
    class or function `returns`.
    """
    module_name, _, name = target.rpartition(":" if ":" in target else ".")
    if not module_name or not name:
        raise ConfigError(f"{option}._target_ is {target!r}; write package.module:Name, such as my_{option}:make.")
    folder = os.path.abspath(search_path or os.getcwd())
    # commands and workers do not search the current directory; a file there replaces no installed
    # package, except for the custom module: the folder is the last one afterwards
    was_there = folder in sys.path
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name)
        why = f"there is no module {error.name}" if is_missing else first_line(error)  # type: ignore[attr-defined]
        raise ConfigError(f"{option}._target_ {target} cannot be imported from {folder} ({why}); set {option}.search_path to the "
                          "folder that holds it, or correct the module.") from error
    finally:
        # the module may have changed the list
        with suppress(ValueError):
            sys.path.remove(folder)
        if not was_there:
            sys.path.append(folder)
    factory = getattr(module, name, None)
    if not callable(factory):
        what = f"has no {name}" if factory is None else f"has a {name} that is not callable"
        raise ConfigError(f"{option}._target_ is {target}, but {module_name} ({module.__file__}) {what}; give the name of a "
                          f"class or function that returns {returns}.")
    return factory  # type: ignore[no-any-return]


def first_line(error: Exception) -> str:
    """Return type and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def load(module: str, *, extra: str, purpose: str) -> Any:
    """Import a module; raise MissingExtraError with the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.replace("_", "-"), extra, purpose) from error
