"""MLflow stores: where a run is kept, opening it, and the final model that is put there."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError
from ngsgd.files import read_json, write_text
from ngsgd.interface import is_command_line
from ngsgd.launcher.text import MASK, conceal, is_masked, masked
from ngsgd.object_storage.urls import local_root

# bytes; what a run asks for is far smaller
_MAX_ANSWER = 64 * 2**20
# where a server may have artifacts put; all else would be a place on this machine, or leads to one
_REMOTE_SCHEMES = ("mlflow-artifacts", "http", "https", "s3", "gs", "wasb", "wasbs", "abfs", "abfss", "r2", "b2", "hdfs", "viewfs",
                   "ftp", "sftp", "oss", "cos", "swift", "dbfs")
# characters, MLflow's limit
_LONGEST_DIGEST = 36
_PACKAGES = ("ngsgd", "torch", "numpy", "safetensors")


_USER, _PASSWORD, _TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"


def tracking_uri(config: RunConfig) -> str:
    """The configured store with what logs in to it, or SQLite in the output directory; raises as
    `with_login` does.
    """
    if masked(config.tracking.uri, known=False) != config.tracking.uri:
        conceal(config.tracking.uri)
    return with_login(config.tracking.uri) or sqlite_uri(local_root(config.output_dir))


def with_login(uri: str) -> str:
    """A store's address as files have it, masked, with the user and password of the environment.

    Raises ConfigError where it was masked and the environment has none.
    """
    if not is_masked(uri):
        return uri
    user, password = os.environ.get(_USER, ""), os.environ.get(_PASSWORD, "")
    scheme, _, rest = uri.partition(f"://{MASK}@")
    if rest and not is_masked(rest):
        if scheme in ("http", "https") and ((user and password) or os.environ.get(_TOKEN)):
            # MLflow reads the environment itself
            return f"{scheme}://{rest}"
        if user and password:
            return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{rest}"
    again = "continue with ngsgd train --continue name=NAME tracking.uri=URI, " if is_command_line() else ""
    raise ConfigError(f"tracking.uri is stored as {uri}, without its login. Set {_USER} and {_PASSWORD}, {again}or set "
                      "tracking.kind=none for a new run.")


def without_login(uri: str) -> str:
    """The address alone: it identifies the store, without a login."""
    return masked(uri, known=False).replace(f"{MASK}@", "")


def sqlite_uri(output_dir: Path) -> str:
    return f"sqlite:///{output_dir.absolute() / 'mlflow.db'}"


def open_client(uri: str) -> Any:
    """Imports MLflow (1 to 2 s) without its greetings."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # stdout is for scripts
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    # a server that is down must not hold up the end
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        # otherwise it logs the creation of its tables
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        # it logs each error of a database with its traceback, and then raises it
        logging.getLogger("mlflow.store.db").setLevel(logging.CRITICAL)
    if is_server(uri):
        _bound_answers()
    return MlflowClient(tracking_uri=uri)


def is_server(uri: str) -> bool:
    """Whether the store is another program, whose answers need checks."""
    return uri.lower().startswith(("http://", "https://"))


def _is_remote(place: str) -> bool:
    """Whether files that go there leave this machine."""
    return urlsplit(place).scheme.lower() in _REMOTE_SCHEMES


class Artifacts:
    """Puts files into one MLflow run; with a server, only where the files leave this machine."""

    def __init__(self, client: Any, run_id: str, uri: str) -> None:
        self._client, self.run_id = client, run_id
        self._repository: Any = None
        # a place on this machine that the server named
        self.refused: str | None = None
        if is_server(uri):
            place = str(client.get_run(run_id).info.artifact_uri)
            if not _is_remote(place):
                self.refused = place
                return
            from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

            # not the client's own: it would ask the server again, which may answer something else
            self._repository = get_artifact_repository(place, tracking_uri=uri)

    def log_file(self, path: Path) -> None:
        if self._repository is not None:
            self._repository.log_artifact(str(path))
        elif self.refused is None:
            self._client.log_artifact(self.run_id, str(path))

    def log_text(self, text: str, name: str) -> None:
        """Store a text as a file of that name."""
        with tempfile.TemporaryDirectory(prefix="ngsgd-mlflow-") as scratch:
            write_text(Path(scratch) / name, text)
            self.log_file(Path(scratch) / name)

    def log_folder(self, path: Path, name: str) -> None:
        if self._repository is not None:
            self._repository.log_artifacts(str(path), name)
        elif self.refused is None:
            self._client.log_artifacts(self.run_id, str(path), name)


def _bound_answers() -> None:
    """An answer without an end must not fill the memory of a training process; MLflow reads answers
    to their end.
    """
    from mlflow.utils import rest_utils

    name = "_get_http_response_with_retries"
    # private: where a version does not have it, answers are not bounded
    original = getattr(rest_utils, name, None)
    if original is None or hasattr(original, "is_bounded"):
        return

    def request(*arguments: Any, **options: Any) -> Any:
        if options.get("stream"):
            return original(*arguments, **options)
        answer = original(*arguments, **{**options, "stream": True})
        content = bytearray()
        for part in answer.iter_content(1 << 16):
            content += part
            if len(content) > _MAX_ANSWER:
                answer.close()
                raise ConnectionError(f"the MLflow server's answer is longer than {_MAX_ANSWER >> 20} MiB")
        answer._content = bytes(content)
        return answer
    request.is_bounded = True  # type: ignore[attr-defined]
    setattr(rest_utils, name, request)


def read_tracking(run_dir: Path) -> dict[str, Any]:
    """Where a run is in MLflow; empty if it never was there."""
    try:
        stored = read_json(run_dir / "tracking.json")
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) and stored.keys() >= {"experiment_id", "run_id", "worker_runs"} else {}


def log_model(client: Any, run_id: str, experiment_id: str, final: Path, artifacts: Artifacts, *, uri: str, step: int) -> str:
    """Store the final model as a logged model named "model", an output of the run; returns its id.

    Empty where a server names a place on this machine for the files.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    model = client.create_logged_model(experiment_id, name="model", source_run_id=run_id)
    if is_server(uri) and not _is_remote(model.artifact_location):
        artifacts.refused = model.artifact_location
        client.delete_logged_model(model.model_id)
        return ""
    with tempfile.TemporaryDirectory(prefix="ngsgd-mlflow-") as scratch:
        folder = Path(scratch) / "model"
        _save(final, folder, model_id=model.model_id)
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


def log_dataset(client: Any, run_id: str, name: str, digest: str, source: str) -> None:
    """Record which data a run was trained on."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(name, digest[:_LONGEST_DIGEST], "local", json.dumps({"uri": source}))
    client.log_inputs(run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])])


def _save(final: Path, folder: Path, *, model_id: str) -> None:
    """An MLflow model folder around the files of final/."""
    import mlflow.pyfunc
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import Schema, TensorSpec

    from ngsgd.launcher.console import version

    about = read_json(final / "model.json")
    signature = ModelSignature(Schema([TensorSpec(np.dtype(np.float32), (-1, about["num_inputs"]))]),
                               Schema([TensorSpec(np.dtype(np.float32), (-1, about["num_classes"]))]))
    # what the package brings is named, since MLflow would import everything to find out
    requirements = [f"{package}=={version(package)}" for package in _PACKAGES]
    with warnings.catch_warnings():
        # it recommends an input example in addition to the signature
        warnings.simplefilter("ignore", UserWarning)
        mlflow.pyfunc.save_model(str(folder), python_model=str(Path(__file__).with_name("model.py")),
                                 artifacts={"final": str(final)}, signature=signature, pip_requirements=requirements)
    # links the files to the logged model, as mlflow.pyfunc.log_model does
    stored = Model.load(str(folder))
    stored.model_id = model_id
    stored.save(str(folder / "MLmodel"))
