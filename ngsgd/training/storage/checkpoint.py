"""Checkpoints: one directory per outer iteration, written atomically and without pickle.

Files of `iter-000012`:

- `model.safetensors`: the model
- `outer.safetensors`: additional arrays of the outer optimizer
- `fisher.safetensors`: the Fisher estimates of the jobs, if they are kept
- `jobs.safetensors`: the state of jobs that continue from their own results
- `record.json`: the line of the event log
- `manifest.json`: everything else, with the checksums of all files including its own
"""

from __future__ import annotations

import errno
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
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

from ngsgd import files, interface
from ngsgd.errors import CheckpointError
from ngsgd.training.job import Fisher
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.planning import Progress
from ngsgd.training.records import OuterIterationRecord
from ngsgd.training.storage.ledger import piece_fields, pieces_of
from ngsgd.training.storage.lock import RunLock

_MODEL, _OUTER, _FISHER = "model.safetensors", "outer.safetensors", "fisher.safetensors"
_JOBS, _RECORD = "jobs.safetensors", "record.json"
# prefix of arrays and numbers of the averages over sites
_SITE = "site."
_NAME = re.compile(r"iter-(\d{6,})")
# of a file that is missing, of another kind or too large; others may be temporary
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL, errno.EFBIG)


@dataclass(frozen=True)
class JobStates:
    """What the jobs of the next outer iteration start from, in addition to the checkpoint."""

    # job -> parameters or delta that its last run ended with
    own: Mapping[int, Vector] = field(default_factory=dict)
    # model that these jobs start from; None: that of the checkpoint
    model: Vector | None = None
    # of the plan, if it was made before the checkpoint
    excluded: tuple[str, ...] | None = None

    def write(self, path: Path) -> None:
        """Write a file."""
        arrays = {f"own/{job}": vector for job, vector in self.own.items()}
        if self.model is not None:
            arrays["model"] = self.model
        save_arrays(arrays, path, metadata={"plan": json.dumps({"excluded": self.excluded})})

    @classmethod
    def read(cls, path: Path, size: int) -> JobStates:
        """Read vectors of `size`; OSError, ValueError or SafetensorError if the file is damaged."""
        with safe_open(path, framework="np") as file:
            excluded = json.loads(file.metadata()["plan"])["excluded"]
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if any(vector.shape != (size,) or vector.dtype != np.float32 for vector in arrays.values()):
            raise ValueError("it belongs to another model")
        own = {int(name.removeprefix("own/")): vector for name, vector in arrays.items() if name.startswith("own/")}
        return cls(own, arrays.get("model"), None if excluded is None else tuple(excluded))


@dataclass(frozen=True)
class Checkpoint:
    """A committed outer iteration."""

    progress: Progress
    # parameters of the evaluated model
    parameters: Vector
    # checksum of the model file; empty before the first commit
    model_sha256: str
    # arrays of the outer optimizer, in addition to the model
    buffers: Mapping[str, Vector] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)     # numbers of the outer optimizer
    # the corresponding line of the ledger
    commit: Mapping[str, Any] = field(default_factory=dict)
    # job -> Fisher estimates that its next run continues from
    fisher: Mapping[int, Fisher] = field(default_factory=dict)
    # record of the event log, without diagnostics; None once it is written there
    record: OuterIterationRecord | None = None
    # only while it is written; `CheckpointStore.load_jobs` reads it
    jobs: JobStates | None = None
    has_jobs: bool = False

    def outer_state(self) -> dict[str, Any]:
        """State in the format of `OuterOptimizer.load_state_dict`."""
        arrays = {"model": self.parameters, **self.buffers}
        return {"arrays": _without_sites(arrays), "numbers": _without_sites(self.numbers)}

    def site_state(self) -> dict[str, Any]:
        """State of the averages over sites, in the same format."""
        found = [{name.removeprefix(_SITE): value for name, value in values.items() if name.startswith(_SITE)}
                 for values in (self.buffers, self.numbers)]
        return {"arrays": found[0], "numbers": found[1]}


def with_sites(state: Mapping[str, Any], of_sites: Mapping[str, Any]) -> dict[str, Any]:
    """Add the state of the averages over sites to the state of the outer optimizer."""
    return {kind: {**state[kind], **{f"{_SITE}{name}": value for name, value in of_sites[kind].items()}}
            for kind in ("arrays", "numbers")}


def _without_sites(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith(_SITE)}


def first_checkpoint(parameters: Vector) -> Checkpoint:
    """Return the initial checkpoint of a new run."""
    return Checkpoint(Progress(), parameters, "")


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, layout: FlatLayout, num_to_keep: int, candidates: Collection[int] = (), lock: RunLock
                 | None = None, *, jobs_interval: int = 1) -> None:
        self.directory, self.layout, self.num_to_keep = directory, layout, num_to_keep
        # outer iterations between two checkpoints that contain the state of jobs
        self.jobs_interval = jobs_interval
        # outer iterations whose models are kept for the final combination, regardless of age
        self.candidates = candidates
        self.models = directory.parent / "models"
        # run lock; None gives no protection against a second coordinator
        self.lock = lock

    def save(self, progress: Progress, outer_state: Mapping[str, Any], commit: Mapping[str, Any] = MappingProxyType({}),
             fisher: Mapping[int, Fisher] = MappingProxyType({}), record: OuterIterationRecord | None = None, jobs: JobStates
             | None = None) -> Checkpoint:
        """Commit an outer iteration, then remove the oldest checkpoints beyond `num_to_keep`.

        Args:
            progress: state of the run after the outer iteration.
            outer_state: of the outer optimizer; its arrays become those of the checkpoint.
            commit: values stored with it, completed by the checksum of the model as "model".
            fisher: job -> Fisher estimates for its next run.
            record: record of the event log that is not written yet.
            jobs: state that the jobs of the next outer iteration continue from.
        """
        arrays = dict(outer_state["arrays"])
        parameters = arrays.pop("model")
        if self.lock:
            self.lock.require_held()
            commit = {**commit, "fence": self.lock.fence}
        checkpoint = Checkpoint(progress, parameters, "", arrays, outer_state["numbers"], commit, dict(fisher), record, jobs)
        try:
            with files.new_directory(self.directory / f"iter-{progress.outer_iter:06d}") as temporary:
                whole = self._write(temporary, checkpoint)
        except OSError as error:
            raise CheckpointError(f"outer iteration {progress.outer_iter + 1} could not be saved under {self.directory} "
                                  f"({error.strerror}); free disk space or fix the permissions, then continue with: "
                                  f"{interface.resume(self.directory.parent)}") from error
        self._keep_candidates({progress.outer_iter: whole.model_sha256})
        # later ones are of a future that was given up, so they are older than this one
        found = sorted(self._found(), key=lambda path: (_outer_iter(path) <= progress.outer_iter, path))
        # if only some contain the state of jobs, one of two of these may be damaged
        num_resumable = 1 if self.jobs_interval == 1 else 2
        resumable = [path for path in found if (path / _JOBS).is_file()][-num_resumable:]
        for old in found[:-self.num_to_keep]:
            if old not in resumable:
                shutil.rmtree(old, ignore_errors=True)
        if self.lock:
            self.lock.committed()
        return whole

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Return (newest undamaged checkpoint or None, a message for each damaged one skipped).

        If only some checkpoints contain the state of jobs, it is the newest one of these. The outer
        iterations after it are repeated, with bitwise identical results.

        Raises:
            CheckpointError: a checkpoint cannot be read, although it may be undamaged. A process
                that continued from an older one, and a later one that can read it, would write two
                histories of the run.
        """
        files.remove_abandoned(self.directory)
        # a killed process may not have synced the names of the last checkpoint and model
        for folder in filter(Path.is_dir, (self.directory, self.models)):
            files.fsync(folder)
        # a crash may have occurred between a checkpoint and this step
        self._keep_candidates()
        problems: list[str] = []
        newest: Checkpoint | None = None
        for path in reversed(self._found()):
            try:
                found = self.load(path)
            except CheckpointError as error:
                if _may_be_undamaged(error.__cause__):
                    raise
                problems.append(str(error))
                continue
            if found.has_jobs or self.jobs_interval == 1:
                return found, problems
            newest = newest or found
        if newest and problems:
            problems.append("No checkpoint with the state of jobs is left. Jobs start from the model alone, so the "
                            "result is not bitwise identical to that of an undisturbed run.")
        return newest, problems

    def outer_iters(self) -> list[int]:
        """Outer iterations whose checkpoints are on disk, oldest first."""
        return list(map(_outer_iter, self._found()))

    def wants_jobs(self, outer_iter: int) -> bool:
        """Whether the checkpoint of an outer iteration should contain the state of jobs."""
        return outer_iter % self.jobs_interval == 0

    def has_jobs(self, outer_iter: int) -> bool:
        """Whether a checkpoint on disk contains the state of jobs."""
        return (self.directory / f"iter-{outer_iter:06d}" / _JOBS).is_file()

    def load_model(self, outer_iter: int) -> Vector:
        """Return the model of a candidate for the final combination, with a verified checksum."""
        path = self.models / f"iter-{outer_iter:06d}.safetensors"
        try:
            if not files.matches_digest(path):
                raise ValueError("its checksum does not match")
            state = load_file(path)
            if difference := self.layout.difference(state):
                raise ValueError(difference)
            return self.layout.flatten(state)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); remove it and resume: the final "
                                  "model is then combined from the other models.") from error

    def model_after(self, outer_iter: int) -> Vector:
        """Return the model of an outer iteration that is a checkpoint or a candidate on disk."""
        path = next((path for path in self._found() if _outer_iter(path) == outer_iter), None)
        if path is not None:
            return self.load(path).parameters
        if outer_iter in self.kept():
            return self.load_model(outer_iter)
        there = sorted({*self.kept(), *map(_outer_iter, self._found())})
        raise CheckpointError(f"the model of outer iteration {outer_iter + 1} was not kept; choose "
                              f"one of {', '.join(str(one + 1) for one in there) or 'none'}.")

    def kept(self) -> list[int]:
        """Candidates on disk, newest first."""
        return sorted((_outer_iter(path) for path in self.models.glob("iter-*.safetensors")
                       if _NAME.fullmatch(path.stem)), reverse=True)

    def missing_candidates(self, last: int) -> list[int]:
        """Candidates up to outer iteration `last` whose models are missing on disk."""
        return sorted({one for one in self.candidates if one <= last} - set(self.kept()))

    def _keep_candidates(self, digests: Mapping[int, str] = MappingProxyType({})) -> None:
        """Link to the file of each candidate; `digests` are those of checkpoints just written."""
        for path in self._found():
            target = self.models / f"{path.name}.safetensors"
            wanted = _outer_iter(path) in self.candidates and (path / _MODEL).is_file()
            # an outer iteration repeated because of a damaged checkpoint has a new file
            if wanted and not (target.exists() and target.samefile(path / _MODEL)):
                try:
                    digest = digests.get(_outer_iter(path)) or self.load(path).model_sha256
                except CheckpointError as error:
                    if _may_be_undamaged(error.__cause__):
                        raise
                    continue
                files.make_directories(self.models)
                target.unlink(missing_ok=True)
                files.keep_digest(target, digest)
                try:
                    os.link(path / _MODEL, target)
                except OSError:
                    # not every file system has links
                    shutil.copyfile(path / _MODEL, target)
                    files.fsync(target)
                files.fsync(self.models)

    def load(self, path: Path) -> Checkpoint:
        """Load a checkpoint, verified against its checksums and the shapes of the model."""
        try:
            manifest = files.unsealed("checkpoint", files.read_json(path / "manifest.json"))
            if _MODEL not in manifest["files"]:
                raise ValueError("manifest.json lists no model")
            for name, expected in manifest["files"].items():
                if files.sha256(path / name) != expected:
                    raise ValueError(f"the checksum of {name} does not match")
            fields = manifest["progress"]
            progress = Progress(**{**fields, "pending": pieces_of(fields["pending"]),
                                   "quarantined": pieces_of(fields["quarantined"]), "bad_examples": tuple(fields["bad_examples"])})
            if progress.outer_iter != _outer_iter(path):
                raise ValueError(f"it belongs to outer iteration {progress.outer_iter + 1}")
            state = load_file(path / _MODEL)
            buffers = load_arrays(path / _OUTER) if _OUTER in manifest["files"] else {}
            arrays = load_arrays(path / _FISHER) if _FISHER in manifest["files"] else {}
            fisher: dict[int, dict[str, dict[str, Any]]] = {}
            for name, value in arrays.items():
                job, layer, key = name.split("/")
                fisher.setdefault(int(job), {}).setdefault(layer, {})[key] = value
            record = OuterIterationRecord.from_json(files.read_json(path / _RECORD)) if _RECORD in manifest["files"] else None
        # a damaged file can raise anything in a parser; the previous checkpoint is tried then
        except Exception as error:
            if _may_be_undamaged(error):
                raise CheckpointError(f"checkpoint {path} cannot be read ({error}); check the disk and the permissions, "
                                      "then resume. To continue from an earlier one, remove this folder first.") from error
            raise CheckpointError(f"checkpoint {path} is damaged ({error}) and is skipped.") from error
        if difference := self.layout.difference(state):
            raise CheckpointError(f"checkpoint {path} is of another model ({difference}); resume with the configuration "
                                  "of its run.")
        return Checkpoint(progress, self.layout.flatten(state), manifest["files"][_MODEL], buffers,
                          manifest["numbers"], manifest["commit"], fisher, record, has_jobs=_JOBS in manifest["files"])

    def load_jobs(self, checkpoint: Checkpoint) -> JobStates:
        """Load the state of jobs of a checkpoint of this store."""
        path = self.directory / f"iter-{checkpoint.progress.outer_iter:06d}" / _JOBS
        try:
            return JobStates.read(path, self.layout.size)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); check the disk, then resume.") from error

    def _write(self, folder: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Write the folder of a checkpoint; return the checkpoint with its checksum."""
        save_file(self.layout.unflatten(checkpoint.parameters), folder / _MODEL)
        if checkpoint.buffers:
            save_arrays(dict(checkpoint.buffers), folder / _OUTER)
        if checkpoint.fisher:
            # names of estimates contain dots but no slashes
            save_arrays({f"{job}/{name}/{key}": np.asarray(value, order="C") for job, estimates in checkpoint.fisher.items()
                         for name, state in estimates.items() for key, value in state.items()}, folder / _FISHER)
        if checkpoint.jobs:
            checkpoint.jobs.write(folder / _JOBS)
        if checkpoint.record:
            (folder / _RECORD).write_text(json.dumps(asdict(checkpoint.record)), encoding="utf-8")
        digests = {path.name: files.sha256(path) for path in sorted(folder.iterdir())}
        commit = {**checkpoint.commit, "model": digests[_MODEL]}
        progress = checkpoint.progress
        fields = {**asdict(progress), "pending": list(map(piece_fields, progress.pending)),
                  "quarantined": list(map(piece_fields, progress.quarantined))}
        manifest = {"files": digests, "numbers": dict(checkpoint.numbers), "progress": fields, "commit": commit}
        (folder / "manifest.json").write_text(json.dumps(files.sealed("checkpoint", manifest), indent=1), encoding="utf-8")
        return replace(checkpoint, model_sha256=digests[_MODEL], commit=commit, jobs=None)

    def _found(self) -> list[Path]:
        return sorted((path for path in self.directory.glob("iter-*") if _NAME.fullmatch(path.name)), key=_outer_iter)


def _may_be_undamaged(error: BaseException | None) -> bool:
    """Whether the system could not read a file that is there."""
    return isinstance(error, OSError) and error.errno not in _DAMAGE


def _outer_iter(path: Path) -> int:
    """Outer iteration of the folder of a checkpoint, or of the file of a candidate."""
    return int(path.stem.removeprefix("iter-"))
