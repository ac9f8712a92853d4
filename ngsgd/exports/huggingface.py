"""A folder in the layout of Hugging Face: a bundle with JSON configurations and a model card.

`ngsgd transcribe FOLDER` and `Recognizer.load(FOLDER)` read it like any bundle.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ngsgd.counting import counted
from ngsgd.exports.source import Source, write_graph, write_words
from ngsgd.files import new_directory, parse_json, sealed, sha256, write_text
from ngsgd.runs.final_model import DIGESTS
from ngsgd.word_errors import WordErrors


def write(source: Source, output: Path) -> list[Path]:
    """Write the folder; its parameters are bitwise identical to those of the run."""
    content = source.bundle.files()
    about = parse_json(content["model.json"].decode())
    num_parameters = sum(parameter.numel() for parameter in source.network.network.parameters())
    features = source.facts["features"]
    config = {"model_type": "ngsgd", "architectures": [source.facts["provenance"].get("model")], **about,
              **{key: source.facts[key] for key in ("pdfs", "words", "acoustic_scale", "word_penalty", "ngsgd_version")}}
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


# longer vocabularies are counted instead of listed
_MAX_WORDS = 30
# maximum length of a text from a bundle
_MAX_CHARACTERS = 200


def model_card(source: Source, num_parameters: int) -> str:
    """Return Markdown with the metadata of Hugging Face at the top."""
    features, window = source.bundle.features, source.window
    data = [(about, _fact(source, name)) for about, name in (
        ("corpus", "corpus"), ("SHA-256 of the prepared corpus", "corpus_sha256"),
        ("training utterances", "train_utterances"), ("training hours", "train_hours"),
        ("training speakers", "train_speakers"))]
    settings = [("features", f"{features.kind}, {window.feature_dim} values"),
                ("normalization", features.cmvn), ("i-vectors", window.side_dim or "none"),
                ("context", f"{window.left_context} + {window.right_context} frames"),
                *((name, _fact(source, name)) for name in ("model", "objective", "optimizer", "seed"))]
    introduction = (f"A hybrid acoustic model ({_fact(source, 'model')}, {num_parameters:,} parameters, "
                    f"{len(source.facts['pdfs'])} HMM states) and its decoding graph, trained with ngsgd "
                    f"{_fact(source, 'ngsgd')}. The parameters are in `model.safetensors`. The file `config.json` has the shapes, "
                    "class priors, words and decoding setting. The features are described in `preprocessor_config.json`. The "
                    "graph is `graph.fst` (input pdf + 1, output word + 1).\n\n    ngsgd transcribe FOLDER recording.wav")
    parts = [_metadata(source), f"# {_fact(source, 'run')}", introduction,
             "## Data\n\n" + _table(("data", "value"), data), _results(source),
             "## Settings\n\n" + _table(("setting", "value"), settings), _limits(source)]
    return "\n\n".join(parts) + "\n"


def _metadata(source: Source) -> str:
    """Return YAML, with strings in JSON, a subset of YAML."""
    name, corpus = json.dumps(_fact(source, "run")), json.dumps(_fact(source, "corpus"))
    lines = ["---", "library_name: ngsgd", f"license: {json.dumps(source.license_id)}",
             "pipeline_tag: automatic-speech-recognition", "tags: [speech, hybrid-hmm]"]
    errors = _errors(source, "test")
    if errors and errors.num_words:
        lines += ["model-index:", f"- name: {name}", "  results:", "  - task: {type: automatic-speech-recognition}",
                  f"    dataset: {{name: {corpus}, type: {corpus}, split: test}}",
                  f"    metrics: [{{type: wer, value: {errors.wer:.2f}}}]"]
    return "\n".join([*lines, "---"])


def _results(source: Source) -> str:
    weights = source.bundle.weights
    decoding = f"Acoustic scale {weights.acoustic_scale:g} and word penalty {weights.word_penalty:g}"
    if "wer" not in source.bundle.provenance:
        return f"## Results\n\n{decoding} are those of this export. The WER of its words and weights was not measured."
    try:
        found = source.bundle.provenance["wer"]["test_interval_95"]
        interval = f"{found['low']:.2f} to {found['high']:.2f}"
    except (KeyError, TypeError, ValueError):
        interval = ""
    rows = [("test", _errors(source, "test") or "", interval), ("validation", _errors(source, "valid") or "", "")]
    return ("## Results\n\n" + _table(("set", "WER", "95 % interval of WER"), rows)
            + f"\n\n{decoding} were chosen on the validation set. The interval is a bootstrap over utterances.")


def _limits(source: Source) -> str:
    words, features = source.bundle.graph.words, source.bundle.features
    listed = ": " + ", ".join(words) if len(words) <= _MAX_WORDS else ""
    limits = [f"It recognizes only {counted(len(words), 'word')}{listed}.", "Results are for the "
              "test set above; other speakers, microphones, rooms and noise were not measured."]
    if features.kind != "given":
        limits.append(f"Audio is mono at {features.sample_rate_hz} Hz; other rates must be resampled.")
    if _fact(source, "corpus") == "digits":
        limits.append("All of its training and test speech is synthetic; human speech was not measured.")
    if features.cmvn in ("utterance", "speaker", "given"):
        limits.append(f"Features are normalized ({features.cmvn}) over complete utterances, which "
                      "delays recognition until the audio is complete.")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _fact(source: Source, name: str) -> str:
    """Return a provenance value in one line, since a bundle may be untrusted."""
    value = source.bundle.provenance.get(name, "unknown")
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return " ".join(text.split())[:_MAX_CHARACTERS]


def _errors(source: Source, name: str) -> WordErrors | None:
    """Errors on a set; None where an untrusted bundle has something else."""
    try:
        return WordErrors.of_json(source.bundle.provenance["wer"][name])
    except (KeyError, TypeError, ValueError):
        return None


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    # a bar in a name would begin a cell
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
