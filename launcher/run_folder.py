"""The folder of a run: where each file is, and how a run gets its name."""

from __future__ import annotations

import contextlib
import difflib
import glob
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError, ConfigError
from ngsgd.files import new_file, write_text


@dataclass(frozen=True)
class RunFolder:
    """Every file that a run writes, by name; docs/files.md tells what is in each."""

    path: Path

    IVECTORS: ClassVar[str] = "ivectors.safetensors"   # the extractor; beside the final model, too

    @classmethod
    def create(cls, config: RunConfig, config_yaml: str) -> RunFolder:
        """A new folder under the output directory, holding the composed configuration."""
        root = Path(config.output_dir)
        name = f"{run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):  # two runs started in one second
            folder = cls(root / (name + suffix))
            try:
                folder.path.mkdir(parents=True)
            except FileExistsError:
                continue
            folder.checkpoints.mkdir()
            folder.config.write_text(config_yaml)
            return folder
        raise ConfigError(f"a hundred runs are named {root / name}; set another name=.")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise CheckpointError(f"{path} is not the folder of a run: it has no config.yaml; see the folders in "
                                  f"{path.parent}.")
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def workers(self) -> Path:
        """What the worker processes write (cluster=local)."""
        return self.path / "workers"

    @property
    def data(self) -> Path:
        """Which prepared data the run trains on."""
        return self.path / "data.json"

    @property
    def fingerprint(self) -> Path:
        """What decided the bits of the run's results: versions, processor, kernels, threads."""
        return self.path / "fingerprint.json"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def denominator(self) -> Path:
        """What a sequence objective tells labels apart from."""
        return self.path / "denominator.safetensors"

    @property
    def init_model(self) -> Path:
        """The final model that training started from (init_model)."""
        return self.path / "init"

    @property
    def ivectors(self) -> Path:
        """What makes the run's i-vectors (ivectors.dim)."""
        return self.path / self.IVECTORS

    @property
    def decode(self) -> Path:
        return self.path / "decode"

    @property
    def learning_curve(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def report(self) -> Path:
        """What `ngsgd report` makes."""
        return self.path / "report.html"

    @property
    def measured(self) -> Path:
        """What `ngsgd compare` saw of the process that trained, if it trained the run."""
        return self.path / "measured.json"

    @property
    def process(self) -> Path:
        """Which process trains; there while one does."""
        return self.path / "process.json"

    @contextlib.contextmanager
    def marked_as_running(self) -> Iterator[None]:
        """Says which process it is that trains, for `ngsgd status` and `ngsgd stop`; a killed one leaves its mark behind."""
        write_text(self.process, json.dumps({"host": socket.gethostname(), "process_id": os.getpid()}))
        try:
            yield
        finally:
            self.process.unlink(missing_ok=True)

    def remember_data(self, digest: str, egs_directory: Path, extractor: Path | None) -> None:
        """Notes the data at the first start and keeps the i-vector extractor; a resumed run on other data would be another run."""
        if extractor is not None and not self.ivectors.exists():
            with new_file(self.ivectors) as temporary:
                shutil.copyfile(extractor, temporary)
        if not self.data.exists():
            self.data.write_text(json.dumps({"digest": digest, "egs": str(egs_directory)}, indent=1))
        elif json.loads(self.data.read_text())["digest"] != digest:
            raise CheckpointError(f"the data of {self.path} has changed since the run began; start a new run.")


def check_output_dir(config: RunConfig) -> None:
    """Raises ConfigError unless files can be written there."""
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.output_dir):
            pass
    except OSError as error:
        raise ConfigError(f"output_dir is {config.output_dir}, where nothing can be written ({error.strerror}); "
                          "choose another with output_dir=PATH.") from error


def run_name(config: RunConfig) -> str:
    """What tells runs of one corpus apart, unless the user named the run."""
    return config.name or (f"{config.data.corpus}-{config.model.label}-{config.optimizer.kind}-"
                           f"j{config.schedule.num_jobs_final}-s{config.seed}")


def run_to_continue(config: RunConfig) -> Path | None:
    """The newest run of the configured name in the output directory; None where there is none yet."""
    if not config.name:
        raise ConfigError("--continue finds a run by its name, and none is given; add name=NAME.")
    stamped = re.compile(rf"{re.escape(config.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    found = [file.parent for file in Path(config.output_dir).glob("*/config.yaml") if stamped.fullmatch(file.parent.name)]
    return max(found, default=None, key=lambda folder: folder.name)


def known_run(run: str) -> Path | None:
    """The folder of a run given as a path, by its folder under runs/, or by its name= there, the newest of several.

    None where the word names something else.
    """
    named = sorted(Path("runs").glob(f"{glob.escape(run)}-[0-9]*/config.yaml"), reverse=True) if run and "/" not in run else []
    folders = (Path(run), Path("runs") / run, *(config.parent for config in named))
    return next((folder.resolve() for folder in folders if (folder / "config.yaml").is_file()), None)


def folder_of_model(init_model: str) -> Path:
    """The folder of a run, or of a model made by `ngsgd import`, which has no configuration."""
    return Path(init_model) if (Path(init_model) / "final" / "model.json").is_file() else find_run(init_model)


def find_run(run: str) -> Path:
    """The folder of a run given as a path, or by its name under runs/."""
    found = known_run(run)
    if found:
        return found
    existing = [folder.parent.name for folder in Path("runs").glob("*/config.yaml")]
    near = difflib.get_close_matches(Path(run).name, existing, n=1)
    hint = f"Did you mean {Path('runs') / near[0]}?" if near else "Give the folder that ngsgd train printed at its end."
    raise ConfigError(f"{run} is not a run folder (it has no config.yaml). {hint}")
