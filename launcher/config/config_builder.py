"""From composed values to a checked `RunConfig`; unused options and wrong paths are errors."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd import config as options
from ngsgd.errors import ConfigError, DataError
from ngsgd.object_storage.urls import check_url, is_url, local_root
from ngsgd.runs.run_folder import folder_of_model

# section -> the group that also chooses its kind
_ALSO_SET_BY = {"combination": "objective"}
# settings that conf/ngsgd.yaml copies, and their source
_COPIED = {"schedule.num_jobs_initial": "cluster.num_workers", "schedule.num_jobs_final": "cluster.num_workers"}


@dataclass(frozen=True)
class Given:
    """The options and groups that a command line gives."""

    # such as outer.gain
    settings: frozenset[str] = frozenset()
    # such as outer, in outer=bmuf
    groups: frozenset[str] = frozenset()


def build_checked(values: Mapping[str, Any], given: Given) -> tuple[options.RunConfig, list[str]]:
    """Build a configuration with defaults instead of wrong values, and list all problems.

    The values hold every option. Options without effect are problems where they are `given`.
    """
    config, wrong = options.build(values)
    found = options.problems_of(config, wrong)
    bad = [option for problem in wrong for option in problem.options]
    for setting in options.unused(config):
        refusal = options.Problem((setting.path, *setting.switches), setting.sentence)
        if is_refused(setting, given) and not any(map(refusal.is_about, bad)):
            found.append(refusal)
    # settings that are copies of a wrong one are not reported again
    alone = {one.options for one in found}
    copies = {(copy,) for copy, source in _COPIED.items() if (source,) in alone and copy not in given.settings}
    return config, [one.message for one in found if one.options not in copies]


def is_refused(setting: options.Unused, given: Given) -> bool:
    """Return whether an option without effect is a mistake.

    It is where the command line gives it (unless it is empty), or where a file sets it for the
    kind that the file chooses. It is none where the command line chooses another kind than the
    one that a recipe was written for.
    """
    if not setting.is_set and setting.value in ("", None):
        return False
    section, _, name = setting.path.rpartition(".")
    if setting.path in given.settings or (name == "kind" and section in given.groups):
        return True
    chosen = (section in given.groups or _ALSO_SET_BY.get(section) in given.groups
              or bool(given.settings & {*setting.switches}))
    return setting.is_set and not chosen


def require_paths(config: options.RunConfig) -> None:
    """Check that paths to read exist (else DataError), and that folders can be written."""
    if is_url(config.output_dir):
        check_url(config.output_dir)
    require_writable("output_dir", local_root(config.output_dir))
    if is_url(config.data.source):
        check_url(config.data.source)
    if config.data.cache_dir:
        require_writable("data.cache_dir", Path(config.data.cache_dir))
    if config.init_model:
        folder_of_model(config.init_model)
    data, augment = config.data, config.augment
    source = data.source.rstrip("/")
    # of data.source in object storage, or below it
    stored = f"{source}/" if is_url(source) else None
    inputs = {"task.search_path": config.task.search_path} if config.task._target_ else {
        "data.source": data.source, "data.lexicon": data.lexicon, "data.lm": data.lm, "data.graph": data.graph,
        "data.alignment": "" if data.alignment == "flat" else data.alignment, "model.search_path": config.model.search_path,
        "augment.rir_dir": augment.rir_dir if augment.reverb else "",
        "augment.noise_dir": augment.noise_dir if augment.noise else ""}
    if missing := [f"{name} is {path}, which does not exist; correct the path." for name, path in inputs.items() if path
                   and not (stored and f"{path.rstrip('/')}/".startswith(stored)) and not Path(path).expanduser().exists()]:
        raise DataError("\n".join(missing))


def require_writable(name: str, folder: Path) -> None:
    """Raise ConfigError unless files can be written to a folder; nothing stays there."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".ngsgd-"):
            pass
    except OSError as error:
        raise ConfigError(f"{name} is {folder}, which cannot be written ({error.strerror}); choose "
                          "another folder, or fix its permissions.") from error
