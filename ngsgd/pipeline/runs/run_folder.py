"""The folder of a run: where each file is, and how a run gets its name."""

from __future__ import annotations

import contextlib
import difflib
import glob
import hashlib
import json
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ngsgd import process_identity
from ngsgd.config import RunConfig
from ngsgd.errors import EXIT_RUN_FAILED, CheckpointError, ConfigError
from ngsgd.files import (
    fsync,
    make_directories,
    new_file,
    read_json,
    read_json_lines,
    read_log,
    read_regular_text,
    remove_abandoned,
    sealed,
    unsealed,
    write_text,
)
from ngsgd.masking import masked
from ngsgd.training.storage.lock import RunLock

# begins the last line of config.yaml
_DIGEST = "# sha256 of the lines above: "


@dataclass(frozen=True)
class RunFolder:
    """Every file that a run writes, by name; docs/files.md tells what is in each."""

    path: Path

    RUN_ID: ClassVar[str] = "run_id"
    # the extractor; beside the final model, too
    IVECTORS: ClassVar[str] = "ivectors.safetensors"

    @classmethod
    def create(cls, config: RunConfig, config_yaml: str) -> RunFolder:
        """A new folder under the output directory, holding the composed configuration."""
        root = Path(config.output_dir)
        name = f"{run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
        # two runs started in one second
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):
            folder = cls(root / (name + suffix))
            try:
                make_directories(root)
                folder.path.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"the run folder {folder.path} cannot be made "
                                  f"({error.strerror}); choose another place with "
                                  "output_dir=PATH, or a shorter name=.") from error
            folder.checkpoints.mkdir()
            # before the first job: a run without its configuration cannot be resumed
            write_text(folder.config, with_digest(config_yaml))
            write_text(folder.path / folder.RUN_ID, secrets.token_hex(16))
            fsync(root)
            return folder
        raise ConfigError(f"a hundred runs are named {root / name}; set another name=.")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise CheckpointError(f"{path} is not the folder of a run: it has no config.yaml; see "
                                  f"the folders in {path.parent}.")
        return folder

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def run_id(self) -> str:
        """Random, so that no received folder can be taken for a run of this user; empty for runs of
        earlier versions.
        """
        try:
            return read_regular_text(self.path / self.RUN_ID, max_bytes=1024).strip()
        except (OSError, ValueError):
            return ""

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def models(self) -> Path:
        """Candidates for the final combination."""
        return self.path / "models"

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
    def metrics(self) -> Path:
        """Scores of the final model of a task of the user's own."""
        return self.path / "metrics.json"

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

    @property
    def error(self) -> Path:
        """Exit code and message of the process that trained last, if it failed."""
        return self.path / "error.json"

    @contextlib.contextmanager
    def error_recorded(self) -> Iterator[None]:
        """Write error.json if the block raises, and remove that of an earlier process."""
        self.error.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            about = {"exit_code": getattr(error, "exit_code", EXIT_RUN_FAILED),
                     "message": masked(str(error) or type(error).__name__)}
            # a full disk has been reported already
            with contextlib.suppress(OSError):
                write_text(self.error, json.dumps(about, indent=1))
            raise

    def last_error(self) -> dict[str, Any]:
        """Content of error.json: exit_code and message; empty where there is none."""
        try:
            about = read_json(self.error)
        except (OSError, ValueError):
            return {}
        is_valid = isinstance(about, dict) and type(about.get("exit_code")) is int and isinstance(about.get("message"), str)
        return dict(about) if is_valid else {}

    @property
    def lock(self) -> Path:
        """Who writes to the run, and how often that has changed."""
        return self.path / "lock"

    @contextlib.contextmanager
    def locked(self, purpose: str, warn: Callable[[str], None]) -> Iterator[RunLock]:
        """The right to write to the run; RunLockedError where another process has it.

        Removes temporary files of a killed process.
        """
        lines = read_json_lines(self.ledger) if self.ledger.is_file() else []
        fences = [line["fence"] for line in lines if type(line.get("fence")) is int]
        last_fence = max(fences, default=0)
        with RunLock(self.lock, purpose, last_fence, warn) as lock:
            for directory in (self.path, self.checkpoints, self.models):
                remove_abandoned(directory)
            yield lock

    @contextlib.contextmanager
    def marked_as_running(self) -> Iterator[None]:
        """Says which process it is that trains, for `ngsgd status` and `ngsgd stop`; a killed one
        leaves its mark behind.
        """
        write_text(self.process, json.dumps(process_identity.current()))
        try:
            yield
        finally:
            self.process.unlink(missing_ok=True)

    def remember_data(self, digest: str, egs_directory: Path, extractor: Path | None) -> None:
        """Notes the data at the first start and keeps the i-vector extractor; a resumed run on
        other data would be another run.
        """
        if extractor is not None and not self.ivectors.exists():
            with new_file(self.ivectors) as temporary:
                shutil.copyfile(extractor, temporary)
        if not self.data.exists():
            about = {"digest": digest, "egs": str(egs_directory)}
            write_text(self.data, json.dumps(sealed(about), indent=1))
        elif self._known_data()["digest"] != digest:
            raise CheckpointError(f"the data of {self.path} has changed since the run began; start "
                                  "a new run.")

    def _known_data(self) -> dict[str, Any]:
        try:
            # runs of before the digests have none
            about, _ = unsealed(read_json(self.data))
            if not isinstance(about.get("digest"), str):
                raise ValueError("it names no data")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.data} is damaged ({error}); remove it, and the run is "
                                  "resumed without the comparison "
                                  "of its data with those it began with.") from error
        return about


def with_digest(config_yaml: str) -> str:
    """The text of config.yaml with a last line that holds its checksum."""
    return f"{config_yaml}{_DIGEST}{hashlib.sha256(config_yaml.encode()).hexdigest()}\n"


def require_unchanged(config: Path, *, accept: bool = False) -> bool:
    """Whether config.yaml was changed since the run began; raises CheckpointError if so, unless
    that is accepted.

    An accepted change is kept: the checksum becomes that of the present content.
    """
    text = read_log(config)
    body, mark, digest = text.rpartition(_DIGEST)
    if not mark:
        # runs of before the checksum have neither one nor an id
        if not (config.parent / RunFolder.RUN_ID).exists():
            return False
        body = text
    elif digest.strip() == hashlib.sha256(body.encode()).hexdigest():
        return False
    if not accept:
        raise CheckpointError(f"{config} was changed since the run began: its checksum does not "
                              "match. If you changed it, resume with --accept-changed-config; "
                              "otherwise it is damaged, and the run may be trained with other "
                              "settings than it began with.")
    write_text(config, with_digest(body))
    return True


def check_output_dir(config: RunConfig) -> None:
    """Raises ConfigError unless files can be written there."""
    try:
        Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=config.output_dir):
            pass
    except OSError as error:
        raise ConfigError(f"output_dir is {config.output_dir}, where nothing can be written "
                          f"({error.strerror}); "
                          "choose another with output_dir=PATH.") from error


def what_is_trained(config: RunConfig) -> str:
    """The name of the task, or corpus and model of a speech recipe."""
    return config.task.label if config.task._target_ else f"{config.data.corpus}-{config.model.label}"


def run_name(config: RunConfig) -> str:
    """What tells runs of one corpus apart, unless the user named the run."""
    others = [config.outer.kind] if config.outer.kind != RunConfig().outer.kind else []
    return config.name or "-".join([what_is_trained(config), config.optimizer.kind, *others,
                                    f"j{config.schedule.num_jobs_final}", f"s{config.seed}"])


def run_to_continue(config: RunConfig) -> Path | None:
    """The newest run of the configured name in the output directory; None where there is none yet."""
    if not config.name:
        raise ConfigError("--continue finds a run by its name, and none is given; add name=NAME.")
    stamped = re.compile(rf"{re.escape(config.name)}-\d{{8}}-\d{{6}}(-\d+)?")
    found = [file.parent for file in Path(config.output_dir).glob("*/config.yaml")
             if stamped.fullmatch(file.parent.name)]
    return max(found, default=None, key=lambda folder: folder.name)


def known_run(run: str) -> Path | None:
    """The folder of a run given as a path, by its folder under runs/, or by its name= there, the
    newest of several.

    None where the word names something else.
    """
    named = sorted(Path("runs").glob(f"{glob.escape(run)}-[0-9]*/config.yaml"), reverse=True) if run and "/" not in run else []
    folders = (Path(run), Path("runs") / run, *(config.parent for config in named))
    return next((folder.resolve() for folder in folders if (folder / "config.yaml").is_file()),
                None)


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
