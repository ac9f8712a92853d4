"""Options of tracking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ngsgd.config.option import option

_MLFLOW = "kind=mlflow"


@dataclass(frozen=True)
class TrackingConfig:
    """Trackers, which show runs; the event log of the run folder is always written."""

    kind: Literal["mlflow", "tensorboard", "wandb", "none"] = option(
        "mlflow", "tracking service; none: event log of the run folder only")
    uri: str = option("", "MLflow tracking URI; empty: that of an active run in Python, MLFLOW_TRACKING_URI, or "
                      "sqlite:///OUTPUT_DIR/mlflow.db", used=_MLFLOW)
    experiment_name: str = option("", "name of the MLflow experiment, or of the W&B project; empty: MLFLOW_EXPERIMENT_NAME or "
                                  "WANDB_PROJECT, or CORPUS-MODEL", used="kind=mlflow|wandb & !run_id")
    run_id: str = option("", "MLflow run that receives the results; empty: an active run in Python, MLFLOW_RUN_ID, or a new one",
                         used=_MLFLOW)
    parent_run_id: str = option("", "MLflow run that contains this one; empty: none, or in a sweep a new run",
                                used=f"{_MLFLOW} & !run_id")
    registered_model_name: str = option(
        "", "name in the MLflow model registry, where the final model becomes a new version; "
        "empty: not registered", used=_MLFLOW)
    curvature_frames: int = option(0, "training data for the gradient noise and curvature of each "
                                   "layer; 0: not measured", unit="frames", low=0)
