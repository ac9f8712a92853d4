"""`ngsgd export` and `ngsgd import`: models, features, alignments and examples from here to Kaldi, and models back."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.files import read_regular_bytes
from ngsgd.launcher.console import TRUST, Parser
from ngsgd.pipeline.runs.run_folder import find_run

# of a model; as text about a billion parameters
_MAX_MODEL_BYTES = 1 << 34


def export(arguments: Sequence[str]) -> int:
    """`ngsgd export`."""
    parser = Parser("export")
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/")
    parser.add_argument("file", metavar="FILE", nargs="?", help="with --format bundle: the file to write")
    parser.add_argument("--format", choices=("nnet3", "bundle"), default="nnet3",
                        help="nnet3: a folder in Kaldi's formats (default); bundle: one file with all that ngsgd transcribe takes")
    parser.add_argument("--output", "-o", help="folder for final.raw (text) and priors.vec")
    parser.add_argument("--data", action="store_true", help="also features, CMVN and alignments (pdf ids) of train, valid and test")
    parser.add_argument("--egs", type=int, default=0, metavar="N", help="also the first N archives of training examples")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options = parser.parse_args(list(arguments))
    if options.format == "bundle":
        return _bundle(options)
    if not options.output or options.file:
        raise ConfigError("ngsgd export --format nnet3 writes a folder; give it with --output FOLDER, and no FILE.")
    folder, output = find_run(options.run), Path(options.output)
    from ngsgd.launcher.commands.train import open_run
    from ngsgd.pipeline import kaldi_exchange

    run = open_run(folder, quiet=False, is_unchanged=options.data)
    try:
        output.mkdir(parents=True, exist_ok=True)
        written = [*kaldi_exchange.export_model(run, output, trust=options.trust),
                   *(kaldi_exchange.export_data(run, output) if options.data else []),
                   *(kaldi_exchange.export_egs(run.folder, output, options.egs) if options.egs else [])]
    except OSError as error:
        raise DataError(f"{error.filename or output} could not be written ({error.strerror or error}); make room, or choose "
                        "another --output.") from error
    print("\n".join(map(str, written)))
    return EXIT_OK


def _bundle(options: argparse.Namespace) -> int:
    if not options.file or options.output or options.data or options.egs:
        raise ConfigError("ngsgd export --format bundle writes one file: ngsgd export --format bundle RUN FILE.")
    from ngsgd.launcher.commands.train import open_run
    from ngsgd.pipeline.runs.recognizer import export_bundle

    run, output = open_run(find_run(options.run), quiet=True), Path(options.file)
    try:
        export_bundle(run.folder, run.config, run.data.corpus, output)
    except OSError as error:
        raise DataError(f"{error.filename or output} could not be written ({error.strerror or error}); make room, or choose "
                        "another FILE.") from error
    print(output)
    return EXIT_OK


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
