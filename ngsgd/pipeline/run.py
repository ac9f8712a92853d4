"""The composition root: `build_run` builds a run for every command, test and Python script.

    run = build_run(recipe("yesno", data={"source": "waves_yesno.tar.gz"}))
    run.train()              # outer iterations, final model, decoding
    print(run.metrics["test"])
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from ngsgd.asr.decode.evaluation import DecodingResult
from ngsgd.cluster.fingerprint import why_no_kernels
from ngsgd.config import RunConfig
from ngsgd.data.fetching.files import publish
from ngsgd.data.reader import EgsReader
from ngsgd.files import read_json, write_text
from ngsgd.models import custom
from ngsgd.models.growing import set_stage
from ngsgd.models.statistics import model_for, needs_statistics
from ngsgd.object_storage.client import ObjectStore
from ngsgd.phase import Phase
from ngsgd.pipeline import sequences
from ngsgd.pipeline.base_run import BaseRun, Training
from ngsgd.pipeline.finish import decode_final, finish, refined_corpus, wanted_for_combination
from ngsgd.pipeline.ladder import Ladder, with_rungs
from ngsgd.pipeline.prepare import PreparedData, check_data, prepare
from ngsgd.pipeline.score import score_held_out
from ngsgd.pipeline.services import Report, Services
from ngsgd.pipeline.task_run import TaskRun, new_task_run
from ngsgd.runs import trust as permission
from ngsgd.runs.config_file import to_yaml
from ngsgd.runs.final_model import check_final, load_final
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.known_data import known_archives, preparation_key
from ngsgd.runs.run_folder import RunFolder, check_output_dir, folder_of_model
from ngsgd.schedules import Schedule
from ngsgd.tasks.frame_scores import average_posterior
from ngsgd.tasks.frames import FrameClassification, stages_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.records import FinalReport
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.task import Task, TaskSpec


def build_run(config: RunConfig, services: Services | None = None, *,
              folder: RunFolder | None = None,
              fingerprint: FingerprintCheck | None = None, trust: bool = False,
              allow_other_bits: bool = False) -> BaseRun:
    """Build a new run, or continue the one in `folder`.

    A new run prepares its data and builds its model before it creates a folder, so that an error
    leaves no folder behind.

    Args:
        config: complete configuration of the run.
        services: trackers, worker pool and so on. Default: a silent run on this machine.
        folder: folder of a run that has begun; None creates a new one under config.output_dir.
        fingerprint: numeric fingerprint of the run that has begun; None reads it from its folder.
        trust: import a module that only `folder` or the initial model names. Default: False.
        allow_other_bits: accept workers whose results agree only up to rounding. Default: False.

    Returns:
        A `Run` for speech, or a `TaskRun` if task._target_ is set.

    Raises:
        ConfigError: the settings cannot be used.
        DataError: data cannot be read or written.
    """
    services = services or Services()
    if folder is not None:
        module = config.task if config.task._target_ else config.model
        permission.require_run(folder, module, trust=trust)
        fingerprint = fingerprint or FingerprintCheck.of_resumed_run(config, folder,
                                                                     services.report,
                                                                     allow_other_bits=allow_other_bits)
        if config.task._target_:
            return TaskRun(config, folder, services, fingerprint)
        return Run(config, folder, services, fingerprint)
    if config.task._target_:
        return new_task_run(config, services, allow_other_bits=allow_other_bits)
    check_output_dir(config)
    why_no_kernels(services.report)
    config = _with_search_path(with_rungs(config))
    permission.allow(config.model)
    sequences.require_init_model(config)
    if config.init_model:
        check_final(folder_of_model(config.init_model) / "final")
        permission.require_final(folder_of_model(config.init_model) / "final", config.model, trust=trust)
    data = _prepared(config, services)
    require_model(config, EgsReader(data.egs_directory), services.report)
    folder = RunFolder.create(config, to_yaml(config))
    services.report(f"run folder {folder.address}")
    fingerprint = FingerprintCheck.of_new_run(config, folder, allow_other_bits=allow_other_bits)
    if config.model._target_:
        permission.remember_or_warn(config.model, folder.run_id, services.warn)
    sequences.keep_init_model(config, folder)
    return Run(config, folder, services, fingerprint, data)


class Run(BaseRun):
    """A run of speech recognition: the steps from data to WER."""

    def __init__(self, config: RunConfig, folder: RunFolder, services: Services | None = None,
                 fingerprint: FingerprintCheck | None = None,
                 data: PreparedData | None = None) -> None:
        super().__init__(config, folder, services, fingerprint, is_new=data is not None)
        self._data = data

    def decode(self, *, trust: bool = False) -> DecodingResult:
        """Decode the validation and the test set with the final model.

        Args:
            trust: import the module that the run names. Default: False.

        Returns:
            Words, WER and the chosen decoding weights.
        """
        with self.folder.locked("decode", self.services.warn):
            model, prior_P = load_final(self.folder, trust=trust)
            return decode_final(self.folder, self.config, self.data, model, prior_P, self.services.report)

    def evaluate(self, outer_iter: int | None = None, *,
                 trust: bool = False) -> dict[str, dict[str, float] | None]:
        """Compute objective per frame and frame accuracy of the validation and the test set.

        Args:
            outer_iter: evaluate the checkpoint after this outer iteration, counted from 1; None
                evaluates the final model.
            trust: import the module that the run names. Default: False.

        Returns:
            "valid" and "test" -> scores; None for a set without alignment.
        """
        if outer_iter is None:
            model, prior_P = load_final(self.folder, trust=trust)
        else:
            permission.require_run(self.folder, self.config.model, trust=trust)
            model, prior_P = self._model_after(outer_iter)
        corpus = refined_corpus(self.config, self.data, model, prior_P, self.services.report)
        scores = score_held_out(self.config, corpus, model, prior_P)
        return {name: asdict(score) if score else None for name, score in scores.items()}

    @cached_property
    def data(self) -> PreparedData:
        """Prepared data, from the cache if it is complete there."""
        return self._data or _prepared(self.config, self.services, self.folder)

    @property
    def model(self) -> nn.Module:
        """The final model in evaluation mode."""
        return load_final(self.folder)[0]

    @property
    def metrics(self) -> dict[str, Any]:
        """Content of decode/wer.json: WER and frame scores of valid and test, and decoding
        weights.
        """
        found: dict[str, Any] = read_json(self.folder.decode / "wer.json")
        return found

    def _spec(self) -> SpeechTaskSpec:
        config, folder, report = self.config, self.folder, self.services.report
        known = None if self._data else known_archives(config, folder)
        if known:
            check_data(config)
            self.services.begin(config)
            return SpeechTaskSpec(config, str(known))
        data = self._compared_data()
        if data.rungs:
            write_text(folder.rungs, json.dumps([asdict(rung) for rung in data.rungs], indent=1))
        spec = SpeechTaskSpec(config, str(data.egs_directory),
                              sequences.sequence_data(config, folder, data.corpus, data.cache_root,
                                                      report))
        sequences.report_skipped(spec, report)
        return spec

    def _compared_data(self) -> PreparedData:
        """Prepared data; raises CheckpointError if they changed since the run began."""
        data = self.data
        self.folder.remember_data(data.corpus.digest, data.egs_directory, data.extractor,
                                  data.adaptation, data.alignment, preparation_key(self.config))
        return data

    def _kept_models(self, task: Task, schedule: Schedule) -> Sequence[int]:
        assert isinstance(task, FrameClassification)
        return wanted_for_combination(self.config, schedule, stages_of(self.config, task.reader))

    def _read_by_workers(self, spec: TaskSpec) -> Sequence[Path]:
        assert isinstance(spec, SpeechTaskSpec)
        return [Path(spec.egs_directory), *([Path(spec.sequences.directory)] if spec.sequences else [])]

    def _iterate(self, training: Training) -> Checkpoint:
        assert isinstance(training.spec, SpeechTaskSpec)
        if self.config.data.store:
            publish(training.spec.offers(), ObjectStore(self.config.data.store), self.services.report)
        return super()._iterate(training)

    def _initial_parameters(self, task: Task) -> Vector:
        return sequences.starting_parameters(self.config, self.folder, task.model())

    def _finish(self, training: Training, end: Checkpoint) -> FinalReport:
        assert isinstance(training.spec, SpeechTaskSpec)
        return finish(self.folder, self._compared_data(), training.spec, training.checkpoints, end,
                      self.services)

    def _model_after(self, outer_iter: int) -> tuple[nn.Module, npt.NDArray[np.float64]]:
        """Model and priors of a checkpoint; outer iterations are counted from 1."""
        config, reader = self.config, EgsReader(self.data.egs_directory)
        model = model_for(config, reader)
        set_stage(model, stages_of(config, reader).at(outer_iter - 1))
        layout = FlatLayout.of(model)
        store = CheckpointStore(self.folder.checkpoints, layout, config.checkpoint.num_to_keep)
        layout.load(model, store.model_after(outer_iter - 1))
        return model, average_posterior(model.eval(), reader)


def _prepared(config: RunConfig, services: Services, folder: RunFolder | None = None) -> PreparedData:
    check_data(config)
    services.begin(config)
    ladder = Ladder(services, build_run)
    data = prepare(config, services.report, folder, ladder.labels)
    return replace(data, rungs=tuple(ladder.rungs))


def _with_search_path(config: RunConfig) -> RunConfig:
    """Find a custom module before data are prepared, and record its folder for other processes."""
    if not config.model._target_:
        return config
    search_path = os.path.abspath(config.model.search_path or os.getcwd())
    config = replace(config, model=replace(config.model, search_path=search_path))
    custom.find(config.model)
    return config


def require_model(config: RunConfig, reader: EgsReader, report: Report) -> None:
    """Check the model for these data; its statistics are stored next to the archives."""
    if needs_statistics(config.model):
        report(Phase("statistics of the training examples, for the model"))
    model_for(config, reader)
    stages_of(config, reader)
