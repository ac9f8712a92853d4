"""The ladder from transcripts to good labels: each rung trains on the labels of the one before.

1. flat start: labels of phones, or those of the corpus;
2. tied states of triphones, with features adapted to speakers (LDA, MLLT, fMLLR);
3. a first network: the model of the run with fewer epochs, which realigns the speech;
4. the final network: the run itself.

Each rung is stored under a name made of everything that it depends on. A stopped run therefore
continues at the rung that it reached, and runs that differ in later rungs share the first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ngsgd.asr.corpora import alignments
from ngsgd.asr.corpora import corpus as corpora
from ngsgd.config import DataConfig, ObjectiveConfig, RunConfig, SitesConfig
from ngsgd.errors import RunInterrupted
from ngsgd.files import cache_name, sha256
from ngsgd.models import build
from ngsgd.phase import Phase
from ngsgd.pipeline import score
from ngsgd.pipeline.adaptation import network_input, read
from ngsgd.pipeline.align import cache_folder, label, make_tied, with_alignment
from ngsgd.pipeline.base_run import BaseRun
from ngsgd.pipeline.services import Report, Services
from ngsgd.runs.run_folder import Place, RunFolder, folder_of_model, run_to_continue
from ngsgd.runs.rungs import Rung, Stopwatch, stored
from ngsgd.training.records import FinalReport, Trackers
from ngsgd.word_errors import WordErrors

# raise it when the same settings would give other labels
_VERSION = 3
# epochs of a network that realigns, relative to those of the final one
_EPOCHS = 2 / 3
_LDA_DIM = 40
# sections that determine a network; its data are known by their digest
_DECIDES = ("seed", "adaptation", "augment", "ivectors", "egs", "model", "optimizer", "schedule", "outer", "combination")

BuildRun = Callable[..., BaseRun]


def with_rungs(config: RunConfig) -> RunConfig:
    """Return the configuration with the settings that data.labels=ladder stands for.

    Settings other than 0 keep their values. Labels from a file, a graph with its own states, and
    i-vectors exclude the ladder, so that recipes for own data can ask for it.
    """
    data, adaptation, augment = config.data, config.adaptation, config.augment
    is_excluded = data.graph or config.ivectors.dim or data.alignment not in ("", "flat")
    if data.labels != "ladder" or is_excluded:
        return config
    if not adaptation.lda_dim:
        adaptation = replace(adaptation, lda_dim=_LDA_DIM, fmllr=True)
    if config.features.kind != "given" and not augment.changes_audio:
        # Kaldi's default for small corpora
        augment = replace(augment, speed="all")
    return replace(config, adaptation=adaptation, augment=augment, data=replace(data, num_leaves=data.num_leaves or -1),
                   align=replace(config.align, num_full_passes=config.align.num_full_passes or 1))


class Ladder:
    """The labels of a run, by the rungs below its own network; `rungs` are the finished ones.

    `build_run` is that of `ngsgd.pipeline.run`, which uses this class.
    """

    def __init__(self, services: Services, build_run: BuildRun) -> None:
        self.rungs: list[Rung] = []
        self._services, self._build_run = services, build_run

    def labels(self, config: RunConfig, cache_root: Path, report: Report) -> DataConfig:
        """Return the data settings with the file of labels.

        Raises RunInterrupted for a stop in a first network; the same command continues.
        """
        climbs = config.align.num_full_passes > 0
        if climbs and config.init_model and (known := RunFolder(folder_of_model(config.init_model)).alignment()):
            # another tree would not have the states of the initial model
            return replace(config.data, alignment=known)
        data = with_alignment(config, cache_root, report)
        if climbs and data is not config.data:
            self._reached(Path(data.alignment))
            if config.data.num_leaves:
                data = replace(data, alignment=str(make_tied(config, data, cache_root, report)))
                self._reached(Path(data.alignment))
        for _ in range(config.align.num_full_passes):
            data = replace(data, alignment=str(self._realigned(config, data, cache_root)))
        return data

    def _realigned(self, config: RunConfig, data: DataConfig, cache_root: Path) -> Path:
        """The file of labels by a network that is trained on the labels of `data`."""
        report, watch = self._services.report, Stopwatch("tied states and adapted features")
        network = replace(
            config, output_dir=str(cache_root / "networks"), init_model="",
            data=replace(data, cache_dir=str(cache_root), labels="one_step"),
            align=replace(config.align, num_full_passes=0), objective=ObjectiveConfig(),
            sites=SitesConfig(), tracking=replace(config.tracking, kind="none"),
            schedule=replace(config.schedule, num_epochs=_EPOCHS * config.schedule.num_epochs),
            decode=replace(score.coarse(config.decode), oracle=False, lattices=False))
        corpus = corpora.prepare(data, config.features, cache_root, report, augment_config=config.augment)
        corpus, adaptation = network_input(network, corpus, cache_root, report)
        if adaptation:
            if not stored(adaptation):
                # those that the transforms were estimated with, as of Kaldi's tri3
                mixtures, valid = read(adaptation, corpus.num_pdfs).adapted, corpus.valid
                features = dict(zip(valid.frames.utt_ids, valid.split_features(), strict=True))
                errors = score.word_errors(corpus, config.decode, lambda utt_id: mixtures.log_likelihood(features[utt_id]),
                                           report) if mixtures else None
                watch.stored(adaptation, errors)
            self._reached(adaptation)
        name = network_name(network, corpus)
        labels = cache_root / f"ali-{name}.npz"
        if not labels.exists():
            watch = Stopwatch("first network")
            scores = self._trained_and_realigned(replace(network, name=name), labels)
            watch.stored(labels, WordErrors.of_json(scores["valid"]))
        self._reached(labels)
        return labels

    def _reached(self, path: Path) -> None:
        for rung in stored(path):
            self.rungs.append(rung)
            self._services.report(f"ladder: {rung}")

    def _trained_and_realigned(self, network: RunConfig, labels: Path) -> dict[str, Any]:
        """Train a network, or finish its training, and write its labels; return its scores."""
        self._services.report(Phase("first network"))
        begun = run_to_continue(network)
        trackers = self._services.make_trackers
        services = replace(self._services, begin=lambda _config: None, place=Place(),
                           make_trackers=lambda *of_run: [_WithoutResult(trackers(*of_run))])
        try:
            run = self._build_run(network, services, folder=RunFolder(begun) if begun else None)
            if not run.folder.decode.exists():
                run.train()
                # the pool of the network ended the Ray that was begun for the run
                self._services.begin(network)
        except RunInterrupted as stop:
            raise RunInterrupted("stopped in the first network of the ladder; the same command continues there.") from stop
        self._services.report(Phase("first network: realignment"))
        alignments.write(labels, label(network, run.folder, cache_folder(network), self._services.report))
        return run.metrics


def network_name(network: RunConfig, corpus: corpora.Corpus) -> str:
    """Name of a network that realigns the corpus, and of its labels."""
    settings = {name: value for name, value in asdict(network).items() if name in _DECIDES}
    # of a custom network
    path = inspect.getsourcefile(build.find_custom(network.model)) if network.model._target_ else None
    return cache_name("network", version=_VERSION, corpus=corpus.digest, settings=settings,
                      oov_word=network.data.oov_word, code=sha256(Path(path)) if path else "",
                      precision=network.cluster.precision, compression=network.cluster.compression)


class _WithoutResult(Trackers):
    """Trackers that do not show the result of a first network as that of the run."""

    def finished(self, report: FinalReport) -> None:
        pass
