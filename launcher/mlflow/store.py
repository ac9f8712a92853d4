"""MLflow stores: where a run is kept, opening it, and the final model that is put there.

A run is kept where its settings say, else in the active run of the Python program, else where
MLflow's environment variables say, else in a database in the output directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import ngsgd
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.files import read_json
from ngsgd.imports import first_line
from ngsgd.interface import is_command_line
from ngsgd.masking import MASK, conceal, is_masked, masked
from ngsgd.object_storage.urls import local_root
from ngsgd.runs.run_folder import what_is_trained

# where a server may have artifacts put; all else would be a place on this machine, or leads to one
_REMOTE_SCHEMES = ("mlflow-artifacts", "http", "https", "s3", "gs", "wasb", "wasbs", "abfs", "abfss", "r2", "b2", "hdfs", "viewfs",
                   "ftp", "sftp", "oss", "cos", "swift", "dbfs")
# of the stored model: the library's own, and those of the extra asr
_PACKAGES = ("torch", "numpy", "safetensors", "kaldi-native-fbank", "kaldifst", "kaldi-decoder", "kaldialign", "soxr", "kaldilm",
             "soundfile", "webrtcvad-wheels", "psutil", "pyyaml")
# parts of the library that a stored model does not need
_WITHOUT = ("launcher", "conf", "exports")
_USER, _PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
# settings that an empty value leaves to MLflow's environment
_ENVIRONMENT = {"uri": "MLFLOW_TRACKING_URI", "experiment_name": "MLFLOW_EXPERIMENT_NAME", "run_id": "MLFLOW_RUN_ID"}
VARIABLES = (*_ENVIRONMENT.values(), "MLFLOW_EXPERIMENT_ID")
_UNKNOWN_RUN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")

Say = Callable[[str], None]


def active_run_id() -> str:
    """The MLflow run that is active in this thread of the Python program; empty without one."""
    mlflow = sys.modules.get("mlflow")
    run = mlflow.active_run() if mlflow else None
    return str(run.info.run_id) if run else ""


def resolved(config: RunConfig, warn: Say) -> RunConfig:
    """Fill in the settings of a new run from the active run, or else from MLflow's environment.

    A setting wins; the value that it replaces is named. Raises ConfigError if the run to write to
    does not exist.
    """
    given = config.tracking
    if given.kind != "mlflow":
        return config
    around, sources = {name: os.environ.get(variable, "") for name, variable in _ENVIRONMENT.items()}, dict(_ENVIRONMENT)
    if run_id := active_run_id():
        around = {"uri": sys.modules["mlflow"].get_tracking_uri(), "experiment_name": "", "run_id": run_id}
        sources = {"uri": "the tracking URI of mlflow", "run_id": "the active run"}
    replaced = {name: name for name, value in around.items() if value and (own := getattr(given, name))
                and without_login(own) != without_login(value)}
    # a run is in one store and in one experiment
    others = ["uri"] if "uri" in replaced else [name for name in ("experiment_name", "parent_run_id") if getattr(given, name)]
    if around["run_id"] and not given.run_id and others:
        replaced["run_id"] = others[0]
    for name, by in replaced.items():
        if around[name] != given.parent_run_id:
            warn(f"tracking.{by} is {masked(getattr(given, by))}, so that {sources[name]}, {masked(around[name])}, is not used")
    found: dict[str, Any] = {name: value for name, value in around.items() if not getattr(given, name) and name not in replaced}
    if given.run_id or found.get("run_id"):
        found.pop("experiment_name", None)
    config = replace(config, tracking=replace(given, **found))
    if config.tracking.run_id:
        _require_run(tracking_uri(config), config.tracking.run_id)
    return config


def _require_run(uri: str, run_id: str) -> None:
    try:
        stage = open_client(uri).get_run(run_id).info.lifecycle_stage
    except Exception as error:
        if getattr(error, "error_code", "") not in _UNKNOWN_RUN:
            # training does not wait for a store that is down
            return
        stage = "unknown"
    if stage != "active":
        raise ConfigError(f"the MLflow run {run_id} of tracking.run_id or MLFLOW_RUN_ID is {stage} in {masked(uri)}; name another "
                          "run, or leave both empty for a new one.")


@contextlib.contextmanager
def sweep(configs: Sequence[RunConfig], warn: Say) -> Iterator[list[str]]:
    """Open the run that contains those of a sweep until they end; yields settings for all of them.

    None where they are not in one store of MLflow, or where it does not answer.
    """
    if any(config.tracking.run_id for config in configs):
        raise ConfigError("tracking.run_id names one run, and a sweep makes several; set tracking.parent_run_id.")
    if not configs or len({(one.tracking.kind, one.tracking.uri, one.tracking.parent_run_id) for one in configs}) != 1:
        yield []
        return
    config = resolved(replace(configs[0], tracking=replace(configs[0].tracking, run_id="")), warn)
    if config.tracking.kind != "mlflow" or config.tracking.parent_run_id:
        yield []
        return
    if config.tracking.run_id:
        yield [f"tracking.parent_run_id={config.tracking.run_id}"]
        return
    try:
        client = open_client(tracking_uri(config))
        run = client.create_run(experiment_id(client, config), run_name=f"{config.name or what_is_trained(config)} sweep",
                                tags={"ngsgd.sweep": "true"})
    except Exception as error:
        warn(f"MLflow cannot be written ({masked(first_line(error))}); the runs of this sweep have no parent")
        yield []
        return
    status = "KILLED"
    try:
        yield [f"tracking.parent_run_id={run.info.run_id}"]
        status = "FINISHED"
    finally:
        # all runs are stored already
        with contextlib.suppress(Exception):
            client.set_terminated(run.info.run_id, status)


def experiment_id(client: Any, config: RunConfig, name: str = "") -> str:
    """The experiment of the settings or of MLflow's environment, else that of a name."""
    number = os.environ.get("MLFLOW_EXPERIMENT_ID", "")
    if number and not config.tracking.experiment_name:
        found = client.get_experiment(number)
    else:
        name = config.tracking.experiment_name or name or what_is_trained(config)
        found = client.get_experiment_by_name(name)
    if found is None:
        # a server decides for itself where artifacts go
        is_local, artifacts = tracking_uri(config).startswith("sqlite:"), local_root(config.output_dir).absolute() / "mlartifacts"
        return str(client.create_experiment(name, artifact_location=artifacts.as_uri() if is_local else None))
    if found.lifecycle_stage == "deleted":
        raise ValueError(f"the experiment {found.name} was deleted there; restore it or set tracking.experiment_name")
    return str(found.experiment_id)


def tracking_uri(config: RunConfig) -> str:
    """The configured store by `with_login`, which may raise, or SQLite in the output directory."""
    if masked(config.tracking.uri, known=False) != config.tracking.uri:
        conceal(config.tracking.uri)
    return with_login(config.tracking.uri) or sqlite_uri(local_root(config.output_dir))


def with_login(uri: str) -> str:
    """A store's address as files have it, masked, with the user and password of the environment.

    Raises ConfigError where it was masked and the environment has none.
    """
    if not is_masked(uri):
        return uri
    around = os.environ.get("MLFLOW_TRACKING_URI", "")
    if masked(around, known=False) == uri:
        return around
    user, password = os.environ.get(_USER, ""), os.environ.get(_PASSWORD, "")
    scheme, _, rest = uri.partition(f"://{MASK}@")
    if rest and not is_masked(rest):
        is_set = bool(user and password)
        if scheme in ("http", "https") and (is_set or os.environ.get("MLFLOW_TRACKING_TOKEN")):
            # MLflow reads the environment itself
            return f"{scheme}://{rest}"
        if is_set:
            return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{rest}"
    again = "continue with ngsgd train --continue name=NAME tracking.uri=URI, " if is_command_line() else ""
    raise ConfigError(f"tracking.uri is stored as {uri}, without its login. Set {_USER} and "
                      f"{_PASSWORD}, {again}or set tracking.kind=none for a new run.")


def without_login(uri: str) -> str:
    """The address alone: it identifies the store, without a login."""
    return masked(uri, known=False).replace(f"{MASK}@", "")


def sqlite_uri(output_dir: Path) -> str:
    return f"sqlite:///{output_dir.absolute() / 'mlflow.db'}"


def open_client(uri: str) -> Any:
    """Imports MLflow (1 to 2 s) without its greetings."""
    settings = {"MLFLOW_DISABLE_TELEMETRY": "true",
                # stdout is for scripts
                "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true", "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
                # a server that is down must not hold up the end
                "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient
    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        # otherwise it logs the creation of its tables
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # it logs each error of a database with its traceback, and then raises it
        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)
    return MlflowClient(tracking_uri=uri)


def _is_server(uri: str) -> bool:
    """Whether the store is another program, whose answers need checks."""
    return uri.lower().startswith(("http://", "https://"))


def _is_remote(place: str) -> bool:
    return urlsplit(place).scheme.lower() in _REMOTE_SCHEMES


class Artifacts:
    """Puts files into one MLflow run; with a server, only where the files leave this machine."""

    def __init__(self, client: Any, run_id: str, uri: str) -> None:
        self._client, self.run_id = client, run_id
        self._repository: Any = None
        # a place on this machine that the server named
        self.refused: str | None = None
        if _is_server(uri):
            place = str(client.get_run(run_id).info.artifact_uri)
            if not _is_remote(place):
                self.refused = place
                return
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
            # not the client's own: it would ask the server again, which may answer something else
            self._repository = get_artifact_repository(place, tracking_uri=uri)

    def log(self, path: Path) -> None:
        """Put a file there, or a folder under its name."""
        if self.refused is not None:
            return
        place, first = self._client, [self.run_id]
        if self._repository is not None:
            place, first = self._repository, []
        if path.is_dir():
            place.log_artifacts(*first, str(path), path.name)
        else:
            place.log_artifact(*first, str(path))


def read_tracking(run_dir: Path) -> dict[str, Any]:
    """Where a run is in MLflow; empty if it never was there."""
    try:
        stored = read_json(run_dir / "tracking.json")
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) and stored.keys() >= {"experiment_id", "run_id"} else {}


def log_model(client: Any, run_id: str, experiment_id: str, final: Path, artifacts: Artifacts, *,
              uri: str, step: int, takes_audio: bool) -> str:
    """Store the final model as a logged model named "model", an output of the run; returns its id.

    Empty where a server names a place on this machine for the files. `takes_audio` makes it a
    recognizer.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    model = client.create_logged_model(experiment_id, name="model", source_run_id=run_id)
    if _is_server(uri) and not _is_remote(model.artifact_location):
        artifacts.refused = model.artifact_location
        client.delete_logged_model(model.model_id)
        return ""
    with tempfile.TemporaryDirectory(prefix="ngsgd-mlflow-") as scratch:
        folder = Path(scratch) / "model"
        _save(final, folder, Path(scratch) / "ngsgd.zip", model_id=model.model_id, takes_audio=takes_audio)
        get_artifact_repository(model.artifact_location, tracking_uri=uri).log_artifacts(str(folder))
    client.finalize_logged_model(model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step)])
    return str(model.model_id)


def register_model(client: Any, run_id: str, model_id: str, name: str) -> str:
    """Make a logged model a new version of a registered model; returns the version."""
    if not any(found.name == name for found in client.search_registered_models(f"name = '{name}'")):
        client.create_registered_model(name)
    # not models:/ID, which the client looks up in the store of MLFLOW_TRACKING_URI
    source = client.get_logged_model(model_id).artifact_location
    return str(client.create_model_version(name, source=source, run_id=run_id, model_id=model_id).version)


def _save(final: Path, folder: Path, library: Path, *, model_id: str, takes_audio: bool) -> None:
    """An MLflow model folder around the files of final/, with the code of the library.

    No index has ngsgd, so that it cannot be a requirement; all others can be installed from one.
    """
    import mlflow.pyfunc
    from mlflow.models import Model

    from ngsgd.launcher.console import version
    root = Path(ngsgd.__file__).parent
    with zipfile.ZipFile(library, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path for path in root.rglob("*") if path.suffix in (".py", ".cpp")):
            if (place := file.relative_to(root)).parts[0] not in _WITHOUT:
                archive.write(file, f"ngsgd/{place}")
    # named, since MLflow would import everything to find out; torch of PyTorch's own index has a
    # suffix, such as +cpu, which no other index has
    requirements = [f"{package}=={version(package).partition('+')[0]}" for package in _PACKAGES]
    with warnings.catch_warnings():
        # it recommends an input example in addition to the signature
        warnings.simplefilter("ignore", UserWarning)
        mlflow.pyfunc.save_model(str(folder), python_model=str(Path(__file__).with_name("model.py")),
                                 artifacts={"final": str(final), "library": str(library)},
                                 signature=_signature(read_json(final / "model.json"), takes_audio=takes_audio),
                                 pip_requirements=requirements, model_config={"takes_audio": takes_audio})
    # links the files to the logged model, as mlflow.pyfunc.log_model does
    stored = Model.load(str(folder))
    stored.model_id = model_id
    stored.save(str(folder / "MLmodel"))


def _signature(about: dict[str, Any], *, takes_audio: bool) -> Any:
    """Names and types of inputs and outputs; model.py explains them."""
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec
    from mlflow.types.schema import Array, ColSpec, DataType, Object, Property
    if not takes_audio:
        return ModelSignature(*(Schema([TensorSpec(np.dtype(np.float32), (-1, about[size]))])
                                for size in ("num_inputs", "num_classes")))
    of_word = {"word": DataType.string, "start_s": DataType.double, "end_s": DataType.double, "confidence": DataType.double}
    word = Object([Property(name, kind) for name, kind in of_word.items()])
    columns = {"audio": DataType.binary, "samples": Array(DataType.double), "sample_rate_hz": DataType.double}
    return ModelSignature(Schema([ColSpec(kind, name, required=False) for name, kind in columns.items()]),
                          Schema([ColSpec(DataType.string, "text"), ColSpec(Array(word), "words")]))
