"""Files and registry entries of a run in MLflow: what is sent once, at its end."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

_PACKAGES = ("ngsgd", "torch", "numpy", "safetensors")


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
