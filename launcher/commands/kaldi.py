"""`ngsgd export` and `ngsgd import`: models for Kaldi and other programs, and from Kaldi."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import read_regular_bytes
from ngsgd.launcher.arguments import RUN, TRUST, WORDS, Parser, words_of
from ngsgd.launcher.screen import loading
from ngsgd.runs.run_folder import find_model, find_run

# of ngsgd export
FORMATS = ("nnet3", "bundle", "onnx", "torch", "sherpa-onnx", "huggingface")
_OF_ENDING = {".ngsgd": "bundle", ".onnx": "onnx", ".pt2": "torch"}
# largest model file; as text it holds about a billion parameters
_MAX_MODEL_BYTES = 1 << 34


def export(arguments: Sequence[str]) -> int:
    options = _export_options(arguments)
    try:
        written = _written(options, Path(options.output))
    except OSError as error:
        raise DataError(f"{error.filename or options.output} could not be written ({error.strerror or error}); make room, or "
                        "choose another place.") from error
    print("\n".join(map(str, written)))
    return EXIT_OK


def _export_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("export")
    parser.declare({"RUN": f"{RUN}; or a bundle, except for --format nnet3, and for bundle without other words"})
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help="file (bundle, onnx, torch) or folder to write")
    parser.add_argument("--output", "-o", dest="named_output", metavar="OUTPUT", help="OUTPUT as an option")
    parser.add_argument("--format", choices=FORMATS, default="nnet3",
                        help="nnet3 (default): Kaldi raw model and priors; bundle: one file for "
                             "ngsgd transcribe; onnx, torch (torch.export): network and decoding "
                             "graph; sherpa-onnx: model and graph for that engine; huggingface: folder with a model card")
    parser.declare({"--trust": TRUST})
    parser.declare(WORDS, "other words than those of the model, except for nnet3")
    parser.declare({
        "--include-data": "also write features, CMVN statistics and alignments (pdf ids) of all sets",
        "--egs N": (int, "also write the first N archives of training examples")}, "--format nnet3")
    parser.declare({"--license ID": "license in the model card (default: unknown)"}, "--format huggingface")
    options = parser.parse_args(arguments)
    if (options.output is None) == (options.named_output is None):
        parser.error("give OUTPUT once, after RUN or with --output")
    options.output = options.output or options.named_output
    wanted = _OF_ENDING.get(Path(options.output).suffix, options.format)
    if wanted != options.format:
        parser.error(f"{options.output} has the ending of --format {wanted}, and --format is {options.format}; change one of them")
    if options.format != "nnet3" and (options.include_data or options.egs):
        parser.error("--include-data and --egs need --format nnet3, and --format is "
                     f"{options.format}; remove them, or export twice")
    if options.format != "huggingface" and options.license:
        parser.error("--license needs --format huggingface")
    changed = words_of(options)
    is_changed = any(vars(changed["words"]).values()) or options.scale is not None or options.penalty is not None
    if options.format == "nnet3" and is_changed:
        parser.error("--lm, --lexicon, --words, --grammar, --scale and --penalty change the "
                     "decoding graph, which --format nnet3 does not write; remove them, or choose another format")
    options.changed = changed if is_changed else {}
    return options


def _written(options: argparse.Namespace, output: Path) -> list[Path]:
    model = find_model(options.run)
    with loading():
        from ngsgd import exports
    if options.changed or options.format not in ("nnet3", "bundle"):
        return exports.export(model, options.format, output, trust=options.trust,
                              license_id=options.license or "unknown", changed=options.changed)
    from ngsgd.exports import kaldi
    from ngsgd.launcher.commands.train import open_run
    from ngsgd.runs.recognizer import export_bundle
    exports.require_new(output)
    if options.format == "bundle":
        run = open_run(find_run(str(model)), quiet=True)
        export_bundle(run.folder, run.config, run.data.corpus, output)
        return [output]
    run = open_run(find_run(str(model)), quiet=False, is_unchanged=options.include_data)
    output.mkdir(parents=True, exist_ok=True)
    written = kaldi.export_model(run.folder, run.config, output, trust=options.trust)
    if options.include_data:
        written += kaldi.export_data(run.folder, run.config, run.data.corpus, output)
    return [*written, *(kaldi.export_egs(run.folder, output, options.egs) if options.egs else [])]


def import_(arguments: Sequence[str]) -> int:
    parser = Parser("import")
    parser.add_argument("model", metavar="FILE", help="Kaldi nnet3 raw model, binary or text; nnet3-copy converts other "
                             "models")
    parser.declare({"--priors FILE": "vector of priors, binary or text (default: equal priors)"})
    parser.add_argument("--output", "-o", required=True, metavar="FOLDER", help="new folder, for init_model=FOLDER")
    options = parser.parse_args(arguments)
    output = Path(options.output)
    if (output / "final").exists():
        raise ConfigError(f"{output} holds a model already; choose a new folder.")
    from ngsgd.exports import kaldi
    priors = _read(Path(options.priors)) if options.priors else b""
    kaldi.import_model(_read(Path(options.model)), priors, output)
    print(output / "final")
    return EXIT_OK


def _read(path: Path) -> bytes:
    try:
        return read_regular_bytes(path, _MAX_MODEL_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the path and its permissions.") from error
