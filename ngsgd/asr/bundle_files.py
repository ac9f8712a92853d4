"""Files of a bundle: the folder `final/` of a run, or one file.

The index `recognizer.json` lists every other file with its SHA-256:

    recognizer.json                    language, feature and decoding settings, provenance, digests
    model.json, model.safetensors      the network, its input and the priors of its classes
    input_transform.safetensors, ivectors.safetensors, adaptation.safetensors, lm.arpa, HCLG.fst,
    tree.txt, grammar.jsgf             optional

A bundle in one file is an uncompressed zip archive of these. Its content is never executed or
unpickled.
"""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from ngsgd import files, interface
from ngsgd.asr.decode.calibration import Calibration
from ngsgd.asr.decode.tuning import DecodingWeights
from ngsgd.asr.features.cmvn import Stats
from ngsgd.asr.lang.language import GRAMMAR, Language
from ngsgd.config import DecodeConfig, FeatureConfig
from ngsgd.errors import CheckpointError

INDEX = "recognizer.json"
# increase it if earlier readers would misread the files
TRANSFORM, IVECTORS = "input_transform.safetensors", "ivectors.safetensors"
ADAPTATION = "adaptation.safetensors"
# files that a model may consist of
MODEL_FILES = ("model.json", "model.safetensors", TRANSFORM, IVECTORS, ADAPTATION)
LANGUAGE_FILES = ("lm.arpa", "HCLG.fst", "tree.txt", GRAMMAR)
AGAIN = "copy it again, or recreate it with: ngsgd export --format bundle RUN FILE"
_MAX_BYTES = 1 << 34
_UNCALIBRATED = Calibration()


# Writing ------------------------------------------------------------------------------------------


def index_of(model_files: Mapping[str, bytes], *, language: Language, features: FeatureConfig,
             decode: DecodeConfig, weights: DecodingWeights, calibration: Calibration = _UNCALIBRATED,
             all_speech: Stats | None, provenance: Mapping[str, Any]) -> str:
    """Return the text of `recognizer.json`.

    Args:
        model_files: name -> content of the existing `MODEL_FILES`.
        language, features, decode, weights, calibration, all_speech, provenance: as in `Bundle`.
    """
    content = {**model_files, **language.files()}
    index = {"sha256": {name: sha256(data).hexdigest() for name, data in sorted(content.items())},
             "language": language.to_json(), "features": asdict(features), "decode": asdict(decode),
             "weights": asdict(weights), "calibration": asdict(calibration),
             "all_speech": None if all_speech is None else all_speech.tolist(),
             "provenance": dict(provenance)}
    return json.dumps(files.sealed("bundle", index), indent=1)


def write_file(path: Path, content: Mapping[str, bytes]) -> None:
    """Write a bundle to one file: the index, then the files that it lists."""
    with files.new_file(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(content, key=lambda name: (name != INDEX, name)):
            # the default time of ZipInfo: equal content gives an equal file
            archive.writestr(zipfile.ZipInfo(name), content[name])


# Reading ------------------------------------------------------------------------------------------


def read_files(path: Path) -> dict[str, bytes]:
    """Read name -> content of every file of a model, with verified digests and the index last.

    Raises:
        CheckpointError: the model is missing, damaged, modified, or of another format.
    """
    return {**read_index(path)["files"], INDEX: _reader(path)(INDEX)}


def read_index(path: Path) -> dict[str, Any]:
    """Return the index, with the content of the listed files under "files", all verified."""
    try:
        read = _reader(path)
        index = files.unsealed("bundle", files.parse_json(read(INDEX).decode("utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as a model ({_reason(error)}); {AGAIN}.") from error
    listed = index.get("sha256")
    if not isinstance(listed, dict) or not set(listed) <= {*MODEL_FILES, *LANGUAGE_FILES}:
        raise CheckpointError(f"{path} lists files that are not part of a model; {AGAIN}.")
    found: dict[str, bytes] = {}
    for name, digest in listed.items():
        try:
            found[name] = read(name)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({_reason(error)}); {AGAIN}.") from error
        if sha256(found[name]).hexdigest() != digest:
            raise CheckpointError(f"{path}: {name} was modified (its SHA-256 differs from {INDEX}); {AGAIN}.")
    return {**index, "files": found}


def _reader(path: Path) -> Callable[[str], bytes]:
    """Return a function from the name of a file to its content."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; use a run folder, or a file of: ngsgd export "
                              "--format bundle RUN FILE.")
    if path.is_dir():
        is_run = (path / "config.yaml").is_file() or (path / "final").is_dir()
        folder = path / "final" if is_run else path
        if not (folder / "model.json").is_file():
            raise CheckpointError(f"{path} has no final model; finish the run with: {interface.resume(path)}")
        if not (folder / INDEX).is_file():
            raise CheckpointError(f"{path} was not decoded to its end, so final/ has no {INDEX}; finish the "
                                  f"run with: {interface.resume(path)}")
        return lambda name: files.read_regular_bytes(folder / name, _MAX_BYTES)
    # an uncompressed archive; its files together are not larger than it
    content = files.read_regular_bytes(path, _MAX_BYTES)
    members: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _require_plain(archive.infolist(), len(content))
            for name in (INDEX, *MODEL_FILES, *LANGUAGE_FILES):
                with contextlib.suppress(KeyError):
                    members[name] = archive.read(name)
    except (zipfile.BadZipFile, RuntimeError, EOFError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error

    def read(name: str) -> bytes:
        if name not in members:
            raise ValueError(f"it has no {name}")
        return members[name]

    return read


def _require_plain(members: Sequence[zipfile.ZipInfo], size: int) -> None:
    """Raise ValueError unless all members have their own bytes of the file, uncompressed."""
    names: set[str] = set()
    end = size
    for info in sorted(members, key=lambda one: -one.header_offset):
        is_plain = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if info.filename in names or not is_plain or info.flag_bits & 1:
            raise ValueError(f"its member {info.filename[:40]!r} is compressed, encrypted or duplicated")
        # the header of a member in the file has at least 30 bytes and the name
        if info.header_offset + 30 + len(info.filename) + info.file_size > end:
            raise ValueError(f"its member {info.filename[:40]!r} overlaps another one, or is cut")
        names.add(info.filename)
        end = info.header_offset


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)[:200]
