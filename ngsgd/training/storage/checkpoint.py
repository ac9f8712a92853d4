"""Checkpoints: a directory per outer iteration, whole or absent; no pickle.

`iter-000012/model.safetensors` holds the model, `outer.safetensors` what the outer optimiser keeps
beside it, `fisher.safetensors` the jobs' Fisher estimates where they are kept, `record.json` the
line of the event log, and `manifest.json` everything else, with the checksums of all files and its
own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from ngsgd.errors import CheckpointError
from ngsgd.files import (
    fsync,
    keep_digest,
    make_directories,
    matches_digest,
    new_directory,
    read_json,
    remove_abandoned,
    sealed,
    sha256,
    unsealed,
)
from ngsgd.training.job import Fisher
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.planning import Progress
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.storage.ledger import piece_fields, pieces_of
from ngsgd.training.storage.lock import RunLock

_FORMAT = 3
# the format before, whose manifests have no digest of their own
_WITHOUT_DIGEST = 2
_MODEL, _OUTER, _FISHER = "model.safetensors", "outer.safetensors", "fisher.safetensors"
_RECORD = "record.json"
# the newest, the one being written, and one that was damaged
_NUM_THAT_MUST_FIT = 3
_NAME = re.compile(r"iter-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A committed outer iteration."""

    progress: Progress
    # the model that is evaluated
    parameters: Vector
    # of its file; empty before the first
    model_sha256: str
    # the outer optimiser's arrays beside the model
    buffers: Mapping[str, Vector] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)     # and its numbers
    # the line of the ledger that goes with it
    commit: Mapping[str, Any] = field(default_factory=dict)
    # by job: the Fisher estimates that the next one goes on from
    fisher: Mapping[int, Fisher] = field(default_factory=dict)
    # of the event log, without diagnostics; None once it is written there
    record: OuterIterationRecord | None = None

    def outer_state(self) -> dict[str, Any]:
        """As `OuterOptimizer.load_state_dict` takes it."""
        return {"arrays": {"model": self.parameters, **self.buffers}, "numbers": self.numbers}


def first_checkpoint(parameters: Vector) -> Checkpoint:
    """Where a new run starts."""
    return Checkpoint(Progress(), parameters, "")


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, layout: FlatLayout, num_to_keep: int,
                 candidates: Collection[int] = (), lock: RunLock | None = None) -> None:
        self.directory = directory
        self.layout = layout
        self.num_to_keep = num_to_keep
        # outer iterations whose models the final combination wants, however old they are
        self.candidates = candidates
        self.models = directory.parent / "models"
        self._undiagnosed = directory / "undiagnosed.json"
        # of the run; without one nothing guards against a second coordinator
        self.lock = lock

    def save(self, progress: Progress, outer_state: Mapping[str, Any],
             commit: Mapping[str, Any] = MappingProxyType({}),
             fisher: Mapping[int, Fisher] = MappingProxyType({}),
             record: OuterIterationRecord | None = None) -> Checkpoint:
        """Commits an outer iteration, then removes the oldest checkpoints beyond `num_to_keep`.

        `commit` is kept with it, and completed by the model's checksum as "model".  The arrays of
        the checkpoint returned are those of `outer_state`, not copies.
        """
        arrays = dict(outer_state["arrays"])
        parameters = arrays.pop("model")
        if self.lock:
            self.lock.require_held()
            commit = {**commit, "fence": self.lock.fence}
        checkpoint = Checkpoint(progress, parameters, "", arrays, outer_state["numbers"], commit,
                                dict(fisher), record)
        try:
            with new_directory(self.directory / f"iter-{progress.outer_iter:06d}") as temporary:
                whole = self._write(temporary, checkpoint)
        except OSError as error:
            raise CheckpointError(
                f"outer iteration {progress.outer_iter + 1} could not be saved under "
                f"{self.directory} ({error.strerror}); "
                f"make room or fix the permissions, then `ngsgd resume {self.directory.parent}`.") from error
        self._keep_candidates()
        self._undiagnosed.unlink(missing_ok=True)
        for old in self._found()[:-self.num_to_keep]:
            shutil.rmtree(old, ignore_errors=True)
        return whole

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """(the newest whole checkpoint or None, one sentence for each damaged one that was passed
        over).
        """
        remove_abandoned(self.directory)
        # a crash may have come between a checkpoint and this
        self._keep_candidates()
        problems: list[str] = []
        for path in reversed(self._found()):
            try:
                return self.load(path), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def load_model(self, outer_iter: int) -> Vector:
        """The model of a candidate for the final combination, verified against its digest."""
        path = self._candidate(outer_iter)
        try:
            if not matches_digest(path):
                raise ValueError("its checksum does not match")
            state = load_file(path)
            if {name: tuple(t.shape) for name, t in state.items()} != self.layout.by_name():
                raise ValueError("it is of a model with other layers")
            return self.layout.flatten(state)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); remove it and resume: the final "
                                  "model is then combined "
                                  "from the other models.") from error

    def model_after(self, outer_iter: int) -> Vector:
        """The model of an outer iteration whose checkpoint is still there, or that is a candidate
        for the final combination.
        """
        path = next((path for path in self._found() if _outer_iter(path) == outer_iter), None)
        if path is not None:
            return self.load(path).parameters
        if outer_iter in self.kept():
            return self.load_model(outer_iter)
        there = sorted({*self.kept(), *map(_outer_iter, self._found())})
        raise CheckpointError(f"the model of outer iteration {outer_iter + 1} was not kept; those "
                              f"that were are {', '.join(str(one + 1) for one in there) or 'none'}.")

    def kept(self) -> list[int]:
        """The candidates that are there, newest first."""
        return sorted((_outer_iter(path) for path in self.models.glob("iter-*.safetensors")
                       if _NAME.fullmatch(path.stem)),
                      reverse=True)

    def missing_candidates(self, last: int) -> list[int]:
        """The candidates up to outer iteration `last` whose models are not there."""
        return sorted({one for one in self.candidates if one <= last} - set(self.kept()))

    def _candidate(self, outer_iter: int) -> Path:
        return self.models / f"iter-{outer_iter:06d}.safetensors"

    def _keep_candidates(self) -> None:
        """A second name for each candidate's file: it costs no space while the checkpoint is there."""
        for path in self._found():
            target = self._candidate(_outer_iter(path))
            wanted = _outer_iter(path) in self.candidates and (path / _MODEL).is_file()
            # an outer iteration that was done again, because its checkpoint was damaged, has a new
            # file
            if wanted and not (target.exists() and target.samefile(path / _MODEL)):
                try:
                    digest = self.load(path).model_sha256
                except CheckpointError:
                    continue
                self._keep_candidate(path / _MODEL, target, digest)

    def _keep_candidate(self, model: Path, target: Path, digest: str) -> None:
        make_directories(self.models)
        target.unlink(missing_ok=True)
        keep_digest(target, digest)
        try:
            os.link(model, target)
        except OSError:
            # not every file system has links
            shutil.copyfile(model, target)
            fsync(target)
        fsync(self.models)

    def load(self, path: Path) -> Checkpoint:
        """The checkpoint in `path`, verified against its checksums and the model's shape."""
        try:
            manifest = _verified_manifest(path)
            fields = manifest["progress"]
            progress = Progress(**{**fields, "pending": pieces_of(fields["pending"]),
                                   "quarantined": pieces_of(fields["quarantined"])})
            if progress.outer_iter != _outer_iter(path):
                raise ValueError(f"it is of outer iteration {progress.outer_iter + 1}")
            state = load_file(path / _MODEL)
            buffers = load_arrays(path / _OUTER) if _OUTER in manifest["files"] else {}
            fisher = _nested_fisher(load_arrays(path / _FISHER)) if _FISHER in manifest["files"] else {}
            record = self._record_of_before(progress)
            if _RECORD in manifest["files"]:
                record = OuterIterationRecord.from_json(read_json(path / _RECORD))
        # whatever a damaged file makes a parser raise, the checkpoint before is tried
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} is damaged ({error}) and is skipped.") from error
        if {name: tuple(t.shape) for name, t in state.items()} != self.layout.by_name():
            raise CheckpointError(f"checkpoint {path} is of a model with other layers; resume with "
                                  "its own configuration.")
        return Checkpoint(progress, self.layout.flatten(state), manifest["files"][_MODEL], buffers,
                          manifest["numbers"], manifest["commit"], fisher, record)

    def _write(self, folder: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Fills a checkpoint's folder; returns it with its checksum."""
        save_file(self.layout.unflatten(checkpoint.parameters), folder / _MODEL)
        if checkpoint.buffers:
            save_arrays(dict(checkpoint.buffers), folder / _OUTER)
        if checkpoint.fisher:
            save_arrays(_flat_fisher(checkpoint.fisher), folder / _FISHER)
        if checkpoint.record:
            (folder / _RECORD).write_text(json.dumps(asdict(checkpoint.record)), encoding="utf-8")
        digests = {path.name: sha256(path) for path in sorted(folder.iterdir())}
        commit = {**checkpoint.commit, "model": digests[_MODEL]}
        progress = checkpoint.progress
        fields = {**asdict(progress), "pending": list(map(piece_fields, progress.pending)),
                  "quarantined": list(map(piece_fields, progress.quarantined))}
        manifest = {"format": _FORMAT, "files": digests, "numbers": dict(checkpoint.numbers),
                    "progress": fields, "commit": commit}
        (folder / "manifest.json").write_text(json.dumps(sealed(manifest), indent=1),
                                              encoding="utf-8")
        return replace(checkpoint, model_sha256=digests[_MODEL], commit=commit)

    def _record_of_before(self, progress: Progress) -> OuterIterationRecord | None:
        """Of runs begun before format 3, which kept a waiting record in a file next to the
        checkpoints.
        """
        try:
            record = OuterIterationRecord.from_json(read_json(self._undiagnosed))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if record.outer_iter == progress.outer_iter else None

    def _found(self) -> list[Path]:
        return sorted((path for path in self.directory.glob("iter-*")
                       if _NAME.fullmatch(path.name)), key=_outer_iter)


def _outer_iter(path: Path) -> int:
    """Of a checkpoint's folder, or of a candidate's file."""
    return int(path.stem.removeprefix("iter-"))


def _verified_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, whose files and own values match their checksums; raises
    ValueError otherwise.
    """
    manifest, has_digest = unsealed(read_json(path / "manifest.json"))
    if manifest["format"] not in (_FORMAT, _WITHOUT_DIGEST):
        raise ValueError(f"format {manifest['format']} is not supported by this version")
    if manifest["format"] == _FORMAT and not has_digest:
        raise ValueError("manifest.json has no checksum")
    if _MODEL not in manifest["files"]:
        raise ValueError("manifest.json lists no model")
    for name, expected in manifest["files"].items():
        if sha256(path / name) != expected:
            raise ValueError(f"the checksum of {name} does not match")
    return manifest


def _flat_fisher(fisher: Mapping[int, Fisher]) -> dict[str, Any]:
    """Arrays by "job/estimate/key"; estimates have dots in their names, and no slashes."""
    return {f"{job}/{name}/{key}": np.asarray(value, order="C") for job, estimates in fisher.items()
            for name, state in estimates.items() for key, value in state.items()}


def _nested_fisher(arrays: Mapping[str, Any]) -> dict[int, Fisher]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for path, value in arrays.items():
        job, name, key = path.split("/")
        found.setdefault(int(job), {}).setdefault(name, {})[key] = value
    return dict(found)


def require_room(directory: Path, num_bytes: int) -> None:
    """Raises CheckpointError unless there is room for three checkpoints of so many bytes."""
    free = shutil.disk_usage(directory).free
    if free < _NUM_THAT_MUST_FIT * num_bytes:
        raise CheckpointError(f"{directory} has {free / 1e6:.0f} MB free, and three checkpoints "
                              f"take {_NUM_THAT_MUST_FIT * num_bytes / 1e6:.0f} MB; make room, or "
                              "choose another place with output_dir=PATH.")
