"""The composition root: `build_run` makes a run of a configuration, for every command, test and Python script.

    run = build_run(recipe("yesno", data={"source": "waves_yesno.tar.gz"}))
    run.train()              # outer iterations, final model, decoding
    print(run.metrics["test"])
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ngsgd.asr.decode.evaluation import Evaluation
from ngsgd.config import RunConfig
from ngsgd.data.reader import EgsReader
from ngsgd.errors import CheckpointError, RunInterrupted
from ngsgd.files import read_json
from ngsgd.models import custom
from ngsgd.models.growing import set_stage
from ngsgd.models.statistics import model_for, needs_statistics
from ngsgd.optim.outer import make_rule
from ngsgd.pipeline import sequences
from ngsgd.pipeline.finish import finish, wanted_for_combination
from ngsgd.pipeline.prepare import PreparedData, prepare
from ngsgd.pipeline.runs import trust as permission
from ngsgd.pipeline.runs.config_file import to_yaml
from ngsgd.pipeline.runs.final_model import check_final, load_final
from ngsgd.pipeline.runs.fingerprint_check import FingerprintCheck
from ngsgd.pipeline.runs.run_folder import RunFolder, check_output_dir, folder_of_model
from ngsgd.pipeline.score import decode_and_score, score_held_out
from ngsgd.pipeline.services import PoolRequest, Report, Services
from ngsgd.pipeline.train import train
from ngsgd.tasks.frame_scores import average_posterior
from ngsgd.tasks.frames import schedule_of, stages_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import FinalReport, Incident
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, first_checkpoint, require_room
from ngsgd.training.storage.event_log import EventLog
from ngsgd.training.storage.lock import RunLock
from ngsgd.training.tracking import Trackers


def build_run(config: RunConfig, services: Services | None = None, *, folder: RunFolder | None = None,
              fingerprint: FingerprintCheck | None = None, trust: bool = False, allow_other_bits: bool = False) -> Run:
    """Make a new run, or continue the one in `folder`.

    A new run prepares its data and builds its model before it makes a folder, so that an error leaves no folder behind.

    Args:
        config: complete configuration of the run.
        services: trackers, worker pool and so on; by default the run is silent and stays on this machine.
        folder: folder of a run that has begun; None makes a new one under config.output_dir.
        fingerprint: numeric fingerprint of the run that has begun; None takes it from its folder.
        trust: import a module that only `folder` or the model to start from names.
        allow_other_bits: accept workers whose results agree to rounding only.

    Raises:
        ConfigError: settings that cannot be carried out.
        DataError: data that cannot be read or written.
    """
    services = services or Services()
    if folder is not None:
        permission.require_run(folder, config.model, trust=trust)
        fingerprint = fingerprint or FingerprintCheck.of_resumed_run(config, folder, services.report,
                                                                     allow_other_bits=allow_other_bits)
        return Run(config, folder, services, fingerprint)
    check_output_dir(config)
    config = _with_search_path(config)
    permission.allow(config.model)
    sequences.require_init_model(config)
    if config.init_model:
        check_final(folder_of_model(config.init_model) / "final")
        permission.require_final(folder_of_model(config.init_model) / "final", config.model, trust=trust)
    data = prepare(config, services.report)
    require_model(config, EgsReader(data.egs_directory), services.report)
    folder = RunFolder.create(config, to_yaml(config))
    services.report(f"run folder {folder.path}")
    fingerprint = FingerprintCheck.of_new_run(config, folder, allow_other_bits=allow_other_bits)
    _remember(config, folder, services.warn)
    sequences.keep_init_model(config, folder)
    return Run(config, folder, services, fingerprint, data)


@dataclass(frozen=True)
class _Training:
    """A run that holds its lock and is ready to train."""

    spec: SpeechTaskSpec
    checkpoints: CheckpointStore
    latest: Checkpoint | None
    trackers: Trackers


class Run:
    """A run: its configuration, its folder, and the steps from data to WER."""

    def __init__(self, config: RunConfig, folder: RunFolder, services: Services | None = None,
                 fingerprint: FingerprintCheck | None = None, data: PreparedData | None = None) -> None:
        self.config = config
        self.folder = folder
        self.services = services or Services()
        self._fingerprint = fingerprint
        self._data = data
        self._purpose = "resume" if data is None else "train"

    def train(self) -> FinalReport:
        """Train from the last checkpoint to the end, combine the last models, decode and score."""
        with self._training() as training:
            end = self._iterate(training)
            report = finish(self.folder, self.data, training.spec, training.checkpoints, end, self.services)
            training.trackers.finished(report)
        return report

    def train_only(self) -> Checkpoint:
        """Run the remaining outer iterations; without final model and decoding."""
        with self._training() as training:
            return self._iterate(training)

    def decode(self, *, trust: bool = False) -> Evaluation:
        """Decode valid and test with the final model."""
        with self.folder.locked("decode", self.services.warn):
            model, prior_P = load_final(self.folder, trust=trust)
            return decode_and_score(self.folder, self.config, self.data.corpus, model, prior_P)

    def evaluate(self, outer_iter: int | None = None, *, trust: bool = False) -> dict[str, dict[str, float] | None]:
        """Objective per frame and frame accuracy of valid and test.

        Args:
            outer_iter: evaluate the checkpoint after this outer iteration, counted from 1; None evaluates the final model.
            trust: import the module that the run names.
        """
        if outer_iter is None:
            model, prior_P = load_final(self.folder, trust=trust)
        else:
            permission.require_run(self.folder, self.config.model, trust=trust)
            model, prior_P = self._model_after(outer_iter)
        scores = score_held_out(self.config, self.data.corpus, model, prior_P)
        return {name: asdict(score) if score else None for name, score in scores.items()}

    @cached_property
    def data(self) -> PreparedData:
        """Prepared data, from the cache if it is complete there."""
        return self._data or prepare(self.config, self.services.report, self.folder)

    @property
    def model(self) -> nn.Module:
        """The final model in evaluation mode."""
        return load_final(self.folder)[0]

    @property
    def metrics(self) -> dict[str, Any]:
        """Content of decode/wer.json: WER of valid and test, frame scores, the setting chosen on valid."""
        found: dict[str, Any] = read_json(self.folder.decode / "wer.json")
        return found

    # Steps of train -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _training(self) -> Iterator[_Training]:
        """Lock the folder, open checkpoints and trackers, and report how the run ended."""
        with self.folder.locked(self._purpose, self.services.warn) as lock, self._disk_errors():
            training = self._open(lock)
            status = "FAILED"
            try:
                with self.folder.marked_as_running():
                    yield training
                status = "FINISHED"
            except (RunInterrupted, KeyboardInterrupt) as interrupt:
                status = "KILLED"
                raise RunInterrupted(f"{interrupt or 'interrupted'}; go on with: ngsgd resume {self.folder.path}") from interrupt
            finally:
                training.trackers.close(status)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turn a full or failing disk into one message."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{error.filename or self.folder.path} could not be written ({error.strerror}); make room or fix "
                                  f"the permissions, then go on with: ngsgd resume {self.folder.path}") from error

    def _open(self, lock: RunLock) -> _Training:
        config, folder, data, report = self.config, self.folder, self.data, self.services.report
        folder.remember_data(data.corpus.digest, data.egs_directory, data.extractor)
        spec = SpeechTaskSpec(config, str(data.egs_directory),
                          sequences.sequence_data(config, folder, data.corpus, data.cache_root, report))
        sequences.report_skipped(spec, report)
        shards = spec.shards()
        schedule, stages = schedule_of(config, shards), stages_of(config, shards)
        layout = FlatLayout.of(model_for(config, spec.frames()))
        checkpoints = CheckpointStore(folder.checkpoints, layout, config.checkpoint.num_to_keep,
                                      wanted_for_combination(config, schedule, stages), lock)
        latest, problems = checkpoints.latest()
        for problem in problems:
            report(problem)
        events = EventLog(folder.events, latest.progress.outer_iter if latest else -1)
        if latest and events.has(latest.progress.outer_iter):
            latest = replace(latest, record=None)
        job_counts = [one.num_jobs for one in schedule.outer_iterations()]
        return _Training(spec, checkpoints, latest, Trackers([events, *self.services.make_trackers(config, folder, job_counts)]))

    def _iterate(self, training: _Training) -> Checkpoint:
        """Run the remaining outer iterations on the workers that the services provide."""
        config, folder, services, spec = self.config, self.folder, self.services, training.spec
        fingerprint = self._fingerprint or FingerprintCheck.of_resumed_run(config, folder, services.report, allow_other_bits=False)
        torch.set_num_threads(fingerprint.num_threads)
        size = training.checkpoints.layout.size
        # the model, and next to it at most two buffers of the outer optimizer and a moving average
        require_room(folder.path, 4 * size * (1 + len(make_rule(config.outer).buffers) + (config.outer.ema_decay > 0)))
        start = self._start(training)
        pool = services.make_pool(PoolRequest(spec, fingerprint.num_threads, size, folder.workers, fingerprint.agreement,
                                              services.stop.expired))
        services.report(f"starting {config.cluster.num_workers} workers ({config.cluster.kind}, {fingerprint.num_threads} threads "
                        "each)")

        def on_start() -> None:
            fingerprint.keep(start.progress.outer_iter + 1)
            for line in fingerprint.differences:
                training.trackers.incident(Incident("other_bits", f"other bits from here on, as was allowed: {line}",
                                                    start.progress.outer_iter + 1, elapsed_s=start.progress.elapsed_s))

        return train(spec, pool, training.checkpoints, start, folder.ledger, tracker=training.trackers, stop=services.stop,
                     clock=services.clock, on_start=on_start, catch_signals=services.catch_signals)

    def _start(self, training: _Training) -> Checkpoint:
        if training.latest is None:
            model = model_for(self.config, training.spec.frames())
            return first_checkpoint(sequences.starting_parameters(self.config, self.folder, model))
        self.services.report(f"going on after outer iteration {training.latest.progress.outer_iter + 1}")
        return training.latest

    def _model_after(self, outer_iter: int) -> tuple[nn.Module, npt.NDArray[np.float64]]:
        """Model and priors of a checkpoint; outer iterations are counted from 1."""
        config, reader = self.config, EgsReader(self.data.egs_directory)
        model = model_for(config, reader)
        set_stage(model, stages_of(config, reader).at(outer_iter - 1))
        layout = FlatLayout.of(model)
        store = CheckpointStore(self.folder.checkpoints, layout, config.checkpoint.num_to_keep)
        layout.load(model, store.model_after(outer_iter - 1))
        return model, average_posterior(model.eval(), reader, config.decode.num_prior_frames)


def _with_search_path(config: RunConfig) -> RunConfig:
    """Find a custom module before any data is made, and record its folder for the other processes of the run."""
    if not config.model._target_:
        return config
    search_path = os.path.abspath(config.model.search_path or os.getcwd())
    config = replace(config, model=replace(config.model, search_path=search_path))
    custom.find(config.model)
    return config


def require_model(config: RunConfig, reader: EgsReader, report: Report) -> None:
    """Raise what is wrong with the model for these data; statistics that it needs are kept next to the archives."""
    if needs_statistics(config.model):
        report("statistics of the training examples, for the model")
    model_for(config, reader)
    stages_of(config, reader)


def _remember(config: RunConfig, folder: RunFolder, warn: Report) -> None:
    """Record that this user began the run, so that it resumes on this machine without --trust."""
    if not config.model._target_:
        return
    try:
        permission.remember(config.model, folder.run_id)
    except (OSError, RuntimeError) as error:
        # no home directory, or a full one
        warn(f"that you began this run could not be recorded ({error}); to resume or decode it, add --trust.")
