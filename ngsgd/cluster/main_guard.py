"""The guard that a script needs because worker processes import it."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from ngsgd.errors import ConfigError


def require_main_guard() -> None:
    """Raise ConfigError if the running script starts workers outside of its main guard.

    Each worker process imports the script, and would start workers itself. A notebook and `python
    -c` are not imported.
    """
    main = sys.modules["__main__"]
    name, path = getattr(getattr(main, "__spec__", None), "name", ""), getattr(main, "__file__", None)
    frame = inspect.currentframe()
    while frame and not (frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    # multiprocessing does not import the __main__ module of a package either
    if frame is None or path is None or name.rpartition(".")[2] == "__main__":
        return
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for statement in body:
        tests = ast.walk(statement.test) if isinstance(statement, ast.If) else ()
        if statement.lineno <= frame.f_lineno and any(isinstance(one, ast.Name) and one.id == "__name__" for one in tests):
            return
    raise ConfigError(f"{path}, line {frame.f_lineno}, starts workers, and each worker imports this file and would start "
                      "workers again. Move the lines that start the training into a function main(), and end the file with:\n\n"
                      'if __name__ == "__main__":\n    main()\n')
