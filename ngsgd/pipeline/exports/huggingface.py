"""A folder in the style of Hugging Face: the files of the final model, configurations in JSON and a
model card.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ngsgd.files import new_directory, read_json, write_text
from ngsgd.pipeline.exports.model_card import model_card
from ngsgd.pipeline.exports.source import Source, write_graph, write_words

GRAPH, WORDS = "HCLG.fst", "words.txt"


def write(source: Source, output: Path) -> list[Path]:
    """Write the folder; its files of the final model are those of the run, byte by byte."""
    about = read_json(source.folder.final / "model.json")
    num_parameters = sum(parameter.numel() for parameter in source.network.network.parameters())
    config = {"model_type": "ngsgd", "architectures": [source.config.model._target_ or source.config.model.kind], **about,
              **{key: source.facts[key] for key in ("pdfs", "words", "acoustic_scale", "word_penalty", "ngsgd_version")}}
    preprocessor = {"feature_extractor_type": "ngsgd", "sampling_rate": source.facts["features"].get("sample_rate_hz"),
                    "feature_size": source.window.feature_dim, **source.facts["features"], "cmvn": source.facts["cmvn"]}
    with new_directory(output) as temporary:
        for file in sorted(source.folder.final.iterdir()):
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        write_text(temporary / "config.json", json.dumps(config, indent=1))
        write_text(temporary / "preprocessor_config.json", json.dumps(preprocessor, indent=1))
        if not (temporary / GRAPH).exists():
            write_graph(source.graph, temporary / GRAPH)
        if not (temporary / WORDS).exists():
            write_words(source.graph, temporary / WORDS)
        write_text(temporary / "README.md", model_card(source, num_parameters))
    return [output]
