"""A run's final model in one file, or for other programs: ONNX, torch.export, sherpa-onnx, Hugging
Face.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from ngsgd.errors import ConfigError
from ngsgd.pipeline.exports import huggingface, onnx, sherpa, torch_program
from ngsgd.pipeline.exports.source import Source, load
from ngsgd.pipeline.run import Run
from ngsgd.pipeline.runs.recognizer import export_bundle

# what each writes: paths, the named one first
WRITERS: Mapping[str, Callable[[Source, Path], list[Path]]] = {
    "onnx": onnx.write, "torch": torch_program.write, "sherpa-onnx": sherpa.write,
    "huggingface": huggingface.write}


def export(run: Run, format_name: str, output: Path, *, license_id: str = "unknown",
           trust: bool = False) -> list[Path]:
    """Write the final model of a run to a new file or folder.

    Args:
        run: a run that has been decoded.
        format_name: bundle, or a key of `WRITERS`.
        output: file (bundle, onnx, torch) or folder (sherpa-onnx, huggingface) to make.
        license_id: licence of the model, for the model card.
        trust: import the module that the run names (see docs/own-model.md).

    Returns:
        The files that were written.

    Raises:
        ConfigError: the output exists, or this model has no such form.
        MissingExtraError: a package of the format is not installed.
        CheckpointError: the run has not ended, or a file of its model is damaged.
    """
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists; choose another name, or remove it.")
    output.parent.mkdir(parents=True, exist_ok=True)
    if format_name == "bundle":
        export_bundle(run.folder, run.config, run.data.corpus, output)
        return [output]
    return WRITERS[format_name](load(run, license_id=license_id, trust=trust), output)
