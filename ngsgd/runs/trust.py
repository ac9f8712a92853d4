"""Permission to import modules of received runs: begun by this user here, or explicitly trusted.

`_target_` of model, task and optimizer of a run is code, and a run folder or a final model may come
from anyone. Its module is imported only with permission: by the command line that begins a run,
--trust or trust=True, NGSGD_TRUST=1, or the record of runs that this user began, outside of every
run folder.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd import interface
from ngsgd.config import ModelConfig, OptimizerConfig, RunConfig, TaskConfig
from ngsgd.errors import CheckpointError, ConfigError
from ngsgd.files import digest_of_json, new_file, read_json
from ngsgd.interface import option
from ngsgd.runs.failure_record import state_folder
from ngsgd.shared_work import turn

if TYPE_CHECKING:
    from ngsgd.runs.run_folder import RunFolder

VARIABLE = "NGSGD_TRUST"
# settings that name a module, or their content in a file
Module = ModelConfig | OptimizerConfig | TaskConfig | Mapping[str, Any]
# the settings that determine the imported code and its arguments
_EXECUTED = ("_target_", "search_path", "args")
_MAX_RECORDS = 5000
_YES = ("1", "true", "yes")
_LOCK_TIMEOUT_S = 5.0

# digests of the model settings that this process may import
allowed_modules: set[str] = set()


def allow(model: Module) -> None:
    """Allow these settings for the rest of this process: they are given or trusted by the user."""
    allowed_modules.add(_digest(_settings(model)))


def modules_of(config: RunConfig) -> dict[str, Any]:
    """Return the sections, by name, whose modules training imports."""
    names = ("task" if config.task._target_ else "model", "optimizer")
    sections = {name: getattr(config, name) for name in names}
    # a task of a Python program is no module
    return {name: section for name, section in sections.items() if section._target_ and not getattr(section, "from_python", "")}


def absolute(config: RunConfig) -> RunConfig:
    """Return a configuration with the absolute folders of its modules."""
    return replace(config, **{name: replace(module, search_path=os.path.abspath(module.search_path or os.getcwd()))
                              for name, module in modules_of(config).items()})


def located(config: RunConfig) -> RunConfig:
    """Return `absolute`, and allow the imports."""
    found = absolute(config)
    for module in modules_of(found).values():
        allow(module)
    return found


def remember(module: Module, run_id: str) -> None:
    """Record that this user began the run, so that it resumes without --trust."""
    path = _record_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # both of two simultaneous runs are recorded
    with turn(path.with_name(f"{path.name}.lock"), _LOCK_TIMEOUT_S, os.O_RDWR | os.O_CREAT):
        known = _records()
        digests = dict.fromkeys([*known.pop(run_id, "").split(), _digest(_settings(module))])
        newest = dict(list({**known, run_id: " ".join(digests)}.items())[-_MAX_RECORDS:])
        with new_file(path, mode=0o600) as temporary:
            temporary.write_text(json.dumps(newest, indent=0), encoding="utf-8")


def remember_or_warn(config: RunConfig, run_id: str, warn: Callable[[str], None]) -> None:
    """Call `remember` for all modules; warn if there is no home directory or disk space."""
    try:
        for module in modules_of(config).values():
            remember(module, run_id)
    except (OSError, RuntimeError) as error:
        warn(f"the start of this run could not be recorded ({error}); add {option('trust')} to resume or decode it.")


def require(model: Module, source: Path, run_id: str = "", *, trust: bool = False) -> None:
    """Raise ConfigError unless the module, if any, of these settings may be imported here."""
    settings = _settings(model)
    if not settings.get("_target_"):
        return
    digest = _digest(settings)
    is_told = trust or os.environ.get(VARIABLE, "").lower() in _YES
    if is_told or digest in allowed_modules or (run_id and digest in _records().get(run_id, "").split()):
        allowed_modules.add(digest)
        return
    where = settings.get("search_path") or "the current folder"
    arguments = f" with {str(settings['args'])[:200]}" if settings.get("args") else ""
    raise ConfigError(f"{source} asks to import {settings['_target_']} from {where}{arguments}, "
                      "which runs that code with your permissions, but this user did not begin "
                      "that run on this machine. Inspect that module; if you trust it, repeat this "
                      f"with {option('trust')}, or {VARIABLE}=1 in the environment.")


def require_run(folder: RunFolder, config: RunConfig, *, trust: bool = False, trains: bool = True) -> None:
    """Call `require` for the modules of a run (the optimizer's if it `trains`) and its model."""
    for name, module in modules_of(config).items():
        if trains or name != "optimizer":
            require(module, folder.config, folder.run_id, trust=trust)
    if not config.task._target_ and (folder.init_model / "model.json").is_file():
        require_final(folder.init_model, config.model, trust=trust)


def require_final(final: Path, own: ModelConfig | None = None, *, trust: bool = False) -> None:
    """Call `require` for a final model; `own` is the model of the run that starts from it."""
    about = read_about(final)
    require(as_own(about["model"], own), final / "model.json", about["run_id"], trust=trust)


def as_own(settings: Mapping[str, Any], own: ModelConfig | None) -> Mapping[str, Any]:
    """Replace module and arguments of a final model by those of the run that starts from it."""
    # The parameters must match that module in any case: one that only the final model names is not
    # imported.
    if own is None or not own._target_ or settings.get("_target_") != own._target_:
        return settings
    return {**settings, **{name: getattr(own, name) for name in _EXECUTED}}


def read_about(final: Path) -> dict[str, Any]:
    """Read model.json of a final model; OSError if it is missing, CheckpointError if damaged."""
    path = final / "model.json"
    try:
        about = read_json(path)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {str(error)[:100]}); "
                              f"restore it, or recreate it with: {interface.resume(final.parent)}") from error
    if not isinstance(about, dict) or not isinstance(about.get("model"), dict):
        raise CheckpointError(f"{path} does not describe a model; restore it, or recreate it with: "
                              f"{interface.resume(final.parent)}")
    return {**about, "run_id": str(about.get("run_id", ""))}


def _record_path() -> Path:
    return state_folder() / "trusted.json"


def _records() -> dict[str, str]:
    """Run id -> digests of its modules; empty if missing, damaged or writable by others."""
    path = _record_path()
    try:
        with path.open(encoding="utf-8") as file:
            about = os.fstat(file.fileno())
            if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return {}
            stored = json.load(file)
    except (OSError, ValueError, RecursionError, RuntimeError):
        return {}
    whole = isinstance(stored, dict) and all(isinstance(digest, str) for digest in stored.values())
    return stored if whole else {}


def _settings(model: Module) -> Mapping[str, Any]:
    return model if isinstance(model, Mapping) else asdict(model)


def _digest(settings: Mapping[str, Any]) -> str:
    executed = [settings.get(name) or None for name in _EXECUTED]
    # through JSON first: a file has strings for all keys, and lists for tuples
    plain = json.loads(json.dumps(executed, default=str))
    return digest_of_json(plain)
