"""Import of custom classes and functions by name from a folder."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ngsgd.errors import ConfigError


def find(target: str, search_path: str, option: str, returns: str) -> Callable[..., Any]:
    """Import `package.module:Name` from a folder (empty: the current one) or installed packages.

    Messages name the section `option`, which has `_target_` and `search_path`, and what the class
    or function `returns`. Raises ConfigError if it cannot be imported or called.
    """
    module_name, _, name = target.rpartition(":" if ":" in target else ".")
    if not module_name or not name:
        raise ConfigError(f"{option}._target_ is {target!r}; write package.module:Name, such as my_{option}:make.")
    folder = os.path.abspath(search_path or os.getcwd())
    try:
        with _found_first(folder):
            module = importlib.import_module(module_name)
    except Exception as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name and module_name.startswith(error.name)
        why = f"there is no module {error.name}" if is_missing else first_line(error)  # type: ignore[attr-defined]
        raise ConfigError(f"{option}._target_ {target} cannot be imported from {folder} ({why}); set {option}.search_path to the "
                          "folder that holds it, or correct the module.") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        what = f"has no {name}" if factory is None else f"has a {name} that is not callable"
        raise ConfigError(f"{option}._target_ is {target}, but {module_name} ({module.__file__}) {what}; give the name of a "
                          f"class or function that returns {returns}.")
    return factory  # type: ignore[no-any-return]


@contextmanager
def _found_first(folder: str) -> Iterator[None]:
    """Put the folder first in the search path inside the context, and last afterwards.

    Neither an installed command nor a worker searches the current directory. A file there with the
    name of an installed package must not replace that package, except for the custom module.
    """
    was_there = folder in sys.path
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The module may have changed the list.
        with suppress(ValueError):
            sys.path.remove(folder)
        if not was_there:
            sys.path.append(folder)


def first_line(error: Exception) -> str:
    """Return type and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
