"""A folder in the layout of Hugging Face: a bundle with JSON configurations and a model card.

`ngsgd transcribe FOLDER` and `Recognizer.load(FOLDER)` read it like any bundle.
"""

from __future__ import annotations

import json
from pathlib import Path

from ngsgd.exports.model_card import model_card
from ngsgd.exports.source import Source, write_graph, write_words
from ngsgd.files import new_directory, parse_json, sealed, sha256, write_text
from ngsgd.runs.final_model import DIGESTS


def write(source: Source, output: Path) -> list[Path]:
    """Write the folder; its parameters are bitwise identical to those of the run."""
    content = source.bundle.files()
    about = parse_json(content["model.json"].decode())
    num_parameters = sum(parameter.numel() for parameter in source.network.network.parameters())
    features = source.facts["features"]
    config = {"model_type": "ngsgd", "architectures": [source.facts["provenance"].get("model")], **about,
              **{key: source.facts[key]
                 for key in ("pdfs", "words", "acoustic_scale", "word_penalty", "ngsgd_version")}}
    preprocessor = {"feature_extractor_type": "ngsgd", "feature_size": source.window.feature_dim,
                    "sampling_rate": features.get("sample_rate_hz"), **features,
                    "cmvn": source.facts["cmvn"]}
    with new_directory(output) as temporary:
        for name, data in content.items():
            (temporary / name).write_bytes(data)
        write_text(temporary / "config.json", json.dumps(config, indent=1))
        write_text(temporary / "preprocessor_config.json", json.dumps(preprocessor, indent=1))
        write_graph(source.bundle.graph, temporary / "graph.fst")
        write_words(source.bundle.graph, temporary / "words.txt")
        write_text(temporary / "README.md", model_card(source, num_parameters))
        digests = {file.name: sha256(file) for file in sorted(temporary.iterdir())}
        write_text(temporary / DIGESTS, json.dumps(sealed("final model", digests), indent=1))
    return [output]
