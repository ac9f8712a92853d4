"""Options of MLflow tracking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option

_MLFLOW = "kind=mlflow"


@dataclass(frozen=True)
class TrackingConfig:
    """MLflow tracking; the event log of the run folder is always written."""

    kind: Literal["mlflow", "none"] = option(
        "mlflow", "tracking service; none: event log of the run folder only")
    uri: str = option(
        "", "MLflow tracking URI; empty: sqlite:///OUTPUT_DIR/mlflow.db",
        used=_MLFLOW)
    experiment_name: str = option(
        "", "name of the MLflow experiment; empty: CORPUS-MODEL",
        used=_MLFLOW)
    nested_runs: bool = option(
        False, "nested MLflow runs for up to 32 workers, with one request each per outer iteration",
        used=_MLFLOW)
    log_model: bool = option(
        True, "upload of the final model, for mlflow.pyfunc.load_model",
        used=_MLFLOW)
    registered_model_name: str = option(
        "",
        "name in the MLflow model registry, where the final model becomes a new version; empty: "
        "not registered",
        used=_MLFLOW)
    curvature_frames: int = option(
        0, "training data for the gradient noise and curvature of each layer; 0: not measured",
        unit="frames", low=0)
    log_system_metrics: bool = option(
        True, "load, memory, disk and network of up to 32 machines at every outer iteration",
        used=_MLFLOW)
