"""A bundle holds all that recognizing speech takes; a damaged or edited one is refused."""

from __future__ import annotations

import json
import re
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd import files
from ngsgd.asr import bundle
from ngsgd.asr.bundle import Bundle
from ngsgd.asr.decode.tuning import Calibration
from ngsgd.asr.lang.vocabulary import Vocabulary
from ngsgd.errors import CheckpointError, ConfigError
from tests.asr import tiny_recognizer

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def content() -> Files:
    return tiny_recognizer.content()


def folder_of(path: Path, content: Files) -> Path:
    path.mkdir()
    for name, data in content.items():
        (path / name).write_bytes(data)
    return path


def write_changed(path: Path, content: Files, change: Callable[[Any], dict[str, Any]]) -> None:
    """Write a bundle with other entries of the index, and a valid checksum."""
    index = files.unsealed("bundle", json.loads(content[bundle.INDEX]))
    changed = files.sealed("bundle", {**index, **change(index)})
    bundle.write_file(path, {**content, bundle.INDEX: json.dumps(changed).encode()})


def test_a_file_and_a_folder_hold_the_same(tmp_path: Path, content: Files) -> None:
    bundle.write_file(tmp_path / "a", content)
    bundle.write_file(tmp_path / "b", dict(reversed(content.items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (tmp_path / "run").mkdir()
    folder = folder_of(tmp_path / "run" / "final", content)
    x_TD = np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32)
    found = [Bundle.load(path) for path in (tmp_path / "a", folder, tmp_path / "run")]
    scores = [one.log_likelihoods(x_TD) for one in found]
    assert all(np.array_equal(one, scores[0]) for one in scores)
    first = found[0]
    assert first.provenance == {"corpus": "made-up speech"}
    assert first.language == tiny_recognizer.LANGUAGE and first.features == tiny_recognizer.FEATURES
    assert first.weights.word_penalty == 1.0 and first.search.acoustic_scale == 0.3


def test_scores_of_spliced_frames_are_those_of_the_utterance(tmp_path: Path) -> None:
    found = Bundle.load(tiny_recognizer.write(tmp_path / "a"))
    x_TD = np.random.default_rng(0).normal(size=(30, 20)).astype(np.float32)
    at_TW = (np.arange(30)[:, None] + np.arange(-2, 3)).clip(0, 29)
    scores = found.scores(x_TD[at_TW].reshape(30, -1))
    np.testing.assert_allclose(scores, found.log_likelihoods(x_TD), rtol=1e-5, atol=1e-5)


def test_other_words_over_the_same_phones_make_another_graph(tmp_path: Path) -> None:
    found = Bundle.load(tiny_recognizer.write(tmp_path / "a"))
    (tmp_path / "lexicon").write_text("NY N Y\n")
    other = found.with_words(Vocabulary(lexicon=tmp_path / "lexicon"))
    assert other.graph.words == ("NY",) and found.graph.words == ("NO", "YES")


def test_an_invalid_model_is_rejected_with_the_next_step(tmp_path: Path, content: Files) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        Bundle.load(tmp_path / "nothing")
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    with pytest.raises(CheckpointError, match="ngsgd resume"):
        Bundle.load(run)
    folder_of(run / "final", {name: data for name, data in content.items() if name != bundle.INDEX})
    with pytest.raises(CheckpointError, match="ngsgd resume"):
        Bundle.load(run)


@pytest.mark.parametrize("name", ["model.json", "model.safetensors", bundle.INDEX])
@pytest.mark.parametrize("damage", [
    lambda data: data[:-1], lambda data: data[:100] + b"x" + data[101:], lambda _: b"", None])
def test_a_damaged_or_missing_file_is_named(
        tmp_path: Path, content: Files, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    folder = folder_of(tmp_path / "final", content)
    if damage is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(damage(content[name]))
    with pytest.raises(CheckpointError, match=re.escape(name) if name == "model.safetensors"
                       else None):
        Bundle.load(folder)


def test_a_calibration_is_read(tmp_path: Path, content: Files) -> None:
    write_changed(tmp_path / "a", content, lambda index: {"calibration": {"slope": 0.5, "offset": -1.0}})
    assert Bundle.load(tmp_path / "a").calibration == Calibration(0.5, -1.0)


CALIBRATIONS: list[Any] = [None, [], {"slope": 1.0}, {"slope": -1.0, "offset": 0.0},
                           {"slope": 1e300, "offset": 0.0}, {"slope": "x", "offset": 0.0}]
COUNTS: list[Any] = [None, [], 5, {"YES": -1}, {"YES": 1.5}, {"YES": True}, {"YES": "1"}]


@pytest.mark.parametrize("change", [
    *({"calibration": values} for values in CALIBRATIONS), *({"word_counts": counts} for counts in COUNTS)])
def test_other_values_in_the_index_are_refused(tmp_path: Path, content: Files, change: Any) -> None:
    write_changed(tmp_path / "a", content, lambda index: change if "calibration" in change else {
        "language": {**index["language"], **change}})
    with pytest.raises(CheckpointError):
        Bundle.load(tmp_path / "a")


@pytest.mark.parametrize("changes", [
    {"num_inputs": 10}, {"num_classes": 10**9}, {"left_context": -1}, {"left_context": 10**6},
    {"feature_dim": 40}, {"side_dim": 5}, {"priors": [0.0] * 7}, {"priors": [1.0]}, {"stage": 5},
    {"model": {"hidden_dim": 10**9}}, {"model": {"num_layers": 10**9}}, {"model": 5},
    {"ivectors": {"dim": 3}}])
def test_a_description_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tiny_recognizer.write(tmp_path / "a", **changes)
    with pytest.raises(CheckpointError):
        Bundle.load(path)


def test_a_custom_network_needs_trust(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    trap = {"_target_": "trap:Net", "search_path": str(tmp_path)}
    path = tiny_recognizer.write(tmp_path / "a", model=trap)
    with pytest.raises(ConfigError, match="trust"):
        Bundle.load(path)
    assert not (tmp_path / "ran").exists()


def test_a_compressed_archive_is_refused(tmp_path: Path, content: Files) -> None:
    with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    with pytest.raises(CheckpointError, match="compressed"):
        Bundle.load(tmp_path / "a")


def archive(members: list[tuple[str, bytes]], *, overlap: bool = False, twice: bool = False) -> bytes:
    """A zip file; members that overlap contain all members after them."""
    body, entries = b"", list[bytes]()
    for name, data in reversed(members):
        inside = data + body if overlap else data
        crc = zlib.crc32(inside)
        fields = struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 33, crc, len(inside), len(inside), len(name), 0)
        body = b"PK\x03\x04" + fields + name.encode() + data + body
        entries.append(struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 20, 20, 0, 0, 0, 33, crc, len(inside), len(inside),
                                   len(name), 0, 0, 0, 0, 0, len(body)) + name.encode())
    # offsets count from the start
    entries = [entry[:42] + struct.pack("<I", len(body) - struct.unpack("<I", entry[42:46])[0]) + entry[46:] for entry in entries]
    entries = entries * (2 if twice else 1)
    directory = b"".join(entries)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, len(entries), len(entries), len(directory), len(body), 0)
    return body + directory + end


NAMES = [bundle.INDEX, *bundle.MODEL_FILES, *bundle.LANGUAGE_FILES]


@pytest.mark.entry("At2", "read a bundle whose zip archive has overlapping, duplicate or many other members", "error",
                   "`CheckpointError`; only the files of a model are read, and together they are not larger than the file.")
@pytest.mark.parametrize("made", [
    lambda: archive([(f"{number}", b"") for number in range(60)] + [("last", bytes(1 << 20))], overlap=True),
    lambda: archive([(name, b"") for name in NAMES] + [("last", bytes(1 << 20))], overlap=True),
    lambda: archive([(bundle.INDEX, b"{}"), ("other", bytes(1 << 20))], twice=True),
    lambda: archive([(f"{number}", bytes(1 << 14)) for number in range(64)])],
    ids=["overlapping", "overlapping files of a model", "duplicates", "others"])
def test_an_archive_takes_no_more_memory_than_its_size(tmp_path: Path, made: Callable[[], bytes]) -> None:
    path = tmp_path / "bundle"
    path.write_bytes(made())
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            bundle.read_index(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.5 * path.stat().st_size


def test_the_archive_of_this_test_is_read_as_one_of_zipfile(tmp_path: Path, content: Files) -> None:
    (tmp_path / "bundle").write_bytes(archive([*content.items(), ("another", b"x")]))
    assert bundle.read_files(tmp_path / "bundle") == {name: content[name] for name in content}
