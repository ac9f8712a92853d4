"""The final model as MLflow loads it: `mlflow.pyfunc.load_model("runs:/<run>/model").predict(x_ND)`.

MLflow runs this file itself ("models from code"): what is stored is text and safetensors, and nothing is unpickled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import numpy.typing as npt
import torch
from mlflow.pyfunc import PythonModel


class AcousticModel(PythonModel):  # type: ignore[misc]
    """Spliced frames in, log posteriors out."""

    def load_context(self, context: Any) -> None:
        from launcher.final_model import open_final

        self._model, _ = open_final(Path(context.artifacts["final"]))

    @torch.no_grad()
    def predict(self, context: Any, model_input: npt.NDArray[np.float32], params: Any = None) -> npt.NDArray[np.float32]:
        """N x D spliced frames -> N x P log posteriors."""
        x_ND = torch.from_numpy(np.asarray(model_input, dtype=np.float32))
        return self._model(x_ND).log_softmax(dim=1).numpy()  # type: ignore[no-any-return]


mlflow.models.set_model(AcousticModel())
