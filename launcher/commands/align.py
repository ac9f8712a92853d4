"""`ngsgd align`: write the HMM states of all frames to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ngsgd.errors import EXIT_OK, ConfigError, DataError
from ngsgd.launcher.arguments import TRUST, Parser
from ngsgd.launcher.config import compose
from ngsgd.launcher.config.config_builder import require_paths, require_writable
from ngsgd.object_storage.urls import is_url
from ngsgd.runs.run_folder import RunFolder, find_run, require_unchanged


def command(arguments: Sequence[str]) -> int:
    parser = Parser("align")
    parser.add_argument("--output", "-o", required=True, metavar="FILE",
                        help="file to write: .npz, or text lines \"utterance pdf pdf ...\"")
    parser.declare({"--model RUN": "run whose final model, data and settings are used (default: flat start)",
                    "--trust": f"with --model: {TRUST}"})
    options = parser.parse_with_settings(arguments, "settings of ngsgd train, such as recipe=fsdd data.source=PATH")
    if options.model and options.overrides:
        raise ConfigError(f"--model uses the settings of its run; remove {' '.join(options.overrides)}.")
    output = Path(options.output)
    require_writable("--output", output.parent)
    folder = RunFolder.open(find_run(options.model)) if options.model else None
    if folder is None:
        config = compose.compose(options.overrides)
        require_paths(config)
        if is_url(config.data.source):
            raise ConfigError(f"data.source is {config.data.source}, and ngsgd align reads folders "
                              "of this machine; copy the data to a folder, and set data.source to it.")
    from ngsgd.asr.corpora import alignments
    from ngsgd.pipeline import align
    from ngsgd.runs.config_file import read_config

    if folder is not None:
        config = read_config(folder.config)
        require_unchanged(folder.config)
    try:
        cache = align.cache_folder(config)
        labels = (align.label(config, folder, cache, print, trust=options.trust) if folder
                  else alignments.read(align.make(config, cache, print)).pdf_T)
        alignments.write(output, labels)
    except OSError as error:
        raise DataError(f"the alignment could not be written to {error.filename or output} "
                        f"({error.strerror or error}); make room, or choose another place.") from error
    print(f"alignment {output}; use it with data.alignment={output}")
    return EXIT_OK
