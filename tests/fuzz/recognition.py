"""Mutated recordings and bundles: `ngsgd transcribe` ends each with words or with one message."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from ngsgd import files
from ngsgd.asr.bundle import INDEX
from tests.asr import tiny_recognizer
from tests.fuzz import judge, server
from tests.fuzz.report import Report, chosen
from tests.fuzz.server import Outcome

WORDS = ["NO", "YES", "YES", "NO"]
# file name -> rate, channels, libsndfile's subtype
_RECORDINGS = {
    "pcm16.wav": (8000, 1, "PCM_16"), "pcm8.wav": (8000, 1, "PCM_U8"),
    "pcm24.wav": (48000, 2, "PCM_24"), "float.wav": (96000, 1, "FLOAT"),
    "double.wav": (16000, 1, "DOUBLE"), "ulaw.wav": (8000, 1, "ULAW"),
    "alaw.wav": (8000, 1, "ALAW"), "adpcm.wav": (8000, 1, "IMA_ADPCM"),
    "pcm.flac": (44100, 2, "PCM_16"), "vorbis.ogg": (16000, 1, "VORBIS"),
    "opus.opus": (16000, 1, "OPUS"), "layer3.mp3": (16000, 1, "MPEG_LAYER_III"),
    "pcm.aiff": (22050, 1, "PCM_16"), "ulaw.au": (8000, 1, "ULAW"),
    "pcm.caf": (8000, 1, "PCM_16"), "pcm.w64": (8000, 1, "PCM_16")}
_HEADER_BYTES = 128
_EXTREMES = (0, 1, 0x7F, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, 0x10000)
_LEAVES: tuple[Any, ...] = (
    None, "", "x", [], {}, -1, 0, 1, True, 10**25, 1e308, float("nan"), float("inf"), [1], {"a": 1},
    "../../x", "\x1b[2J", 2.5, 1 << 40)
Change = Callable[[bytearray, random.Random], bytes | bytearray]


def audio_campaign(folder: Path, num_cases: int, only: str | None, seed: int,
                   hang_s: float) -> Report:
    """A damaged recording among sound ones: the words of the others are kept."""
    report = _report("audio", seed)
    bundle = tiny_recognizer.write(folder / "model.ngsgd")
    sound = folder / "sound.wav"
    soundfile.write(sound, tiny_recognizer.say(WORDS), tiny_recognizer.RATE_HZ)
    bases = _recordings(folder)
    num_rounds = -(-num_cases // len(bases) // len(_CHANGES))
    names = [f"{base}:{kind}:{number}" for number in range(num_rounds) for base in bases
             for kind in _CHANGES]
    for name in chosen(names, num_cases, str, only):
        base, kind, _ = name.split(":")
        damaged = folder / f"damaged{Path(base).suffix}"
        damaged.write_bytes(_CHANGES[kind](bytearray(bases[base]), random.Random(f"{seed}:{name}")))
        words = ["transcribe", str(bundle), str(damaged), str(sound)]
        done = server.call(words, folder, timeout_s=hang_s)
        report.add(name, _judged_audio(done))
        report.notes[done.ending] += 1
        damaged.unlink()
    return report


def bundle_campaign(folder: Path, num_cases: int, only: str | None, seed: int,
                    hang_s: float) -> Report:
    """Damaged bundles, and edited ones with right digests: no code, no silent change."""
    report = _report("bundles", seed)
    content = tiny_recognizer.content()
    bundle, sound, canary = folder / "model.ngsgd", folder / "sound.wav", folder / "canary"
    soundfile.write(sound, tiny_recognizer.say(WORDS), tiny_recognizer.RATE_HZ)
    tiny_recognizer.write(bundle)
    whole = bundle.read_bytes()
    words = server.call(["transcribe", str(bundle), str(sound)], folder).out
    kinds = [*_CHANGES, *_EDITS]
    names = [f"{kind}:{number}" for number in range(-(-num_cases // len(kinds))) for kind in kinds]
    for name in chosen(names, num_cases, str, only):
        kind = name.split(":")[0]
        rng = random.Random(f"{seed}:{name}")
        is_edited = kind in _EDITS
        bundle.write_bytes(_EDITS[kind](content, rng, canary) if is_edited
                           else _CHANGES[kind](bytearray(whole), rng))
        done = server.call(["transcribe", str(bundle), str(sound)], folder, timeout_s=hang_s)
        report.add(name, _judged_bundle(done, words, canary, is_edited=is_edited))
        report.notes[done.ending] += 1
    return report


def _report(name: str, seed: int) -> Report:
    return Report(name, lambda case: f"python -m tests.fuzz {name} --seed {seed} --only '{case}'")


def _judged_audio(done: Outcome) -> Iterator[str]:
    yield from judge.well_told(done)
    lines = done.out.splitlines()
    if not done.hung and not any(line.endswith(f"sound.wav: {' '.join(WORDS)}") for line in lines):
        yield f"the other recording lost its words: {lines[-1:]}"
    if done.code not in (0, 3):
        yield f"{done.ending} for a damaged recording"
    if (done.code == 3) != (len(done.sentences) == 1):
        yield f"{done.ending} with {len(done.sentences)} messages"


def _judged_bundle(done: Outcome, words: str, canary: Path, *, is_edited: bool) -> Iterator[str]:
    yield from judge.well_told(done)
    # 2: a custom network without --trust; 3: a model that takes no audio
    if done.code not in ((0, 2, 3, 6) if is_edited else (0, 6)):
        yield f"{done.ending} for a damaged bundle"
    if done.code and len(done.sentences) != 1:
        yield f"{done.ending} with {len(done.sentences)} messages"
    if done.code == 0 and not is_edited and done.out != words:
        yield "silently other words"
    if canary.exists():
        canary.unlink()
        yield "executed code from the bundle"


def _recordings(folder: Path) -> dict[str, bytes]:
    found = {}
    for name, (rate_hz, num_channels, subtype) in _RECORDINGS.items():
        samples_N = tiny_recognizer.say(WORDS, rate_hz=rate_hz) / 32768.0
        soundfile.write(folder / name, np.stack([samples_N] * num_channels, axis=1), rate_hz,
                        subtype=subtype, format="OGG" if name.endswith(".opus") else None)
        found[name] = (folder / name).read_bytes()
    return found


def _flip(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 8, 100))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return data


def _flip_header(data: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.choice((1, 4))):
        data[rng.randrange(min(_HEADER_BYTES, len(data)))] = rng.randrange(256)
    return data


def _extreme(data: bytearray, rng: random.Random) -> bytearray:
    """A number of the header becomes one at the edge of its range."""
    width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
    at = rng.randrange(min(_HEADER_BYTES, len(data)) - width)
    value = rng.choice(_EXTREMES) & ((1 << (8 * width)) - 1)
    data[at : at + width] = value.to_bytes(width, order)  # type: ignore[arg-type]
    return data


def _insert(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    data[at:at] = rng.randbytes(rng.choice((1, 7, 5000)))
    return data


def _repeat(data: bytearray, rng: random.Random) -> bytearray:
    at, length = rng.randrange(len(data)), rng.randrange(1, 2000)
    data[at:at] = data[at : at + length]
    return data


def _cut_out(data: bytearray, rng: random.Random) -> bytearray:
    at = rng.randrange(len(data))
    del data[at : at + rng.choice((1, 3, 500, 50_000))]
    return data


def _overwrite(data: bytearray, rng: random.Random) -> bytearray:
    at, length = rng.randrange(len(data)), rng.randrange(1, 5000)
    data[at : at + length] = rng.choice((bytes(length), b"\xff" * length, rng.randbytes(length)))
    return data


_CHANGES: dict[str, Change] = {
    "flip": _flip, "flip-header": _flip_header, "extreme": _extreme, "insert": _insert,
    "repeat": _repeat, "cut-out": _cut_out, "overwrite": _overwrite,
    "truncate": lambda data, rng: data[: rng.randrange(len(data))],
    "head": lambda data, rng: data[: rng.randrange(min(_HEADER_BYTES, len(data)))],
    "append": lambda data, rng: data + rng.randbytes(rng.randrange(1, 5000)),
    "random": lambda data, rng: rng.randbytes(rng.randrange(len(data))),
    "empty": lambda _data, _rng: b""}

# Bundles whose digests are right ------------------------------------------------------------------

Edit = Callable[[dict[str, bytes], random.Random, Path], bytes]


def _leaf(name: str) -> Edit:
    """A value somewhere in a JSON file becomes another."""
    def edit(content: dict[str, bytes], rng: random.Random, _canary: Path) -> bytes:
        tree = json.loads(content[name])
        node, parent, key = tree, None, None
        while isinstance(node, (dict, list)) and node and (parent is None or rng.random() < 0.9):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            parent, key = node, rng.choice(keys)
            node = node[key]
        if rng.random() < 0.2 and isinstance(parent, dict):
            del parent[key]
        else:
            parent[key] = rng.choice(_LEAVES)  # type: ignore[index]
        return _sealed({**content, name: json.dumps(tree).encode()})
    return edit


def _of_file(name: str, change: Change) -> Edit:
    return lambda content, rng, _canary: _sealed(
        {**content, name: bytes(change(bytearray(content[name]), rng))})


def _pickled(content: dict[str, bytes], _rng: random.Random, canary: Path) -> bytes:
    return _sealed({**content, "model.safetensors": pickle.dumps(_Touch(canary))})


def _custom(content: dict[str, bytes], _rng: random.Random, canary: Path) -> bytes:
    """The network becomes a module that writes the canary when it is imported."""
    (canary.parent / "fuzz_network.py").write_text(f"open({str(canary)!r}, 'w')\n")
    about = json.loads(content["model.json"])
    about["model"] |= {"_target_": "fuzz_network:Net", "search_path": str(canary.parent)}
    return _sealed({**content, "model.json": json.dumps(about).encode()})


def _newer(content: dict[str, bytes], rng: random.Random, _canary: Path) -> bytes:
    index = json.loads(content[INDEX]) | {files.FORMAT: rng.randrange(2, 100)}
    return _zipped({**content, INDEX: _index(index)})


def _compressed(content: dict[str, bytes], rng: random.Random, _canary: Path) -> bytes:
    return _zipped(content, rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))


def _renamed(content: dict[str, bytes], rng: random.Random, _canary: Path) -> bytes:
    name = rng.choice(list(content))
    other = rng.choice(("../../x", "/etc/passwd", "model.json", "a" * 300))
    return _zipped({other if one == name else one: data for one, data in content.items()})


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def _sealed(content: dict[str, bytes]) -> bytes:
    """A zip whose index has the digests of the files as they are."""
    index = json.loads(content[INDEX])
    if isinstance(index.get("sha256"), dict):
        index["sha256"] |= {name: hashlib.sha256(content[name]).hexdigest()
                            for name in index["sha256"] if name in content}
    return _zipped({**content, INDEX: _index(index)})


def _index(index: dict[str, Any]) -> bytes:
    about = {name: value for name, value in index.items() if name != files.DIGEST}
    return json.dumps(files.sealed("bundle", about)).encode()


def _zipped(content: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return file.getvalue()


_EDITS: dict[str, Edit] = {
    **{f"leaf-{number}-{name}": _leaf(name) for name in (INDEX, "model.json") for number in range(6)},
    **{f"{kind}-{name}": _of_file(name, _CHANGES[kind]) for name in ("model.json", "model.safetensors")
       for kind in ("flip", "flip-header", "truncate", "overwrite")},
    "pickle": _pickled, "custom": _custom, "newer": _newer, "compressed": _compressed,
    "renamed": _renamed}
