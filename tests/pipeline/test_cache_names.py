"""The name of every prepared file covers all that decides it: each cache, each changed input."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd import files
from ngsgd.asr import denominators
from ngsgd.asr.align import forced_alignment
from ngsgd.asr.align.tree_building import with_tied_states
from ngsgd.asr.corpora import alignments, corpus
from ngsgd.asr.ivectors import model as ivector_model
from ngsgd.config import ObjectiveConfig, RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.errors import DataError
from ngsgd.pipeline import adaptation, align, ladder
from ngsgd.pipeline.recipes import recipe
from ngsgd.pipeline.sequences import uniform_priors
from ngsgd.sequence.archives import prepare_sequences
from tests.asr.fake_fsdd import write_wav
from tests.asr.made_up_speech import write_data
from tests.reported import silent

for module in ("kaldi_decoder", "kaldi_native_fbank", "kaldifst"):
    pytest.importorskip(module)

ALL = {"kaldi", "ali", "tree", "adaptation", "network", "ivectors", "egs", "sequences"}
OF_LABELS = ALL - {"kaldi"}


def settings(source: Path) -> RunConfig:
    return recipe(
        "kaldi", features={"kind": "mfcc", "num_mel_bins": 23}, data={"source": str(source), "labels": "one_step"},
        adaptation={"lda_dim": 4},
        egs={"left_context": 1, "right_context": 1}, model={"hidden_dim": 8, "num_layers": 1})


def names(config: RunConfig, cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """Prepare everything that has a cache; return the names by kind."""
    found: dict[str, list[str]] = {}
    digest_of = files.digest_of_json

    def recorded(tree: Any) -> str:
        digest = digest_of(tree)
        if {"kind", "version"} <= tree.keys():
            found.setdefault(tree["kind"], []).append(digest)
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(files, "digest_of_json", recorded)
        # few frames are enough
        patched.setattr(ivector_model, "POSTERIOR_SCALE", 1.0)
        data = align.with_alignment(config, cache, silent)
        speech = corpus.prepare(data, config.features, cache, silent)
        tied = with_tied_states(speech, 12, cache, silent)
        adapted, _ = adaptation.with_adaptation(config, tied, cache, silent)
        ladder.network_name(config, adapted)
        of_vectors = replace(config, ivectors=replace(config.ivectors, dim=2, num_gaussians=2))
        extractor = adaptation.extractor_of(of_vectors, speech, cache, silent, None)
        adaptation.with_ivectors(of_vectors, speech, extractor, cache, silent)
        prepare_archives(speech.train.frames, speech.valid.frames, config.egs, num_classes=speech.num_pdfs, digest=speech.digest,
                         cache_root=cache, groups=speech.train.speakers)
        denominator = denominators.of_corpus(speech, ObjectiveConfig(kind="lfmmi"), config.decode, uniform_priors(speech.num_pdfs))
        prepare_sequences(speech.train.frames, denominator.graph, samples_per_iter=1000, chunk_frames=0, digest=speech.digest,
                          cache_root=cache)
    return {kind: tuple(digests) for kind, digests in found.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mine", num_utterances=4)


Change = Callable[[Path, RunConfig], RunConfig]


def with_lexicon(text: str) -> Change:
    def change(source: Path, config: RunConfig) -> RunConfig:
        (source / "lexicon.txt").write_text(text)
        return config
    return change


def with_option(section: str, **values: Any) -> Change:
    return lambda _source, config: replace(config,
                                           **{section: replace(getattr(config, section), **values)})


rename_phones = with_lexicon("NO Z\nYES A\n")
correct_a_pronunciation = with_lexicon("NO N\nYES Y N\n")


def change_a_transcript(source: Path, config: RunConfig) -> RunConfig:
    path = source / "test" / "text"
    path.write_text(path.read_text().replace("YES", "NO"))
    return config


def change_the_audio(source: Path, config: RunConfig) -> RunConfig:
    path = source / "train" / "train-s0-0.wav"
    size = path.stat().st_size
    write_wav(path, np.random.default_rng(0).normal(0, 900, (size - 44) // 2).astype("<i2"), rate_hz=16000)
    assert path.stat().st_size == size
    return config


CHANGES: dict[str, tuple[Change, set[str]]] = {
    "phones": (rename_phones, ALL), "pronunciation": (correct_a_pronunciation, ALL),
    "another word": (with_lexicon("MAYBE N Y\nNO N\nYES Y\n"), ALL),
    "order of the words": (with_lexicon("YES Y\nNO N\n"), ALL),
    "silence states": (with_option("data", num_silence_states=3), ALL),
    "transcript": (change_a_transcript, ALL), "audio": (change_the_audio, ALL),
    "features": (with_option("features", num_ceps=10), ALL),
    "alignment": (with_option("align", num_gaussians=9), {"ali"}),
    "projection": (with_option("adaptation", lda_dim=5), {"adaptation", "network"}),
    "network": (with_option("model", hidden_dim=9), {"network"}),
    "context": (with_option("egs", left_context=2), {"network", "egs"})}


def copied(source: Path, target: Path) -> Path:
    """The data in another folder, with the times of the files."""
    return Path(shutil.copytree(source, target))


@pytest.mark.entry("Sp1", "you edit the lexicon, a transcript, audio or a setting, and train again in the same folder", "works",
                   "every prepared file (labels, trees, transforms, networks, i-vectors, archives) has a name that covers all that "
                   "decides it, phones and pronunciations included, and is made again.")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.slow
def test_a_changed_input_changes_the_names_of_all_that_it_decides(
        source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, expected = CHANGES[name]
    mine = copied(source, tmp_path / "mine")
    before = names(settings(mine), tmp_path / "cache", monkeypatch)
    assert before.keys() == ALL
    # the time of a file of the same size differs, however coarse the clock of the file system is
    changed = change(mine, settings(mine))
    for path in (mine / "lexicon.txt", mine / "train" / "train-s0-0.wav"):
        os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1_000_000_000 * (change is change_the_audio)))
    after = names(changed, tmp_path / "cache", monkeypatch)
    same = {kind for kind in ALL if before[kind] == after[kind]}
    assert expected <= ALL - same
    if expected in ({"network"}, {"adaptation", "network"}):
        assert same == ALL - expected


@pytest.mark.entry("Sp1")
def test_labels_and_language_of_another_lexicon_have_other_names(source: Path, tmp_path: Path) -> None:
    mine = copied(source, tmp_path / "mine")
    first = corpus.prepare_unaligned(settings(mine).data, settings(mine).features, tmp_path / "cache", silent)
    again = corpus.prepare_unaligned(settings(mine).data, settings(mine).features, tmp_path / "cache", silent)
    rename_phones(mine, settings(mine))
    other = corpus.prepare_unaligned(settings(mine).data, settings(mine).features, tmp_path / "cache", silent)
    assert first.digest == again.digest != other.digest
    assert first.content == other.content
    assert first.language != other.language


@pytest.mark.entry("Sp1")
@pytest.mark.slow
def test_unchanged_input_uses_the_files_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(settings(source), tmp_path / "cache", monkeypatch)
    files = {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")}
    assert names(settings(source), tmp_path / "cache", monkeypatch) == before
    assert {path: path.stat().st_ino for path in (tmp_path / "cache").rglob("*")} == files


@pytest.mark.entry("Sp1")
@pytest.mark.parametrize("change", [rename_phones, correct_a_pronunciation, change_a_transcript])
def test_labels_of_another_lexicon_or_transcript_are_refused_whatever_their_name(
        source: Path, tmp_path: Path, change: Change) -> None:
    mine = copied(source, tmp_path / "mine")
    config = settings(mine)
    labels = tmp_path / "ali.npz"
    speech = corpus.prepare_unaligned(config.data, config.features, tmp_path / "cache", silent)
    alignments.write(labels, forced_alignment.flat_start(speech, ""))
    given = replace(config.data, alignment=str(labels))
    assert corpus.prepare(given, config.features, tmp_path / "cache", silent).train.is_aligned
    change(mine, config)
    with pytest.raises(DataError, match=r"ali\.npz.*(train|test)-s"):
        corpus.prepare(given, config.features, tmp_path / "cache", silent)
