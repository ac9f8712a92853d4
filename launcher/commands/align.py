"""`ngsgd align`: write the HMM states of all frames to a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ngsgd.config import RunConfig
from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.launcher.arguments import TRUST, Parser
from ngsgd.launcher.config import compose
from ngsgd.launcher.config.paths import require_paths, require_writable
from ngsgd.object_storage.urls import is_url
from ngsgd.runs.run_folder import find_run


def command(arguments: Sequence[str]) -> int:
    """`ngsgd align`."""
    parser = Parser("align")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE",
                        help="settings of ngsgd train, such as recipe=fsdd data.source=PATH")
    parser.add_argument("--output", "-o", required=True, metavar="FILE",
                        help="file to write: .npz, or text lines \"utterance pdf pdf ...\"")
    parser.add_argument("--model", metavar="RUN",
                        help="run whose final model, data and settings are used (default: flat "
                             "start)")
    parser.add_argument("--trust", action="store_true", help=f"with --model: {TRUST}")
    options = parser.parse_with_settings(arguments)
    if options.model and options.overrides:
        raise ConfigError("--model uses the settings of its run; remove "
                          f"{' '.join(options.overrides)}.")
    output = Path(options.output)
    require_writable("--output", output.parent)
    if options.model:
        _with_model(find_run(options.model), output, trust=options.trust)
    else:
        _from_flat_start(compose.compose(options.overrides), output)
    return EXIT_OK


def _from_flat_start(config: RunConfig, output: Path) -> None:
    require_paths(config)
    if is_url(config.data.source):
        raise ConfigError(f"data.source is {config.data.source}, and ngsgd align reads folders of this machine; copy the data to "
                          "a folder, and set data.source to it.")
    from ngsgd.asr.corpora import alignments
    from ngsgd.pipeline import align

    with _written(output):
        alignments.write(output, alignments.read(align.make(config, align.cache_folder(config), print)).pdf_T)


def _with_model(run: Path, output: Path, *, trust: bool) -> None:
    from ngsgd.asr.corpora import alignments
    from ngsgd.pipeline import align
    from ngsgd.runs.run_folder import RunFolder, require_unchanged
    from ngsgd.runs.saved_config import read_config

    folder = RunFolder.open(run)
    config = read_config(folder.config)
    require_unchanged(folder.config)
    with _written(output):
        alignments.write(output, align.label(config, folder, align.cache_folder(config), print, trust=trust))


@contextlib.contextmanager
def _written(output: Path) -> Iterator[None]:
    """Report the path of the alignment, or that it could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"the alignment could not be written to {error.filename or output} "
                        f"({error.strerror or error}); make room, or choose another "
                        "place.") from error
    print(f"alignment {output}; use it with data.alignment={output}")
