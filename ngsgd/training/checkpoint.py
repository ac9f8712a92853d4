"""Checkpoints: a directory per outer iteration, whole or absent; no pickle.

`iter-000012/model.safetensors` holds the model, `outer.safetensors` what the outer optimiser keeps beside it,
`fisher.safetensors` the jobs' Fisher estimates where they are kept, and `manifest.json` everything else, with the checksums
that make them one thing.
"""

from __future__ import annotations

import json
import os
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
from ngsgd.files import new_directory, sha256, write_text
from ngsgd.training.flat import Layout, Vector
from ngsgd.training.job import Fisher
from ngsgd.training.ledger import piece_fields, pieces_of
from ngsgd.training.planning import Progress

_FORMAT = 2
_MODEL, _OUTER, _FISHER = "model.safetensors", "outer.safetensors", "fisher.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A committed outer iteration."""

    progress: Progress
    parameters: Vector                 # the model that is evaluated
    model_sha256: str                  # of its file; empty before the first
    buffers: Mapping[str, Vector] = field(default_factory=dict)    # the outer optimiser's arrays beside the model
    numbers: Mapping[str, float] = field(default_factory=dict)     # and its numbers
    commit: Mapping[str, Any] = field(default_factory=dict)        # the line of the ledger that goes with it
    fisher: Mapping[int, Fisher] = field(default_factory=dict)     # by job: the Fisher estimates that the next one goes on from

    def outer_state(self) -> dict[str, Any]:
        """As `OuterOptimizer.load_state_dict` takes it."""
        return {"arrays": {"model": self.parameters, **self.buffers}, "numbers": self.numbers}


def first_checkpoint(parameters: Vector) -> Checkpoint:
    """Where a new run starts."""
    return Checkpoint(Progress(), parameters, "")


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, layout: Layout, num_to_keep: int, candidates: Collection[int] = ()) -> None:
        self.directory = directory
        self.layout = layout
        self.num_to_keep = num_to_keep
        self.candidates = candidates  # outer iterations whose models the final combination wants, however old they are
        self.models = directory.parent / "models"

    def save(self, progress: Progress, outer_state: Mapping[str, Any], commit: Mapping[str, Any] = MappingProxyType({}),
             fisher: Mapping[int, Fisher] = MappingProxyType({})) -> Checkpoint:
        """Commits an outer iteration, then removes the oldest checkpoints beyond `num_to_keep`.

        `commit` is kept with it, and completed by the model's checksum as "model".  The arrays of the
        checkpoint returned are those of `outer_state`, not copies.
        """
        arrays = dict(outer_state["arrays"])
        parameters = arrays.pop("model")
        try:
            with new_directory(self.directory / f"iter-{progress.outer_iter:06d}") as temporary:
                whole = self._write(temporary, Checkpoint(progress, parameters, "", arrays, outer_state["numbers"], commit,
                                                                    dict(fisher)))
        except OSError as error:
            raise CheckpointError(
                f"outer iteration {progress.outer_iter + 1} could not be saved under {self.directory} ({error.strerror}); "
                f"make room or fix the permissions, then `ngsgd resume {self.directory.parent}`.") from error
        self._keep_candidates()
        for old in (*self._found()[:-self.num_to_keep], *self.directory.glob(".iter-*.tmp")):  # and what a killed process left
            shutil.rmtree(old, ignore_errors=True)
        return whole

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """(the newest whole checkpoint or None, one sentence for each damaged one that was passed over)."""
        self._keep_candidates()  # a crash may have come between a checkpoint and this
        problems: list[str] = []
        for path in reversed(self._found()):
            try:
                return self.load(path), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def load_model(self, outer_iter: int) -> Vector:
        """The model of a candidate for the final combination."""
        path = self.models / f"iter-{outer_iter:06d}.safetensors"
        try:
            return self.layout.flatten(load_file(path))
        except (OSError, KeyError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); remove it and resume, and the others are combined.") from error

    def model_after(self, outer_iter: int) -> Vector:
        """The model of an outer iteration whose checkpoint is still there, or that is a candidate for the final combination."""
        path = next((path for path in self._found() if int(path.name.rpartition("-")[2]) == outer_iter), None)
        if path is not None:
            return self.load(path).parameters
        if outer_iter in self.kept():
            return self.load_model(outer_iter)
        there = sorted({*self.kept(), *(int(path.name.rpartition("-")[2]) for path in self._found())})
        raise CheckpointError(f"the model of outer iteration {outer_iter + 1} was not kept; those that were are "
                              f"{', '.join(str(one + 1) for one in there) or 'none'}.")

    def kept(self) -> list[int]:
        """The candidates that are there, newest first."""
        return sorted((int(path.stem.rpartition("-")[2]) for path in self.models.glob("iter-*.safetensors")), reverse=True)

    def _keep_candidates(self) -> None:
        """A second name for each candidate's file: it costs no space while the checkpoint is there."""
        for path in self._found():
            target = self.models / f"{path.name}.safetensors"
            wanted = int(path.name.rpartition("-")[2]) in self.candidates and (path / _MODEL).exists()
            # an outer iteration that was done again, because its checkpoint was damaged, has a new file
            if wanted and not (target.exists() and target.samefile(path / _MODEL)):
                self.models.mkdir(exist_ok=True)
                target.unlink(missing_ok=True)
                try:
                    os.link(path / _MODEL, target)
                except OSError:  # not every file system has links
                    shutil.copyfile(path / _MODEL, target)

    def load(self, path: Path) -> Checkpoint:
        """The checkpoint in `path`, verified against its checksums and the model's shape."""
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            if manifest["format"] != _FORMAT or any(sha256(path / name) != digest for name, digest in manifest["files"].items()):
                raise ValueError("checksum or format does not match")
            state = load_file(path / _MODEL)
            buffers = load_arrays(path / _OUTER) if _OUTER in manifest["files"] else {}
            fisher = _nested_fisher(load_arrays(path / _FISHER)) if _FISHER in manifest["files"] else {}
            progress = _progress(manifest["progress"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"checkpoint {path} is damaged ({error}) and is passed over.") from error
        if {name: tuple(t.shape) for name, t in state.items()} != self.layout.by_name():
            raise CheckpointError(f"checkpoint {path} is of a model with other layers; resume with its own configuration.")
        return Checkpoint(progress, self.layout.flatten(state), manifest["files"][_MODEL], buffers, manifest["numbers"],
                          manifest["commit"], fisher)

    def _write(self, folder: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Fills a checkpoint's folder; returns it with its checksum."""
        save_file(self.layout.unflatten(checkpoint.parameters), folder / _MODEL)
        if checkpoint.buffers:
            save_arrays(dict(checkpoint.buffers), folder / _OUTER)
        if checkpoint.fisher:
            save_arrays(_flat_fisher(checkpoint.fisher), folder / _FISHER)
        digests = {path.name: sha256(path) for path in sorted(folder.glob("*.safetensors"))}
        commit = {**checkpoint.commit, "model": digests[_MODEL]}
        progress = checkpoint.progress
        fields = {**asdict(progress), "pending": list(map(piece_fields, progress.pending)),
                  "quarantined": list(map(piece_fields, progress.quarantined))}
        manifest = {"format": _FORMAT, "files": digests, "numbers": dict(checkpoint.numbers), "progress": fields, "commit": commit}
        write_text(folder / "manifest.json", json.dumps(manifest, indent=1))
        return replace(checkpoint, model_sha256=digests[_MODEL], commit=commit)

    def _found(self) -> list[Path]:
        return sorted(self.directory.glob("iter-*"))


def _progress(fields: Mapping[str, Any]) -> Progress:
    return Progress(**{**fields, "pending": pieces_of(fields["pending"]), "quarantined": pieces_of(fields["quarantined"])})


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
