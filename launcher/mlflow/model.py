"""The final model as MLflow loads it: `mlflow.pyfunc.load_model("runs:/<run>/model").predict(x_ND)`.

MLflow runs this file itself ("models from code"): the stored files are text and safetensors, and
nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import torch
from mlflow.pyfunc import PythonModel


class AcousticModel(PythonModel):  # type: ignore[misc]
    """Spliced frames in, log posteriors out."""

    def load_context(self, context: Any) -> None:
        from ngsgd.runs.final_model import open_final

        self._model, _ = open_final(Path(context.artifacts["final"]))

    @torch.no_grad()
    def predict(self, context: Any, model_input: np.ndarray, params: Any = None) -> Any:
        """N x D spliced frames -> N x P log posteriors."""
        # the hint above is as bare as MLflow requires: it warns of any other, and of none
        x_ND = torch.from_numpy(np.asarray(model_input, dtype=np.float32))
        return self._model(x_ND).log_softmax(dim=1).numpy()


mlflow.models.set_model(AcousticModel())
