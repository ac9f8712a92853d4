"""A small learnable task and the pieces around it, for tests of training."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import ClusterConfig, EgsConfig, ModelConfig, OptimizerConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader
from ngsgd.models.statistics import model_for
from ngsgd.optim.outer.rules import Array, Average
from ngsgd.schedules import Schedule
from ngsgd.tasks.speech import SequenceData, SpeechTaskSpec
from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.dispatcher import NeverStop, StopSignal
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord
from ngsgd.training.storage.audit import audit
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, first_checkpoint
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.worker_pool import WorkerPool

NUM_CLASSES, DIM = 6, 5


def frame_set(num_frames: int, seed: int, utterance: int = 57) -> FrameSet:
    """Frames around one mean per class; the utterance length divides neither example nor set."""
    random = np.random.default_rng(seed)
    means = np.random.default_rng(99).normal(size=(NUM_CLASSES, DIM))
    pdf = np.repeat(random.integers(0, NUM_CLASSES, num_frames // 4 + 1), 4)[:num_frames].astype(np.int32)
    features = (means[pdf] + 0.7 * random.normal(size=(num_frames, DIM))).astype(np.float32)
    offsets = np.append(np.arange(0, num_frames, utterance), num_frames)
    return FrameSet(features, pdf, offsets, tuple(f"utt{u}" for u in range(len(offsets) - 1)))


class Median(Average):
    """The middle of the jobs' vectors: no function of their mean."""

    def center(self, vectors: Sequence[Array], shares: Sequence[float], part: slice) -> Array:
        return np.asarray(np.median([vector[part].astype(np.float64) for vector in vectors], axis=0))


def config(**changes: Any) -> RunConfig:
    """A run of a second: 3 archives, 2 jobs."""
    settings: dict[str, Any] = {
        "egs": EgsConfig(left_context=2, right_context=1, frames_per_eg=4, samples_per_iter=300, num_diagnostic_frames=200),
        "model": ModelConfig(num_layers=2, hidden_dim=16),
        "schedule": ScheduleConfig(num_epochs=1.0, minibatch_size=64, lr_initial=0.01, lr_final=0.001,
                                   num_jobs_initial=2, num_jobs_final=2),
        "optimizer": OptimizerConfig(rank_in=4, rank_out=4),
        "outer": OuterConfig("average"),
        "cluster": ClusterConfig(num_workers=2, threads_per_worker=1)}
    return RunConfig(**{**settings, **changes})


class Recorder:
    def __init__(self) -> None:
        self.records: list[OuterIterationRecord] = []
        self.incidents: list[Incident] = []
        self.reports: list[FinalReport] = []
        self.status = ""

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.records.append(record)

    def incident(self, incident: Incident) -> None:
        self.incidents.append(incident)

    def finished(self, report: FinalReport) -> None:
        self.reports.append(report)

    def close(self, status: str) -> None:
        self.status = status


class StopAfter:
    """Requests a stop after some questions of the coordinator, with time to finish or `at_once`."""

    def __init__(self, num_questions: int, at_once: bool = False) -> None:
        self.left, self.at_once = num_questions, at_once

    def requested(self) -> bool:
        self.left -= 1
        return self.left < 0

    def expired(self) -> bool:
        return self.at_once and self.requested()


class Run:
    """A run folder with its data, and a coordinator over whatever pool."""

    def __init__(self, folder: Path, run_config: RunConfig | None = None, sequences: SequenceData | None = None) -> None:
        self.folder = folder
        self.config = run_config or config()
        self.egs = prepare_archives(frame_set(3600, 1), frame_set(600, 2), self.config.egs, num_classes=NUM_CLASSES,
                                    digest="toy", cache_root=folder)
        self.reader = EgsReader(self.egs)
        self.spec = SpeechTaskSpec(self.config, str(self.egs), sequences)
        self.shards = self.spec.shards()
        self.recorder = Recorder()
        # takes lines of progress
        self.report: Callable[[str], object] = lambda _line: None
        self.model = model_for(self.config, self.reader)
        self.store = CheckpointStore(folder / "checkpoints", FlatLayout.of(self.model), num_to_keep=3)
        self.store.directory.mkdir(exist_ok=True)

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.jsonl"

    @property
    def schedule(self) -> Schedule:
        return self.spec.task().shards().schedule(self.config.schedule)

    def in_process(self, should_stop: Callable[[], bool] = lambda: False) -> InProcessPool:
        return InProcessPool(self.spec, self.config.cluster.num_workers, 1, should_stop)

    def train(self, pool: WorkerPool | None = None, stop: StopSignal | None = None) -> Checkpoint:
        pool = pool or self.in_process()
        layout = self.store.layout
        latest, problems = self.store.latest()
        for problem in problems:
            self.recorder.incident(Incident("checkpoint_skipped", problem, latest.progress.outer_iter if latest else -1))
        if latest and any(record.outer_iter == latest.progress.outer_iter for record in self.recorder.records):
            latest = replace(latest, record=None)
        fresh = model_for(self.config, self.reader)
        start = latest or first_checkpoint(layout.flatten(fresh.state_dict()))
        ledger = Ledger(self.ledger_path)
        try:
            pool.start()
            return Coordinator(
                self.spec.task(), self.model, self.schedule, pool, RunStorage(self.store, ledger, self.recorder),
                self.spec.settings, RunControl(stop or NeverStop(), report=self.report)).train(start)
        finally:
            ledger.close()
            pool.close()


@functools.cache
def undisturbed(run_config: RunConfig) -> Checkpoint:
    with tempfile.TemporaryDirectory() as folder:
        return Run(Path(folder), run_config).train()


def require_undisturbed(run: Run, pool: WorkerPool | None = None, plain: RunConfig
                        | None = None) -> Checkpoint:
    """Train; the model must be that of one process without faults, and the ledger sound.

    `plain` is the configuration of the undisturbed run. Default: that of `run`.
    """
    whole = undisturbed(plain or run.config)
    end = run.train(pool)
    assert end.model_sha256 == whole.model_sha256
    assert audit(run.ledger_path) == []
    return end
