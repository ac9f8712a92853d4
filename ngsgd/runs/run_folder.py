"""The folder of a run: paths of its files, and names of runs."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import itertools
import json
import secrets
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ngsgd import files, interface, process_identity
from ngsgd.errors import CheckpointError, ConfigChangedError, ConfigError
from ngsgd.interface import option
from ngsgd.object_storage.urls import is_url, local_root
from ngsgd.runs import stored_run
from ngsgd.runs.failure_record import describe, mark_recorded, read_record, write_record
from ngsgd.training.sites.rounds import check_exchange
from ngsgd.training.storage.lock import RunLock

if TYPE_CHECKING:
    from ngsgd.config import RunConfig, TaskConfig

# in the run folders of ngsgd simulate only
SIMULATION = "simulation.json"
# begins the last line of config.yaml
_DIGEST = "# sha256 of the lines above: "


class _Below:
    """A file of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: RunFolder, _: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class Place:
    """Where a new run is written."""

    # an empty folder; None: a new one in output_dir
    path: Path | None = None
    # name -> text of further files
    files: Mapping[str, str] = field(default_factory=dict)

    def require_empty(self) -> None:
        """Raise ConfigError if the folder has other files than the log of Hydra."""
        if self.path and self.path.is_dir() and [one for one in self.path.iterdir() if one.suffix != ".log"]:
            raise ConfigError(f"{self.path} is not empty; choose another hydra.run.dir, or resume the run there.")


@dataclass(frozen=True)
class RunFolder:
    """Paths of the files of a run; docs/files.md describes their content."""

    path: Path

    RUN_ID: ClassVar[str] = "run_id"
    # the extractor; also next to the final model
    IVECTORS: ClassVar[str] = "ivectors.safetensors"
    ADAPTATION: ClassVar[str] = "adaptation.safetensors"

    config = _Below("config.yaml")
    checkpoints = _Below("checkpoints")
    # candidates for the final combination
    models = _Below("models")
    events = _Below("events.jsonl")
    ledger = _Below("ledger.jsonl")
    # output of the worker processes (cluster=local)
    workers = _Below("workers")
    # prepared data of the run
    data = _Below("data.json")
    # numeric fingerprint of the results: versions, processor, kernels, threads
    fingerprint = _Below("fingerprint.json")
    final = _Below("final")
    # denominator of a sequence objective
    denominator = _Below("denominator.safetensors")
    # the final model that training started from (init_model)
    init_model = _Below("init")
    # the projection and the mixtures of speaker adaptation (adaptation.lda_dim)
    adaptation = _Below(ADAPTATION)
    # i-vector extractor of the run (ivectors.dim)
    ivectors = _Below(IVECTORS)
    decode = _Below("decode")
    # scores of the final model of a custom task
    metrics = _Below("metrics.json")
    learning_curve = _Below("learning_curve.png")
    # report of `ngsgd report`
    report = _Below("report.html")
    # identity of the training process, while there is one
    process = _Below("process.json")
    # times and errors of the rungs below the run (data.labels=ladder)
    rungs = _Below("rungs.json")
    # exit code and message of the process that trained last, if it failed
    error = _Below("error.json")
    # digests of the results, which the process writes that finishes the run
    finished = _Below("finished.json")
    # holder of the run lock, and number of holders so far
    lock = _Below("lock")

    @classmethod
    def create(cls, config: RunConfig, config_yaml: str, place: Place | None = None) -> RunFolder:
        """Create a folder in the output directory, or `place`, with the configuration."""
        root, place = local_root(config.output_dir), place or Place()
        if place.path and is_url(config.output_dir):
            raise ConfigError(f"hydra.run.dir is {place.path}, and output_dir is a URL, which names the run; remove hydra.run.dir.")
        name = f"{run_name(config)}-{time.strftime('%Y%m%d-%H%M%S')}"
        # two runs started in one second
        for suffix in ("", *(f"-{number}" for number in range(2, 100))):
            folder = cls(place.path or root / (name + suffix))
            try:
                files.make_directories(root)
                if place.path:
                    files.make_directories(place.path)
                    place.require_empty()
                else:
                    folder.path.mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"the run folder {folder.path} cannot be created "
                                  f"({error.strerror}); choose another folder with "
                                  "output_dir=PATH, or a shorter name=.") from error
            try:
                if is_url(config.output_dir) and not stored_run.reserved(folder.path, config.output_dir):
                    shutil.rmtree(folder.path)
                    continue
                folder.checkpoints.mkdir()
                # before config.yaml, which allows resuming: resumed runs sync only their files
                with files.write_errors_named(folder.path):
                    files.fsync(root)
                    # the process that created the output directory may have been killed before
                    # it synced its name
                    with contextlib.suppress(PermissionError):
                        files.fsync(root.resolve().parent)
                # before the first job: a run without its configuration cannot be resumed
                files.write_text(folder.config, with_digest(config_yaml))
                files.write_text(folder.path / folder.RUN_ID, secrets.token_hex(16))
                for file, text in place.files.items():
                    files.make_directories((folder.path / file).parent)
                    files.write_text(folder.path / file, text)
            except OSError:
                shutil.rmtree(folder.path, ignore_errors=True)
                raise
            return folder
        raise ConfigError(f"there are 100 runs named {root / name}; set another name=.")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of an existing run."""
        folder = cls(path)
        if not folder.config.is_file():
            raise CheckpointError(f"{path} is not a run folder: it has no config.yaml; choose one "
                                  f"of the folders in {path.parent}.")
        return folder

    @property
    def address(self) -> str:
        """How a user names the run: its folder, or its URL in object storage."""
        return stored_run.address(self.path)

    @property
    def run_id(self) -> str:
        """Random id, so that no folder of another user passes as this run; empty if unreadable."""
        try:
            return files.read_regular_text(self.path / self.RUN_ID, max_bytes=1024).strip()
        except (OSError, ValueError):
            return ""

    @contextlib.contextmanager
    def error_recorded(self, signal_name: Callable[[], str] = str,
                       also: Callable[[Mapping[str, Any]], None] = lambda about: None) -> Iterator[None]:
        """Write error.json if the block raises, and remove error and result of an earlier process.

        `signal_name` returns the signal that requested the end; `also` receives the content.
        """
        self.error.unlink(missing_ok=True)
        self.finished.unlink(missing_ok=True)
        try:
            yield
        except BaseException as error:
            about = describe(error, signal_name())
            write_record(self.error, about)
            # a full disk has been reported already
            with contextlib.suppress(OSError):
                also(about)
            mark_recorded(error, self.path)
            raise

    def mark_finished(self) -> None:
        """Record that the run is complete."""
        files.write_text(self.finished, json.dumps(files.sealed("results", self._results()), indent=1))

    def is_finished(self) -> bool:
        """Whether the last process that trained finished the run, and the results are unchanged."""
        try:
            return files.unsealed("results", files.read_json(self.finished)) == self._results()
        except (OSError, ValueError):
            return False

    def _results(self) -> dict[str, Any]:
        results = [self.config, self.decode / "wer.json", self.metrics, *sorted(self.final.rglob("*"))]
        return {str(file.relative_to(self.path)): files.sha256(file) for file in results if file.is_file()}

    def last_error(self) -> dict[str, Any]:
        """Content of error.json (`failure_record.describe`); empty where there is none."""
        return read_record(self.error)

    @contextlib.contextmanager
    def locked(self, purpose: str, warn: Callable[[str], None]) -> Iterator[RunLock]:
        """Hold the lock, or raise RunLockedError; remove temporary files of killed processes."""
        with RunLock(self.lock, purpose, self._last_fence(), warn) as lock:
            for directory in (self.path, self.checkpoints, self.models):
                files.remove_abandoned(directory)
            if not stored_run.url_of(self.path):
                yield lock
                return
            with stored_run.locked(self.path, lock, warn) as stored:
                yield stored

    def _last_fence(self) -> int:
        """The largest fencing number in the ledger, in case the lock file was removed; or 0."""
        # from the end to the first line of the last process, whose number is the largest: it may
        # repeat a commit with the number of an earlier one
        if not self.ledger.is_file():
            return 0
        largest = 0
        with contextlib.closing(files.lines_from_end(self.ledger)) as lines:
            for found in itertools.chain.from_iterable(files.parse_json_lines(line) for line, _ in lines):
                if type(fence := found.get("fence")) is int:
                    largest = max(largest, fence)
                    if found.get("event") == "started":
                        break
        return largest

    @contextlib.contextmanager
    def marked_as_running(self) -> Iterator[None]:
        """Store the identity of the training process; a killed process leaves the file behind."""
        files.write_text(self.process, json.dumps(process_identity.current()))
        try:
            yield
        finally:
            self.process.unlink(missing_ok=True)

    def remember_data(self, digest: str, egs_directory: Path | None = None, extractor: Path | None = None,
                      adaptation: Path | None = None, alignment: str = "", key: str = "") -> None:
        """Record the data at the first start, and copy the i-vector extractor and the adaptation.

        CheckpointError if the digest of the corpus changed. `alignment`: the file of the labels, if
        not of the corpus. With `key`, of `preparation_key`, `archives` returns the archives again.
        """
        for made, kept in ((extractor, self.ivectors), (adaptation, self.adaptation)):
            if made is not None and not kept.exists():
                with files.new_file(kept) as temporary:
                    shutil.copyfile(made, temporary)
        known = self._known_data() if self.data.exists() else {}
        if known and known["digest"] != digest:
            raise CheckpointError(f"the data of {self.path} changed since the run began; start a new run.")
        about = {"digest": digest, "egs": str(egs_directory or ""), "alignment": alignment, "key": key}
        # with the same data, other settings or times of the source files give another key
        if known.get("key") != key:
            files.write_text(self.data, json.dumps(files.sealed("prepared data", about), indent=1))

    def archives(self, key: str) -> Path | None:
        """Archives that were recorded with this key by `remember_data`; None for another key."""
        known = self._known_data()
        return Path(known["egs"]) if known.get("key") == key and isinstance(known.get("egs"), str) else None

    def alignment(self) -> str:
        """File of the labels that the run was trained on; empty where it is not known."""
        return str(self._known_data().get("alignment", "")) if self.data.exists() else ""

    def _known_data(self) -> dict[str, Any]:
        try:
            about = files.unsealed("prepared data", files.read_json(self.data))
            if not isinstance(about.get("digest"), str):
                raise ValueError("it names no data")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.data} is damaged ({error}); remove it to resume without "
                                  "comparing the data with those of the start of the run.") from error
        return about


def with_digest(config_yaml: str) -> str:
    """Return the text of config.yaml with a last line that contains its checksum."""
    return f"{config_yaml}{_DIGEST}{hashlib.sha256(config_yaml.encode()).hexdigest()}\n"


def require_unchanged(config: Path, *, accept: bool = False) -> bool:
    """Whether config.yaml was changed since the run began; ConfigChangedError unless `accept`."""
    text = files.read_log(config)
    body, mark, digest = text.rpartition(_DIGEST)
    if not mark:
        body = text
    elif digest.strip() == hashlib.sha256(body.encode()).hexdigest():
        return False
    if not accept:
        raise ConfigChangedError(f"{config} was changed since the run began: its checksum does not "
                              "match. If the change is intended, resume with "
                              f"{option('accept-changed-config')}; otherwise the file is damaged, and its "
                              "settings may differ from those at the start.")
    # permanent: the checksum is that of the current content
    files.write_text(config, with_digest(body))
    return True


def check_output_dir(config: RunConfig) -> None:
    """Raise an error unless a new run can write its files, and use the exchange of its sites."""
    if config.sites.jobs:
        check_exchange(config.sites)
    if is_url(config.output_dir):
        stored_run.check_output_url(config.output_dir)
        return
    try:
        files.make_directories(Path(config.output_dir))
        with tempfile.TemporaryFile(dir=config.output_dir):
            pass
    except OSError as error:
        raise ConfigError(f"output_dir is {config.output_dir}, which is not writable "
                          f"({error.strerror}); choose another folder with output_dir=PATH.") from error


def what_is_trained(config: RunConfig) -> str:
    """Name of the task, or corpus and model of a speech recipe."""
    return config.task.label if config.task._target_ else f"{config.data.corpus}-{config.model.label}"


def resume_command(task: TaskConfig, run: Path, **flags: bool) -> str:
    """The command, or for a task of a Python program the call, that continues a run."""
    if not task.from_python and (run / SIMULATION).exists():
        return "ngsgd simulate, from the beginning"
    return interface.resume(str(stored_run.address(run)), task.from_python, **flags)


def run_name(config: RunConfig) -> str:
    """Name of the run: as configured, else built from the settings that distinguish runs."""
    # the help of commands imports this module, and the options take as long as the rest of it
    from ngsgd.config import RunConfig
    others = [config.outer.kind] if config.outer.kind != RunConfig().outer.kind else []
    return config.name or "-".join([what_is_trained(config), config.optimizer.label, *others,
                                    f"j{config.schedule.num_jobs_final}", f"s{config.seed}"])


def run_to_continue(config: RunConfig, path: Path | None = None) -> Path | None:
    """The run in `path`, or the newest of its name in the output directory; None: there is none."""
    if path:
        return path if RunFolder(path).config.is_file() else None
    if not config.name:
        raise ConfigError(f"{option('continue', '')} selects a run by its name, but name is not set; add name=NAME.")
    if is_url(config.output_dir):
        found = stored_run.newest_named(stored_run.names_of_runs(config.output_dir), config.name)
        return find_run(f"{config.output_dir.rstrip('/')}/{found}", to_write=True) if found else None
    return _newest_named(Path(config.output_dir), config.name)


def _newest_named(output_dir: Path, name: str) -> Path | None:
    found = stored_run.newest_named((config.parent.name for config in output_dir.glob("*/config.yaml")), name)
    return output_dir / found if found else None


def known_run(run: str, *, with_models: bool = True, to_write: bool = False) -> Path | None:
    """Folder of a run by path or URL, folder name under runs/, or name=; the newest of several.

    Files of a run in object storage are fetched, those of models only if `with_models`. With
    `to_write`, for a command that continues or decodes the run, the result is the folder that
    training works in, else a copy for this process. None if there is no such run.
    """
    if is_url(run):
        fetch = stored_run.fetched_to_write if to_write else partial(stored_run.fetched, with_models=with_models)
        output_url, _, name = run.rstrip("/").rpartition("/")
        if (found := fetch(run)) or not is_url(output_url):
            return found
        newest = stored_run.newest_named(stored_run.names_of_runs(output_url), name)
        return fetch(f"{output_url}/{newest}") if newest else None
    named = _newest_named(Path("runs"), run) if "/" not in run else None
    folders = (Path(run), Path("runs") / run, *([named] if named else []))
    return next((one.resolve() for one in folders if (one / "config.yaml").is_file()), None)


def folder_of_model(init_model: str) -> Path:
    """Folder of a run, or of a model of `ngsgd import`, which has no configuration."""
    return Path(init_model) if (Path(init_model) / "final" / "model.json").is_file() else find_run(init_model)


def find_run(run: str, *, with_models: bool = True, to_write: bool = False) -> Path:
    """Return the folder of a run as `known_run`; ConfigError with a similar name if it is none."""
    if found := known_run(run, with_models=with_models, to_write=to_write):
        return found
    if is_url(run):
        raise ConfigError(f"{run} is not a run; ngsgd status {run.rstrip('/').rpartition('/')[0]} lists the runs there.")
    newest = sorted(Path("runs").glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [file.parent.name for file in newest]
    near = difflib.get_close_matches(Path(run).name, names, n=1)
    listed = f"Newest runs: {', '.join(names[:3])}. " if names else ""
    # output_dir may be any folder, and only names under runs/ are found
    hint = (f"Did you mean {shlex.quote(str(Path('runs') / near[0]))}?" if near else
            f"{listed}Give the complete path of a run that is not under {Path('runs').absolute()}; ngsgd status FOLDER lists the "
            "runs of a folder.")
    raise ConfigError(f"{run} is not a run folder (it has no config.yaml). {hint}")


def find_model(model: str | Path) -> Path:
    """Return the path of a bundle, or the folder of a run; ConfigError if it is neither."""
    # commands call it before slow imports, and pass on the path: a run at a URL is copied once
    path = Path(model)
    return path if path.is_file() or (path / "model.json").is_file() else find_run(str(model))
