"""Recipes without Hydra: a configuration from conf/recipe/NAME.yaml and additional settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig, build, problems_of, unused, with_kinds
from ngsgd.config.build import defaults, leaves, merged
from ngsgd.config.sections.sites import total_jobs
from ngsgd.errors import ConfigError

_CONF = Path(__file__).resolve().parents[1] / "conf"


def recipe(name: str, **settings: Any) -> RunConfig:
    """Return the configuration of a recipe with settings on top, like `ngsgd train recipe=NAME`.

    Workers are processes of this machine (cluster.kind=local), and tracking is off.

    Args:
        name: a file of conf/recipe, such as "yesno".
        **settings: values of the configuration; those of a section as a mapping.

    Returns:
        The complete configuration.

    Raises:
        ConfigError: all problems of the settings at once.

    Example:
        >>> recipe("yesno", data={"source": "waves_yesno.tar.gz"}, seed=1).seed
        1
    """
    written = _read(name)
    values = defaults()
    values["cluster"]["kind"], values["tracking"]["kind"] = "local", "none"
    given = _plain(settings)
    for layer in (_resolved(written, settings), with_kinds(given)):
        values = merged(values, layer)
    config, wrong = build(values)
    config = _with_jobs(config, given)
    paths = set(dict(leaves(given, "")))
    problems = [one.message for one in problems_of(config, wrong)]
    problems += [setting.sentence for setting in unused(config) if setting.path in paths]
    if problems:
        raise ConfigError(problems)
    return config


def expected_wer(name: str) -> dict[str, float]:
    """Return the recorded WER of a recipe in percent, by kind of optimizer."""
    import yaml

    return dict(yaml.safe_load((_CONF / "expected_wer.yaml").read_text(encoding="utf-8")).get(name, {}))


def _read(name: str) -> dict[str, Any]:
    import yaml

    folder = _CONF / "recipe"
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"{name} is not a recipe; choose one of {', '.join(known)}.")
    return dict(yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8")))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert paths in settings to strings."""
    return {name: _plain(value) if isinstance(value, Mapping) else str(value) if isinstance(value, Path) else value
            for name, value in settings.items()}


def _resolved(written: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Resolve references of the recipe to data.source."""
    source = str(settings.get("data", {}).get("source", ""))
    for section in written.values():
        for name, value in section.items():
            if isinstance(value, str):
                section[name] = value.replace("${data.source}", source)
    return written


def _with_jobs(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Set the default number of jobs, unless it is given."""
    given, schedule = settings.get("schedule", {}), config.schedule
    num_jobs = total_jobs(config.cluster.num_workers, config.sites.jobs)
    return replace(config, schedule=replace(
        schedule,
        num_jobs_initial=schedule.num_jobs_initial if "num_jobs_initial" in given else num_jobs,
        num_jobs_final=schedule.num_jobs_final if "num_jobs_final" in given else num_jobs))
