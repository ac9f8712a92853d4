"""From command-line overrides and YAML to `ngsgd.config.RunConfig`, with all mistakes at once.

Hydra merges, and the dataclasses decide. Hydra's schema consists of the dataclasses' defaults. Its
result is built back into dataclasses, which rejects unknown keys and wrong types of files as well.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig, choices_of, default_with, types_of, with_kinds
from ngsgd.config.build import defaults, kinds_in, leaves, options_of_kinds, paths, plain, section_names
from ngsgd.config.other_names import did_you_mean, instead_of
from ngsgd.config.sections.sites import total_jobs
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import suggestions
from ngsgd.launcher.config.config_builder import Given, build_checked
from ngsgd.runs.saved_config import yaml_problem

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# composing takes about 0.1 s each; further jobs are checked when they start
_MAX_SWEEP_JOBS_CHECKED = 64
# arguments of a custom network, whose names are free
_FREE = "model.args"
_CONFIG_NAME = "config"
# sections whose kind is chosen by optimizer=adam, which is the same as optimizer.kind=adam
_GROUPS_OF_KINDS = ("model", "objective", "optimizer", "outer", "cluster")
# characters of an override in a message
_LONGEST_SHOWN = 200


def conf_dir() -> Path:
    """Return the folder of YAML groups, next to `launcher` in a wheel and in a source tree."""
    return Path(__file__).resolve().parents[2] / "conf"


def groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Return the choices of each group: kinds of sections, files of conf/ and of `config_dir`."""
    found = {group: set(kinds) for group, kinds in _kinds().items()}
    for root in [conf_dir(), *([config_dir] if config_dir else [])]:
        for file in root.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(choices) for group, choices in sorted(found.items())}


def about_choice(group: str, choice: str) -> str:
    """Return what a choice is: of a kind, or the first sentence of its file in conf/."""
    file = conf_dir() / group / f"{choice}.yaml"
    if group in _kinds() and choice in _kinds()[group]:
        [kind] = (spec for spec in fields(types_of(RunConfig)[group]) if spec.name == "kind")
        return str(kind.metadata["choices"].get(choice, ""))
    if not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.lstrip("# ") for line in comments if not line.startswith("# @"))
    return text.partition(". ")[0].rstrip(".")


def as_settings(overrides: Sequence[str]) -> list[str]:
    """Return overrides that name a kind or a task like a group, such as task=X, as settings.

    optimizer.kind=adam becomes optimizer=adam: one choice has one set of defaults.
    """
    found = []
    for line in overrides:
        key, _, value = line.partition("=")
        group, _, name = key.rpartition(".")
        is_kind = name == "kind" and group in _GROUPS_OF_KINDS
        if is_kind and {*value.split(",")} <= {*_kinds()[group]}:
            found.append(f"{group}={value}")
        else:
            found.append(f"task._target_={value}" if line.startswith("task=") else line)
    return found


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> RunConfig:
    """Return the configuration of these overrides.

    Raises:
        ConfigError: all mistakes.
    """
    good, problems = _read_overrides(overrides, config_dir)
    sweeps = [override.input_line for override in good if override.is_sweep_override()]
    problems += [f"{line} lists several values; add --multirun to run them one after another." for line in sweeps]
    return _compose([_line(override) for override in good if not override.is_sweep_override()], problems, config_dir)


def wrong_settings(overrides: Sequence[str]) -> list[str]:
    """Return a message per mistake in these overrides; an empty list if they compose."""
    try:
        compose(overrides)
    except ConfigError as error:
        return error.problems
    return []


def check_sweep(overrides: Sequence[str], *, config_dir: Path | None = None) -> None:
    """Check all runs that `--multirun` would start.

    Raises:
        ConfigError: all mistakes in any of them.
    """
    good, problems = _read_overrides(overrides, config_dir)
    # a dict keeps the order and drops repetitions
    found = dict.fromkeys(problems)
    countable = [override for override in good if not override.is_sweep_override() or override.is_discrete_sweep()]
    for lines in itertools.islice(itertools.product(*map(_lines, countable)), _MAX_SWEEP_JOBS_CHECKED):
        try:
            _compose(list(lines), [], config_dir)
        except ConfigError as error:
            found |= dict.fromkeys(error.problems)
    if found:
        raise ConfigError(found)


@functools.cache
def register_schema() -> None:
    """Register all keys and defaults with Hydra; groups may set any part of the plain mapping."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("default_of_kind", _default_of_kind, replace=True)
    OmegaConf.register_new_resolver("total_jobs", total_jobs, replace=True)
    schema = defaults()
    for path in options_of_kinds():
        section, _, name = path.partition(".")
        schema[section][name] = f"${{default_of_kind:{path}}}"
    store = ConfigStore.instance()
    store.store(name="schema", node=schema, provider="ngsgd")
    for group, kinds in _kinds().items():
        for kind in kinds:
            # above a recipe: the kind with all defaults that it has, also of other sections
            store.store(group=group, name=kind, node=with_kinds({group: {"kind": kind}}), package="_global_", provider="ngsgd")


def _kinds() -> dict[str, tuple[str, ...]]:
    """Return the groups whose choices are the kinds of a section."""
    return {group: choices_of(types_of(RunConfig)[group], "kind") for group in _GROUPS_OF_KINDS}


def _default_of_kind(path: str, *, _root_: Any) -> Any:
    """Return the default of a setting, such as optimizer.damping, with the composed kinds."""
    from omegaconf import ListConfig

    kinds = kinds_in({name: {"kind": _root_[name].kind} for name in _GROUPS_OF_KINDS})
    value = plain(default_with(path, kinds))
    return ListConfig(value) if isinstance(value, list) else value


def given_by(overrides: Sequence[str]) -> Given:
    """Return the settings and groups of a command line that can be read."""
    good, _ = _read_overrides(overrides, None)
    chosen = groups()
    settings, names = set(), set()
    for override in good:
        key, value = override.key_or_group, None if override.is_sweep_override() else override.value()
        if key in chosen:
            names.add(key)
        elif isinstance(value, dict) and key in section_names():
            settings |= {path for path, _ in leaves(value, f"{key}.")}
        else:
            settings.add(key)
    return Given(frozenset(settings), frozenset(names))


# Overrides ----------------------------------------------------------------------------------------


def _read_overrides(overrides: Sequence[str], config_dir: Path | None) -> tuple[list[Override], list[str]]:
    """Return the overrides that can be applied, and a message about each of the others."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder; give one that holds "
                          "recipe/*.yaml and so on.")
    parser, choices = OverridesParser.create(), groups(config_dir)
    good: list[Override] = []
    problems: list[str] = []
    for text in as_settings(overrides):
        if text.startswith("--"):
            problems.append(_flag_problem(text, choices))
            continue
        if text.startswith("="):
            problems.append(_syntax_problem(text, choices))
            continue
        try:
            [override] = parser.parse_overrides([text])
        except (OverrideParseException, ValueError, RecursionError):
            # the last two: thousands of digits or brackets
            problems.append(_syntax_problem(text, choices))
            continue
        wrong = list(_override_problems(override, choices))
        problems += wrong
        good += [] if wrong else [override]
    return good, problems


def _flag_problem(text: str, choices: Mapping[str, Any]) -> str:
    """The message about a flag that no command has, such as --epochs=5."""
    flag, _, value = text.partition("=")
    key = flag.lstrip("-").replace("-", "_")
    hint = did_you_mean(key, [*paths(), *choices], key.rpartition(".")[2], value, _suggested)
    return f"{flag} is not a flag; settings are written KEY=VALUE.{hint or ' See them with: ngsgd settings.'}"


def _syntax_problem(text: str, choices: Mapping[str, Any]) -> str:
    key, has_value, value = text.partition("=")
    if not key or not has_value:
        near = did_you_mean(text, ["train", "resume", "decode", "ui", "info", *paths()], text)
        return f"{text!r} is not a setting; write key=value, such as seed=1.{near}"
    if len(text) > _LONGEST_SHOWN:
        return f"{text[:_LONGEST_SHOWN]!r}... cannot be read; it has {len(text)} characters."
    if hint := _unknown_hint(key, choices, value):
        return f"{key} is not a setting.{hint}"
    line = _suggested(key, value)
    hint = f". Did you mean {line}?" if "=" in line else "; quote texts with special characters for Hydra and for the shell."
    return f"{text!r} cannot be read{hint}"


def _suggested(key: str, value: str) -> str:
    """KEY=VALUE with the quotes that it needs; KEY alone where no line composes to the value."""
    return suggestions.assignment(key, value, lambda line: _resolved([line], [], None))


def _override_problems(override: Override, choices: dict[str, list[str]]) -> Iterator[str]:
    key = override.key_or_group
    if override.is_hydra_override() or (key.startswith(f"{_FREE}.") and (override.is_add() or override.is_force_add())):
        return
    if override.is_add() or override.is_force_add() or override.is_delete():
        known = key in paths() or key in choices
        see_all = f"search for it with: ngsgd settings PATTERN.{_unknown_hint(key, choices)}"
        advice = f"write {key}=VALUE." if known else see_all
        yield f"{override.input_line}: settings can be changed, not added or deleted; {advice}"
    elif key in choices:
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else [str(override.value())]
        for value in values:
            if not override.is_interval_sweep() and value not in choices[key]:
                near = difflib.get_close_matches(value.lower(), choices[key], n=1, cutoff=0.7)
                hint = f" Did you mean {key}={near[0]}?" if near else ""
                yield f"{key}={value} is not a choice; choose one of {', '.join(choices[key])}.{hint}"
    elif key not in paths() and key not in section_names():
        value = _line(override).partition("=")[2]
        hint = _unknown_hint(key, choices, value) or f" Search for it with: ngsgd settings {key.rpartition('.')[2]}"
        yield f"{key} is not a setting.{hint}"


def _unknown_hint(key: str, choices: Mapping[str, Any], value: str = "") -> str:
    """A question with the nearest key to an unknown one; empty for a known key."""
    if key in paths() or key in choices:
        return ""
    if option := suggestions.mapping_of(key):
        line = _suggested(key, value) if value else option
        return f" Did you mean {line}?" if "=" in line else f" Write {option}={{NAME: VALUE}}, with quotes for the shell."
    section, _, last = key.rpartition(".")
    siblings = [path.rpartition(".")[2] for path in paths() if section and path.startswith(f"{section}.")]
    # a name of other trainers, an unknown section, or none
    if instead_of(last) or not siblings:
        return did_you_mean(key, [*paths(), *choices], last, value, _suggested)
    near = difflib.get_close_matches(last, siblings, n=1)
    line = _suggested(f"{section}.{near[0]}", value) if near and value else f"{section}.{near[0]}=VALUE" if near else ""
    return f" Did you mean {line}?" if near else f" {section} has {', '.join(siblings)}."


def _line(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


def _lines(override: Override) -> list[str]:
    """Return the override itself, or one per value of a sweep."""
    if not override.is_discrete_sweep():
        return [_line(override)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


# Composition --------------------------------------------------------------------------------------


def _compose(lines: list[str], problems: list[str], config_dir: Path | None) -> RunConfig:
    """Compose the valid overrides, and raise all problems together."""
    try:
        values = _resolved(lines, problems, config_dir)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    config, more = build_checked(values, given_by(lines))
    if problems or more:
        raise ConfigError(dict.fromkeys([*problems, *more]))
    return config


def _resolved(lines: list[str], problems: list[str], config_dir: Path | None) -> dict[str, Any]:
    """Return Hydra's composition as nested dicts, with defaults for unresolved values."""
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register_schema()
    extra = [f"hydra.searchpath=['file://{config_dir.resolve()}']"] if config_dir else []
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            composed = hydra_compose(_CONFIG_NAME, overrides=[*extra, *lines])
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, conf_dir())) from None
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_composition_problem(error)) from None
    return typing.cast("dict[str, Any]", _plain_values(composed, "", problems))


def _plain_values(node: Any, prefix: str, problems: list[str]) -> Any:
    """Return nested plain values, with defaults for values that cannot be resolved."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(node, (DictConfig, ListConfig)) or node._is_none():
        return None if isinstance(node, (DictConfig, ListConfig)) else node
    names = list(node) if isinstance(node, DictConfig) else range(len(node))
    found: dict[Any, Any] = {}
    for name in names:
        path = f"{prefix}{name}"
        try:
            found[name] = _plain_values(node[name], f"{path}.", problems)
        except OmegaConfBaseException:
            raw = typing.cast("Any", OmegaConf.to_container(node))[name]
            problems.append(f"{path} is {raw}, an unresolved interpolation; give a value.")
            found[name] = dict(leaves(defaults(), "")).get(path)
    return found if isinstance(node, DictConfig) else list(found.values())


def _composition_problem(error: Exception) -> str:
    """The message of a composition error; Hydra's first lines hold the reason."""
    import yaml

    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        if isinstance(cause, yaml.YAMLError):
            return yaml_problem(cause, conf_dir())
    lines = [line.strip() for cause in causes for line in str(cause).splitlines() if line.strip()]
    reasons = dict.fromkeys(line.rstrip(".") for line in lines[:1] + str(causes[-1]).splitlines()[:1])
    return f"The settings cannot be composed: {': '.join(reasons)}; see ngsgd train --info searchpath."
