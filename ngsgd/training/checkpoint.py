"""Checkpoints: a directory per outer iteration, whole or absent; no pickle.

`iter-000012/model.safetensors` holds the averaged parameters, `manifest.json` everything else and the checksum that
makes the pair one thing.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file

from ngsgd.errors import CheckpointError
from ngsgd.files import new_directory, sha256, write_text
from ngsgd.training.flat import Layout, Vector

_FORMAT = 1


@dataclass(frozen=True)
class Progress:
    """Where a run stands after a committed outer iteration."""

    outer_iter: int          # the last one committed; -1 before the first
    frames_processed: int
    elapsed_s: float         # of training, over all processes that worked on the run


@dataclass(frozen=True)
class Checkpoint:
    """A committed outer iteration."""

    progress: Progress
    parameters: Vector
    model_sha256: str


class CheckpointStore:
    """The checkpoints of one run."""

    def __init__(self, directory: Path, layout: Layout, num_to_keep: int) -> None:
        self.directory = directory
        self.layout = layout
        self.num_to_keep = num_to_keep

    def save(self, progress: Progress, parameters: Vector) -> Checkpoint:
        """Commits an outer iteration, then removes the oldest checkpoints beyond `num_to_keep`."""
        try:
            with new_directory(self.directory / f"iter-{progress.outer_iter:06d}") as temporary:
                save_file(self.layout.unflatten(parameters), temporary / "model.safetensors")
                digest = sha256(temporary / "model.safetensors")
                manifest = {"format": _FORMAT, "model_sha256": digest, **asdict(progress)}
                write_text(temporary / "manifest.json", json.dumps(manifest, indent=1))
        except OSError as error:
            raise CheckpointError(
                f"outer iteration {progress.outer_iter + 1} could not be saved under {self.directory} ({error.strerror}); "
                f"make room or fix the permissions, then `ngsgd resume {self.directory.parent}`.") from error
        for old in self._found()[:-self.num_to_keep]:
            shutil.rmtree(old, ignore_errors=True)
        return Checkpoint(progress, parameters, digest)

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """(the newest whole checkpoint or None, one sentence for each damaged one that was passed over)."""
        problems: list[str] = []
        for path in reversed(self._found()):
            try:
                return self.load(path), problems
            except CheckpointError as error:
                problems.append(str(error))
        return None, problems

    def load(self, path: Path) -> Checkpoint:
        """The checkpoint in `path`, verified against its checksum and the model's shape."""
        try:
            manifest = json.loads((path / "manifest.json").read_text())
            model = path / "model.safetensors"
            if manifest["format"] != _FORMAT or sha256(model) != manifest["model_sha256"]:
                raise ValueError("checksum or format does not match")
            state = load_file(model)
            progress = Progress(manifest["outer_iter"], manifest["frames_processed"], manifest["elapsed_s"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"checkpoint {path} is damaged ({error}) and is passed over.") from error
        if {name: tuple(t.shape) for name, t in state.items()} != self.layout.by_name():
            raise CheckpointError(f"checkpoint {path} is of a model with other layers; resume with its own configuration.")
        return Checkpoint(progress, self.layout.flatten(state), manifest["model_sha256"])

    def _found(self) -> list[Path]:
        return sorted(self.directory.glob("iter-*"))
