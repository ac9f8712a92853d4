"""torch.export: a program that torch loads without the classes of the model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import torch

from ngsgd.exports.onnx import not_exportable
from ngsgd.exports.source import Source, path_of_graph, write_graph
from ngsgd.files import new_file

# name of the extra file with the facts in the archive
FACTS = "about.json"


def write(source: Source, output: Path) -> list[Path]:
    """Write the program to `output` and the graph next to it (.fst)."""
    graph_path = path_of_graph(output)
    try:
        with torch.no_grad():
            program = torch.export.export(source.network, source.example(20),
                                          dynamic_shapes=source.dynamic_shapes())
    except Exception as error:
        raise not_exportable(error) from error
    for node in program.graph.nodes:
        # contains paths of this machine
        node.meta.pop("stack_trace", None)
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files={FACTS: json.dumps(source.facts)})
    with new_file(output) as temporary:
        temporary.write_bytes(buffer.getvalue())
    with new_file(graph_path) as temporary:
        write_graph(source.bundle.graph, temporary)
    return [output, graph_path]
