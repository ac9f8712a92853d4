"""Recipes without Hydra: a configuration from conf/recipe/NAME.yaml and additional settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ngsgd.config import Problem, RunConfig, build, problems_of, unused, with_kinds
from ngsgd.config.build import defaults, leaves, merged
from ngsgd.config.sections.sites import total_jobs
from ngsgd.errors import ConfigError

_CONF = Path(__file__).resolve().parents[1] / "conf"


def recipe(name: str, **settings: Any) -> RunConfig:
    """Return the configuration of a recipe with settings on top, like `ngsgd train recipe=NAME`.

    Tracking is off.

    Args:
        name: a file of conf/recipe, such as "yesno".
        **settings: values of the configuration; those of a section as a mapping.

    Raises:
        ConfigError: all problems of the settings at once.

    Example:
        >>> recipe("yesno", data={"source": "waves_yesno.tar.gz"}, seed=1).seed
        1
    """
    import yaml
    folder = _CONF / "recipe"
    known = sorted(file.stem for file in folder.glob("*.yaml"))
    if name not in known:
        raise ConfigError(f"{name} is not a recipe; choose one of {', '.join(known)}.")
    written = dict(yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8")))
    # references of the recipe
    source = str(settings.get("data", {}).get("source", ""))
    for section in written.values():
        for key, value in section.items():
            if isinstance(value, str):
                section[key] = value.replace("${data.source}", source)
    values = defaults()
    values["tracking"]["kind"] = "none"
    given = _plain(settings)
    config, wrong = build(merged(merged(values, written), with_kinds(given)))
    num_jobs = total_jobs(config.cluster.num_workers, config.sites.jobs)
    jobs = {name: num_jobs for name in ("num_jobs_initial", "num_jobs_final") if name not in given.get("schedule", {})}
    config = replace(config, schedule=replace(config.schedule, **jobs))
    require_sound(config, wrong, given)
    return config


def require_sound(config: RunConfig, wrong: Sequence[Problem], given: Mapping[str, Any], others: Sequence[str] = ()) -> None:
    """Raise one ConfigError for wrong values and options of `given` without effect."""
    named = set(dict(leaves(given, "")))
    problems = [*others, *(one.message for one in problems_of(config, wrong)),
                *(one.sentence for one in unused(config) if one.path in named)]
    if problems:
        raise ConfigError(problems)


def expected_wer(name: str) -> dict[str, float]:
    """Return the recorded WER of a recipe in percent, by kind of optimizer."""
    import yaml
    return dict(yaml.safe_load((_CONF / "expected_wer.yaml").read_text(encoding="utf-8")).get(name, {}))


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, Mapping) else str(value) if isinstance(value, Path) else value
            for name, value in settings.items()}
