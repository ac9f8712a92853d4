"""`ngsgd align`: writes the HMM states of all frames to a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ngsgd.asr.corpora import alignments
from ngsgd.config import RunConfig
from ngsgd.errors import DataError
from ngsgd.launcher.config import compose
from ngsgd.pipeline import align
from ngsgd.pipeline.runs.run_folder import RunFolder, check_output_dir, require_unchanged
from ngsgd.pipeline.runs.saved_config import read_config


def to_file(overrides: Sequence[str], output: Path) -> None:
    """Align the corpus of these settings by a flat start."""
    config = compose.compose(overrides)
    check_output_dir(config)
    with _written(output):
        alignments.write(output, alignments.read(align.make(config, _cache_root(config), print)).pdf_T)


def with_model(run: Path, output: Path, *, trust: bool = False) -> None:
    """Align the corpus of a run by its final model."""
    folder = RunFolder.open(run)
    config = read_config(folder.config)
    require_unchanged(folder.config)
    with _written(output):
        alignments.write(output, align.label(config, folder, _cache_root(config), print, trust=trust))


def _cache_root(config: RunConfig) -> Path:
    return Path(config.data.cache_dir or Path(config.output_dir) / "data").absolute()


@contextlib.contextmanager
def _written(output: Path) -> Iterator[None]:
    """Report the path of the alignment, or that it could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"the alignment could not be written to {error.filename or output} ({error.strerror or error}); "
                        "make room, or choose another place.") from error
    print(f"alignment {output}; use it with data.alignment={output}")
