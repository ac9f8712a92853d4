"""Options and commands in messages, as the interface in use, command line or Python, names them."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from ngsgd.yaml_text import read_entry

# begins task._target_ of a run whose task is an object or a function of a Python program
_FROM_PYTHON = "python:"
# whether the launcher of the command line runs, by nesting
_command_lines: list[bool] = []


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Name options as the command line does inside the context."""
    _command_lines.append(True)
    try:
        yield
    finally:
        _command_lines.pop()


def is_command_line() -> bool:
    """Return whether a command of `ngsgd` runs."""
    return bool(_command_lines)


def option(flag: str, value: str = "True", python: str = "") -> str:
    """Name an option: `--num-best 3`, or `num_best=3` in Python.

    Args:
        flag: its name on the command line, without dashes.
        value: "True" gives the flag alone on the command line, and "" the option without a value.
        python: the name in Python. Default: "", the flag with underscores.

    Example:
        >>> option("allow-other-bits"), option("lm", "FILE")
        ('allow_other_bits=True', 'lm=FILE')
        >>> with command_line():
        ...     option("allow-other-bits"), option("lm", "FILE")
        ('--allow-other-bits', '--lm FILE')
    """
    if is_command_line():
        return f"--{flag}" + (f" {value}" if value not in ("", "True") else "")
    return (python or flag.replace("-", "_")) + (f"={value}" if value else "")


def resume(run: Path | str, task: str | None = None, **flags: bool) -> str:
    """Return the command that continues a run, or the call for a task of a Python program.

    Args:
        run: its folder or URL.
        task: name of the task of a Python program; "" for none, None for that in config.yaml.
        **flags: arguments in Python, which are flags of `ngsgd resume`, and whether to give them.

    Example:
        >>> resume("runs/a", "make_task", trust=True)
        'ngsgd.train(make_task, resume="runs/a", trust=True) in Python'
        >>> resume("runs/a", "", trust=True)
        'ngsgd resume runs/a --trust'
    """
    if task is None:
        target = read_entry(Path(run) / "config.yaml", "task", "_target_")
        is_from_python = isinstance(target, str) and target.startswith(_FROM_PYTHON)
        task = target.removeprefix(_FROM_PYTHON) if is_from_python else ""
    given = [name for name, is_given in flags.items() if is_given]
    if not task:
        return " ".join(["ngsgd resume", shlex.quote(str(run)), *(f"--{name.replace('_', '-')}" for name in given)])
    arguments = [argument(task), f"resume={json.dumps(str(run), ensure_ascii=False)}", *(f"{name}=True" for name in given)]
    return f"ngsgd.train({', '.join(arguments)}) in Python"


def argument(task: str) -> str:
    """Return the argument of a Python program for a task; "task" for an object or a lambda."""
    return task if task.isidentifier() and not task[0].isupper() else "task"
