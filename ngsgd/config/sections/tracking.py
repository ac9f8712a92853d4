"""Options of MLflow tracking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option

_MLFLOW = "kind=mlflow"


@dataclass(frozen=True)
class TrackingConfig:
    """MLflow tracking; the event log of the run folder is always written."""

    kind: Literal["mlflow", "none"] = option("mlflow", "tracking service")
    uri: str = option("", "MLflow tracking URI; empty: sqlite:///OUTPUT_DIR/mlflow.db",
                      used=_MLFLOW)
    experiment_name: str = option("", "MLflow experiment; empty: CORPUS-MODEL", used=_MLFLOW)
    nested_runs: bool = option(
        False, "a nested MLflow run for each of up to 32 workers, one request each", used=_MLFLOW)
    log_model: bool = option(True, "log the final model for mlflow.pyfunc.load_model",
                             used=_MLFLOW)
    registered_model_name: str = option(
        "", "name in the model registry under which the final model becomes a version; empty: none",
        used=_MLFLOW)
    curvature_frames: int = option(
        0, "training frames for gradient noise and curvature by layer; 0: not measured",
        unit="frames", low=0)
    log_system_metrics: bool = option(
        True, "load, memory, disk and network of up to 32 machines at every outer iteration",
        used=_MLFLOW)
