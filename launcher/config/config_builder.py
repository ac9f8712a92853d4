"""From composed values to a checked `RunConfig`; options without effect are errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngsgd import config as options
from ngsgd.config import RunConfig
from ngsgd.errors import ConfigError

# section -> the group that also chooses its kind
_ALSO_SET_BY = {"combination": "objective"}
# settings that conf/config.yaml copies, and their source
_COPIED = {"schedule.num_jobs_initial": "cluster.num_workers", "schedule.num_jobs_final": "cluster.num_workers"}


@dataclass(frozen=True)
class Given:
    """The options and groups that a command line gives."""

    # such as outer.gain
    settings: frozenset[str] = frozenset()
    # such as outer, in outer=bmuf
    groups: frozenset[str] = frozenset()


def build(values: Mapping[str, Any], given: Given | None = None) -> RunConfig:
    """Build a configuration from nested mappings that hold every option.

    Raises:
        ConfigError: everything that is wrong, at once. Options without effect are wrong where
            `given` holds those of the command line; a run folder may hold them.
    """
    config, problems = build_checked(values, given)
    if problems:
        raise ConfigError(problems)
    return config


def build_checked(values: Mapping[str, Any],
                  given: Given | None = None) -> tuple[RunConfig, list[str]]:
    """Build a configuration with defaults instead of wrong values, and list all problems."""
    config, wrong = options.build(values)
    found = options.problems_of(config, wrong)
    if given is not None:
        refused = [options.Problem((setting.path, *setting.switches), setting.sentence)
                   for setting in options.unused(config) if is_refused(setting, given)]
        found += [one for one in refused if not any(one.is_about(option) for other in wrong for option in other.options)]
    # settings that are copies of a wrong one are not reported again
    alone, settings = {one.options for one in found}, given.settings if given else ()
    copies = {(copy,) for copy, source in _COPIED.items() if (source,) in alone and copy not in settings}
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
