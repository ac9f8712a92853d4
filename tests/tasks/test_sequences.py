"""Sequence objectives under the coordinator: they rise, and resuming changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.config import CombinationConfig, ObjectiveConfig, ScheduleConfig
from ngsgd.data.fetching.files import RemoteData
from ngsgd.errors import ConfigError, DivergenceError, RunInterrupted
from ngsgd.schedules import Shard
from ngsgd.sequence.archives import SequenceReader, prepare_sequences
from ngsgd.sequence.ngram import state_ngram
from ngsgd.sequence.objectives import Denominator
from ngsgd.tasks.speech import SequenceData, SpeechTaskSpec
from ngsgd.training.dispatcher import NeverStop
from ngsgd.training.worker import Worker
from tests import toy
from tests.data.test_fetching import FolderSource

SCHEDULE: dict[str, Any] = {"num_epochs": 2.0, "minibatch_size": 150, "lr_initial": 0.003, "lr_final": 0.001}


def run(folder: Path, kind: Any, *, num_jobs: int = 2, lr: float = 0.003, **objective: Any) -> toy.Run:
    train = toy.frame_set(3600, 1)
    labels = [train.pdf_T[begin:end] for begin, end in zip(train.offsets[:-1], train.offsets[1:], strict=True)]
    graph = state_ngram(labels, order=2).with_leak(0.1 if kind == "lfmmi" else 0.0)
    prior_P = np.bincount(train.pdf_T, minlength=toy.NUM_CLASSES) / len(train.pdf_T)
    denominator = Denominator(graph, np.log(prior_P), np.arange(toy.NUM_CLASSES) // 2, np.arange(toy.NUM_CLASSES) == 0)
    directory = prepare_sequences(train, graph, samples_per_iter=600, chunk_frames=0, digest="toy", cache_root=folder)
    schedule = ScheduleConfig(**SCHEDULE | {"lr_initial": lr, "num_jobs_initial": num_jobs, "num_jobs_final": num_jobs})
    config = toy.config(objective=ObjectiveConfig(kind=kind, acoustic_scale=1.0, **objective), schedule=schedule,
                        combination=CombinationConfig("none"))
    return toy.Run(folder, config, SequenceData(str(directory), denominator))


def test_a_node_without_the_folders_fetches_sequences_and_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = run(tmp_path, "mmi").spec
    offers = spec.offers()
    source = FolderSource({digest: path for offer in offers for digest, path in offer.paths.items()})
    fetched = spec.fetching(RemoteData(tuple(offer.folder for offer in offers), source, 1 << 40)).shards()
    here = spec.shards()
    assert isinstance(fetched, SequenceReader) and isinstance(here, SequenceReader)
    assert fetched.index == here.index and fetched.info == here.info
    for one, other in zip(*(reader.minibatches(Shard(1, 0), 150, seed=0, outer_iter=0, job=0) for reader in (here, fetched)),
                          strict=True):
        assert one.x_ND.equal(other.x_ND) and one.log_weight_B.equal(other.log_weight_B)
    # two indexes and one archive
    assert source.asked[-1] == here.index.sha256[1] and len(source.asked) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mmi", "bmmi", "mpe", "smbr", "lfmmi"])
def test_each_objective_rises_with_two_jobs(tmp_path: Path, kind: Any) -> None:
    training = run(tmp_path, kind)
    training.train()
    records = training.recorder.records
    assert len(records) == 6
    assert all(record.num_accepted == 2 for record in records)
    # seed 0: 0.03 (mpe, in shares of frames) to 0.3
    assert records[-1].objf > records[0].objf + 0.02
    assert records[-1].accuracy > records[0].accuracy  # of single frames


@pytest.mark.slow
def test_resuming_is_bitwise_identical_to_the_complete_run(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = run(tmp_path / "whole", "lfmmi").train()
    stopped = run(tmp_path / "stopped", "lfmmi")

    class StopAfterThree(NeverStop):
        def requested(self) -> bool:
            return len(stopped.recorder.records) >= 2  # records come one outer iteration late
    with pytest.raises(RunInterrupted):
        stopped.train(stop=StopAfterThree())
    end = stopped.train()
    assert end.progress.outer_iter == whole.progress.outer_iter
    assert np.array_equal(end.parameters, whole.parameters)


@pytest.mark.slow
def test_a_rate_far_too_high_is_stopped_by_the_guards(tmp_path: Path) -> None:
    """Limits on change keep this one from overflowing; without them no result is accepted."""
    limited = run(tmp_path, "lfmmi", lr=1e4)
    limited.train()
    assert all(np.isfinite(record.objf) for record in limited.recorder.records)
    (tmp_path / "free").mkdir()
    free = run(tmp_path / "free", "lfmmi", lr=1e30)
    object.__setattr__(free.config.optimizer, "max_change", 0.0)
    object.__setattr__(free.config.optimizer, "max_param_change", 0.0)
    with pytest.raises(DivergenceError):
        free.train()


def test_a_worker_without_the_denominator_reports_it(tmp_path: Path) -> None:
    training = run(tmp_path, "lfmmi")
    with pytest.raises(ConfigError, match="objective=ce"):
        Worker(SpeechTaskSpec(training.config, str(training.egs)), 0)
