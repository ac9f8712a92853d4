"""`ngsgd export` and `ngsgd import`: models for Kaldi and other programs, and from Kaldi."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import read_regular_bytes
from ngsgd.launcher.arguments import TRUST, Parser, add_words, words_of
from ngsgd.runs.run_folder import find_run

# of ngsgd export
FORMATS = ("nnet3", "bundle", "onnx", "torch", "sherpa-onnx", "huggingface")
# largest model file; as text it holds about a billion parameters
_MAX_MODEL_BYTES = 1 << 34


def export(arguments: Sequence[str]) -> int:
    """`ngsgd export`."""
    options = _export_options(arguments)
    write = {"nnet3": _export_nnet3, "bundle": _export_bundle}.get(options.format, _export_other)
    if options.format == "bundle" and options.changed:
        write = _export_other
    try:
        written = write(options, Path(options.output))
    except OSError as error:
        raise DataError(f"{error.filename or options.output} could not be written "
                        f"({error.strerror or error}); make room, or "
                        "choose another place.") from error
    print("\n".join(map(str, written)))
    return EXIT_OK


def _export_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _export_parser()
    options = parser.parse_args(list(arguments))
    if (options.output is None) == (options.named_output is None):
        parser.error("give OUTPUT once, after RUN or with --output")
    options.output = options.output or options.named_output
    if options.format != "nnet3" and (options.include_data or options.egs):
        parser.error("--include-data and --egs need --format nnet3, and --format is "
                     f"{options.format}; remove them, or export twice")
    if options.format != "huggingface" and options.license:
        parser.error("--license needs --format huggingface")
    changed = words_of(options)
    is_changed = any(vars(changed["words"]).values()) or options.scale is not None or options.penalty is not None
    if options.format == "nnet3" and is_changed:
        parser.error("--lm, --lexicon, --words, --grammar, --scale and --penalty change the decoding graph, "
                     "which --format nnet3 does not write; remove them, or choose another format")
    options.changed = changed if is_changed else {}
    return options


def _export_parser() -> Parser:
    parser = Parser("export")
    parser.add_argument("run", metavar="RUN",
                        help="run folder, or its name under runs/; or a bundle, except for "
                             "--format nnet3, and for bundle without other words")
    parser.add_argument("output", metavar="OUTPUT", nargs="?",
                        help="file (bundle, onnx, torch) or folder to write")
    parser.add_argument("--output", "-o", dest="named_output", metavar="OUTPUT",
                        help="OUTPUT as an option")
    parser.add_argument("--format", choices=FORMATS, default="nnet3",
                        help="nnet3 (default): Kaldi raw model and priors; bundle: one file for "
                             "ngsgd transcribe; onnx, torch (torch.export): network and decoding "
                             "graph; sherpa-onnx: model and graph for that engine; huggingface: "
                             "folder with a model card")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    add_words(parser.add_argument_group("other words than those of the model, except for nnet3"))
    nnet3 = parser.add_argument_group("--format nnet3")
    nnet3.add_argument("--include-data", action="store_true",
                       help="also write features, CMVN statistics and alignments (pdf ids) of all "
                            "sets")
    nnet3.add_argument("--egs", type=int, default=0, metavar="N",
                       help="also write the first N archives of training examples")
    card = parser.add_argument_group("--format huggingface")
    card.add_argument("--license", metavar="ID",
                      help="license in the model card (default: unknown)")
    return parser


def _export_nnet3(options: argparse.Namespace, output: Path) -> list[Path]:
    from ngsgd.exports import kaldi
    from ngsgd.launcher.commands.train import open_run

    run = open_run(find_run(options.run), quiet=False, is_unchanged=options.include_data)
    output.mkdir(parents=True, exist_ok=True)
    return [*kaldi.export_model(run.folder, run.config, output, trust=options.trust),
            *(kaldi.export_data(run.folder, run.config, run.data.corpus, output) if options.include_data else []),
            *(kaldi.export_egs(run.folder, output, options.egs) if options.egs else [])]


def _export_bundle(options: argparse.Namespace, output: Path) -> list[Path]:
    from ngsgd.exports import require_new
    from ngsgd.launcher.commands.train import open_run
    from ngsgd.runs.recognizer import export_bundle

    require_new(output)
    run = open_run(find_run(options.run), quiet=True)
    export_bundle(run.folder, run.config, run.data.corpus, output)
    return [output]


def _export_other(options: argparse.Namespace, output: Path) -> list[Path]:
    from ngsgd import exports

    return exports.export(options.run, options.format, output, license_id=options.license or "unknown", trust=options.trust,
                          changed=options.changed)


def import_(arguments: Sequence[str]) -> int:
    """`ngsgd import`."""
    parser = Parser("import")
    parser.add_argument("model", metavar="FILE",
                        help="Kaldi nnet3 raw model, binary or text; nnet3-copy converts other "
                             "models")
    parser.add_argument("--priors", metavar="FILE",
                        help="vector of priors, binary or text (default: equal priors)")
    parser.add_argument("--output", "-o", required=True, metavar="FOLDER",
                        help="new folder, for init_model=FOLDER")
    options = parser.parse_args(list(arguments))
    output = Path(options.output)
    if (output / "final").exists():
        raise ConfigError(f"{output} holds a model already; choose a new folder.")
    from ngsgd.exports import kaldi

    kaldi.import_model(_read(Path(options.model)), _read(Path(options.priors)) if options.priors else b"", output)
    print(output / "final")
    return EXIT_OK


def _read(path: Path) -> bytes:
    try:
        return read_regular_bytes(path, _MAX_MODEL_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the path and "
                        "its permissions.") from error
