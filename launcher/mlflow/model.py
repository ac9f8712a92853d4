"""The final model as MLflow loads it: a recognizer, audio in and words out (see docs/mlflow.md).

A model on precomputed features maps spliced frames to log posteriors. MLflow runs this file itself
("models from code"): the stored files are text, safetensors and code, and nothing is unpickled.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import io
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE
from mlflow.pyfunc import PythonModel


class SpeechModel(PythonModel):  # type: ignore[misc]
    """A recognizer, or for `features.kind=given` the acoustic model alone."""

    def load_context(self, context: Any) -> None:
        if importlib.util.find_spec("ngsgd") is None:
            # ngsgd.zip is the library that trained the model; removed when this model is
            self._library = tempfile.TemporaryDirectory(prefix="ngsgd-library-")
            with zipfile.ZipFile(context.artifacts["library"]) as archive:
                archive.extractall(self._library.name)
            sys.path.append(self._library.name)
        from ngsgd.asr.recognizer import Recognizer
        from ngsgd.runs.final_model import open_final
        from ngsgd.runs.recognizer import open_bundle
        final = Path(context.artifacts["final"])
        self._recognizer: Any = None
        if context.model_config.get("takes_audio"):
            self._recognizer = Recognizer(open_bundle(str(final)))
        else:
            self._model = open_final(final)[0]

    # the hint is as bare as MLflow requires: it warns of any other, and of none
    def predict(self, context: Any, model_input: pd.DataFrame, params: Any = None) -> Any:
        """A row per recording -> text and words; or N x D spliced frames -> N x P log posteriors.

        A row has `audio`, the bytes of a wav or another audio file (base64 in JSON), or `samples`,
        numbers from -1 to 1 at `sample_rate_hz` (default: the rate of the model).
        """
        if self._recognizer is None:
            import torch
            with torch.no_grad():
                x_ND = torch.from_numpy(np.asarray(model_input, dtype=np.float32))
                return self._model(x_ND).log_softmax(dim=1).numpy()
        return pd.DataFrame([self._words_of(number, row) for number, row in enumerate(model_input.to_dict("records"))],
                            columns=["text", "words"])

    def _words_of(self, number: int, row: dict[str, Any]) -> dict[str, Any]:
        from ngsgd.asr.recording import AudioFile, Recording
        from ngsgd.errors import NgsgdError
        given: list[Any] = [row.get(name) for name in ("audio", "samples", "sample_rate_hz")]
        audio, samples, rate_hz = [None if np.isscalar(value) and pd.isna(value) else value for value in given]
        name = f"row {number}"
        try:
            if (audio is None) == (samples is None) or (audio is not None and rate_hz is not None):
                raise MlflowException(f"{name} needs either audio, the bytes of an audio file, or samples with sample_rate_hz",
                                      INVALID_PARAMETER_VALUE)
            # MLflow decodes it in some forms of a request only; no audio file is base64 in itself
            with contextlib.suppress(ValueError):
                audio = audio and base64.b64decode(audio, validate=True)
            if audio is None:
                found = self._recognizer.transcribe(np.asarray(samples, np.float64), rate_hz)
            else:
                with contextlib.closing(AudioFile(name, io.BytesIO(audio))) as file:
                    found = self._recognizer.transcribe(Recording(name, file.sample_rate_hz, file.num_channels, file.read))
        except NgsgdError as error:
            raise MlflowException(str(error), INVALID_PARAMETER_VALUE) from error
        return {"text": found.text, "words": [word._asdict() for word in found.words]}


mlflow.models.set_model(SpeechModel())
