"""What all tests of one process share, and what a test must not leave changed.

The order of the tests in a process follows from how long other processes take, so a leftover fails
a test in one run of a hundred.  Each row of `PARTS` reads one such thing and sets it again.
"""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class Part(NamedTuple):
    """One thing that the tests of a process share.

    Attributes:
        read: Returns its value; it must not import a module.
        write: Sets that value again.  It is called after each test, if the value is another.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _read_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


def _write_environment(variables: dict[str, str]) -> None:
    for name in _read_environment().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _loggers() -> dict[str, logging.Logger]:
    loggers = logging.root.manager.loggerDict
    return {"": logging.root, **{name: one for name, one in loggers.items() if isinstance(one, logging.Logger)}}


def _is_of_pytest(handler: logging.Handler) -> bool:
    """pytest adds and removes its own handlers around each phase of a test."""
    return type(handler).__module__.startswith("_pytest.")


def _read_logging() -> Any:
    return logging.root.manager.disable, {
        name: (one.level, one.disabled, one.propagate, [x for x in one.handlers if not _is_of_pytest(x)], [*one.filters])
        for name, one in _loggers().items()}


def _write_logging(state: Any) -> None:
    """Hydra, MLflow and Alembic disable the loggers that exist when they configure theirs."""
    logging.disable(state[0])
    for name, logger in _loggers().items():
        if name in state[1]:
            level, logger.disabled, logger.propagate, handlers, logger.filters[:] = state[1][name]
            logger.setLevel(level)
            logger.handlers[:] = [*handlers, *filter(_is_of_pytest, logger.handlers)]
        else:
            logger.disabled = False


def _read_signals() -> Any:
    # pytest-timeout sets and removes its own handler of SIGALRM
    return {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}}


def _write_signals(handlers: Any) -> None:
    for number, handler in handlers.items():
        # None: a handler that no Python code installed
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


def _of_module(module: str, read: Callable[[Any], Any], write: Callable[[Any, Any], Any]) -> Part:
    """A part of a module that may not be imported yet; then there is nothing to restore."""
    def written(value: Any) -> None:
        if value is not None and module in sys.modules:
            write(sys.modules[module], value)

    return Part(lambda: read(sys.modules[module]) if module in sys.modules else None, written)


def _write_hydra(module: Any, instance: Any) -> None:
    module.GlobalHydra.instance().hydra = instance[0]


def _torch(name: str, set_name: str = "") -> Part:
    return _of_module("torch", lambda torch: getattr(torch, f"get_{name}")(),
                      lambda torch, value: getattr(torch, f"set_{set_name or name}")(value))


def _write_tempdir(folder: str | None) -> None:
    tempfile.tempdir = folder


def _write_hooks(hooks: Any) -> None:
    sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook = hooks


def _write_collection(state: Any) -> None:
    gc.set_threshold(*state[1])
    if state[0]:
        gc.enable()
    else:
        gc.disable()


def _read_mask() -> int:
    mask = os.umask(0o22)
    os.umask(mask)
    return mask


def _read_fork_servers(module: Any) -> set[Any]:
    """Those of other environments than the present one, with other kernels."""
    present = (os.getpid(), *(os.environ.get(name, "") for name in module._READ_AT_START))
    return set(module._servers.keys() - {present})


def _end_fork_servers(module: Any, kept: set[Any]) -> None:
    for key in _read_fork_servers(module) - kept:
        server = module._servers.pop(key)
        if process_id := server.process_id:
            server.end()
            os.waitpid(process_id, 0)


_URI = "mlflow.tracking._tracking_service.utils"

PARTS: dict[str, Part] = {
    # ``mlflow.set_tracking_uri`` sets a variable as well, so it comes before the environment
    "server of MLflow": Part(lambda: _URI in sys.modules and sys.modules[_URI]._tracking_uri,
                             lambda uri: sys.modules[_URI].set_tracking_uri(uri or None)),
    "environment": Part(_read_environment, _write_environment),
    "folder": Part(os.getcwd, os.chdir),
    "mask of new files": Part(_read_mask, os.umask),
    "folder of temporary files": Part(lambda: tempfile.tempdir, _write_tempdir),
    "arguments": Part(lambda: list(sys.argv), lambda value: sys.argv.__setitem__(slice(None), value)),
    "hooks": Part(lambda: (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.displayhook), _write_hooks),
    "recursion limit": Part(sys.getrecursionlimit, sys.setrecursionlimit),
    "switch interval": Part(sys.getswitchinterval, sys.setswitchinterval),
    "garbage collection": Part(lambda: (gc.isenabled(), gc.get_threshold()), _write_collection),
    "locale": Part(lambda: locale.setlocale(locale.LC_ALL), lambda value: locale.setlocale(locale.LC_ALL, value)),
    "signals": Part(_read_signals, _write_signals),
    "logging": Part(_read_logging, _write_logging),
    "default dtype": _torch("default_dtype"),
    "threads of torch": _torch("num_threads"),
    "precision of products": _torch("float32_matmul_precision"),
    "gradients": _of_module("torch", lambda torch: torch.is_grad_enabled(), lambda torch, on: torch.set_grad_enabled(on)),
    "deterministic algorithms": _of_module(
        "torch", lambda torch: torch.get_deterministic_debug_mode(), lambda torch, mode: torch.set_deterministic_debug_mode(mode)),
    "fork servers": _of_module("ngsgd.cluster.fork_server", _read_fork_servers, _end_fork_servers),
    "Hydra": _of_module("hydra.core.global_hydra", lambda module: (module.GlobalHydra.instance().hydra,), _write_hydra),
}


def taken() -> dict[str, Any]:
    """The values of all parts."""
    return {name: part.read() for name, part in PARTS.items()}


def restore(state: dict[str, Any]) -> list[str]:
    """Set all parts to these values again; return the names of those that had others."""
    changed = [name for name, part in PARTS.items() if part.read() != state[name]]
    for name in changed:
        PARTS[name].write(state[name])
    return changed
