"""Alignment of frames with HMM states, from the transcripts alone or by a trained model.

A flat start gives each state of the words an equal part of the utterance. Training then alternates
with the search for the best path: of one Gaussian per state first, then of a small network.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ngsgd.asr.align import forced_alignment
from ngsgd.asr.align.forced_alignment import Realigned, Scores, States
from ngsgd.asr.corpora import alignments, corpus
from ngsgd.asr.corpora.corpus import Corpus
from ngsgd.asr.lang import graphs
from ngsgd.asr.utterance import UNALIGNED
from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import ClusterConfig, DataConfig, ModelConfig, OuterConfig, RunConfig, ScheduleConfig
from ngsgd.counting import counted
from ngsgd.data.archives import prepare_archives
from ngsgd.data.reader import EgsReader
from ngsgd.errors import ConfigError
from ngsgd.files import cache_name
from ngsgd.interface import option
from ngsgd.models import build_model
from ngsgd.object_storage.urls import local_root
from ngsgd.phase import Progress
from ngsgd.pipeline.adaptation import network_input, with_ivectors
from ngsgd.pipeline.base_run import train
from ngsgd.pipeline.score import computed_log_likelihoods, word_errors
from ngsgd.pipeline.services import Report
from ngsgd.runs.final_model import load_final
from ngsgd.runs.run_folder import RunFolder
from ngsgd.runs.rungs import Stopwatch
from ngsgd.tasks.frame_scores import average_posterior
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import OuterIterationRecord, Tracker
from ngsgd.training.storage.checkpoint import CheckpointStore, first_checkpoint
from ngsgd.training.worker import never

# learning rates of the small networks, per frame
LR_INITIAL, LR_FINAL = 0.005, 0.0005
# of each training of the small network
NUM_EPOCHS = 2.0
# fraction of all frames; another pass would change as few
FEW_CHANGES = 0.005
# realignments with one Gaussian per state after a flat start
_GAUSSIAN_PASSES = 20
# increase it if the same settings would give another alignment
RECIPE_VERSION = 3


def cache_folder(config: RunConfig) -> Path:
    """The folder of prepared data of a run."""
    return Path(config.data.cache_dir or local_root(config.output_dir) / "data").absolute()


def with_alignment(config: RunConfig, cache_root: Path, report: Report) -> DataConfig:
    """Return the data settings, with a new alignment if labels are needed."""
    if not corpus.needs_alignment(config.data):
        return config.data
    return replace(config.data, alignment=str(make(config, cache_root, report)))


def make(config: RunConfig, cache_root: Path, report: Report) -> Path:
    """Return the file of the alignment for these data and settings; compute it if needed.

    Raises ConfigError if data.graph numbers the HMM states: a flat start numbers those of the
    lexicon.
    """
    if config.data.graph:
        raise ConfigError(f"data.graph is {config.data.graph}, which defines the numbers of its "
                          "HMM states, but a flat start uses the numbers of the phones of the "
                          "lexicon. Set data.alignment=FILE with the numbers of the graph, such as "
                          "ali.*.gz of Kaldi with its final.mdl, or leave data.graph empty.")
    speech = corpus.prepare_unaligned(config.data, config.features, cache_root, report)
    # the small network and its schedule, one job at a time
    a = config.align
    settings = RunConfig(
        seed=config.seed, align=a, features=config.features, data=DataConfig(oov_word=config.data.oov_word),
        egs=replace(config.egs, samples_per_iter=a.samples_per_iter),
        model=ModelConfig(kind="relu", num_layers=a.num_layers, hidden_dim=a.hidden_dim),
        schedule=ScheduleConfig(num_epochs=NUM_EPOCHS, minibatch_size=128, lr_initial=LR_INITIAL,
                                lr_final=LR_FINAL, num_jobs_initial=1, num_jobs_final=1), outer=OuterConfig(kind="average"),
        cluster=ClusterConfig(kind="in_process", num_workers=1, threads_per_worker=1))
    name = cache_name("ali", version=RECIPE_VERSION, corpus=speech.digest, settings=asdict(settings))
    path = cache_root / f"{name}.npz"
    if not path.exists():
        watch = Stopwatch("flat start")
        known: States = {}
        if config.data.added_dirs and config.data.alignment != "flat":
            # only the speech of data.added_dirs has no labels
            known = {utt_id: pdf_T for utt_id, pdf_T in _labels(speech).items() if not (pdf_T == UNALIGNED).any()}
        with tempfile.TemporaryDirectory(prefix=".align-", dir=cache_root) as folder:
            states, logliks = _align(speech, settings, Path(folder), report, known)
        is_rung = logliks and config.align.num_full_passes
        errors = word_errors(speech, config.decode, logliks, report) if is_rung else None
        alignments.write(path, states)
        watch.stored(path, errors)
    return path


def _labels(speech: Corpus) -> States:
    return {utt_id: pdf_T for one in (speech.train, speech.valid, speech.test)
            for utt_id, pdf_T in zip(one.frames.utt_ids, one.split_pdfs(), strict=True)}


def _align(speech: Corpus, settings: RunConfig, folder: Path, report: Report, known: States) -> tuple[States, Scores]:
    """Return the states of unknown utterances, and the scores of the last network, if any."""
    a, oov = settings.align, settings.data.oov_word
    lost: tuple[str, ...] = ()
    if known:
        starts = forced_alignment.flat_start(speech, oov)
        unknown: States = {utt_id: starts[utt_id] for utt_id in starts if utt_id not in known}
    else:
        moved = _sorted_out(speech, settings, report)
        unknown, lost = moved.states, moved.lost
    states = known or unknown
    num_short = sum(len(one.texts) for one in (speech.train, speech.valid, speech.test)) - len(known) - len(unknown)
    if num_short:
        report(f"align: {counted(num_short, 'utterance is', 'utterances are')} skipped, because they have fewer frames than "
               "their words have states")
    # equal parts alone would not use the known labels
    num_passes = max(a.num_passes, 1) if known else a.num_passes
    tested = set(speech.test.frames.utt_ids)
    logliks: Scores = {}
    for number in range(1, num_passes + 1):
        (folder / str(number)).mkdir()
        logliks = _learn(speech, states, settings, folder / str(number), report, f"alignment: network {number} of {num_passes}")
        # no network learns from the test set, so it is aligned by the last one
        aligned = {utt_id: unknown[utt_id] for utt_id in unknown if number == num_passes or utt_id not in tested}
        progress = Progress(report, f"alignment: by network {number} of {num_passes}", len(aligned))
        done = forced_alignment.realign(speech, aligned, logliks, oov, each=progress.each)
        report(f"align: network {number}/{num_passes}: "
               f"{forced_alignment.share_changed(aligned, done.states):.1%} of the frames changed "
               "their state" + (f", {counted(len(done.lost), 'utterance has', 'utterances have')} no path" if done.lost else ""))
        unknown, lost = {**unknown, **done.states}, done.lost
        states = {**known, **unknown}
    return {utt_id: pdf_T for utt_id, pdf_T in unknown.items() if utt_id not in lost}, logliks


def _sorted_out(speech: Corpus, settings: RunConfig, report: Report) -> Realigned:
    """Re-align two flat starts by Gaussians until they converge; return the more likely one.

    The Gaussians are of the training set, so held-out utterances are aligned once, at the end.
    """
    found, oov, x_TK = [], settings.data.oov_word, forced_alignment.Decorrelated(speech)
    train = set(speech.train.frames.utt_ids)
    for name, start in (("equal parts", forced_alignment.flat_start),
                        ("equal parts of speech", forced_alignment.silence_start)):
        starts = start(speech, oov)
        states: States = {utt_id: pdf_T for utt_id, pdf_T in starts.items() if utt_id in train}
        for number in range(1, _GAUSSIAN_PASSES + 1):
            passes = Progress(report, f"alignment: {name}, pass {number} of at most {_GAUSSIAN_PASSES}", len(states))
            logliks = forced_alignment.score_by_gaussians(speech, states, oov, x_TK)
            done = forced_alignment.realign(speech, states, logliks, oov, each=passes.each)
            changed = forced_alignment.share_changed(states, done.states)
            states = done.states
            if changed < FEW_CHANGES:
                break
        report(f"align: {name}, then Gaussians: log-likelihood {-done.cost_per_frame:.3f} per frame")
        found.append((done, logliks, {utt_id: pdf_T for utt_id, pdf_T in starts.items() if utt_id not in train}))
    best, logliks, held_out = min(found, key=lambda one: one[0].cost_per_frame)
    others = forced_alignment.realign(speech, held_out, logliks, oov, each=Progress(report, "alignment: held-out speech").each)
    return Realigned({**best.states, **others.states}, best.lost + others.lost, best.cost_per_frame)


class _Iterations(Tracker):
    """Counts the outer iterations of a small network."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self._progress.add(1)


def _learn(speech: Corpus, states: States, settings: RunConfig, folder: Path, report: Report, name: str) -> Scores:
    """Train a network on these states in this process; return all log-likelihoods."""
    frames, valid = speech.train.labelled(states).frames, speech.valid.labelled(states).frames
    reader = EgsReader(prepare_archives(frames, valid, settings.egs, num_classes=speech.num_pdfs, digest="", cache_root=folder))
    model = build_model(settings.model, reader.info.num_inputs, reader.info.num_classes, settings.seed)
    layout = FlatLayout.of(model)
    spec = SpeechTaskSpec(settings, str(reader.directory))
    (folder / "checkpoints").mkdir()
    num_iters = spec.task(torch.device("cpu")).shards().schedule(spec.settings.schedule).num_outer_iters
    end = train(spec, InProcessPool(spec, 1, 1, never), CheckpointStore(folder / "checkpoints", layout, 1),
                first_checkpoint(layout.flatten(model.state_dict())), folder / "ledger.jsonl",
                tracker=_Iterations(Progress(report, name, num_iters, "outer iterations")))
    layout.load(model, end.parameters)
    prior_P = average_posterior(model.eval(), reader)
    return computed_log_likelihoods((speech.train, speech.valid, speech.test), settings.egs, model, prior_P)


def label(config: RunConfig, folder: RunFolder, cache_root: Path, report: Report, *, trust: bool = False) -> States:
    """Align all frames by the final model of a run, with the best path of every transcript.

    All pronunciations and optional pauses are allowed, so the labels fit the speech better than
    those of the training. `trust` imports the module of a custom network. Raises ConfigError if the
    corpus is spliced from labeled recordings.
    """
    if config.data.corpus in ("digits", "fsdd"):
        raise ConfigError(f"recipe={config.data.corpus} splices its speech from labeled "
                          f"recordings, which a model of complete strings cannot align; align without {option('model', '')}.")
    model, prior_P = load_final(folder, trust=trust)
    tied = None
    if config.data.num_leaves or config.adaptation.lda_dim:
        # the tree and the transforms are made from the labels and the speech of the run
        data = replace(config.data, alignment=folder.alignment()) if folder.alignment() else \
            with_alignment(config, cache_root, report)
        speech = corpus.prepare(data, config.features, cache_root, report, augment_config=config.augment)
        features, _ = network_input(config, speech, cache_root, report)
        tied = features.language if config.data.num_leaves else None
    else:
        speech = corpus.prepare_unaligned(config.data, config.features, cache_root, report)
        if config.ivectors.dim:
            speech = with_ivectors(config, speech, folder.ivectors, cache_root, report)
        features = speech
    logliks = computed_log_likelihoods((features.train, features.valid, features.test), config.egs, model, prior_P)
    # the states of a graph of the data have separate numbers, and may be tied
    given = graphs.read(speech.language.given) if config.data.graph and speech.language.given else None
    each = Progress(report, "alignment", len(labels := _labels(speech))).each
    done = forced_alignment.realign(speech, labels, logliks, config.data.oov_word, given, tied, each)
    states = {utt_id: pdf_T for utt_id, pdf_T in done.states.items() if utt_id not in done.lost}
    report(f"align: {counted(len(states), 'utterance')}, {len(done.lost)} without a path skipped; "
           f"log-likelihood {-done.cost_per_frame:.3f} per frame")
    return states
