"""The composition root: `build_run` builds a run for every command, test and Python script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from ngsgd.asr.bundle import INDEX
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.decode.evaluation import DecodingResult
from ngsgd.cluster.fingerprint import why_no_kernels
from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.data.fetching.files import publish
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader
from ngsgd.files import read_json, write_text
from ngsgd.models import build
from ngsgd.models.growing import Stages, set_stage
from ngsgd.models.statistics import model_for, needs_statistics
from ngsgd.object_storage.client import ObjectStore
from ngsgd.phase import Phase
from ngsgd.pipeline import sequences
from ngsgd.pipeline.adaptation import refined_by_network
from ngsgd.pipeline.base_run import BaseRun, Training
from ngsgd.pipeline.combination import HeldOut, generalized, normalize_stddev, running_mean
from ngsgd.pipeline.combination.models import kept_models, kept_outer_iters
from ngsgd.pipeline.ladder import Ladder, with_rungs
from ngsgd.pipeline.prepare import PreparedData, check_data, prepare
from ngsgd.pipeline.score import decode_and_score, log_likelihoods, score_held_out
from ngsgd.pipeline.services import Report, Services
from ngsgd.pipeline.task_run import TaskRun, new_task_run
from ngsgd.preconditioners.methods.torch_optimizers import require_optimizer
from ngsgd.runs import trust as permission
from ngsgd.runs.config_file import to_yaml
from ngsgd.runs.final_model import check_final, load_final, save_final
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.known_data import known_archives, preparation_key
from ngsgd.runs.recognizer import keep_recognizer
from ngsgd.runs.run_folder import RunFolder, check_output_dir, folder_of_model
from ngsgd.schedules import Schedule
from ngsgd.tasks.frame_scores import average_posterior, score_subset
from ngsgd.tasks.speech import FrameClassification, SpeechTaskSpec, stages_of
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.records import FinalReport
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore
from ngsgd.training.task import Task, TaskSpec


def build_run(config: RunConfig, services: Services | None = None, *,
              folder: RunFolder | None = None, fingerprint: FingerprintCheck | None = None,
              trust: bool = False, allow_other_bits: bool = False) -> BaseRun:
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
        permission.require_run(folder, config, trust=trust)
        fingerprint = fingerprint or FingerprintCheck.of_resumed_run(
            config, folder, services.report, allow_other_bits=allow_other_bits)
        return (TaskRun if config.task._target_ else Run)(config, folder, services, fingerprint)
    if config.task._target_:
        return new_task_run(config, services, allow_other_bits=allow_other_bits)
    check_output_dir(config)
    why_no_kernels(services.report)
    config = with_rungs(config)
    # before data are prepared; other processes find modules in the recorded folder
    config = permission.located(config)
    if config.model._target_:
        build.find_custom(config.model)
    require_optimizer(config.optimizer)
    sequences.require_init_model(config)
    if config.init_model:
        check_final(folder_of_model(config.init_model) / "final")
        permission.require_final(folder_of_model(config.init_model) / "final", config.model, trust=trust)
    data = _prepared(config, services)
    require_model(config, EgsReader(data.egs_directory), services.report)
    folder = RunFolder.create(config, to_yaml(config), services.place)
    services.report(f"run folder {folder.address}")
    fingerprint = FingerprintCheck.of_new_run(config, folder, allow_other_bits=allow_other_bits)
    permission.remember_or_warn(config, folder.run_id, services.warn)
    sequences.keep_init_model(config, folder)
    return Run(config, folder, services, fingerprint, data)


class Run(BaseRun):
    """A run of speech recognition: the steps from data to WER."""

    def __init__(self, config: RunConfig, folder: RunFolder, services: Services | None = None,
                 fingerprint: FingerprintCheck | None = None, data: PreparedData | None = None) -> None:
        super().__init__(config, folder, services, fingerprint, is_new=data is not None)
        self._data = data

    def decode(self, *, trust: bool = False) -> DecodingResult:
        """Decode the validation and the test set; `trust` imports the module that the run names."""
        with self.folder.locked("decode", self.services.warn):
            return self._decode_final(*load_final(self.folder, trust=trust))

    def evaluate(self, outer_iter: int | None = None, *, trust: bool = False) -> dict[str, dict[str, float] | None]:
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
            permission.require_run(self.folder, self.config, trust=trust, trains=False)
            config, reader = self.config, EgsReader(self.data.egs_directory)
            model = model_for(config, reader)
            set_stage(model, stages_of(config, reader).at(outer_iter - 1))
            layout = FlatLayout.of(model)
            store = CheckpointStore(self.folder.checkpoints, layout, config.checkpoint.num_to_keep)
            layout.load(model, store.model_after(outer_iter - 1))
            prior_P = average_posterior(model.eval(), reader)
        corpus = refined_corpus(self, model, prior_P)
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
        """Content of decode/wer.json: WER and frame scores of valid and test, and weights."""
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
        of_sequences = sequences.sequence_data(config, folder, data.corpus, data.cache_root, report)
        spec = SpeechTaskSpec(config, str(data.egs_directory), of_sequences)
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
        """Combine the last models, write and decode the final one, and plot the learning curve."""
        spec = training.spec
        assert isinstance(spec, SpeechTaskSpec)
        config, folder, services = self.config, self.folder, self.services
        checkpoints = training.checkpoints
        self._compared_data()
        reader = spec.frames()
        model, scratch = model_for(config, reader), model_for(config, reader)
        for one in (model, scratch):
            set_stage(one, stages_of(config, spec.shards()).at(end.progress.outer_iter))
        if missing := checkpoints.missing_candidates(end.progress.outer_iter):
            services.report(f"the models of outer iterations {', '.join(str(one + 1) for one in missing)} are missing in "
                            f"{checkpoints.models}; the final model is combined from the others")
        services.report(Phase("combining the last models"))
        checkpoints.layout.load(model, self._final_parameters(end, checkpoints, scratch, reader))
        services.report(Phase("writing final/"))
        save_final(folder, config, model, reader)
        # the model that users will load, read from disk
        model, prior_P = load_final(folder)
        result = self._decode_final(model, prior_P)
        services.report(Phase("drawing the learning curve"))
        services.plot(folder.events, folder.learning_curve)
        takes_audio = config.features.kind != "given"
        files = {"run folder": folder.path, "final model": folder.final,
                 **({"recognizer": folder.final / INDEX} if takes_audio else {}),
                 "per-utterance": folder.decode / "test.per_utt.txt",
                 "learning curve": folder.learning_curve, "events": folder.events}
        train, valid = (score_subset(model, reader.diagnostic(name)) for name in ("train", "valid"))
        return FinalReport(result.test, result.valid, train, valid, end.progress.frames_processed, end.progress.elapsed_s,
                           {label: str(path) for label, path in files.items() if path.exists()},
                           interval=asdict(result.test_interval))

    def _final_parameters(self, end: Checkpoint, store: CheckpointStore, scratch: nn.Module, reader: EgsReader) -> Vector:
        """Return the moving average if it exists, else the combination."""
        models, kind = kept_models(self.config, store, end), self.config.combination.kind
        if not models:
            return end.buffers.get("ema", end.parameters)
        combine = running_mean if kind == "mean" else generalized
        found = combine(models, HeldOut(scratch, reader.diagnostic("valid")))
        objf, newest = f"{found.objf:.3f}", f"{found.objf_newest:.3f}"
        if objf != newest:
            chosen = "mean" if found.chosen == "mean" else "weighted mean"
            self.services.report(f"final model: {chosen} of the last "
                                 f"{counted(found.num_models, 'model')}, valid objf {objf}; the "
                                 f"last model alone has {newest}")
        if kind == "generalized":
            return normalize_stddev(found.parameters, scratch)
        return found.parameters

    def _decode_final(self, model: nn.Module, prior_P: npt.NDArray[np.float64]) -> DecodingResult:
        corpus = refined_corpus(self, model, prior_P)
        result = decode_and_score(self.folder, self.config, corpus, model, prior_P, self.services.report)
        keep_recognizer(self.folder, self.config, corpus, result)
        return result


def refined_corpus(run: Run, model: nn.Module, prior_P: npt.NDArray[np.float64]) -> Corpus:
    """Return the corpus; with fMLLR the network adapts valid and test to their speakers again."""
    data = run.data
    if data.adaptation is None:
        return data.corpus

    def scores(features_TD: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        frames = FrameSet.of_utterance(features_TD)
        return next(log_likelihoods(frames, run.config.egs, model, prior_P))
    return refined_by_network(run.config, data.corpus, data.unadapted, data.adaptation, scores, run.services.report)


def wanted_for_combination(config: RunConfig, schedule: Schedule, stages: Stages) -> tuple[int, ...]:
    """Outer iterations whose complete models a run must keep for the final combination."""
    return tuple(outer_iter for outer_iter in kept_outer_iters(config, schedule)
                 if stages.at(outer_iter) == stages.at(schedule.num_outer_iters - 1))


def _prepared(config: RunConfig, services: Services, folder: RunFolder | None = None) -> PreparedData:
    check_data(config)
    services.begin(config)
    ladder = Ladder(services, build_run)
    data = prepare(config, services.report, folder, ladder.labels)
    return replace(data, rungs=tuple(ladder.rungs))


def require_model(config: RunConfig, reader: EgsReader, report: Report) -> None:
    """Check the model for these data; its statistics are stored next to the archives."""
    if needs_statistics(config.model):
        report(Phase("statistics of the training examples, for the model"))
    model_for(config, reader)
    stages_of(config, reader)
