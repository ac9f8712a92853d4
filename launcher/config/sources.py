"""The YAML files of a composition: those of ngsgd, and of --config-name, -path and -dir."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig, choices_of, types_of
from ngsgd.errors import ConfigError
from ngsgd.runs.config_file import yaml_problem
from ngsgd.runs.run_folder import RunFolder, find_run
from ngsgd.yaml_text import load_yaml, read_yaml_text

# the primary config of ngsgd, and the default name in a folder of --config-path
BASE, _CONFIG = "ngsgd", "config"
# folder of a run with the files that Hydra users expect
HYDRA = ".hydra"
# sections whose kind is chosen by optimizer=adam, which is the same as optimizer.kind=adam
GROUPS_OF_KINDS = ("model", "objective", "optimizer", "outer", "cluster")


def conf_dir() -> Path:
    """Return the folder of YAML groups, next to `launcher` in a wheel and in a source tree."""
    return Path(__file__).resolve().parents[2] / "conf"


def kinds() -> dict[str, tuple[str, ...]]:
    """Return the kinds of each section that has a group of them."""
    return {group: choices_of(types_of(RunConfig)[group], "kind") for group in GROUPS_OF_KINDS}


@dataclass(frozen=True)
class Sources:
    """Folders of YAML files, and the primary config, as the flags of Hydra name them."""

    # --config-dir
    directory: Path | None = None
    # --config-path: folder of the primary config
    path: Path | None = None
    # --config-name
    name: str = ""

    @classmethod
    def of(cls, options: argparse.Namespace) -> Sources:
        """Return the sources of a command line; ConfigError for folders that do not exist."""
        found = cls(options.config_dir, options.config_path, (options.config_name or "").removesuffix(".yaml"))
        if rerun := getattr(options, "experimental_rerun", None):
            if found.path or found.name:
                raise ConfigError("--experimental-rerun names the settings; remove --config-path and --config-name.")
            inner = [rerun, *rerun.parents][rerun.name.startswith("config."):]
            run = find_run(str(inner[inner[0].name == HYDRA]))
            found = replace(found, path=run / HYDRA if (run / HYDRA).is_dir() else run)
        for flag, folder in (("dir", found.directory), ("path", found.path)):
            if folder is not None and not folder.is_dir():
                raise ConfigError(f"--config-{flag} {folder} is not a folder; give one that holds recipe/*.yaml and so on.")
        return found

    @property
    def roots(self) -> list[Path]:
        """The folders, in the order in which Hydra searches them."""
        more = [self.directory] if self.directory else []
        return [self.path, conf_dir(), *more] if self.path else [conf_dir(), *more]

    @property
    def run(self) -> Path | None:
        """The run whose settings are the primary config: RUN of RUN/.hydra, or RUN itself."""
        folder = self.path.resolve() if self.path else Path()
        return folder.parent if folder.name == HYDRA else folder if (folder / RunFolder.RUN_ID).is_file() and self.path else None

    def groups(self) -> dict[str, list[str]]:
        """Return the choices of each group: kinds of sections, and files of all folders."""
        found = {group: set(of_it) for group, of_it in kinds().items()}
        for root in self.roots:
            for file in itertools.chain(root.glob("*/*.yaml"), root.glob("*/*/*.yaml")):
                parts = file.relative_to(root).with_suffix("").parts
                for cut in range(1, len(parts)):
                    found.setdefault("/".join(parts[:cut]), set()).add("/".join(parts[cut:]))
        return {group: sorted(choices) for group, choices in sorted(found.items()) if not group.startswith(("hydra", "."))}

    def primary(self) -> Primary:
        """Return the primary config, and the groups of its defaults list."""
        name = self.name or (_CONFIG if self.path else BASE)
        own = _read(conf_dir() / f"{BASE}.yaml")["defaults"]
        file = next((root / f"{name}.yaml" for root in self.roots if (root / f"{name}.yaml").is_file()), None)
        if file is None:
            raise ConfigError(f"there is no {name}.yaml in {', '.join(map(str, self.roots))}; name one with --config-name, and its "
                              "folder with --config-dir or --config-path.")
        if file == conf_dir() / f"{BASE}.yaml":
            return Primary(BASE, file, {*_groups_of(own)})
        content = _read(file)
        if self.run and {"hydra", "defaults"} & {*content}:
            raise ConfigError(f"{file} is of a run, and has a node that a run does not write; restore it.")
        if "defaults" not in content:
            # like a recipe: above all defaults, and below the groups of the command line
            place = next(number for number, entry in enumerate(own) if isinstance(entry, dict) and "recipe" in entry)
            layered = {**_read(conf_dir() / f"{BASE}.yaml"),
                       "defaults": [*own[:place], f"/{name}", {"recipe": None}, *own[place + 1:]]}
            return Primary(f"{BASE}-{name}", file, {*_groups_of(own)}, layered=layered)
        listed = content["defaults"] or []
        more = _groups_of(own) if {BASE, f"/{BASE}"} & {one for one in listed if isinstance(one, str)} else ()
        return Primary(name, file, {*_groups_of(listed), *more}, is_open=True)


OURS = Sources()


@dataclass(frozen=True)
class Primary:
    """The config that Hydra composes first."""

    name: str
    file: Path
    # in its defaults list: chosen by GROUP=CHOICE, and all others by +GROUP=CHOICE
    groups: set[str]
    # made for a file without a defaults list
    layered: Mapping[str, Any] | None = None
    # its configs may have further groups, and its own values follow those of groups
    is_open: bool = False


def _groups_of(defaults: list[Any]) -> Iterator[str]:
    for entry in defaults:
        for key in entry if isinstance(entry, dict) else ():
            if not key.startswith("override "):
                yield key.removeprefix("optional ").lstrip("/").partition("@")[0]


def _read(file: Path) -> dict[str, Any]:
    import yaml
    try:
        content = load_yaml(read_yaml_text(file)) or {}
    except yaml.YAMLError as error:
        raise ConfigError(yaml_problem(error, file)) from None
    except (OSError, UnicodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); correct it.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no settings; write KEY: VALUE lines.")
    return content
