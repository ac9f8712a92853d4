"""Puts a run together: data, workers, coordinator, trackers; and takes it up again after it was stopped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ngsgd.asr.corpora.corpus import Corpus, check_source, prepare
from ngsgd.cluster.in_process import InProcessPool
from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.reader import EgsReader
from ngsgd.errors import EXIT_OK, CheckpointError, ConfigError, DataError, RunInterrupted
from ngsgd.files import remove_abandoned
from ngsgd.launcher.commands.align import with_alignment
from ngsgd.launcher.config import compose, limits
from ngsgd.launcher.mlflow.store import tracking_uri
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.launcher.ray.probe import require_cluster
from ngsgd.launcher.reports.plots import draw
from ngsgd.launcher.reports.predictions import Forecast
from ngsgd.launcher.reports.progress import ProgressTracker
from ngsgd.launcher.runs import sequences
from ngsgd.launcher.runs import trust as permission
from ngsgd.launcher.runs.final_model import (
    check_final,
    decode_and_score,
    final_parameters,
    load_final,
    save_final,
    score_held_out,
    wanted_for_combination,
)
from ngsgd.launcher.runs.fingerprint_check import SameBits
from ngsgd.launcher.runs.ivectors import extractor_of, with_ivectors
from ngsgd.launcher.runs.run_folder import RunFolder, check_output_dir, folder_of_model, require_unchanged, run_name
from ngsgd.launcher.signals import SignalStop, signals_to
from ngsgd.launcher.text import masked
from ngsgd.models import custom
from ngsgd.models.growing import set_stage
from ngsgd.models.statistics import model_for, needs_statistics
from ngsgd.optim.outer import make_rule
from ngsgd.tasks.frame_scores import average_posterior, score_subset
from ngsgd.tasks.frames import schedule_of, stages_of
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.coordinator import Coordinator, RunControl, RunStorage
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import FinalReport, Incident
from ngsgd.training.settings import EngineSettings
from ngsgd.training.storage.checkpoint import Checkpoint, CheckpointStore, first_checkpoint, require_room
from ngsgd.training.storage.event_log import EventLog, read_events
from ngsgd.training.storage.ledger import Ledger
from ngsgd.training.storage.lock import RunLock
from ngsgd.training.tracking import Tracker, Trackers
from ngsgd.training.worker_pool import WorkerPool


def train(config: RunConfig, quiet: bool, trust: bool = False, *, allow_other_bits: bool = False) -> FinalReport:
    """A new run, from data to word error rate; returns what it came to.

    `trust` allows the import of a module that the model to start from names, and that these settings do not.
    """
    check_output_dir(config)
    if config.cluster.kind in ("slurm", "kubernetes"):
        raise ConfigError(f"cluster={config.cluster.kind} is a place to submit to: ngsgd submit cluster={config.cluster.kind} ...")
    config = _with_search_path(config)
    permission.allow(config.model)
    sequences.require_init_model(config)
    if config.init_model:
        check_final(folder_of_model(config.init_model) / "final")
        permission.require_final(folder_of_model(config.init_model) / "final", config.model, trust=trust)
    require_cluster(config.cluster)
    progress = _progress(config, quiet)
    data = _prepare(config, progress.report)  # before the run folder: wrong data leaves nothing behind, nor does a wrong model
    _require_model(config, EgsReader(data.egs_directory), progress.report)
    folder = RunFolder.create(config, compose.to_yaml(config))
    with folder.locked("train", progress.warn) as lock:
        progress.report(f"run folder {folder.path}")
        _remember(config, folder, progress.warn)
        sequences.keep_init_model(config, folder)
        bits = SameBits.of_new_run(config, folder, allow_other_bits=allow_other_bits)
        return _run(config, folder, lock, data, progress, bits)


def resume(run_dir: Path, quiet: bool, address: str | None = None, num_workers: int | None = None, *,
           accept_changed_config: bool = False, trust: bool = False, given: RunConfig | None = None,
           allow_other_bits: bool = False) -> int:
    """Goes on after the last committed outer iteration, with the run's own configuration.

    Where its workers are and how many changes no number, so that may be another than it was; the threads of each stay.
    `given` has the settings of a command line that began the run or might have: a module that it names too needs no `trust`.
    """
    folder = RunFolder.open(run_dir)
    config = compose.from_yaml(folder.config)
    require_unchanged(folder.config, accept=accept_changed_config)
    bits = SameBits.of_resumed_run(config, folder, _progress(config, quiet).report, allow_other_bits=allow_other_bits)
    cluster = config.cluster
    config = replace(config, cluster=replace(cluster, address=cluster.address if address is None else address,
                                             num_workers=num_workers or cluster.num_workers))
    config = _as_given(config, given)
    if config.tracking.kind == "mlflow":
        # before any work: a password that only the first command line had
        tracking_uri(config)
    permission.require_run(folder, config.model, trust=trust)
    require_cluster(config.cluster)
    progress = _progress(config, quiet)
    with folder.locked("resume", progress.warn) as lock:
        _run(config, folder, lock, _prepare(config, progress.report, folder), progress, bits)
    return EXIT_OK


def _as_given(config: RunConfig, given: RunConfig | None) -> RunConfig:
    """With what is no part of config.yaml: the login of tracking.uri, and leave to import the module that both name.

    That module is found in the folder that the command line names, and its arguments must be the same.
    """
    if given is not None and masked(given.tracking.uri, known=False) == config.tracking.uri:
        config = replace(config, tracking=replace(config.tracking, uri=given.tracking.uri))
    if given is None or not given.model._target_:
        return config
    if (given.model._target_, given.model.args) != (config.model._target_, config.model.args):
        return config
    found = os.path.abspath(given.model.search_path or os.getcwd())
    config = replace(config, model=replace(config.model, search_path=found))
    permission.allow(config.model)
    return config


def _remember(config: RunConfig, folder: RunFolder, warn: Callable[[str], None]) -> None:
    """So that this user resumes the run on this machine without --trust."""
    if not config.model._target_:
        return
    try:
        permission.remember(config.model, folder.run_id)
    except (OSError, RuntimeError) as error:  # no home, or a full one
        warn(f"that you began this run could not be recorded ({error}); to resume or decode it, add --trust.")


def decode(run_dir: Path, quiet: bool, trust: bool = False) -> int:
    """Decodes again with the final model of a run."""
    folder = RunFolder.open(run_dir)
    config = compose.from_yaml(folder.config)
    require_unchanged(folder.config)
    progress = _progress(config, quiet)
    with folder.locked("decode", progress.warn):
        model, prior_P = load_final(folder, trust=trust)
        data = _prepare(config, progress.report, folder)
        result = decode_and_score(folder, config, data.corpus, model, prior_P)
    progress.report(f"valid  {result.valid}")
    progress.report(f"test   {result.test}")
    return EXIT_OK


def evaluate(run_dir: Path, quiet: bool, outer_iter: int | None = None,
             trust: bool = False) -> dict[str, dict[str, float] | None]:
    """Objf per frame and frame accuracy of valid and test, all of them; of the final model, or of a checkpoint that is kept."""
    folder = RunFolder.open(run_dir)
    config = compose.from_yaml(folder.config)
    require_unchanged(folder.config)
    if outer_iter is None:
        model, prior_P = load_final(folder, trust=trust)
    else:
        permission.require_run(folder, config.model, trust=trust)
    data = _prepare(config, _progress(config, quiet).report, folder)
    if outer_iter is not None:
        reader = EgsReader(data.egs_directory)
        model = model_for(config, reader)
        set_stage(model, stages_of(config, reader).at(outer_iter - 1))
        layout = FlatLayout.of(model)
        layout.load(model, CheckpointStore(folder.checkpoints, layout, config.checkpoint.num_to_keep).model_after(outer_iter - 1))
        prior_P = average_posterior(model.eval(), reader, config.decode.num_prior_frames)
    scores = score_held_out(config, data.corpus, model, prior_P)
    return {name: asdict(score) if score else None for name, score in scores.items()}


def _require_model(config: RunConfig, reader: EgsReader, report: Callable[[str], None]) -> None:
    """Raises what is wrong with the model for these data; leaves what it takes from them beside the archives."""
    if needs_statistics(config.model):
        report("statistics of the training examples, for the model")
    model_for(config, reader)
    stages_of(config, reader)


def _with_search_path(config: RunConfig) -> RunConfig:
    """A module of the user's own is found before any data is made, and from then on wherever a process of the run starts."""
    if not config.model._target_:
        return config
    config = replace(config, model=replace(config.model, search_path=os.path.abspath(config.model.search_path or os.getcwd())))
    custom.find(config.model)
    return config


@dataclass(frozen=True)
class _Data:
    corpus: Corpus
    egs_directory: Path
    cache_root: Path
    extractor: Path | None = None


def _prepare(config: RunConfig, report: Callable[[str], None], folder: RunFolder | None = None) -> _Data:
    """The data of a run; of a run that has begun, with the i-vector extractor in its folder."""
    limits.require_memory(config.model)
    check_source(config.data)
    cache_root = Path(config.data.cache_dir or Path(config.output_dir) / "data").absolute()
    remove_abandoned(cache_root)
    try:
        data = with_alignment(config, cache_root, report)
        corpus = prepare(data, config.features, cache_root, report, augment_config=config.augment)
        extractor = None
        if config.ivectors.dim:
            extractor = extractor_of(config, corpus, cache_root, report, folder)
            corpus = with_ivectors(config, corpus, extractor, cache_root, report)
        limits.require_schedule(config, corpus.train.frames.num_frames)
        egs_directory = prepare_archives(corpus.train.frames, corpus.valid.frames, config.egs,
                                         num_classes=corpus.num_pdfs, digest=corpus.digest, cache_root=cache_root,
                                         groups=corpus.train.speakers, silence_classes=corpus.language.topology.silence_pdfs,
                                         report=report)
    except OSError as error:
        raise DataError(f"the prepared data could not be written under {cache_root} ({error.strerror or error}); make room, or "
                        "choose another place with data.cache_dir=PATH.") from error
    return _Data(corpus, egs_directory, cache_root, extractor)


def prepared_corpus(config: RunConfig, folder: RunFolder) -> Corpus:
    """The speech of a run, from the cache where it is there."""
    return _prepare(config, print, folder).corpus


def _run(config: RunConfig, folder: RunFolder, lock: RunLock, data: _Data, progress: ProgressTracker,
         bits: SameBits) -> FinalReport:
    with _disk_errors(folder):
        folder.remember_data(data.corpus.digest, data.egs_directory, data.extractor)
        stop = SignalStop(config.failure.grace_s, progress.report)
        spec = SpeechTaskSpec(config, str(data.egs_directory),
                          sequences.sequence_data(config, folder, data.corpus, data.cache_root, progress.report))
        sequences.tell_left_out(spec, progress.report)
        checkpoints = _checkpoints(config, folder, spec, lock)
        latest = _latest(checkpoints, progress.report)
        events = EventLog(folder.events, latest.progress.outer_iter if latest else -1)
        if latest and events.has(latest.progress.outer_iter):
            latest = replace(latest, record=None)
        trackers = Trackers([events, progress, Forecast(config, _job_counts(config, spec), progress.report),
                             *_mlflow(config, folder, progress.warn)])
        status = "FAILED"
        try:
            with folder.marked_as_running():
                end = _train(config, folder, spec, checkpoints, latest, trackers, stop, progress.report, bits)
                report = _finish(config, folder, data, spec, checkpoints, end, progress.report)
                trackers.finished(report)
            status = "FINISHED"
        except (RunInterrupted, KeyboardInterrupt) as interrupt:
            status = "KILLED"
            raise RunInterrupted(f"{interrupt or 'interrupted'}; go on with: ngsgd resume {folder.path}") from interrupt
        finally:
            trackers.close(status)
        return report


@contextlib.contextmanager
def _disk_errors(folder: RunFolder) -> Iterator[None]:
    """A full or failing disk ends in one message."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder.path} could not be written ({error.strerror}); make room or fix the "
                              f"permissions, then go on with: ngsgd resume {folder.path}") from error


def _checkpoints(config: RunConfig, folder: RunFolder, spec: SpeechTaskSpec, lock: RunLock) -> CheckpointStore:
    """The checkpoints of a run, and the models that its final combination needs."""
    shards = spec.shards()
    wanted = wanted_for_combination(config, schedule_of(config, shards), stages_of(config, shards))
    layout = FlatLayout.of(model_for(config, spec.frames()))
    return CheckpointStore(folder.checkpoints, layout, config.checkpoint.num_to_keep, wanted, lock)


def _latest(checkpoints: CheckpointStore, report: Callable[[str], None]) -> Checkpoint | None:
    latest, problems = checkpoints.latest()
    for problem in problems:
        report(problem)
    return latest


def _train(config: RunConfig, folder: RunFolder, spec: SpeechTaskSpec, checkpoints: CheckpointStore, latest: Checkpoint | None,
           tracker: Tracker, stop: SignalStop, report: Callable[[str], None],
           bits: SameBits) -> Checkpoint:
    """All outer iterations that are left."""
    num_threads = bits.num_threads
    torch.set_num_threads(num_threads)
    reader, shards = spec.frames(), spec.shards()
    model = model_for(config, reader)
    size = checkpoints.layout.size
    # the model, and beside it at most two buffers of the outer optimiser and a moving average
    require_room(folder.path, 4 * size * (1 + len(make_rule(config.outer).buffers) + (config.outer.ema_decay > 0)))
    start = _start(config, folder, latest, model, report)
    pool = _pool(spec, folder, bits, size, stop)
    ledger = Ledger(folder.ledger, checkpoints.lock.fence if checkpoints.lock else 0)
    try:
        report(f"starting {config.cluster.num_workers} workers ({config.cluster.kind}, {num_threads} threads each)")
        pool.start()
        bits.keep(start.progress.outer_iter + 1)
        for line in bits.differences:
            tracker.incident(Incident("other_bits", f"other bits from here on, as was allowed: {line}",
                                      start.progress.outer_iter + 1, elapsed_s=start.progress.elapsed_s))
        coordinator = Coordinator(
            spec.task(), model, schedule_of(config, shards), pool, RunStorage(checkpoints, ledger, tracker),
            EngineSettings.of(config, num_averaging_threads=os.cpu_count() or 1), RunControl(stop))
        with signals_to(stop):
            return coordinator.train(start)
    finally:
        ledger.close()
        pool.close()


def _start(config: RunConfig, folder: RunFolder, latest: Checkpoint | None, model: nn.Module,
           report: Callable[[str], None]) -> Checkpoint:
    if latest is None:
        return first_checkpoint(sequences.starting_parameters(config, folder, model))
    report(f"going on after outer iteration {latest.progress.outer_iter + 1}")
    return latest


def _finish(config: RunConfig, folder: RunFolder, data: _Data, spec: SpeechTaskSpec, checkpoints: CheckpointStore, end: Checkpoint,
            report: Callable[[str], None]) -> FinalReport:
    """Final model, word error rates, learning curve."""
    reader = spec.frames()
    model, scratch = model_for(config, reader), model_for(config, reader)
    for one in (model, scratch):
        set_stage(one, stages_of(config, spec.shards()).at(end.progress.outer_iter))
    missing = checkpoints.missing_candidates(end.progress.outer_iter)
    if missing:
        report(f"the models of outer iterations {', '.join(str(one + 1) for one in missing)} are missing in {checkpoints.models}; "
               "the final model is combined from the others")
    checkpoints.layout.load(model, final_parameters(config, end, checkpoints, scratch, reader, report))
    save_final(folder, config, model, reader)
    model, prior_P = load_final(folder)  # what users will load, not what happens to be in memory
    result = decode_and_score(folder, config, data.corpus, model, prior_P)
    draw(read_events(folder.events), folder.learning_curve)
    files = {"run folder": folder.path, "final model": folder.final, "per-utterance": folder.decode / "test.per_utt.txt",
             "learning curve": folder.learning_curve, "events": folder.events}
    return FinalReport(str(result.test), result.test.wer, str(result.valid),
                       score_subset(model, reader.diagnostic("train")), score_subset(model, reader.diagnostic("valid")),
                       end.progress.frames_processed, end.progress.elapsed_s,
                       {label: str(path) for label, path in files.items()})


def _job_counts(config: RunConfig, spec: SpeechTaskSpec) -> list[int]:
    return [one.num_jobs for one in schedule_of(config, spec.shards()).outer_iterations()]


def _pool(spec: SpeechTaskSpec, folder: RunFolder, bits: SameBits, size: int, stop: SignalStop) -> WorkerPool:
    config, num_threads, agreement = spec.config, bits.num_threads, bits.agreement
    if config.cluster.kind == "in_process":
        return InProcessPool(spec, config.cluster.num_workers, num_threads, stop.expired, agreement)
    if config.cluster.kind == "local":
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads of one worker would starve another
        return ProcessPool(spec, config.cluster.num_workers, num_threads, size, log_directory=folder.workers, agreement=agreement)
    from ngsgd.launcher.ray.pool import RayPool
    return RayPool(spec, num_threads, size, agreement)


def _progress(config: RunConfig, quiet: bool) -> ProgressTracker:
    has_dashboard = config.tracking.kind == "mlflow" and not config.tracking.uri
    return ProgressTracker(quiet=quiet, output_dir=config.output_dir if has_dashboard else None)


def _mlflow(config: RunConfig, folder: RunFolder, warn: Callable[[str], None]) -> list[Tracker]:
    if config.tracking.kind == "none":
        return []
    return [MlflowTracker(config, folder.path, run_name(config), warn)]
