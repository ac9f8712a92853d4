"""From command-line overrides and YAML to `ngsgd.config.RunConfig`, with every mistake reported at once.

Hydra merges; the dataclasses decide.  The schema that Hydra starts from is made of the dataclasses' defaults, and what
it returns is built back into dataclasses, so that unknown keys and wrong types cannot slip through `+key` or a file.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.config import RunConfig, choices_of, default_of, types_of
from ngsgd.config.build import (
    OTHER_NAMES,
    defaults,
    did_you_mean,
    leaves,
    paths,
    section_names,
)
from ngsgd.config.renamed import Rename, with_new_names_in
from ngsgd.errors import ConfigError
from ngsgd.launcher.config.config_builder import Given, build_checked
from ngsgd.pipeline.runs.saved_config import yaml_problem

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# composing takes about 0.1 s each; the jobs beyond are checked when their turn comes
_MAX_SWEEP_JOBS_CHECKED = 64
# what is in it is for a model of the user's own, and no setting of ours
_FREE = "model.args"
_CONFIG_NAME = "config"
# characters of an override in a message
_LONGEST_SHOWN = 200


def conf_dir() -> Path:
    """Return the folder of YAML groups, next to `launcher` in a wheel and in a source tree."""
    return Path(__file__).resolve().parents[2] / "conf"


def groups(config_dir: Path | None = None) -> dict[str, list[str]]:
    """Return the groups and their choices: kinds of sections, and files of conf/ and of the user's folder."""
    found = {group: set(kinds) for group, kinds in _kinds().items()}
    for root in [conf_dir(), *([config_dir] if config_dir else [])]:
        for file in root.glob("*/*.yaml"):
            found.setdefault(file.parent.name, set()).add(file.stem)
    return {group: sorted(choices) for group, choices in sorted(found.items())}


def with_current_names(overrides: Sequence[str]) -> list[str]:
    """Return overrides with the names of this version; old names are reported once on stderr."""
    # a section with one value that matters is chosen like a group
    overrides = [f"task._target_{line.removeprefix('task')}" if line.startswith("task=") else line for line in overrides]
    lines, found = with_new_names_in(overrides)
    for rename in found:
        if rename not in _reported:
            _reported.add(rename)
            print(f"ngsgd: {rename.sentence}", file=sys.stderr)
    return lines


_reported = set[Rename]()


def compose(overrides: Sequence[str], *, config_dir: Path | None = None) -> RunConfig:
    """The configuration that these overrides give; raises one ConfigError that lists everything wrong with them."""
    good, problems = _read_overrides(overrides, config_dir)
    sweeps = [override.input_line for override in good if override.is_sweep_override()]
    problems += [f"{line} lists several values; add --multirun to run them one after another." for line in sweeps]
    return _compose([_line(override) for override in good if not override.is_sweep_override()], problems, config_dir)


def check_sweep(overrides: Sequence[str], *, config_dir: Path | None = None) -> None:
    """Raises one ConfigError that lists everything wrong in any of the runs that `--multirun` would start."""
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



def each_of_sweep(overrides: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """(the settings of a run, those among them that the sweep varies) of every run that `--multirun` would start."""
    good, _ = _read_overrides(overrides, None)
    varied = [override.is_discrete_sweep() for override in good]
    return [(list(lines), [line for line, is_varied in zip(lines, varied, strict=True) if is_varied])
            for lines in itertools.product(*map(_lines, good))]


@functools.cache
def register_schema() -> None:
    """Gives Hydra all keys and their defaults; a plain mapping, so that the groups may fill in any part of it."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("default_of_kind", default_of_kind, replace=True)
    schema = defaults()
    for section, name in _of_kind():
        schema[section][name] = f"${{default_of_kind:{section}.{name},${{{section}.kind}}}}"
    store = ConfigStore.instance()
    store.store(name="schema", node=schema, provider="ngsgd")
    for group, kinds in _kinds().items():
        for kind in kinds:
            if not (conf_dir() / group / f"{kind}.yaml").exists():
                store.store(group=group, name=kind, node={"kind": kind}, provider="ngsgd")


def _kinds() -> dict[str, tuple[str, ...]]:
    """The groups whose choices are the kinds of a section; a file of conf/ may set more for a kind."""
    return {group: choices_of(types_of(RunConfig)[group], "kind") for group in ("model", "optimizer", "outer", "cluster")}


def default_of_kind(path: str, kind: str) -> Any:
    """The default of a setting, such as optimizer.damping, in a section of that kind."""
    section, _, name = path.partition(".")
    return default_of(_of_kind()[section, name], kind)


def _of_kind() -> dict[tuple[str, str], Field[Any]]:
    """The settings whose default depends on the kind of their section, by section and name."""
    run = RunConfig()
    return {(section.name, spec.name): spec for section in fields(run) if is_dataclass(getattr(run, section.name))
            for spec in fields(getattr(run, section.name)) if spec.metadata.get("default_of_kind")}


def given_by(overrides: Sequence[str]) -> Given:
    """Which settings and groups a command line gives, of those that can be read."""
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
    """The overrides that can be applied, and a sentence about each of the others."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException

    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a folder; give one that holds recipe/*.yaml and so on.")
    parser, choices = OverridesParser.create(), groups(config_dir)
    good: list[Override] = []
    problems: list[str] = []
    for text in with_current_names(overrides):
        if text.startswith("="):
            problems.append(_syntax_problem(text))
            continue
        try:
            [override] = parser.parse_overrides([text])
        except (OverrideParseException, ValueError, RecursionError):
            # the last two: thousands of digits or brackets
            problems.append(_syntax_problem(text))
            continue
        wrong = list(_override_problems(override, choices))
        problems += wrong
        good += [] if wrong else [override]
    return good, problems


def _syntax_problem(text: str) -> str:
    if not text.partition("=")[0] or "=" not in text:
        near = did_you_mean(text, ["train", "resume", "decode", "ui", "info", *paths()], "")
        return f"{text!r} is not a setting; write key=value, such as seed=1.{near}"
    if len(text) > _LONGEST_SHOWN:
        return f"{text[:_LONGEST_SHOWN]!r}... cannot be read; it has {len(text)} characters."
    key, _, value = text.partition("=")
    return f"{text!r} cannot be read; quote special characters for Hydra and for the shell: {key}='\"{value}\"'."


def _override_problems(override: Override, choices: dict[str, list[str]]) -> Iterator[str]:
    key = override.key_or_group
    if override.is_hydra_override() or (key.startswith(f"{_FREE}.") and (override.is_add() or override.is_force_add())):
        return
    if override.is_add() or override.is_force_add() or override.is_delete():
        known = key in paths() or key in choices
        see_all = f"see them all with: ngsgd train --cfg job.{_unknown_hint(key, choices)}"
        advice = f"write {key}=VALUE." if known else see_all
        yield f"{override.input_line}: settings can be changed, not added or deleted; {advice}"
    elif key in choices:
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else [str(override.value())]
        for value in values:
            if not override.is_interval_sweep() and value not in choices[key]:
                yield f"{key}={value} is not a choice; choose one of {', '.join(choices[key])}."
    elif key not in paths() and key not in section_names():
        yield f"{key} is not a setting.{_unknown_hint(key, choices) or ' See them all with: ngsgd train --cfg job.'}"


def _unknown_hint(key: str, choices: Mapping[str, Any]) -> str:
    """What the user may have meant by a key that does not exist; empty if it does."""
    if key in paths() or key in choices:
        return ""
    section, _, last = key.rpartition(".")
    siblings = [path.rpartition(".")[2] for path in paths() if section and path.startswith(f"{section}.")]
    # a name of other trainers, an unknown section, or none
    if last in OTHER_NAMES or not siblings:
        return did_you_mean(key, [*paths(), *choices], last)
    near = difflib.get_close_matches(last, siblings, n=1)
    return f" Did you mean {section}.{near[0]}?" if near else f" {section} has {', '.join(siblings)}."



def _line(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line


def _lines(override: Override) -> list[str]:
    """The override itself, or one per value of a sweep."""
    if not override.is_discrete_sweep():
        return [_line(override)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


# Composition --------------------------------------------------------------------------------------


def _compose(lines: list[str], problems: list[str], config_dir: Path | None) -> RunConfig:
    """Composes what can be composed, adds the problems found there, and raises them all."""
    try:
        values = _resolved(lines, problems, config_dir)
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    config, more = build_checked(values, given_by(lines))
    if problems or more:
        raise ConfigError(dict.fromkeys([*problems, *more]))
    return config


def _resolved(lines: list[str], problems: list[str], config_dir: Path | None) -> dict[str, Any]:
    """Hydra's composition as nested dicts; values that cannot be resolved take their defaults and add to `problems`."""
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    register_schema()
    extra = [f"hydra.searchpath=['file://{config_dir.resolve()}']"] if config_dir else []
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
            composed = hydra_compose(_CONFIG_NAME, overrides=[*extra, *lines])
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, conf_dir())) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_composition_problem(error)) from None
    default = dict(leaves(defaults(), ""))
    for path, raw in list(leaves(OmegaConf.to_container(composed), "")):
        if isinstance(raw, str) and ("${" in raw or raw == "???"):
            try:
                value = OmegaConf.select(composed, path, throw_on_missing=True)
            except OmegaConfBaseException:
                problems.append(f"{path} is {raw}, which leads nowhere; give a value.")
                value = default.get(path)
            OmegaConf.update(composed, path, value)
    return typing.cast("dict[str, Any]", OmegaConf.to_container(composed))


def _composition_problem(error: Exception) -> str:
    """Hydra says the useful thing in the first line of the error, or of its cause."""
    import yaml

    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        if isinstance(cause, yaml.YAMLError):
            return yaml_problem(cause, conf_dir())
    lines = [line.strip() for cause in causes for line in str(cause).splitlines() if line.strip()]
    told = dict.fromkeys(line.rstrip(".") for line in lines[:1] + str(causes[-1]).splitlines()[:1])
    return f"The settings cannot be put together: {': '.join(told)}; see ngsgd train --info searchpath."
