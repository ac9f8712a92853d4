"""From command-line overrides and YAML to `ngsgd.config.RunConfig`, with all mistakes at once.

Hydra merges, and the dataclasses decide: its result is built back into them.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import os
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ngsgd.config import RunConfig, default_with, types_of, with_kinds
from ngsgd.config.build import defaults, kinds_in, leaves, options_of_kinds, paths, plain, section_names
from ngsgd.config.other_names import did_you_mean, instead_of
from ngsgd.config.sections.cluster import kind_with
from ngsgd.config.sections.sites import total_jobs
from ngsgd.errors import ConfigError
from ngsgd.launcher.config import suggestions
from ngsgd.launcher.config.config_builder import Given, build_checked
from ngsgd.launcher.config.sources import BASE, GROUPS_OF_KINDS, HYDRA, OURS, Primary, Sources, conf_dir, kinds
from ngsgd.runs.config_file import yaml_problem
from ngsgd.yaml_text import load_yaml, read_yaml_text

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

# composing takes about 0.1 s each; further jobs are checked when they start
MOST_CHECKED = 64
# groups of ngsgd.yaml behind the recipe; begins the groups with the same choices behind experiments
_LATE, _AGAIN = {*GROUPS_OF_KINDS, "augment"}, "again/"
# a file of settings learned by `ngsgd tune`
_TUNED = ("+tuned=", "tuned=")
# by launcher or sweeper of Hydra that is not installed; "": any other
_PLUGINS = {"": " pip install 'ngsgd[sweep]' adds joblib, submitit and optuna.",
            "ray": " hydra-ray-launcher needs another Ray; start the runs with hydra/launcher=joblib, and give each its workers on "
                   "the cluster with cluster=ray cluster.address=HEAD:PORT."}
# characters of an override in a message
_LONGEST_SHOWN = 200


def groups() -> dict[str, list[str]]:
    """Return the choices of each group of ngsgd itself."""
    return OURS.groups()


def about_choice(group: str, choice: str) -> str:
    """Return what a choice is: of a kind, or the first sentence of its file in conf/."""
    file = conf_dir() / group / f"{choice}.yaml"
    if group in kinds() and choice in kinds()[group]:
        [kind] = (spec for spec in fields(types_of(RunConfig)[group]) if spec.name == "kind")
        return str(kind.metadata["choices"].get(choice, ""))
    if not file.is_file():
        return ""
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.lstrip("# ") for line in comments if not line.startswith("# @"))
    return text.partition(". ")[0].rstrip(".")


def normalized(overrides: Sequence[str], sources: Sources) -> list[str]:
    """Return overrides as the defaults list needs them, with the settings of tuned files.

    optimizer.kind=adam becomes optimizer=adam: one choice has one set of defaults. `++` is removed
    from a known key, and + is added to a group that the defaults list lacks.
    """
    from hydra.core.config_store import ConfigStore
    choices, primary = sources.groups(), sources.primary()
    lines = [_marked(line, choices, primary) for override in overrides for line in _read_tuned(override)]
    if any(line.startswith("hydra.verbose=") for line in lines) and not any("hydra/job_logging=" in line for line in lines):
        # a level has no effect without a handler
        lines.append("hydra/job_logging=stdout")
    added = [line for line in lines if line[:1] == "+" and line[1:].partition("=")[0] in choices]
    found, last = [line for line in lines if line not in added], list[str]()
    for line in list(found) if added or primary.is_open else ():
        group, _, choice = line.partition("=")
        if group in _LATE & primary.groups and choice[:1] not in ("{", "["):
            # once more: it takes precedence over an experiment, as over a recipe
            for one in choices[group]:
                ConfigStore.instance().store(group=f"{_AGAIN}{group}", name=one, package="_global_",
                                             node={"defaults": [f"/{group}/{one}"]}, provider="ngsgd")
            last.append(f"+{_AGAIN}{line}")
            if "," in choice or "(" in choice:
                found.remove(line)
    return [*found, *added, *last]


def _marked(line: str, choices: Mapping[str, list[str]], primary: Primary) -> str:
    """Return an override with the mark that its key or group needs."""
    mark = line[:len(line) - len(line.lstrip("+~"))]
    key, has_value, value = line[len(mark):].partition("=")
    if mark == "++" and (key in choices or key in paths() or key in section_names()):
        mark = ""
    group = key.removesuffix(".kind")
    if group != key and {*value.split(",")} <= {*kinds().get(group, ())}:
        key = group
    if key == "task" and has_value:
        key = "task._target_"
    if key in choices and mark in ("", "+") and has_value:
        mark = "" if key in primary.groups else mark if primary.is_open else "+"
    if mark == "~" and not has_value and "none" in choices.get(key, ()):
        return f"{key}=none"
    return f"{mark}{key}{has_value}{value}"


class Composition(NamedTuple):
    """A composed run: the settings, and Hydra's configuration that they were built from."""

    config: RunConfig
    hydra: Any

    @property
    def is_sweep(self) -> bool:
        """Whether a file sets hydra.mode to MULTIRUN."""
        return getattr(self.hydra.hydra.mode, "name", "") == "MULTIRUN"


def give(hydra: Any, composed: Any) -> None:
    """Let Hydra's object use a composition, instead of composing again."""
    vars(hydra)["compose_config"] = lambda *_, **__: composed


def compose(overrides: Sequence[str], sources: Sources = OURS) -> RunConfig:
    """Return the configuration of these overrides; raise ConfigError with all mistakes."""
    return composition(normalized(overrides, sources), sources).config


def composition(lines: Sequence[str], sources: Sources) -> Composition:
    """Compose normalized overrides; raise ConfigError with all mistakes."""
    good, problems = _read_overrides(lines, sources)
    sweeps = [override.input_line for override in good if override.is_sweep_override()]
    problems += [f"{line} lists several values; add --multirun to run them one after another." for line in sweeps]
    return _compose([one for one in good if not one.is_sweep_override()], problems, sources)


def wrong_settings(overrides: Sequence[str]) -> list[str]:
    """Return a message per mistake in these overrides; an empty list if they compose."""
    try:
        compose(overrides)
    except ConfigError as error:
        return error.problems
    return []


def jobs_of_sweep(lines: Sequence[str], sources: Sources, most: int | None = MOST_CHECKED) -> Iterator[Composition]:
    """Compose the first runs that `--multirun` would start from normalized overrides, one by one.

    Raises:
        ConfigError: at the end; it has all mistakes of the runs.
    """
    good, problems = _read_overrides(lines, sources)
    # a dict keeps the order and drops repetitions
    found = dict.fromkeys(problems)
    lines_of = [[f"{one.get_key_element()}={value}" for value in one.sweep_string_iterator()]
                if one.is_discrete_sweep() else [str(one.input_line)] for one in good
                if not one.is_sweep_override() or one.is_discrete_sweep()]
    for number, job in enumerate(itertools.islice(itertools.product(*lines_of), most)):
        try:
            yield _compose(_read_overrides(job, sources)[0], [], sources, number)
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
    OmegaConf.register_new_resolver("kind_with", kind_with, replace=True)
    OmegaConf.register_new_resolver("ray_address", _ray_address, replace=True)
    schema = defaults()
    for path in options_of_kinds():
        section, _, name = path.partition(".")
        schema[section][name] = f"${{default_of_kind:{path}}}"
    store = ConfigStore.instance()
    store.store(name="schema", node=schema, provider="ngsgd")
    for group, of_it in kinds().items():
        for kind in of_it:
            # above a recipe: the kind with all defaults that it has, also of other sections
            store.store(group=group, name=kind, node=with_kinds({group: {"kind": kind}}), package="_global_", provider="ngsgd")


def _default_of_kind(path: str, *, _root_: Any) -> Any:
    from omegaconf import ListConfig
    kinds = kinds_in({name: {"kind": _root_[name].kind, "_target_": _root_[name].get("_target_")} for name in GROUPS_OF_KINDS})
    value = plain(default_with(path, kinds))
    return ListConfig(value) if isinstance(value, list) else value


def _ray_address(*, _parent_: Any) -> str:
    from omegaconf import OmegaConf
    # cluster=local is a choice against RAY_ADDRESS; without a choice, the address makes it
    is_used = OmegaConf.is_interpolation(_parent_, "kind") or _parent_.kind == "ray"
    # local is Ray's word for an instance of one process; auto reads the variable
    return "auto" if is_used and os.environ.get("RAY_ADDRESS", "") not in ("", "local") else ""


def given_by(overrides: Sequence[str]) -> Given:
    """Return the settings and groups of a command line that was composed before."""
    return _given(_read_overrides(overrides, OURS)[0])


def _given(good: Sequence[Override]) -> Given:
    chosen = groups()
    settings, names = set(), set()
    for override in good:
        key, value = override.key_or_group.removeprefix(_AGAIN), None if override.is_sweep_override() else override.value()
        if key in chosen:
            names.add(key)
        elif isinstance(value, dict) and key in section_names():
            settings |= {path for path, _ in leaves(value, f"{key}.")}
        else:
            settings.add(key)
    return Given(frozenset(settings), frozenset(names))


def _read_overrides(overrides: Sequence[str], sources: Sources) -> tuple[list[Override], list[str]]:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import OverrideParseException
    parser, choices = OverridesParser.create(), sources.groups()
    good: list[Override] = []
    problems: list[str] = []
    for text in overrides:
        if text.startswith("--"):
            flag, _, value = text.partition("=")
            key = flag.lstrip("-").replace("-", "_")
            hint = did_you_mean(key, [*paths(), *choices], key.rpartition(".")[2], value, _suggested)
            problems.append(f"{flag} is not a flag; settings are written KEY=VALUE."
                            f"{hint or ' See them with: ngsgd settings.'}")
            continue
        try:
            if text.startswith("="):
                raise ValueError(text)
            [override] = parser.parse_overrides([text])
        except (OverrideParseException, ValueError, RecursionError):
            # the last two: thousands of digits or brackets
            problems.append(_syntax_problem(text, choices))
            continue
        wrong = list(_override_problems(override, choices))
        problems += wrong
        good += [] if wrong else [override]
    return good, problems


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
    return suggestions.assignment(key, value, lambda line: values_of([line]))


def _override_problems(override: Override, choices: dict[str, list[str]]) -> Iterator[str]:
    key, is_new = override.key_or_group.removeprefix(_AGAIN), override.is_add() or override.is_force_add()
    if override.is_hydra_override() or ((is_new or override.is_delete()) and suggestions.mapping_of(key)):
        return
    if override.is_delete() and key in choices and key not in kinds():
        return
    if override.is_delete() or (is_new and key not in choices):
        known, section = key in paths() or key in choices, key.partition(".")[0]
        of_module = f"{section}.args" in paths() and not known
        hint = _unknown_hint(key, choices, str(override.input_line).partition("=")[2])
        see_all = f"search for it with: ngsgd settings PATTERN.{hint}"
        advice = f"write {key}=VALUE." if known else see_all
        if of_module:
            advice = f"arguments of {section}._target_ are +{section}.args.NAME=VALUE; {advice}"
        yield f"{override.input_line}: settings can be changed, not added or deleted; {advice}"
    elif key in choices:
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else [str(override.value())]
        for value in values:
            if not override.is_interval_sweep() and value not in choices[key]:
                near = difflib.get_close_matches(value.lower(), choices[key], n=1, cutoff=0.7)
                hint = f" Did you mean {key}={near[0]}?" if near else ""
                yield f"{key}={value} is not a choice; choose one of {', '.join(choices[key])}.{hint}"
    elif key not in paths() and key not in section_names():
        value = str(override.input_line).partition("=")[2]
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


@contextlib.contextmanager
def initialized(sources: Sources) -> Iterator[Any]:
    """Yield Hydra's object with the folders of these sources; its errors become ConfigErrors."""
    import yaml
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    register_schema()
    _search_path().folders = sources.roots[1:]
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(sources.roots[0].resolve()), job_name=BASE):
            yield GlobalHydra.instance().hydra
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, sources.roots[0])) from None
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_composition_problem(error)) from None
    finally:
        HydraConfig.instance().cfg = None
        if outer is not None:
            GlobalHydra.instance().hydra = outer


@functools.cache
def _search_path() -> Any:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class FurtherFolders(SearchPathPlugin):
        """Adds folders behind that of the primary config, where hydra.searchpath stays free."""

        folders: ClassVar[Sequence[Path]] = ()

        def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
            for folder in self.folders:
                search_path.append("command-line", f"file://{folder.resolve()}")

    Plugins.instance().register(FurtherFolders)
    return FurtherFolders


def _compose(good: Sequence[Override], problems: list[str], sources: Sources, number: int | None = None) -> Composition:
    try:
        composed = _composed([str(one.input_line) for one in good], sources, number)
        values = _plain_values(composed, "", problems)
        if lacking := [name for name in section_names() if name not in values]:
            raise ConfigError(f"{sources.primary().file} lacks the settings {', '.join(lacking[:3])}; begin its defaults list with "
                              f"'- {BASE}', or remove that list.")
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from None
    config, more = build_checked(values, _given(good))
    more += _without_effect(composed.hydra)
    if problems or more:
        raise ConfigError(dict.fromkeys([*problems, *more]))
    return Composition(config, composed)


def _without_effect(hydra: Any) -> Iterator[str]:
    """Yield a message per setting of Hydra that a run cannot follow."""
    if hydra.job.chdir:
        yield "hydra.job.chdir is true, but relative paths are those of the current folder; remove it."
    if hydra.output_subdir not in (None, HYDRA):
        yield f"hydra.output_subdir is {hydra.output_subdir}, but it can be {HYDRA} or null (no such folder)."


def _composed(lines: Sequence[str], sources: Sources, number: int | None = None) -> Any:
    """Return Hydra's composition, with its own node; `number` is that of a job of a sweep."""
    import yaml
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict
    primary = sources.primary()
    try:
        with initialized(sources) as hydra:
            if primary.layered:
                ConfigStore.instance().store(name=primary.name, node=dict(primary.layered), provider="ngsgd")
            composed = hydra.compose_config(primary.name, list(lines), RunMode.RUN)
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, conf_dir())) from None
    except ValueError as error:
        raise ConfigError(_composition_problem(error)) from None
    if number is not None:
        with open_dict(composed.hydra):
            composed.hydra.job.num, composed.hydra.job.id = number, str(number)
    # for ${hydra:...}
    HydraConfig.instance().set_config(composed)
    OmegaConf.set_readonly(composed.hydra, None)
    return composed


def values_of(lines: Sequence[str]) -> Mapping[str, Any]:
    """Compose normalized overrides without checks; return nested plain values."""
    return typing.cast("Mapping[str, Any]", _plain_values(_composed(lines, OURS), "", []))


def _plain_values(node: Any, prefix: str, problems: list[str]) -> Any:
    """Return nested plain values, with defaults for values that cannot be resolved."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    if not isinstance(node, (DictConfig, ListConfig)) or node._is_none():
        return None if isinstance(node, (DictConfig, ListConfig)) else node
    # all but the node of Hydra
    names: list[Any] = list(range(len(node)))
    if isinstance(node, DictConfig):
        names = [name for name in node if prefix or name != "hydra"]
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
    import yaml
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for cause in reversed(causes):
        if isinstance(cause, yaml.YAMLError):
            return yaml_problem(cause, conf_dir())
        group, _, choice = str(getattr(cause, "missing_cfg_file", None) or "").rpartition("/")
        if group:
            hint = _PLUGINS.get(choice, _PLUGINS[""]) if group.startswith(("hydra/launcher", "hydra/sweeper")) else ""
            return f"{group}={choice} is not a choice; choose one of {', '.join(getattr(cause, 'options', None) or ())}.{hint}"
    lines = [line.strip() for cause in causes for line in str(cause).splitlines() if line.strip()]
    reasons = dict.fromkeys(line.rstrip(".") for line in lines[:1] + str(causes[-1]).splitlines()[:1])
    return f"The settings cannot be composed: {': '.join(reasons)}; see ngsgd train --info searchpath."


def _read_tuned(override: str) -> list[str]:
    """Return the settings of a tuned file, or another override unchanged."""
    import yaml
    if not override.startswith(_TUNED):
        return [override]
    path = Path(override.partition("=")[2])
    try:
        content = load_yaml(read_yaml_text(path))
    except OSError as error:
        raise ConfigError(f"{override}: {path} cannot be read ({error.strerror}); give the "
                          "tuned.yaml written by ngsgd tune.") from None
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError):
        raise ConfigError(f"{override}: {path} is not valid YAML; tune again, or restore it.") from None
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        raise ConfigError(f"{override}: {path} holds no settings; give the tuned.yaml written by ngsgd tune.")
    if wrong := [name for name in ("_target_", "search_path", "args") if name in content.get("model", {})]:
        raise ConfigError(f"{override}: {path} sets model.{wrong[0]}, which ngsgd tune never "
                          "writes, and which names code to run; give it on the command line.")
    return [f"{section}.{key}={suggestions.in_notation(value)}"
            for section, part in content.items() for key, value in part.items()]
