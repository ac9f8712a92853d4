"""Preparation of Kaldi data directories in shards: same bits, kills, damage and memory."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ngsgd.asr import speech_set
from ngsgd.asr.corpora import data_dir, kaldi_dirs, shard_processes
from ngsgd.asr.corpora import sharding as of_shard
from ngsgd.asr.corpora.corpus import prepare
from ngsgd.asr.features import augment, cmvn
from ngsgd.asr.recording import AudioFile
from ngsgd.asr.speech_set import SpeechSet
from ngsgd.config import AugmentConfig, DataConfig, FeatureConfig
from ngsgd.data.storage import write_arrays
from ngsgd.errors import DataError
from tests.asr.made_up_speech import write_data
from tests.reported import silent

soundfile = pytest.importorskip("soundfile")
kaldiio = pytest.importorskip("kaldiio")
pytest.importorskip("kaldi_native_fbank")

FEATURES = FeatureConfig(kind="mfcc", num_mel_bins=23, cmvn="speaker", sample_rate_hz=16000)
SETS = ("train", "valid", "test")
# utterances last about three seconds
SHARD_S = 5.0


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "mine", num_utterances=8)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_shard, "SHARD_S", SHARD_S)


def config(folder: Path) -> DataConfig:
    return DataConfig(corpus="kaldi", source=str(folder))


def in_memory(folder: Path, features: FeatureConfig, changes: AugmentConfig) -> dict[str, SpeechSet]:
    """The sets by the path of the other corpora, which have all features in memory."""
    spoken = {name: data_dir.spoken(data_dir.read(folder / name, given_features=False), features) for name in SETS}
    sets = {name: speech_set.build(augment.for_set(name, said, changes, sample_rate_hz=16000), features)
            for name, said in spoken.items()}
    if features.cmvn == "online":
        all_speech = cmvn.statistics(sets["train"].frames.features_TD)
        sets = {name: speech_set.normalized_online(one, all_speech) for name, one in sets.items()}
    return sets


def check_equal(found: SpeechSet, expected: SpeechSet) -> None:
    assert (found.texts, found.speakers, found.frames.utt_ids) == (expected.texts, expected.speakers, expected.frames.utt_ids)
    for name in ("features_TD", "pdf_T", "offsets"):
        left, right = getattr(found.frames, name), getattr(expected.frames, name)
        assert left.dtype == right.dtype
        assert np.array_equal(left, right)
    raw = [one.raw_TD for one in (found, expected) if one.raw_TD is not None]
    assert len(raw) in (0, 2)
    assert all(np.array_equal(raw_TD, raw[-1]) for raw_TD in raw)
    assert found.cmvn is not None
    assert expected.cmvn is not None
    assert found.cmvn.unit_of == expected.cmvn.unit_of
    assert list(found.cmvn.stats) == list(expected.cmvn.stats)
    assert all(np.array_equal(found.cmvn.stats[unit], expected.cmvn.stats[unit]) for unit in expected.cmvn.stats)


@pytest.mark.parametrize(("normalization", "changes"), [
    ("none", AugmentConfig()), ("utterance", AugmentConfig()), ("speaker", AugmentConfig(speed="all", noise=True)),
    ("online", AugmentConfig(voice=True, num_copies=2))])
def test_shards_give_the_bits_of_all_features_in_memory(
        mine: Path, tmp_path: Path, normalization: str, changes: AugmentConfig) -> None:
    features = replace(FEATURES, cmvn=normalization)  # type: ignore[arg-type]
    sets, _ = kaldi_dirs.make(config(mine), features, changes, tmp_path, num_processes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 * len(SETS)
    for name, expected in in_memory(mine, features, changes).items():
        check_equal(sets[name], expected)


def test_two_processes_give_the_bits_of_one(mine: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    for number, folder in enumerate((one, two), start=1):
        folder.mkdir()
        kaldi_dirs.make(config(mine), FEATURES, AugmentConfig(), folder, num_processes=number)
    shards = sorted(path.name for path in one.glob("*.safetensors"))
    assert shards == sorted(path.name for path in two.glob("*.safetensors"))
    for name in [*shards, *(str(path.relative_to(one)) for path in one.glob("sets-*/*.npy"))]:
        other = next(two.glob(f"sets-*/{Path(name).name}")) if "/" in name else two / name
        assert (one / name).read_bytes() == other.read_bytes()


# kills itself in the middle of the second shard, before it, or in the normalization
KILLED = """
import os, signal, sys
from ngsgd.asr.corpora.corpus import prepare
from ngsgd.asr.corpora import sharding as of_shard
from ngsgd.config import DataConfig, FeatureConfig
from ngsgd.data import mapped

source, cache, where, shard_s = sys.argv[1:]
of_shard.SHARD_S = float(shard_s)
calls, write_arrays, write_rows = [], of_shard.write_arrays, mapped.write_rows

def shard(path, first, shape, pieces, rest):
    calls.append(path)
    if len(calls) == 2 and where == "between shards":
        os.kill(os.getpid(), signal.SIGKILL)
    digest = write_arrays(path, first, shape, pieces, rest)
    if len(calls) == 2 and where == "in a shard":
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    return digest

def rows(path, shape, pieces):
    if where == "in the normalization":
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return write_rows(path, shape, pieces)

of_shard.write_arrays, mapped.write_rows = shard, rows
prepare(DataConfig(corpus="kaldi", source=source),
        FeatureConfig(kind="mfcc", num_mel_bins=23, cmvn="speaker", sample_rate_hz=16000), __import__("pathlib").Path(cache), print)
"""


@pytest.mark.faults
@pytest.mark.parametrize("where", ["between shards", "in a shard", "in the normalization"])
def test_a_killed_preparation_continues_with_the_same_bytes(
        mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    cache = tmp_path / "cache"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(mine), str(cache), where, str(SHARD_S)], check=False)
    assert killed.returncode == -signal.SIGKILL
    num_finished = len(list(cache.glob("*.shards/*.sha256")))
    written: list[Path] = []

    def counted(path: Path, *arrays: object) -> str:
        written.append(path)
        return write_arrays(path, *arrays)  # type: ignore[arg-type]
    monkeypatch.setattr(of_shard, "write_arrays", counted)
    again = prepare(config(mine), FEATURES, cache, silent)
    num_again = len(written)
    assert [path.name for path in cache.iterdir()] == [next(cache.glob("*/manifest.json")).parent.name]
    assert again.digest == prepare(config(mine), FEATURES, tmp_path / "other", silent).digest
    # no finished shard is computed again
    assert num_finished >= 1
    assert num_finished + num_again == len(written) - num_again


def test_a_damaged_shard_is_computed_again(mine: Path, tmp_path: Path) -> None:
    first, _ = kaldi_dirs.make(config(mine), FEATURES, AugmentConfig(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    shards = sorted(before)
    altered, cut, lost = shards[0], shards[1], shards[2].with_suffix(".sha256")
    altered.write_bytes(before[altered][:-5] + b"other")
    os.truncate(cut, 100)
    lost.unlink()
    second, _ = kaldi_dirs.make(config(mine), FEATURES, AugmentConfig(), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")} == before
    for name in SETS:
        check_equal(second[name], first[name])


def test_processes_that_die_are_replaced_by_this_one(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    sets, _ = kaldi_dirs.make(config(mine), FEATURES, AugmentConfig(), tmp_path, num_processes=2)
    for name, expected in in_memory(mine, FEATURES, AugmentConfig()).items():
        check_equal(sets[name], expected)


def test_an_error_in_another_process_is_the_error_of_the_data(mine: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(mine, tmp_path / "broken"))
    (broken / "train" / "train-s0-4.wav").write_bytes(b"no audio")
    (tmp_path / "work").mkdir()
    with pytest.raises(DataError, match=r"train-s0-4\.wav"):
        kaldi_dirs.make(config(broken), FEATURES, AugmentConfig(), tmp_path / "work", num_processes=2)


def test_a_shard_that_another_process_computes_is_awaited(mine: Path, tmp_path: Path) -> None:
    part = of_shard.Part("train", data_dir.read(mine / "train", given_features=False))
    shards = of_shard.divided(part, FEATURES)
    locked = tmp_path / shards[0].file_name
    holder = subprocess.Popen([sys.executable, "-c", "import fcntl, sys, time\nfile = open(sys.argv[1], 'w')\n"
                               "fcntl.flock(file, fcntl.LOCK_EX)\nprint('locked', flush=True)\nsys.stdin.read()",
                               str(locked.with_suffix(".lock"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    reported: list[str] = []

    def release_at_the_start(line: str) -> None:
        reported.append(line)
        assert not locked.exists()
        holder.communicate()
    shard_processes.compute(shards, FEATURES, tmp_path, num_processes=1,
                            report=release_at_the_start)
    assert reported
    assert all(of_shard.is_complete(tmp_path / shard.file_name) for shard in shards)


@pytest.mark.faults
def test_two_preparations_at_once_share_the_work(mine: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(mine), str(tmp_path), "nowhere", str(SHARD_S)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    (folder,) = tmp_path.iterdir()
    shared, alone = (prepare(config(mine), FEATURES, cache, silent) for cache in (tmp_path, tmp_path / "other"))
    assert shared.digest == alone.digest
    assert (folder / "manifest.json").is_file()


def test_shards_are_in_the_order_of_recordings_and_time(tmp_path: Path) -> None:
    (tmp_path / "wav.scp").write_text("b b.wav\na a.wav\n")
    times = {"u3": ("b", 0, 3), "u0": ("a", 9, 12), "u2": ("b", 4, 8), "u1": ("a", 1, 4)}
    (tmp_path / "segments").write_text("".join(f"{utt} {rec} {start} {end}\n" for utt, (rec, start, end) in times.items()))
    for table in ("text", "utt2spk"):
        (tmp_path / table).write_text("".join(f"{utt} x\n" for utt in times))
    part = of_shard.Part("train", data_dir.read(tmp_path, given_features=False))
    assert [[one.utt_id for one in shard.entries] for shard in of_shard.divided(part, FEATURES)] == [["u1", "u0"], ["u3", "u2"]]


def test_each_recording_is_opened_once_for_all_its_segments(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path / "data", num_utterances=2)
    rng = np.random.default_rng(0)
    for recording in ("a", "b"):
        soundfile.write(tmp_path / f"{recording}.wav", rng.integers(-99, 99, 16000 * 30, np.int16), 16000)
    names = [f"{'ab'[i % 2]}-{i:03d}" for i in range(60)]
    for table, value in {"text": "YES", "utt2spk": "s1"}.items():
        (data / "train" / table).write_text("".join(f"{name} {value}\n" for name in names))
    (data / "train" / "segments").write_text(
        "".join(f"{name} {name[0]} {i // 2} {i // 2 + 0.9}\n" for i, name in enumerate(names)))
    (data / "train" / "wav.scp").write_text(f"a {tmp_path / 'a.wav'}\nb {tmp_path / 'b.wav'}\n")
    opened: list[Path] = []
    open_file = AudioFile.open

    def counted(path: Path, name: str) -> AudioFile:
        opened.append(path)
        return open_file(path, name)
    monkeypatch.setattr(AudioFile, "open", counted)
    kaldi_dirs.make(config(data), FEATURES, AugmentConfig(), tmp_path, num_processes=1)
    assert len(list(tmp_path.glob("train-*.safetensors"))) > 8
    assert sorted(path.name for path in opened if "data" not in path.parts) == ["a.wav", "b.wav"]


MEASURED = """
import re, sys
from pathlib import Path
import numpy as np
from ngsgd.asr.align import forced_alignment
from ngsgd.asr.corpora import alignments
from ngsgd.asr.corpora.corpus import prepare
from ngsgd.config import DataConfig, EgsConfig, FeatureConfig
from ngsgd.data.archives import prepare_archives

source, cache = map(Path, sys.argv[1:])
features = FeatureConfig(kind="given", cmvn="speaker")
corpus = prepare(DataConfig(corpus="kaldi", source=str(source)), features, cache, print)
alignments.write(source / "ali.npz", forced_alignment.flat_start(corpus, ""))
corpus = prepare(DataConfig(corpus="kaldi", source=str(source), alignment=str(source / "ali.npz")), features, cache, print)
prepare_archives(corpus.train.frames, corpus.valid.frames, EgsConfig(), num_writers=1, num_classes=corpus.num_pdfs,
                 digest=corpus.digest, cache_root=cache)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak_bytes(folder: Path, num_utterances: int) -> tuple[int, int]:
    """Peak memory of features, labels and archives, and bytes of the features."""
    write_data(folder, num_utterances=2)
    rng = np.random.default_rng(0)
    size = 0
    for name, number in (("train", num_utterances), ("valid", 2), ("test", 2)):
        utt_ids = [f"{name}-{i:04d}" for i in range(number)]
        matrices = {utt_id: rng.standard_normal((3000, 40), np.float32) for utt_id in utt_ids}
        size += sum(one.nbytes for one in matrices.values())
        kaldiio.save_ark(str(folder / name / "feats.ark"), matrices, scp=str(folder / name / "feats.scp"))
        (folder / name / "text").write_text("".join(f"{utt_id} YES\n" for utt_id in utt_ids))
        (folder / name / "utt2spk").write_text("".join(f"{utt_id} {name}-s{i % 3}\n" for i, utt_id in enumerate(utt_ids)))
    command = [sys.executable, "-c", MEASURED, str(folder), str(folder / "cache")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return 1024 * int(re.findall(r"\d+", done.stdout)[-1]), size


@pytest.mark.slow
def test_memory_does_not_grow_with_the_features(tmp_path: Path) -> None:
    small, size_of_small = peak_bytes(tmp_path / "small", 60)
    large, size_of_large = peak_bytes(tmp_path / "large", 420)
    # blocks and shards fill up to about 30 MB. Labels and indexes, a tenth of the features, do grow
    assert large - small < 0.35 * (size_of_large - size_of_small)


@pytest.mark.slow
def test_tables_take_few_bytes_per_utterance(tmp_path: Path) -> None:
    """As Python objects a line of the three tables takes 1,400 bytes."""
    number = 1000
    names = [f"recording{i // 100:03d}-{i:06d}" for i in range(number)]
    for table, value in {"text": "seven three nine zero", "utt2spk": "speaker",
                         "segments": "recording 0.5 3.25"}.items():
        (tmp_path / table).write_text("".join(f"{name} {value}\n" for name in names))
    (tmp_path / "wav.scp").write_text("recording recording.wav\n")
    # the table of interned strings of Python may grow once, by megabytes
    assert min(traced_bytes(tmp_path, number) for _ in range(2)) < 250 * number


def traced_bytes(folder: Path, number: int) -> int:
    """Peak memory of reading and dividing a data directory."""
    gc.collect()
    tracemalloc.start()
    try:
        part = of_shard.Part("train", data_dir.read(folder, given_features=False))
        assert sum(len(shard.at) for shard in of_shard.divided(part, FEATURES)) == number
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_the_plan_survives_the_way_to_another_process(mine: Path) -> None:
    part = of_shard.Part("train", data_dir.read(mine / "train", given_features=False), AugmentConfig(speed="all"), mine)
    for shard in of_shard.divided(part, FEATURES):
        again = of_shard.Shard.of_json(shard.to_json())
        assert (again.entries, again.file_name, again.part.changes) == (shard.entries, shard.file_name, part.changes)
