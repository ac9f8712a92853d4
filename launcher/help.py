"""The texts of `--help`, from conf/ and the metadata of the options, without Hydra."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Mapping

from ngsgd.errors import EXIT_CODES, ConfigError
from ngsgd.launcher.registry import COMMANDS, GROUPS

_TOP = """\
usage: ngsgd COMMAND [...]

Distributed natural-gradient SGD with parameter averaging, for acoustic models.
{groups}

Help:
  ngsgd COMMAND --help     arguments of a command
  ngsgd train --help GROUP the settings of a group, such as optimizer
  ngsgd --version          the version

Exit codes:
{codes}

Examples:
  ngsgd train              synthetic digits, two workers on this machine
  ngsgd train recipe=fsdd cluster.num_workers=4
  ngsgd status             the runs, their states and WERs
"""

_TRAIN = """\
usage: ngsgd train [KEY=VALUE ...] [flags]
       ngsgd train --help GROUP

Train an acoustic model and decode the test set. Settings that are not given
keep their defaults.

Groups (GROUP=CHOICE):
{groups}

Most used settings (KEY=VALUE):
{settings}

Flags:
{flags}

Examples:
  ngsgd train optimizer=sgd name=baseline
  ngsgd train recipe=fsdd data.source=fsdd.tar.gz model=pnorm
  ngsgd train -m seed=0,1,2          three runs, one after another
  ngsgd train cluster=in_process     one process, for a debugger

All settings:
  ngsgd settings [PATTERN]           search names, help texts and values
  ngsgd train --help optimizer       one group or section
  ngsgd train --cfg job              composed values
"""

MOST_USED = (
    "output_dir", "name", "seed", "data.source", "data.train_minutes", "model.num_layers", "model.hidden_dim",
    "optimizer.max_param_change", "schedule.num_epochs", "schedule.minibatch_size", "schedule.lr_initial",
    "schedule.lr_final", "egs.samples_per_iter", "cluster.num_workers", "cluster.threads_per_worker", "cluster.address",
)
# columns
_WIDEST = 100


def top() -> str:
    groups = []
    for group in GROUPS:
        about = {one.name: one.about for one in COMMANDS if one.group == group}
        groups += ["", f"{group}:", *_rows(about, 12)]
    codes = _rows({str(code): about for code, about in EXIT_CODES.items()}, 5)
    return _TOP.format(groups="\n".join(groups), codes="\n".join(codes))


def train(group: str, flags: Mapping[str, str]) -> str:
    """Return the help of `ngsgd train`, or of a group or section of settings if one is named.

    Raises:
        ConfigError: there is no such group or section.
    """
    if group:
        return _of_group(group)
    from ngsgd.config import RunConfig
    from ngsgd.launcher.config import compose, describe
    from ngsgd.launcher.config.sources import conf_dir
    about = {one.path: one for one in describe.options()}
    # the defaults list; a YAML parser would double the time of --help
    defaults = dict(re.findall(r"^  - (\w+): (\w+)", (conf_dir() / "ngsgd.yaml").read_text(), re.MULTILINE))
    for name in [name for name, choice in defaults.items() if choice == "null"]:
        defaults[name] = getattr(getattr(RunConfig(), name, None), "kind", "none")
    groups = {f"{group}=": f"{' | '.join(choices)}  (default {defaults.get(group, '-')})"
              for group, choices in compose.groups().items()}
    # without the defaults of single kinds
    settings = {f"{path}={about[path].default.partition('; ')[0]}": about[path].about for path in MOST_USED}
    return _TRAIN.format(groups="\n".join(_rows(groups, 12)), settings="\n".join(_rows(settings, 30)),
                         flags="\n".join(_rows(flags, 24)))


def _of_group(name: str) -> str:
    from ngsgd.launcher.config import compose, describe
    choices = compose.groups()
    sections = {one.section for one in describe.options() if one.section}
    if name not in choices and name not in sections:
        known = sorted({*choices, *sections})
        raise ConfigError(f"{name!r} is not a group of settings; choose one of {', '.join(known)}, "
                          f"or search with: ngsgd settings {name}")
    parts = []
    if name in choices:
        about = {f"{name}={choice}": compose.about_choice(name, choice) for choice in choices[name]}
        if not any(about.values()):
            about = {f"{name}=": " | ".join(choices[name])}
        parts.append("\n".join(["Choices:", *_rows(about, 24)]))
    if name in sections:
        parts.append(describe.text(describe.in_section(name)))
    return "\n\n".join(parts) + "\n"


def _rows(entries: Mapping[str, str], indent: int) -> list[str]:
    """Two columns, as wide as the terminal; a long name has a line for itself."""
    width = min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    lines: list[str] = []
    for name, about in entries.items():
        start = f"  {name}"
        wrapped = textwrap.wrap(about, max(width - indent - 2, 24), break_long_words=False, break_on_hyphens=False) or [""]
        if len(start) > indent:
            lines.append(start)
            start = ""
        lines.append(f"{start:{indent}}  {wrapped[0]}".rstrip())
        lines += [f"{'':{indent}}  {line}" for line in wrapped[1:]]
    return lines
