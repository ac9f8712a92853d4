"""Examples on disk and minibatches from them."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ngsgd.config import AugmentConfig, EgsConfig
from ngsgd.data.archives import prepare_archives, spliced_utterances
from ngsgd.data.examples import PIECE_BYTES
from ngsgd.data.frames import FrameSet, Side
from ngsgd.data.reader import EgsReader, ahead
from ngsgd.data.storage import ArrayFile, FormatError
from ngsgd.errors import DamagedArchiveError, DataError
from ngsgd.files import sha256, shared_directory
from ngsgd.schedules import Schedule, Shard
from tests.reference.examples import windows_of
from tests.toy import NUM_CLASSES, frame_set

CONFIG = EgsConfig(left_context=2, right_context=1, frames_per_eg=4, samples_per_iter=100, num_diagnostic_frames=50)


def prepare(folder: Path, train: FrameSet | None = None, config: EgsConfig = CONFIG, num_writers: int | None = None) -> Path:
    return prepare_archives(train or frame_set(1000, 1), frame_set(300, 2), config, num_classes=NUM_CLASSES, digest="toy",
                            cache_root=folder, num_writers=num_writers)


def rows(reader: EgsReader, schedule: Schedule) -> list[tuple[tuple[float, ...], int]]:
    """Every (spliced frame, class) that all shards hold, sorted."""
    found = []
    for index in range(schedule.num_archives * schedule.frames_per_eg):
        for x, pdf, _ in reader.minibatches(schedule.shard(index), 32, seed=0, outer_iter=0, job=index):
            found += [(tuple(row), int(label)) for row, label in zip(x.tolist(), pdf.tolist(), strict=True)]
    return sorted(found)


def test_all_shards_together_hold_every_spliced_frame_once(tmp_path: Path) -> None:
    train = frame_set(1000, 1)
    reader = EgsReader(prepare(tmp_path, train))
    schedule = Schedule(reader.info.num_archives, 4, 1.0, 0.1, 0.1, 1, 1)
    spliced = np.concatenate(list(spliced_utterances(train, 2, 1)))
    assert rows(reader, schedule) == sorted((tuple(row), int(pdf)) for row, pdf in
                                            zip(spliced.tolist(), train.pdf_T.tolist(), strict=True))


def test_splicing_repeats_the_edges_of_an_utterance() -> None:
    features = np.array([[1.0], [2.0], [3.0], [9.0]], np.float32)
    frames = FrameSet(features, np.zeros(4, np.int32), np.array([0, 3, 4]), ("a", "b"))
    first, second = spliced_utterances(frames, 2, 1)
    assert first.tolist() == [[1, 1, 1, 2], [1, 1, 2, 3], [1, 2, 3, 3]]
    assert second.tolist() == [[9, 9, 9, 9]]


def test_order_is_a_function_of_seed_outer_iteration_and_job(tmp_path: Path) -> None:
    reader = EgsReader(prepare(tmp_path))
    shard = Schedule(reader.info.num_archives, 4, 1.0, 0.1, 0.1, 1, 1).shard(0)

    def order(seed: int, outer_iter: int, job: int) -> torch.Tensor:
        return torch.cat([minibatch.x_ND for minibatch in reader.minibatches(shard, 16, seed=seed, outer_iter=outer_iter, job=job)])
    assert torch.equal(order(1, 2, 3), order(1, 2, 3))
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 2)):
        assert not torch.equal(order(1, 2, 3), order(*other))
    sizes = [len(minibatch.pdf_N) for minibatch in reader.minibatches(shard, 32, seed=0, outer_iter=0, job=0)]
    assert set(sizes[:-1]) == {32}
    assert sum(sizes) == reader.num_frames(shard)


@pytest.mark.parametrize(("name", "at", "values", "message"), [
    ("features_TD", (130, 2), [np.nan, np.inf], "utt2"), ("pdf_T", 3, [NUM_CLASSES], rf"\b{NUM_CLASSES}\b"),
    ("weight_T", slice(None), [np.nan, -1.0, 0.0], "weights")])
def test_frames_of_no_use_are_refused(tmp_path: Path, name: str, at: Any, values: list[float], message: str) -> None:
    for value in values:
        train = dataclasses.replace(frame_set(1000, 1), weight_T=np.ones(1000, np.float32))
        getattr(train, name)[at] = value
        with pytest.raises(DataError, match=message):
            prepare(tmp_path, train)
        assert list(tmp_path.iterdir()) == []  # nothing half-written


def test_a_second_call_reads_the_existing_data(tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    before = (directory / "info.json").stat().st_mtime_ns
    assert prepare(tmp_path) == directory
    assert (directory / "info.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(("config", "expected"), [
    (CONFIG, "2f1e705ed74be69d15c2adad7eb2f6d9c54e5634b481696d0bdab083ae2d49d2"),
    (EgsConfig(), "1125275efa88ee7d9bb17cd80287c6f2d002f63c58867b182ca8463424d0f55e")])
def test_every_minibatch_has_the_bits_that_the_first_format_gave(tmp_path: Path, config: EgsConfig, expected: str) -> None:
    """The digests were made with format 1, safetensors' own writer and slices."""
    reader = EgsReader(prepare(tmp_path, config=config))
    found = hashlib.sha256()
    minibatches = [minibatch for archive in range(reader.info.num_archives) for frame in range(config.frames_per_eg)
                   for minibatch in reader.minibatches(Shard(archive, frame), 32, seed=3, outer_iter=5, job=archive + 7)]
    for x_ND, pdf_N, weight_N in (*minibatches, reader.diagnostic("train"), reader.diagnostic("valid")):
        assert weight_N is None
        found.update(x_ND.numpy().tobytes())
        found.update(pdf_N.numpy().tobytes())
    assert found.hexdigest() == expected


def test_archives_hold_the_examples_of_the_reference_once_each(tmp_path: Path) -> None:
    train = frame_set(1000, 1)
    reader = EgsReader(prepare(tmp_path, train))
    expected = [(*window, utt_id) for u, utt_id in enumerate(train.utt_ids) for window in windows_of(train, u, 2, 1, 4)]
    found = [reader.example(archive, index) for archive in range(reader.info.num_archives)
             for index in range(reader.info.num_examples[archive])]
    assert sorted((e.features_WD.tolist(), e.pdf_F.tolist(), e.utt_id) for e in found) == \
        sorted((features_WD.tolist(), classes, utt_id) for features_WD, classes, utt_id in expected)
    assert all((example.weight_F == 1.0).all() and example.group == "" for example in found)
    with pytest.raises(DataError, match=r"example 0.*archive 9.*3"):
        reader.example(9, 0)


def test_part_of_a_pass_has_the_minibatches_of_the_complete_pass(tmp_path: Path) -> None:
    reader = EgsReader(prepare(tmp_path))
    whole, part = (list(reader.minibatches(Shard(0, 1), 16, seed=0, outer_iter=0, job=0, first=first, stop=stop))
                   for first, stop in ((0, None), (2, 4)))
    assert len(part) == 2
    assert all(torch.equal(a.x_ND, b.x_ND) and torch.equal(a.pdf_N, b.pdf_N) for a, b in zip(part, whole[2:4], strict=True))


def mapped(frames: FrameSet, folder: Path) -> FrameSet:
    """The frames with features in a file, as prepared corpora have them."""
    np.save(folder / "features.npy", frames.features_TD)
    return dataclasses.replace(frames, features_TD=np.load(folder / "features.npy", mmap_mode="r"))


@pytest.mark.parametrize("in_file", [True, False])
def test_archives_are_the_same_whatever_the_number_of_writers(tmp_path: Path, in_file: bool) -> None:
    train = mapped(frame_set(1000, 1), tmp_path) if in_file else frame_set(1000, 1)
    train = dataclasses.replace(train, weight_T=np.linspace(0.0, 1.0, 1000, dtype=np.float32))
    one, three = (prepare(tmp_path / str(num), train, num_writers=num) for num in (1, 3))
    assert EgsReader(one).info == EgsReader(three).info
    assert [(path.name, sha256(path)) for path in sorted(one.iterdir())] == \
        [(path.name, sha256(path)) for path in sorted(three.iterdir())]


@pytest.mark.slow
def test_features_pass_through_memory_a_piece_at_a_time(tmp_path: Path) -> None:
    """Python's own memory never holds more than a few pieces of the examples."""
    features_TD = np.lib.format.open_memmap(tmp_path / "big.npy", "w+", np.float32, (30_000, 128))
    frames = FrameSet(features_TD, np.zeros(30_000, np.int32), np.array([0, 30_000]), ("a",))
    config = EgsConfig(left_context=8, right_context=8, frames_per_eg=1, samples_per_iter=30_000, num_diagnostic_frames=10)
    size = 30_000 * 17 * 128 * 4
    assert size > 7 * PIECE_BYTES
    tracemalloc.start()
    try:
        prepare_archives(frames, frames, config, num_classes=1, digest="big", cache_root=tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 4 * PIECE_BYTES
    finally:
        tracemalloc.stop()


_WRITE_WITHOUT_ROOM = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from ngsgd.config import EgsConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.errors import DataError
np.save(sys.argv[3] + "/features.npy", np.zeros((1000, 5), np.float32))
frames = FrameSet(np.load(sys.argv[3] + "/features.npy", mmap_mode="r"), np.zeros(1000, np.int32), np.array([0, 1000]), ("a",))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))   # an archive takes 13 kB
config = EgsConfig(2, 1, 4, samples_per_iter=100, num_diagnostic_frames=50)
try:
    prepare_archives(frames, frames, config, num_classes=1, digest="x", cache_root=Path(sys.argv[1]), num_writers=int(sys.argv[2]))
except DataError as error:
    print(error)
"""


@pytest.mark.parametrize("num_writers", [1, 2])
def test_a_full_disk_gives_one_message_and_removes_incomplete_archives(tmp_path: Path, num_writers: int) -> None:
    said = subprocess.run([sys.executable, "-c", _WRITE_WITHOUT_ROOM, str(tmp_path / "egs"), str(num_writers), str(tmp_path)],
                          check=True, text=True, capture_output=True, cwd=Path(__file__).parents[2]).stdout
    _phase, message = said.splitlines()
    assert f"{tmp_path}/egs ({os.strerror(errno.EFBIG)})" in message
    assert list((tmp_path / "egs").iterdir()) == []


@pytest.mark.parametrize(("place", "value", "message"), [
    ("ngsgd.data.examples.sys.executable", "/bin/false", "ended with 1"),
    ("shutil.disk_usage", lambda _: SimpleNamespace(free=1000), r"0\.001 MB.*MB")])
def test_a_failure_of_writing_is_reported_and_its_files_are_removed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, value: object, message: str) -> None:
    monkeypatch.setattr(place, value)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path, num_writers=2)
    assert list(tmp_path.iterdir()) == []


def test_weights_follow_their_frames_and_frames_of_weight_0_are_skipped(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    weight_T = np.where(random.random(1000) < 0.3, 0.0, random.random(1000)).astype(np.float32)
    train = dataclasses.replace(frame_set(1000, 1), weight_T=weight_T)
    reader = EgsReader(prepare(tmp_path, train))
    found: list[tuple[list[float], int, float]] = []
    for index in range(reader.info.num_archives * 4):
        for x_ND, pdf_N, weight_N in reader.minibatches(Shard(index % 3, index // 3), 32, seed=0, outer_iter=0, job=0):
            assert weight_N is not None
            found += zip(x_ND.tolist(), pdf_N.tolist(), weight_N.tolist(), strict=True)
    spliced = np.concatenate(list(spliced_utterances(train, 2, 1))).tolist()
    assert sorted(found) == sorted((x, int(pdf), float(weight)) for x, pdf, weight
                                   in zip(spliced, train.pdf_T, weight_T, strict=True) if weight)
    assert sum(map(sum, reader.info.num_rows)) == reader.info.num_frames == np.count_nonzero(weight_T)
    diagnostic = reader.diagnostic("train")
    assert diagnostic.weight_N is not None and (diagnostic.weight_N > 0).all()


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-100]),
                                    lambda path: path.write_bytes(b"x" + path.read_bytes()[1:])])
def test_a_damaged_archive_is_reported_by_number_and_others_are_readable(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    reader = EgsReader(prepare(tmp_path))
    damage(reader.directory / "egs.0001.safetensors")
    with pytest.raises(DamagedArchiveError, match=r"egs\.0001\.safetensors") as caught:
        list(reader.minibatches(Shard(1, 0), 8, seed=0, outer_iter=0, job=0))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.archive, str(again), again.exit_code) == (1, str(caught.value), 3)
    assert list(reader.minibatches(Shard(0, 0), 8, seed=0, outer_iter=0, job=0))


def test_a_checksum_is_made_once_in_a_process_and_again_when_the_file_has_changed(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = prepare(tmp_path)
    made: list[str] = []

    def counted(path: Path) -> str:
        made.append(path.name)
        return sha256(path)
    monkeypatch.setattr("ngsgd.data.fetching.source.sha256", counted)
    for _ in range(2):
        list(EgsReader(directory).minibatches(Shard(0, 0), 8, seed=0, outer_iter=0, job=0))
    assert made == ["egs.0000.safetensors"]
    archive = directory / "egs.0000.safetensors"
    archive.write_bytes(archive.read_bytes())
    os.utime(archive, ns=(1, 1))
    list(EgsReader(directory).minibatches(Shard(0, 0), 8, seed=0, outer_iter=0, job=0))
    assert made == 2 * ["egs.0000.safetensors"]


def test_examples_of_another_format_and_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="directory"):
        EgsReader(tmp_path)
    directory = prepare(tmp_path)
    index = json.loads((directory / "info.json").read_text())
    (directory / "info.json").write_text(json.dumps({**index, "format": 1}))
    with pytest.raises(DataError, match=r"format 1.*2"):
        EgsReader(directory)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0not json at all!", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_without_arrays_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FormatError):
        ArrayFile(tmp_path / "file")


def test_a_thread_makes_minibatches_in_advance_and_ends_with_its_reader(tmp_path: Path) -> None:
    reader = EgsReader(prepare(tmp_path))
    plain, ahead_of_time = (list(reader.minibatches(Shard(0, 0), 16, seed=0, outer_iter=0, job=0, prefetch=depth))
                            for depth in (0, 3))
    assert all(torch.equal(a.x_ND, b.x_ND) for a, b in zip(plain, ahead_of_time, strict=True))
    half_read = reader.minibatches(Shard(0, 0), 4, seed=0, outer_iter=0, job=0, prefetch=2)
    next(half_read)
    half_read.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ngsgd-prefetch")]


def test_an_error_in_the_items_is_raised_where_it_happened() -> None:
    def items() -> Iterator[int]:
        yield from (1, 2)
        raise DataError("the third one is broken")
    found = ahead(items(), 5)
    assert (next(found), next(found)) == (1, 2)
    with pytest.raises(DataError, match="third"):
        next(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory is useful for a GPU only")
def test_minibatches_for_a_gpu_are_pinned_and_the_same(tmp_path: Path) -> None:
    reader = EgsReader(prepare(tmp_path))
    plain, pinned = (list(reader.minibatches(Shard(0, 0), 16, seed=0, outer_iter=0, job=0, pin_memory=pin, prefetch=4 * pin))
                     for pin in (False, True))
    assert all(minibatch.x_ND.is_pinned() for minibatch in pinned)
    assert all(torch.equal(a.x_ND, b.x_ND.to("cuda", non_blocking=True).cpu()) for a, b in zip(plain, pinned, strict=True))


def test_who_comes_second_keeps_the_files_that_others_read(tmp_path: Path) -> None:
    (tmp_path / "egs").mkdir()
    (tmp_path / "egs" / "file").write_text("not whole: no index")
    with shared_directory(tmp_path / "egs", "index") as slower:
        (slower / "file").write_text("second")
        with shared_directory(tmp_path / "egs", "index") as faster:
            (faster / "file").write_text("first")
            (faster / "index").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["egs"]
    assert (tmp_path / "egs" / "file").read_text() == "first"


def beside(frames: FrameSet, dim: int = 3, period: int = 10) -> FrameSet:
    lengths = np.diff(frames.offsets)
    first_U = np.cumsum([0, *-(-lengths // period)])
    row_T = np.concatenate([first + np.arange(length) // period for first, length in zip(first_U[:-1], lengths, strict=True)])
    rows_RS = np.random.default_rng(5).normal(size=(int(first_U[-1]), dim)).astype(np.float32)
    return dataclasses.replace(frames, side=Side(rows_RS, row_T.astype(np.int32)))


@pytest.mark.parametrize("num_writers", [1, 2])
def test_a_side_input_is_stored_once_per_row_and_archive(tmp_path: Path, num_writers: int) -> None:
    train = beside(frame_set(1000, 1))
    reader = EgsReader(prepare_archives(
        train, beside(frame_set(300, 2)), CONFIG, num_classes=NUM_CLASSES, digest="toy",
        cache_root=tmp_path, num_writers=num_writers))
    assert reader.info.side_dim == 3 and reader.info.num_inputs == 4 * train.dim + 3
    schedule = Schedule(reader.info.num_archives, 4, 1.0, 0.1, 0.1, 1, 1)
    spliced = np.concatenate(list(spliced_utterances(train, 2, 1)))
    assert spliced.shape == (1000, reader.info.num_inputs)
    assert train.side is not None
    np.testing.assert_array_equal(spliced[:, -3:], train.side.rows_RS[train.side.row_T])
    assert rows(reader, schedule) == sorted((tuple(row), int(pdf)) for row, pdf in
                                            zip(spliced.tolist(), train.pdf_T.tolist(), strict=True))
    assert {tuple(row) for row in reader.diagnostic("train").x_ND.tolist()} <= {tuple(row) for row in spliced.tolist()}
    assert all(len(reader.archive_arrays(a)["side"]) < 2 * reader.info.num_examples[a] for a in range(reader.info.num_archives))
    # masks do not change it
    plain, masked = (
        torch.cat([one.x_ND for one in reader.minibatches(Shard(0, 0), 32, seed=0, outer_iter=0, job=0, augment=masks)])
        for masks in (None, AugmentConfig(spec=True)))
    assert torch.equal(plain[:, -3:], masked[:, -3:]) and not torch.equal(plain[:, :-3], masked[:, :-3])


@pytest.mark.parametrize(("name", "shorter"), [
    ("pdf_T", lambda labels_T: labels_T[:-1]), ("side", lambda side: Side(side.rows_RS, side.row_T[1:]))])
def test_labels_and_side_inputs_that_do_not_fit_the_frames_are_refused(name: str, shorter: Callable[[Any], Any]) -> None:
    frames = beside(frame_set(100, 1))
    with pytest.raises(DataError, match=r"100 frames.*99"):
        dataclasses.replace(frames, **{name: shorter(getattr(frames, name))})
