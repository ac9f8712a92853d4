"""Export of a final model to ONNX, torch.export, sherpa-onnx and Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ngsgd.asr.bundle import write_file
from ngsgd.errors import ConfigError
from ngsgd.exports import huggingface, onnx, sherpa
from ngsgd.exports.source import Source
from ngsgd.runs.recognizer import open_bundle

# format -> writer, which returns the paths written, the main one first
WRITERS: Mapping[str, Callable[[Source, Path], list[Path]]] = {
    "onnx": onnx.write, "torch": onnx.write_program, "sherpa-onnx": sherpa.write,
    "huggingface": huggingface.write}


def export(model: str | Path, format_name: str, output: Path, *, license_id: str = "unknown",
           trust: bool = False, changed: Mapping[str, Any] | None = None) -> list[Path]:
    """Write a model to a new file or folder, and return the files.

    Args:
        model: a run folder, a run by its name under runs/, or a bundle.
        format_name: a key of `WRITERS`, or "bundle".
        output: new file (bundle, onnx, torch) or folder (sherpa-onnx, huggingface).
        license_id: license of the model, for the model card. Default: "unknown".
        trust: import the module that a run names (see docs/own-model.md). Default: False.
        changed: arguments of `Bundle.with_words`: other words or decoding weights. Default: none.

    Raises:
        ConfigError: the format does not support this model, or a custom module may not be imported.
        MissingExtraError: a package of the format is not installed.
        CheckpointError: the run has not ended, or a file of its model is damaged.
    """
    require_new(output)
    bundle = open_bundle(model, trust=trust)
    if changed:
        bundle = bundle.with_words(**changed)
        # a graph that cannot be built is an error before anything is written
        assert bundle.graph is not None
    output.parent.mkdir(parents=True, exist_ok=True)
    if format_name == "bundle":
        write_file(output, bundle.files())
        return [output]
    return WRITERS[format_name](Source.of(bundle, license_id), output)


def require_new(output: Path) -> None:
    """Raise ConfigError if a file or folder of this name exists."""
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists; choose another name, or remove it.")
