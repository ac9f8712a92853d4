"""Canaries in every text and archive format that is read from data: none may be executed.

A canary is a command or a pickle that would make a file. Each format is one row of FORMATS: how a
payload is planted, and the call that reads it. A call may return, or raise an NgsgdError; anything
else fails. For a new format add a row.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest

from ngsgd import files
from ngsgd.asr.corpora import alignments, cache, fsdd, kaldi_dirs
from ngsgd.asr.ivectors import model as extractor_file
from ngsgd.asr.kaldi_io.tables import write_matrices
from ngsgd.asr.kaldi_io.transition_model import TransitionModel
from ngsgd.asr.lang import graphs
from ngsgd.asr.lang.language import Language
from ngsgd.asr.lang.lexicon import read as read_lexicon
from ngsgd.config import AugmentConfig, DataConfig, EgsConfig, FeatureConfig, IvectorConfig, RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.nnet3_examples import read_nnet3_examples
from ngsgd.data.reader import EgsReader
from ngsgd.errors import NgsgdError
from ngsgd.launcher.config import compose
from ngsgd.models.nnet3.network import rebuild
from ngsgd.models.nnet3.raw_models import model_from_bytes, vector_from_bytes
from ngsgd.runs import config_file
from ngsgd.schedules import Shard
from tests.asr.made_up_speech import write_data
from tests.models.test_nnet3 import SAMPLE
from tests.toy import NUM_CLASSES, frame_set

pytest.importorskip("soundfile")
pytest.importorskip("kaldi_native_fbank")

FEATURES = FeatureConfig(kind="mfcc", num_mel_bins=23, cmvn="speaker", sample_rate_hz=16000)
GIVEN = replace(FEATURES, kind="given", cmvn="given")
Plant = Callable[[Path, bytes], None]
Read = Callable[[Path], object]


class Canary:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def npy(marker: Path) -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([Canary(marker)], dtype=object), allow_pickle=True)
    return content.getvalue()


PAYLOADS: dict[str, Callable[[Path], bytes]] = {
    "pipe": lambda marker: f"mkdir {marker} |".encode(),
    "pipe of an absolute path": lambda marker: f"/bin/mkdir {marker} |".encode(),
    "pipe with a range": lambda marker: f"mkdir {marker} |[0:3]".encode(),
    "pipe after a name": lambda marker: f";mkdir {marker} |".encode(),
    "output pipe": lambda marker: f"| mkdir {marker}".encode(),
    "shell expansion": lambda marker: f"$(mkdir${{IFS}}{marker})`mkdir {marker}`".encode(),
    "python": lambda marker: f"__import__('os').mkdir('{marker}')".encode(),
    "yaml tag": lambda marker: f"a: !!python/object/apply:os.mkdir ['{marker}']\n...\n".encode(),
    "resolver": lambda marker: f"seed: ${{oc.env:HOME}}\nname: ${{eval:__import__('os').mkdir('{marker}')}}\n...\n".encode(),
    "pickle": lambda marker: pickle.dumps(Canary(marker)),
    "pickle of kaldiio": lambda marker: b"PKL" + pickle.dumps(Canary(marker)),
    "pickle of kaldiio in NPY": lambda marker: b"NPY" + npy(marker),
    "npy": npy,
}


def config(folder: Path, **settings: Any) -> DataConfig:
    return replace(DataConfig(corpus="kaldi", source=str(folder / "mine")), **settings)


def read_audio(folder: Path) -> object:
    kaldi_dirs.fingerprint(config(folder), FEATURES)
    return kaldi_dirs.make(config(folder), FEATURES, AugmentConfig())


def read_features(folder: Path) -> object:
    kaldi_dirs.fingerprint(config(folder), GIVEN)
    return kaldi_dirs.make(config(folder), GIVEN, AugmentConfig())


def read_arpa(folder: Path) -> object:
    text = (folder / "mine/lm.arpa").read_text(errors="replace")
    return graphs.build(Language(read_lexicon(folder / "mine/lexicon.txt", 1), arpa=text), silence_prob=0.5)


def read_graph(folder: Path) -> object:
    (folder / "graph/words.txt").write_text("<eps> 0\nNO 1\nYES 2\n")
    (folder / "graph/tid2pdf").write_text("1 0\n2 1\n")
    given = read_words(folder)[1].given
    assert given is not None
    return graphs.read(given)


def value(name: str) -> Plant:
    """The payload instead of all fields of the first line but the key."""
    def plant(folder: Path, payload: bytes) -> None:
        first, *rest = (folder / name).read_bytes().splitlines()
        (folder / name).write_bytes(b"\n".join([first.split()[0] + b" " + payload, *rest, b""]))
    return plant


def content(name: str, before: bytes = b"", pack: Callable[[bytes], bytes] = bytes) -> Plant:
    def plant(folder: Path, payload: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(pack(before + payload))
    return plant


def in_archive(folder: Path, payload: bytes) -> None:
    """The first entry of feats.ark, at the offset that feats.scp gives."""
    entry = (folder / "mine/train/feats.scp").read_text().split()[1]
    path, _, offset = entry.rpartition(":")
    archive = Path(path).read_bytes()
    Path(path).write_bytes(archive[:int(offset)] + payload + archive[int(offset) + len(payload):])


def in_npz(folder: Path, payload: bytes) -> None:
    with zipfile.ZipFile(folder / "ali.npz", "w") as archive:
        for name in ("pdf", "offsets", "utt_ids"):
            archive.writestr(f"{name}.npy", payload)


def in_cache(name: str) -> Plant:
    """A file of a prepared corpus, with the digests that belong to the changed file."""
    def plant(folder: Path, payload: bytes) -> None:
        (folder / "corpus" / name).write_bytes(payload)
        manifest = files.unsealed("corpus", json.loads((folder / "corpus/manifest.json").read_text()))
        manifest["sha256"][name] = files.sha256(folder / "corpus" / name)
        (folder / "corpus/manifest.json").write_text(json.dumps(files.sealed("corpus", manifest)))
    return plant


def read_examples(folder: Path) -> object:
    reader = EgsReader(next(folder.glob("egs-*")))
    return reader.groups(), list(reader.minibatches(Shard(0, 0), 8, seed=0, outer_iter=0, job=0))


def in_egs(name: str) -> Plant:
    def plant(folder: Path, payload: bytes) -> None:
        directory = next(folder.glob("egs-*"))
        (directory / name).write_bytes(payload)
        if name != "info.json":
            index = files.unsealed("archives", json.loads((directory / "info.json").read_text()))
            index["sha256"][name] = files.sha256(directory / name)
            (directory / "info.json").write_text(json.dumps(files.sealed("archives", index)))
    return plant


def lhotse(kind: str) -> Plant:
    def plant(folder: Path, payload: bytes) -> None:
        text = payload.decode(errors="replace")
        recording = {"id": "r", "sources": [{"type": kind, "channels": [0], "source": text}], "sampling_rate": 16000}
        supervision = {"id": text, "recording_id": "r", "start": 0, "duration": 1, "text": "YES", "speaker": text}
        for name, item in (("recordings", recording), ("supervisions", supervision)):
            for part in ("train", "test"):
                (folder / "mine" / part / f"{name}.jsonl").write_text(json.dumps(item) + "\n")
    return plant


def read_lhotse(folder: Path) -> object:
    return kaldi_dirs.make(config(folder, corpus="lhotse"), FEATURES, AugmentConfig())


def in_tar(folder: Path, payload: bytes) -> None:
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        for name in ("../../a.wav", payload.decode(errors="replace").replace("\0", "0") + ".wav"):
            member = tarfile.TarInfo(name)
            member.size = len(payload)
            archive.addfile(member, io.BytesIO(payload))


def in_zip(folder: Path, payload: bytes) -> None:
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("../../a.wav", payload)
        archive.writestr(payload.decode(errors="replace").replace("\0", "0") + ".wav", payload)


def in_component(folder: Path, payload: bytes) -> None:
    text = payload.decode(errors="replace")
    (folder / "final.raw").write_text(SAMPLE.replace("component=output.affine", f"component={text}").replace("0.125", text, 1))


def read_model(folder: Path) -> object:
    return rebuild(model_from_bytes((folder / "final.raw").read_bytes()))


def read_words(folder: Path) -> tuple[object, Language]:
    return kaldi_dirs.make(config(folder, graph=str(folder / "graph")), FEATURES, AugmentConfig())


def load_corpus(folder: Path) -> object:
    try:
        return cache.load(folder / "corpus")
    except cache.DamagedError:   # its caller prepares the data again
        return None


def read_model_of_kaldi(folder: Path) -> object:
    return TransitionModel.read(folder / "ali/final.mdl")


def aligned(name: str) -> Read:
    return lambda folder: alignments.read(folder / name)


def read_config_file(folder: Path) -> object:
    return config_file.read_config(folder / "config.yaml")


def read_nnet3(folder: Path) -> object:
    return list(read_nnet3_examples(folder / "egs.ark"))


# how a payload is planted in a folder of prepared and unprepared data, and the call that reads it
FORMATS: dict[str, tuple[Plant, Read]] = {
    **{table: (value(f"mine/train/{table}"), read_audio)
       for table in ("wav.scp", "segments", "text", "utt2spk")},
    **{f"{table}, whole file": (content(f"mine/train/{table}"), read_audio)
       for table in ("wav.scp", "segments", "text", "utt2spk", "train-s0-0.wav")},
    **{table: (value(f"mine/train/{table}"), read_features) for table in ("feats.scp", "cmvn.scp")},
    **{f"{table}, whole file": (content(f"mine/train/{table}"), read_features)
       for table in ("feats.scp", "cmvn.scp")},
    "feats.ark": (in_archive, read_features),
    "lexicon.txt": (value("mine/lexicon.txt"), read_audio),
    "lexicon.txt, whole file": (content("mine/lexicon.txt"), read_audio),
    "lm.arpa": (content("mine/lm.arpa"), read_arpa),
    "lm.arpa, a word": (content("mine/lm.arpa", b"\\data\\\nngram 1=1\n\n\\1-grams:\n-1.0\t"),
                        read_arpa),
    "HCLG.fst": (content("graph/HCLG.fst"), read_graph),
    "words.txt": (content("graph/words.txt", b"word "), read_words),
    "tid2pdf": (content("graph/tid2pdf", b"1 "), read_words),
    "final.mdl": (content("ali/final.mdl"), read_model_of_kaldi),
    "final.mdl, text": (content("ali/final.mdl", b"<TransitionModel> <Topology> "),
                        read_model_of_kaldi),
    "ali.1.gz": (content("ali/ali.1.gz", b"train-s0-0 ", gzip.compress), aligned("ali")),
    "ali.1.gz, text": (content("ali/ali.1.gz", b"train-s0-0 1 2 ", gzip.compress), aligned("ali")),
    "ali.ark": (content("ali/ali.ark", b"train-s0-0 "), aligned("ali")),
    "ali.txt": (content("ali.txt", b"train-s0-0 1 2 "), aligned("ali.txt")),
    "ali.npz": (in_npz, aligned("ali.npz")),
    "ali.npz, whole file": (content("ali.npz"), aligned("ali.npz")),
    "nnet3 examples": (content("egs.ark", b"key "), read_nnet3),
    "nnet3 examples, matrix": (
        content("egs.ark", b"key \0B<Nnet3Eg> <NumIo> \4\1\0\0\0<NnetIo> input <I1V> \4\1\0\0\0\0"),
        read_nnet3),
    "nnet3 model": (content("final.raw"), read_model),
    "nnet3 model, component": (in_component, read_model),
    "priors.vec": (content("priors.vec"),
                   lambda folder: vector_from_bytes((folder / "priors.vec").read_bytes())),
    "corpus manifest": (content("corpus/manifest.json"), load_corpus),
    **{f"corpus {name}": (in_cache(name), load_corpus)
       for name in ("train.json", "train.features_TD.npy", "train.pdf_T.npy", "train.cmvn.npz")},
    "info.json": (in_egs("info.json"), read_examples),
    "utterances.json": (in_egs("utterances.json"), read_examples),
    "example archive": (in_egs("egs.0000.safetensors"), read_examples),
    "i-vector extractor": (content("x.safetensors"),
                           lambda folder: extractor_file.read(folder / "x.safetensors",
                                                              IvectorConfig())),
    "lhotse file": (lhotse("file"), read_lhotse),
    "lhotse command": (lhotse("command"), read_lhotse),
    "lhotse manifest": (content("mine/train/recordings.jsonl"), read_lhotse),
    "tar of recordings": (in_tar, lambda folder: dict(fsdd.wav_files(folder / "a.tar.gz"))),
    "zip of recordings": (in_zip, lambda folder: dict(fsdd.wav_files(folder / "a.zip"))),
    "config.yaml": (content("config.yaml"), read_config_file),
    "config.yaml, a setting": (content("config.yaml", b"name: "), read_config_file),
    "tuned.yaml": (content("tuned.yaml"),
                   lambda folder: compose.compose([f"tuned={folder / 'tuned.yaml'}"])),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data directories with audio and features, a prepared corpus, and examples."""
    folder = tmp_path_factory.mktemp("data")
    write_data(folder / "mine", num_utterances=4)
    (folder / "work").mkdir()
    sets, language = kaldi_dirs.make(config(folder), FEATURES, AugmentConfig(), folder / "work")
    cache.store(folder / "corpus", sets, language, made_from={})
    for name, speech in sets.items():
        (folder / "mine" / name / "segments").write_text("".join(f"{one} {one} 0 0.5\n" for one in speech.frames.utt_ids))
        write_matrices(folder / "mine" / name / "feats.ark", zip(speech.frames.utt_ids, speech.split_features(), strict=True))
        assert speech.cmvn is not None
        write_matrices(folder / "mine" / name / "cmvn.ark", speech.cmvn.stats.items())
    prepare_archives(frame_set(200, 1), frame_set(100, 2), EgsConfig(left_context=1, right_context=1, samples_per_iter=100),
                     num_classes=NUM_CLASSES, digest="toy", cache_root=folder)
    (folder / "graph").mkdir()
    (folder / "graph/words.txt").write_text("<eps> 0\nNO 1\nYES 2\n")
    (folder / "graph/tid2pdf").write_text("1 0\n2 1\n")
    (folder / "graph/HCLG.fst").write_bytes(b"")
    (folder / "config.yaml").write_text(config_file.to_yaml(RunConfig()))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy to plant canaries in; the archives' paths in .scp files are those of the copy."""
    copy = tmp_path / "data"
    for path in prepared.rglob("*"):
        target = copy / path.relative_to(prepared)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            text = path.read_bytes()
            target.write_bytes(text.replace(str(prepared).encode(), str(copy).encode()) if path.suffix == ".scp" else text)
    return copy


def test_prepared_data_is_read_without_canaries(folder: Path) -> None:
    """Otherwise an error elsewhere would hide a canary."""
    assert read_audio(folder) and read_features(folder) and load_corpus(folder) and read_examples(folder)
    for name in ("wav.scp", "feats.scp", "cmvn.scp"):
        assert str(folder) in (folder / "mine/train" / name).read_text() or name == "wav.scp"


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("name", FORMATS)
def test_no_canary_is_executed(folder: Path, name: str, payload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    marker = folder.parent / "canary"
    plant, read = FORMATS[name]
    plant(folder, PAYLOADS[payload](marker))
    outside = set(folder.parent.iterdir())
    with contextlib.suppress(NgsgdError):
        read(folder)
    assert set(folder.parent.iterdir()) == outside, "a canary was executed, or a file was written outside"


def test_canaries_can_be_executed(folder: Path) -> None:
    """By the reader that was used before, so the test above is able to fail."""
    marker = folder.parent / "canary"
    with pytest.raises(Exception):  # noqa: B017, PT011 - the command writes no matrix
        kaldiio.load_mat(PAYLOADS["pipe"](marker).decode())
    marker.rmdir()
    (folder / "a.ark").write_bytes(PAYLOADS["pickle of kaldiio"](marker))
    kaldiio.load_mat(str(folder / "a.ark"))
    marker.rmdir()
