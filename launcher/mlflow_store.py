"""MLflow stores: where a run is kept, opening it, and the final model that is put there."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import quote

from launcher.text import MASK, conceal, is_masked, masked
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError

_PACKAGES = ("ngsgd", "torch", "numpy", "safetensors")


_USER, _PASSWORD, _TOKEN = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"


def tracking_uri(config: RunConfig) -> str:
    """The configured store with what logs in to it, or SQLite in the output directory; raises as `with_login` does."""
    if masked(config.tracking.uri, known=False) != config.tracking.uri:
        conceal(config.tracking.uri)
    return with_login(config.tracking.uri) or sqlite_uri(Path(config.output_dir))


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
            return f"{scheme}://{rest}"  # MLflow reads the environment itself
        if user and password:
            return f"{scheme}://{quote(user, safe='')}:{quote(password, safe='')}@{rest}"
    raise ConfigError(f"tracking.uri is stored as {uri}, without what logs in to it; set {_USER} and {_PASSWORD}, or go on with "
                      "ngsgd train --continue name=NAME tracking.uri=URI, or set tracking.kind=none for a new run.")


def without_login(uri: str) -> str:
    """The address alone: it says which store it is, however one logs in to it."""
    return masked(uri, known=False).replace(f"{MASK}@", "")


def sqlite_uri(output_dir: Path) -> str:
    return f"sqlite:///{output_dir.absolute() / 'mlflow.db'}"


def open_client(uri: str) -> Any:
    """Imports MLflow (1 to 2 s) without its greetings."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for scripts
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # a server that is down must not hold up the end
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    if uri.startswith("sqlite:///"):
        Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    from mlflow import MlflowClient

    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells how it makes its tables otherwise
    return MlflowClient(tracking_uri=uri)


def read_tracking(run_dir: Path) -> dict[str, Any]:
    """Where a run is in MLflow; empty if it never was there."""
    try:
        stored = json.loads((run_dir / "tracking.json").read_text())
    except (OSError, ValueError):
        return {}
    return stored if isinstance(stored, dict) and stored.keys() >= {"experiment_id", "run_id", "worker_runs"} else {}


def log_model(client: Any, run_id: str, final: Path, register_as: str) -> str:
    """Stores the final model under "model" of the run; returns the version registered, or nothing."""
    with tempfile.TemporaryDirectory(prefix="ngsgd-mlflow-") as scratch:
        folder = Path(scratch) / "model"
        _save(final, folder)
        client.log_artifacts(run_id, str(folder), "model")
    if not register_as:
        return ""
    source = f"{client.get_run(run_id).info.artifact_uri.rstrip('/')}/model"
    if not any(found.name == register_as for found in client.search_registered_models(f"name = '{register_as}'")):
        client.create_registered_model(register_as)
    return str(client.create_model_version(register_as, source=source, run_id=run_id).version)


def _save(final: Path, folder: Path) -> None:
    """An MLflow model folder around the files of final/."""
    import mlflow.pyfunc
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import Schema, TensorSpec

    from launcher.console import version

    about = json.loads((final / "model.json").read_text())
    signature = ModelSignature(Schema([TensorSpec(np.dtype(np.float32), (-1, about["num_inputs"]))]),
                               Schema([TensorSpec(np.dtype(np.float32), (-1, about["num_classes"]))]))
    # what the package brings is named, since MLflow would import everything to find out
    requirements = [f"{package}=={version(package)}" for package in _PACKAGES]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it recommends an example of the input beside the signature
        mlflow.pyfunc.save_model(str(folder), python_model=str(Path(__file__).with_name("mlflow_model.py")),
                                 artifacts={"final": str(final)}, signature=signature, pip_requirements=requirements)
