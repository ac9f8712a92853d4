"""`ngsgd export` and `ngsgd import`: models for Kaldi, ONNX and others, data for Kaldi, and Kaldi's models back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import read_regular_bytes
from ngsgd.launcher.arguments import TRUST, Parser
from ngsgd.pipeline.runs.run_folder import find_run

# of ngsgd export
FORMATS = ("nnet3", "bundle", "onnx", "torch", "sherpa-onnx", "huggingface")
# of a model; as text about a billion parameters
_MAX_MODEL_BYTES = 1 << 34


def export(arguments: Sequence[str]) -> int:
    """`ngsgd export`."""
    options = _export_options(arguments)
    write = {"nnet3": _export_nnet3, "bundle": _export_bundle}.get(options.format, _export_other)
    try:
        written = write(options, Path(options.output))
    except OSError as error:
        raise DataError(f"{error.filename or options.output} could not be written ({error.strerror or error}); make room, or "
                        "choose another place.") from error
    print("\n".join(map(str, written)))
    return EXIT_OK


def _export_options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("export")
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/; a bundle, except for nnet3 and bundle")
    parser.add_argument("output", metavar="OUTPUT", nargs="?", help="file (bundle, onnx, torch) or folder to make")
    parser.add_argument("--output", "-o", dest="named_output", metavar="OUTPUT", help="the same as an option")
    parser.add_argument("--format", choices=FORMATS, default="nnet3",
                        help="nnet3: Kaldi's raw model as text, and its priors (default); bundle: one file with all that "
                        "ngsgd transcribe takes; onnx, torch (torch.export): the network and its decoding graph; sherpa-onnx: "
                        "model and graph for that engine; huggingface: a folder with a model card")
    parser.add_argument("--data", action="store_true", help="also features, CMVN and alignments (pdf ids) of train, valid and test "
                        "(nnet3)")
    parser.add_argument("--egs", type=int, default=0, metavar="N", help="also the first N archives of training examples (nnet3)")
    parser.add_argument("--license", metavar="ID", help="licence of the model for the model card (huggingface); default unknown")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options = parser.parse_args(list(arguments))
    if (options.output is None) == (options.named_output is None):
        parser.error("give OUTPUT once, after RUN or with --output")
    options.output = options.output or options.named_output
    if options.format != "nnet3" and (options.data or options.egs):
        parser.error(f"--data and --egs write Kaldi's formats, and --format is {options.format}; leave them out, or export twice")
    if options.format != "huggingface" and options.license:
        parser.error("--license is for the model card of --format huggingface")
    return options


def _export_nnet3(options: argparse.Namespace, output: Path) -> list[Path]:
    from ngsgd.launcher.commands.train import open_run
    from ngsgd.pipeline import kaldi_exchange

    run = open_run(find_run(options.run), quiet=False, is_unchanged=options.data)
    output.mkdir(parents=True, exist_ok=True)
    return [*kaldi_exchange.export_model(run, output, trust=options.trust),
            *(kaldi_exchange.export_data(run, output) if options.data else []),
            *(kaldi_exchange.export_egs(run.folder, output, options.egs) if options.egs else [])]


def _export_bundle(options: argparse.Namespace, output: Path) -> list[Path]:
    from ngsgd.launcher.commands.train import open_run
    from ngsgd.pipeline.exports import require_new
    from ngsgd.pipeline.runs.recognizer import export_bundle

    require_new(output)
    run = open_run(find_run(options.run), quiet=True)
    export_bundle(run.folder, run.config, run.data.corpus, output)
    return [output]


def _export_other(options: argparse.Namespace, output: Path) -> list[Path]:
    from ngsgd.pipeline import exports

    return exports.export(options.run, options.format, output, license_id=options.license or "unknown", trust=options.trust)


def import_(arguments: Sequence[str]) -> int:
    """`ngsgd import`."""
    parser = Parser("import")
    parser.add_argument("model", metavar="FILE", help="nnet3 raw model, binary or text (nnet3-copy)")
    parser.add_argument("--priors", metavar="FILE", help="vector of priors, binary or text; without: all classes alike")
    parser.add_argument("--output", "-o", required=True, help="a new folder; go on from it with init_model=FOLDER")
    options = parser.parse_args(list(arguments))
    output = Path(options.output)
    if (output / "final").exists():
        raise ConfigError(f"{output} holds a model already; choose a new folder.")
    from ngsgd.pipeline import kaldi_exchange

    kaldi_exchange.import_model(_read(Path(options.model)), _read(Path(options.priors)) if options.priors else b"", output)
    print(output / "final")
    return EXIT_OK


def _read(path: Path) -> bytes:
    try:
        return read_regular_bytes(path, _MAX_MODEL_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}); check the path and its permissions.") from error
