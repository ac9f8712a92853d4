"""Checks of the paths among the settings, before heavy packages are imported and workers start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.errors import ConfigError, DataError
from ngsgd.object_storage.urls import check_url, is_url, local_root
from ngsgd.runs.run_folder import folder_of_model

if TYPE_CHECKING:
    from ngsgd.config import RunConfig


def require_paths(config: RunConfig) -> None:
    """Check that paths to read exist, and that folders to write to are writable.

    Raises:
        ConfigError: an output folder cannot be written, or init_model is not a run.
        DataError: an input file or folder does not exist.
    """
    if is_url(config.output_dir):
        check_url(config.output_dir)
    require_writable("output_dir", local_root(config.output_dir))
    if is_url(config.data.source):
        check_url(config.data.source)
    if config.data.cache_dir:
        require_writable("data.cache_dir", Path(config.data.cache_dir))
    if config.init_model:
        folder_of_model(config.init_model)
    source = config.data.source.rstrip("/")
    # of data.source in object storage, or below it
    stored = f"{source}/" if is_url(source) else None
    if missing := [f"{name} is {path}, which does not exist; correct the path." for name, path in _inputs(config)
                   if path and not (stored and f"{path.rstrip('/')}/".startswith(stored)) and not Path(path).expanduser().exists()]:
        raise DataError("\n".join(missing))


def require_writable(name: str, folder: Path) -> None:
    """Check that files can be written to a folder, or that it can be made; nothing stays there.

    Raises:
        ConfigError: it cannot be written.
    """
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".ngsgd-"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} is {folder}, which cannot be written ({error.strerror}); choose "
                          "another folder, or fix its permissions.") from error


def _inputs(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.task._target_:
        yield "task.search_path", config.task.search_path
        return
    data = config.data
    yield from (("data.source", data.source), ("data.lexicon", data.lexicon), ("data.lm", data.lm), ("data.graph", data.graph))
    yield "data.alignment", "" if data.alignment == "flat" else data.alignment
    yield "model.search_path", config.model.search_path
    if config.augment.reverb:
        yield "augment.rir_dir", config.augment.rir_dir
    if config.augment.noise:
        yield "augment.noise_dir", config.augment.noise_dir
