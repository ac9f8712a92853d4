"""`ngsgd.train` and `ngsgd.load`: training from Python."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig, build
from ngsgd.config.build import defaults, merged, paths
from ngsgd.config.other_names import OTHER_NAMES, did_you_mean
from ngsgd.config.sections.cluster import kind_with
from ngsgd.config.sections.model import FROM_PYTHON
from ngsgd.config.sections.sites import total_jobs
from ngsgd.config.unused import of_speech
from ngsgd.errors import ArgumentError, ConfigError
from ngsgd.pipeline.base_run import BaseRun
from ngsgd.pipeline.recipes import require_sound
from ngsgd.pipeline.services import Services
from ngsgd.pipeline.task_run import TaskOrFunction, TaskRun, new_task_run, task_spec
from ngsgd.runs import trust as permission
from ngsgd.runs.config_file import read_config
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import RunFolder, find_run, resume_command
from ngsgd.tasks.functions import name_of
from ngsgd.training.records import Tracker

# packages for progress lines, Ray, MLflow and plots
_OF_SERVICE = ("hydra", "ray", "mlflow", "rich", "matplotlib", "psutil")


def train(task: TaskOrFunction | None = None, *, num_workers: int | None = None, cluster: str | Mapping[str, Any] = "local",
          resume: str | Path | None = None, allow_other_bits: bool = False, trust: bool = False, quiet: bool = False,
          trackers: Sequence[Tracker | Callable[[Mapping[str, float], int], object]] = (), services: Services | None = None,
          **settings: Any) -> TaskRun:
    """Train a model on several workers whose parameters are averaged every outer iteration.

    A worker that dies is replaced, and its job is retried with a bitwise identical result. Scripts
    need the line `if __name__ == "__main__":` before the call, as for `multiprocessing`.

    Args:
        task: `ngsgd.tasks.DatasetTask` or another `ngsgd.training.task.Task`, or a function that
            returns one. Worker processes get a copy. Default: None, the task of the run of
            `resume`, if it is the function of a module (`ngsgd train task=MODULE.FUNCTION`).
        num_workers: number of workers, and of jobs per outer iteration. Default: None, 2, or that
            of the run of `resume`, whose number of jobs never changes.
        cluster: "local" (processes of this machine), "in_process", or "ray" (needs `pip install
            ngsgd[service]`); or the options of the cluster, such as {"kind": "local",
            "ranks_per_worker": 2}. Default: "local".
        resume: folder or name of a stopped or killed run of this task to continue with its own
            settings. Default: None, a new run.
        allow_other_bits: accept workers, or a resumed run, on other processors, versions or
            kernels; results then agree up to rounding. Default: False.
        trust: import the module that the run of `resume` names, though this user did not begin that
            run here. Default: False.
        quiet: print only incidents and the result. Default: False.
        trackers: functions of (figures, samples processed), called after each outer iteration, and
            objects with the methods of `ngsgd.training.records.Tracker`. Default: none. One that
            raises gets no further calls. An active run of `mlflow.start_run()` and the option
            tracking="mlflow", "tensorboard" or "wandb" add theirs (see docs/trackers.md).
        services: replacements of progress lines, trackers and the worker pool.
        **settings: options of `ngsgd train`. Sections are mappings, such as schedule={"num_epochs":
            3}; a section with a kind also accepts its name, such as optimizer="kfac" or
            outer="diloco". Single options: lr, num_epochs, batch_size, seed, name, output_dir. `lr`
            is the initial and final learning rate per example of the summed loss: the rate in torch
            for a mean loss, divided by the batch size.

    Returns:
        The run, with `model`, `metrics` and `folder`.

    Raises:
        ConfigError: the task or a setting is wrong; nothing was started.
        CheckpointError: the run of `resume` has checkpoints, and none fits the task. Nothing is
            changed.
        FingerprintError: results of the run of `resume` would differ by rounding, and
            `allow_other_bits` is False. Nothing is changed.
        RunInterrupted: Ctrl-C; the message contains the call that continues the run.

    Example:
        In a script with a function `make_task`, under `if __name__ == "__main__":`:

            run = ngsgd.train(make_task, num_workers=4, num_epochs=3)
            print(run.metrics["valid/loss"])
            torch.save(run.model.state_dict(), "model.pt")
    """
    own: Any = importlib.import_module("ngsgd.launcher.trackers")
    own.require_trackers(trackers)
    if resume is not None:
        if settings:
            raise ConfigError(f"resume= continues a run with its own settings; remove {', '.join(settings)}.")
        run = _open(resume, task, services, num_workers, trackers, quiet=quiet, allow_other_bits=allow_other_bits, trust=trust)
    else:
        if task is None:
            raise ArgumentError("ngsgd.train got no task; pass an ngsgd.tasks.DatasetTask, a function that returns one, or "
                                "resume=RUN.")
        if trust:
            raise ConfigError("trust=True goes with resume=RUN; a new run imports nothing that others wrote.")
        config = _config(settings, 2 if num_workers is None else num_workers, cluster, name_of(task))
        if config.cluster.kind == "local":
            require_main_guard()
        services = services or _services(config, quiet)
        if config.tracking.kind == "mlflow":
            config = importlib.import_module("ngsgd.launcher.mlflow.store").resolved(config, services.warn)
        run = new_task_run(config, _tracked(services, trackers), task, allow_other_bits=allow_other_bits)
    run.train()
    return run


def load(run: str | Path, task: TaskOrFunction | None = None, *, trust: bool = False) -> BaseRun:
    """Open a run, without Hydra, Ray or MLflow.

    Args:
        run: the run folder, or its name under runs/.
        task: the task of a run of `ngsgd.train`; not needed for `metrics` and `folder`. Default:
            None.
        trust: import the module that the run names, though this user did not begin that run here.
            Default: False.

    Returns:
        The run, with `model`, `metrics` and `folder`. `model` and `metrics` of a run that
        was stopped raise `CheckpointError` until it is resumed and finished.

    Raises:
        ConfigError: the run does not exist.
        CheckpointError: its configuration is damaged.

    Example:
        With a finished run in runs/RUN:

            run = ngsgd.load("runs/RUN")
            print(run.metrics)
    """
    folder = RunFolder.open(find_run(str(run)))
    config = read_config(folder.config)
    if trust:
        for module in permission.modules_of(config).values():
            permission.allow(module)
    if config.task._target_:
        return TaskRun(config, folder, given=task)
    # imports speech recognition
    from ngsgd.pipeline.run import build_run
    return build_run(config, folder=folder)


def _open(run: str | Path, task: TaskOrFunction | None, services: Services | None, num_workers: int | None,
          trackers: Sequence[Any], *, quiet: bool, allow_other_bits: bool, trust: bool) -> TaskRun:
    """Open a run to continue it, once its settings, module and fingerprint are accepted."""
    folder = RunFolder.open(find_run(str(run), to_write=True))
    config = read_config(folder.config)
    if not config.task._target_:
        raise ConfigError(f"{folder.path} trained a speech model; continue it with: "
                          f"{resume_command(config.task, folder.path, allow_other_bits=allow_other_bits, trust=trust)}")
    if config.cluster.kind == "local":
        require_main_guard()
    task_spec(config, task)
    if task is None:
        permission.require_run(folder, config, trust=trust)
    permission.require(config.optimizer, folder.config, folder.run_id, trust=trust)
    services = services or _services(config, quiet)
    fingerprint = FingerprintCheck.of_resumed_run(config, folder, services.report, allow_other_bits=allow_other_bits)
    if num_workers is not None:
        config = replace(config, cluster=replace(config.cluster, num_workers=num_workers))
        require_sound(config, [], {})
    return TaskRun(config, folder, _tracked(services, trackers), fingerprint, given=task)


def _tracked(services: Services, trackers: Sequence[Any]) -> Services:
    """Services that also pass all records to the trackers of the user."""
    if not trackers:
        return services
    own: Any = importlib.import_module("ngsgd.launcher.trackers")
    return replace(services, make_trackers=lambda config, folder: [
        *own.of_user(trackers, config, folder.path, services.warn), *services.make_trackers(config, folder)])


def _services(config: RunConfig, quiet: bool) -> Services:
    """Progress lines and, if configured, Ray and MLflow, which only the launcher has."""
    missing = _missing()
    if missing and (config.cluster.kind == "ray" or config.tracking.kind != "none"):
        raise ConfigError(f"{missing[0]} is not installed, which cluster=ray and tracking need; install ngsgd[service].")
    if missing:
        return Services(report=(lambda _line: None) if quiet else print, warn=print)
    launcher = importlib.import_module("ngsgd.launcher.commands.train")
    return launcher.services_of(config, quiet)  # type: ignore[no-any-return]


def _missing() -> list[str]:
    return [name for name in _OF_SERVICE if importlib.util.find_spec(name) is None]


def _config(settings: Mapping[str, Any], num_workers: int, cluster: str | Mapping[str, Any], name: str) -> RunConfig:
    """Return a complete configuration; raise one ConfigError for all problems."""
    given, problems = _nested(settings)
    schedule = given.get("schedule", {})
    of_cluster = {"kind": cluster} if isinstance(cluster, str) else {"kind": kind_with(cluster.get("address", "")), **cluster}
    num_jobs = total_jobs(num_workers, given.get("sites", {}).get("jobs"))
    # MLflow where the program has opened a run of it
    mlflow: Any = sys.modules.get("mlflow")
    tracking = "mlflow" if mlflow and not _missing() and mlflow.active_run() else "none"
    own = {"cluster": {"num_workers": num_workers, **of_cluster}, "tracking": {"kind": tracking},
           "schedule": {name: num_jobs for name in ("num_jobs_initial", "num_jobs_final") if name not in schedule}}
    config, wrong = build(merged(merged(defaults(), own), given))
    config = replace(config, task=replace(config.task, _target_=FROM_PYTHON + name))
    require_sound(config, wrong, given, problems)
    return config


def _nested(settings: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    sections = {spec.name: getattr(RunConfig(), spec.name) for spec in fields(RunConfig)}
    by_name = {path.rpartition(".")[2]: path for path in reversed(paths()) if not of_speech(path)}
    found: dict[str, Any] = {}
    problems: list[str] = []
    names: dict[str, str] = {}
    given = settings.get("schedule")
    lr_schedule = settings.get("lr_schedule", given.get("lr_schedule") if isinstance(given, Mapping) else None)
    # without another schedule, lr is a constant rate
    rates = ("lr_initial", "lr_final") if lr_schedule in (None, "exponential") else ("lr_initial",)
    for name, value in settings.items():
        section = sections.get(name)
        if name in ("lr", "learning_rate"):
            layer: dict[str, Any] = {"schedule": dict.fromkeys(rates, value)}
        elif is_dataclass(section):
            layer = {name: dict(value) if isinstance(value, Mapping) else {"kind": value}}
        elif section is not None:
            layer = {name: str(value) if isinstance(value, Path) else value}
        elif path := OTHER_NAMES.get(name, by_name.get(name, "")):
            first, _, last = path.partition(".")
            layer = {first: {last: value}}
            if names.setdefault(path, name) != name:
                problems.append(f"{names[path]} and {name} both mean {path}; give one of them.")
        else:
            near = did_you_mean(name, [*sections, *by_name], name)
            problems.append(f"ngsgd.train has no setting {name}.{near} See them all with: ngsgd settings.")
            continue
        found = merged(found, layer)
    return found, problems


def require_main_guard() -> None:
    """Raise ConfigError if the running script, which workers import, has no main guard."""
    main = sys.modules["__main__"]
    name, path = getattr(getattr(main, "__spec__", None), "name", ""), getattr(main, "__file__", None)
    frame = inspect.currentframe()
    while frame and not (frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    # multiprocessing imports no notebook, no `python -c` and no __main__ module of a package
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
