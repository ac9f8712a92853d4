"""Runs of custom tasks: any model, data and loss, with the same fault tolerance."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ngsgd import imports, interface
from ngsgd.cluster.fingerprint import why_no_kernels
from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.errors import CheckpointError, ConfigError, NgsgdError
from ngsgd.files import read_json, write_text
from ngsgd.phase import Phase
from ngsgd.pipeline.base_run import BaseRun, Training
from ngsgd.pipeline.combination.models import kept_models, kept_outer_iters, running_mean
from ngsgd.pipeline.services import Services
from ngsgd.preconditioners.methods.torch_optimizers import require_optimizer
from ngsgd.runs import trust as permission
from ngsgd.runs.config_file import to_yaml
from ngsgd.runs.final_model import check_final, write_final
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import RunFolder, check_output_dir, resume_command
from ngsgd.schedules import Schedule
from ngsgd.tasks.functions import FunctionTask, GivenTask, ImportedTask
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.records import FinalReport
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.checkpoint import Checkpoint
from ngsgd.training.task import Evaluation, Task, TaskSpec, seeded_model

TaskOrFunction = Task | Callable[[], Task]


def new_task_run(config: RunConfig, services: Services, given: TaskOrFunction | None = None, *,
                 allow_other_bits: bool = False) -> TaskRun:
    """Check the task, and create the folder of a run; raise ConfigError for a wrong one.

    `given` is a task, or a function that returns one, from a Python program; without it
    `task._target_` of the configuration names the task.
    """
    check_output_dir(config)
    why_no_kernels(services.report)
    config = permission.located(config)
    require_optimizer(config.optimizer)
    if config.combination.kind == "generalized":
        raise ConfigError("combination.kind is generalized, which needs a speech model; choose none or mean.")
    spec = task_spec(config, given)
    _check(spec, config, services.warn)
    folder = RunFolder.create(config, to_yaml(config), services.place)
    services.report(f"run folder {folder.address}")
    fingerprint = FingerprintCheck.of_new_run(config, folder, allow_other_bits=allow_other_bits)
    permission.remember_or_warn(config, folder.run_id, services.warn)
    return TaskRun(config, folder, services, fingerprint, given=given, is_new=True)


def task_spec(config: RunConfig, given: TaskOrFunction | None, *, for_workers: bool = True) -> TaskSpec:
    """Describe the task to the workers; raise ConfigError if a Python task was not given again."""
    settings = EngineSettings.of(config)
    if given is None:
        if config.task.from_python:
            raise ConfigError(f"the task of this run, {config.task.from_python}, came from a Python program; continue "
                              f"the run there, with ngsgd.train({interface.argument(config.task.from_python)}, resume=RUN).")
        return ImportedTask(settings, config.task)
    if isinstance(given, nn.Module) or not (isinstance(given, Task) or callable(given)):
        raise ConfigError(f"the task is a {type(given).__name__}; pass an ngsgd.tasks.DatasetTask(dataset, make_model, "
                          "loss_fn), or a function that returns one.")
    spec = GivenTask(settings, given)
    if for_workers and config.cluster.kind != "in_process":
        spec.require_picklable()
    return spec


class TaskRun(BaseRun):
    """A run of a custom task."""

    def __init__(self, config: RunConfig, folder: RunFolder, services: Services | None = None,
                 fingerprint: FingerprintCheck | None = None, *, given: TaskOrFunction | None = None,
                 is_new: bool = False) -> None:
        super().__init__(config, folder, services, fingerprint, is_new=is_new)
        self._given = given

    @property
    def model(self) -> nn.Module:
        """The final model in evaluation mode."""
        path = self.folder.final
        self._require_finished(path)
        check_final(path)
        model = seeded_model(self._task(), self.config.seed)
        try:
            model.load_state_dict(load_file(path / "model.safetensors"))
        except OSError as error:
            raise CheckpointError(f"{self.folder.path} has no readable final model ({error}); finish it with: "
                                  f"{resume_command(self.config.task, self.folder.path)}") from error
        except (SafetensorError, RuntimeError) as error:
            # torch lists one layer in a line
            reason = "; ".join(line.strip() for line in str(error).splitlines()[:3])
            raise CheckpointError(f"the final model in {path} does not match the task ({reason}); use the task of the run, with "
                                  "the same task.args.") from error
        return model.eval()

    @property
    def metrics(self) -> dict[str, float]:
        """Scores of the final model by name, such as "valid/loss"; the content of metrics.json."""
        self._require_finished(self.folder.metrics)
        found: dict[str, float] = read_json(self.folder.metrics)
        return found

    def evaluate(self) -> dict[str, float]:
        """Score the final model on the held-out examples of the task."""
        with torch.no_grad():
            return metrics_of(self._task().evaluate(self.model))

    def _require_finished(self, path: Path) -> None:
        if not path.exists():
            raise CheckpointError(f"{self.folder.path} is not finished: it has no {path.name}; finish it with: "
                                  f"{resume_command(self.config.task, self.folder.path)}")

    def _task(self) -> Task:
        if self.config.task.from_python and self._given is None:
            raise ConfigError(f"the model of {self.folder.path} is built by a task of a Python program; pass the task: "
                              f'ngsgd.load("{self.folder.path}", {interface.argument(self.config.task.from_python)}).')
        permission.require(self.config.task, self.folder.config, self.folder.run_id, trust=self._given is not None)
        return task_spec(self.config, self._given, for_workers=False).task(torch.device("cpu"))

    def _spec(self) -> TaskSpec:
        if self._given is None:
            permission.require_run(self.folder, self.config)
        else:
            permission.require(self.config.optimizer, self.folder.config, self.folder.run_id)
        return task_spec(self.config, self._given)

    def _kept_models(self, task: Task, schedule: Schedule) -> Sequence[int]:
        return kept_outer_iters(self.config, schedule)

    def _finish(self, training: Training, end: Checkpoint) -> FinalReport:
        task, folder = training.task, self.folder
        model = seeded_model(task, self.config.seed).eval()
        layout = training.checkpoints.layout
        self.services.report(Phase("combining the last models"))
        layout.load(model, self._final_parameters(training, end, model, layout))
        self.services.report(Phase("scoring the final model"))
        with torch.no_grad():
            scores = task.evaluate(model)
        metrics = metrics_of(scores)
        about = {"model": {}, "task": asdict(self.config.task), "metrics": metrics, "run_id": folder.run_id}
        write_final(folder.final, model, about, None)
        write_text(folder.metrics, json.dumps(metrics, indent=1))
        self.services.plot(folder.events, folder.learning_curve)
        files = {"run folder": folder.path, "final model": folder.final, "metrics": folder.metrics,
                 "learning curve": folder.learning_curve, "events": folder.events}
        return FinalReport(None, None, scores.train, scores.valid, end.progress.frames_processed, end.progress.elapsed_s,
                           {label: str(path) for label, path in files.items() if path.exists()}, metrics)

    def _final_parameters(self, training: Training, end: Checkpoint, model: nn.Module, layout: FlatLayout) -> Vector:
        """Return the moving average if it exists, else the best mean of the last models."""
        models = kept_models(self.config, training.checkpoints, end)
        if not models:
            return end.buffers.get("ema", end.parameters)

        def held_out(parameters: Vector) -> tuple[float, Vector]:
            layout.load(model, parameters)
            with torch.no_grad():
                return training.task.evaluate(model).valid.objf, parameters

        found = running_mean(models, held_out)
        loss, newest = f"{-found.objf:.4f}", f"{-found.objf_newest:.4f}"
        if loss != newest:
            self.services.report(f"final model: mean of the last {counted(found.num_models, 'model')}, valid loss {loss}; "
                                 f"the last model alone has {newest}")
        return found.parameters


def metrics_of(scores: Evaluation) -> dict[str, float]:
    """Scores of a model by name; losses are means over the examples."""
    return {"train/loss": -scores.train.objf, "valid/loss": -scores.valid.objf, **scores.figures}


@contextlib.contextmanager
def _named(what: str) -> Iterator[None]:
    """Raise ConfigError for an error in a function of the user, with the line that raised it."""
    try:
        yield
    except NgsgdError:
        raise
    except Exception as error:
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        raise ConfigError(f"{what} cannot be computed ({imports.first_line(error)}, at {frame.f_code.co_filename}:{line}); correct "
                          "the function of the task that it calls.") from error


def _check(spec: TaskSpec, config: RunConfig, warn: Callable[[str], None]) -> None:
    """Train and score one small minibatch, so that errors appear before a worker starts."""
    task = spec.task(torch.device("cpu"))
    model = seeded_model(task, config.seed)
    with _named("the first minibatch"):
        shard = task.shards().schedule(config.schedule).shard(0)
        batch = next(iter(task.batches(shard, config.schedule.minibatch_size, seed=(config.seed, 0, 0), first=0, stop=1)), None)
    if batch is None:
        raise ConfigError("the first shard of the task has no minibatch; add examples.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        with _named("the loss of the first minibatch"):
            loss = task.loss(model.train(), batch.data).total
    if not loss.requires_grad:
        raise ConfigError("the loss of the task does not depend on the parameters of the model; correct the loss function.")
    if not bool(torch.isfinite(loss)):
        raise ConfigError(f"the loss of the first minibatch is {float(loss)}; check the data and the initial model.")
    with _named("the evaluation of the initial model"):
        task.prepare_evaluation(model.eval())
    if isinstance(task, FunctionTask):
        problem = ""
        # the loss of few examples may be undefined, as in metric learning
        with contextlib.suppress(Exception):
            problem = task.wrong_reduction(model)
        if problem:
            warn(problem)
