"""ONNX and torch.export: the model with metadata, and the decoding graph next to it."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd import imports
from ngsgd.errors import ConfigError
from ngsgd.exports.source import Source, path_of_graph, write_graph
from ngsgd.files import new_file

# relative to the largest log likelihood: float32 sums in another order differ by about 1e-6
_TOLERANCE = 1e-5
_PURPOSE = "Export to ONNX"


def write(source: Source, output: Path) -> list[Path]:
    """Write the model to `output` and the graph next to it (.fst)."""
    graph_path = path_of_graph(output)
    proto = convert(source.network, source.example(20), source.dynamic_shapes(),
                    input_names=source.input_names, output_names=["loglik"], facts=source.facts)
    check(proto, source.network, [source.example(1, seed=1), source.example(57, seed=2)])
    return _with_graph(source, output, proto.SerializeToString(), graph_path)


def _with_graph(source: Source, output: Path, content: bytes, graph_path: Path) -> list[Path]:
    with new_file(output) as temporary:
        temporary.write_bytes(content)
    with new_file(graph_path) as temporary:
        write_graph(source.bundle.graph, temporary)
    return [output, graph_path]


def convert(network: nn.Module, example: tuple[Tensor, ...], dynamic_shapes: tuple[Any, ...], *,
            input_names: Sequence[str], output_names: Sequence[str], facts: Mapping[str, Any]) -> Any:
    """Convert a module to an onnx.ModelProto with each of the facts as a metadata property.

    Raises ConfigError for an operation that torch cannot export, and MissingExtraError.
    """
    for package in ("onnx", "onnxscript", "onnxruntime"):
        imports.load(package, extra="onnx", purpose=_PURPOSE)
    try:
        # warnings on names of dimensions and versions of operators, which users cannot act on
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network, example, input_names=input_names, output_names=output_names,
                dynamic_shapes=dynamic_shapes, dynamo=True, verbose=False)
    except Exception as error:
        raise not_exportable(error) from error
    assert program is not None
    proto = program.model_proto
    # stack traces contain paths of this machine
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in nodes:
            del node.metadata_props[:]
    del proto.graph.metadata_props[:]
    for key, value in facts.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value if isinstance(value, str) else json.dumps(value)
    return proto


def check(proto: Any, network: nn.Module, inputs: Sequence[tuple[Tensor, ...]]) -> None:
    """Raise ConfigError unless onnxruntime reproduces the outputs of torch."""
    onnxruntime = imports.load("onnxruntime", extra="onnx", purpose=_PURPOSE)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [put.name for put in session.get_inputs()]
    for tensors in inputs:
        with torch.no_grad():
            found = network(*tensors)
        expected = (found[0] if isinstance(found, tuple) else found).numpy()
        got = session.run(None, dict(zip(names, (x.numpy() for x in tensors), strict=True)))[0]
        error = float(np.abs(got - expected).max() / np.abs(expected).max())
        # a NaN is an error too
        if not error <= _TOLERANCE:
            raise ConfigError(f"the ONNX model differs from torch by {error:.1e} of the largest "
                              f"log likelihood, more than {_TOLERANCE:g}; the output of a custom "
                              "model for a frame must depend only on its window (docs/export.md).")


def not_exportable(error: Exception) -> ConfigError:
    """Build the error of a model that torch.export cannot trace."""
    root = error
    while root.__cause__ is not None and isinstance(root.__cause__, Exception):
        root = root.__cause__
    reason = next((line.strip() for line in str(root).splitlines() if line.strip()), type(root).__name__)
    return ConfigError(f"torch cannot export this model ({reason[:300]}); use operations whose "
                       "shapes follow from x.shape in its forward, without branches on values (docs/export.md).")


# name of the extra file with the facts in the archive
FACTS = "about.json"


def write_program(source: Source, output: Path) -> list[Path]:
    """Write a program that torch loads without the classes of the model, and the graph (.fst)."""
    graph_path = path_of_graph(output)
    try:
        with torch.no_grad():
            program = torch.export.export(source.network, source.example(20), dynamic_shapes=source.dynamic_shapes())
    except Exception as error:
        raise not_exportable(error) from error
    for node in program.graph.nodes:
        # contains paths of this machine
        node.meta.pop("stack_trace", None)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={FACTS: json.dumps(source.facts)})
    return _with_graph(source, output, buffer.getvalue(), graph_path)
