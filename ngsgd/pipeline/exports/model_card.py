"""The model card (README.md) of an exported model: everything in it comes from the run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ngsgd.pipeline.exports.source import Source

# more words are counted, not listed
_MAX_WORDS = 30


def model_card(source: Source, num_parameters: int) -> str:
    """Markdown with the metadata of Hugging Face at the top."""
    name = source.folder.path.resolve().name
    parts = [_metadata(source, name), f"# {name}\n\n{_introduction(source, num_parameters)}", _data(source), _results(source),
             _settings(source, num_parameters), _limits(source)]
    return "\n\n".join(parts) + "\n"


def _metadata(source: Source, name: str) -> str:
    """YAML; its strings are written as JSON, which is YAML, too."""
    wer = float(source.decoded["test"].split()[1])
    corpus = json.dumps(source.config.data.corpus)
    return "\n".join([
        "---", "library_name: ngsgd", f"license: {json.dumps(source.license_id)}",
        "pipeline_tag: automatic-speech-recognition", "tags: [speech, hybrid-hmm]", "model-index:",
        f"- name: {json.dumps(name)}", "  results:",
        "  - task: {type: automatic-speech-recognition}",
        f"    dataset: {{name: {corpus}, type: {corpus}, split: test}}",
        f"    metrics: [{{type: wer, value: {wer:.2f}}}]", "---"])


def _introduction(source: Source, num_parameters: int) -> str:
    model = source.config.model
    return (f"A hybrid acoustic model ({model._target_ or model.kind}, {num_parameters:,} parameters, "
            f"{len(source.facts['pdfs'])} HMM states) and its decoding graph, trained with ngsgd {source.facts['ngsgd_version']}. "
            "`model.safetensors` has the parameters, `config.json` the shapes, class priors, words and decoding setting, "
            "`preprocessor_config.json` the features, and `graph.fst` the graph (pdf + 1 in, word + 1 out).\n\n"
            "    ngsgd transcribe FOLDER recording.wav")


def _data(source: Source) -> str:
    rows = [(name, one["utterances"], one["speakers"], f"{one['hours']:.2f}") for name, one in source.facts["data"]["sets"].items()]
    return f"## Data\n\nCorpus: {source.facts['data']['corpus']}.\n\n" + _table(("set", "utterances", "speakers", "hours"), rows)


def _results(source: Source) -> str:
    decoded, interval = source.decoded, source.decoded.get("test_interval_95")
    between = f"{interval['low']:.2f} to {interval['high']:.2f}" if interval else ""
    rows = [("test", decoded["test"], between), ("valid", decoded.get("valid", ""), "")]
    return ("## Results\n\n" + _table(("set", "word errors", "95 % interval of WER"), rows)
            + f"\n\nAcoustic scale {decoded['acoustic_scale']:g} and word penalty {decoded['word_penalty']:g} are the best on the "
            "validation set. The interval is a bootstrap over utterances.")


def _settings(source: Source, num_parameters: int) -> str:
    config, features = source.config, source.config.features
    rows = [("model", config.model._target_ or config.model.kind), ("parameters", f"{num_parameters:,}"),
            ("features", features.kind if features.kind == "given" else f"{features.kind}, {source.window.feature_dim} values, "
             f"{features.sample_rate_hz} Hz"),
            ("normalization", features.cmvn), ("i-vectors", source.window.side_dim or "none"),
            ("context", f"{source.window.left_context} + {source.window.right_context} frames"),
            ("objective", config.objective.kind), ("optimizer", config.optimizer.kind),
            ("epochs", f"{config.schedule.num_epochs:g}"), ("jobs", config.schedule.num_jobs_final), ("seed", config.seed)]
    return "## Settings\n\n" + _table(("setting", "value"), rows)


def _limits(source: Source) -> str:
    words = source.graph.words
    listed = ": " + ", ".join(words) if len(words) <= _MAX_WORDS else ""
    limits = [f"It recognizes {len(words)} words and no other{listed}.",
              "Results are for the test set above; other speakers, microphones, rooms and noise were not measured."]
    if source.config.features.kind != "given":
        limits.append(f"Audio is mono at {source.config.features.sample_rate_hz} Hz; other rates must be resampled.")
    if source.config.data.corpus == "digits":
        limits.append("All of its training and test data are synthetic voices; people were not measured.")
    if source.config.features.cmvn not in ("none", "online"):
        limits.append(f"Features are normalized per {source.config.features.cmvn}, so recognition begins when the audio is "
                      "complete.")
    if source.window.side_dim:
        limits.append("Its i-vectors are computed by ngsgd (`ivectors.safetensors`).")
    return "## Limits\n\n" + "\n".join(f"- {limit}" for limit in limits)


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    # a bar in a name would begin a cell
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
