"""`ngsgd train`, a Hydra application with all flags of Hydra, and `ngsgd resume`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher import completion
from ngsgd.launcher import help as texts
from ngsgd.launcher.arguments import CONFIG, OTHER_BITS, RUN, TRUST, Parser, out_of_range
from ngsgd.launcher.config import compose, config_builder
from ngsgd.launcher.config.config_builder import require_paths
from ngsgd.launcher.config.sources import HYDRA, Sources
from ngsgd.launcher.console import run_guarded
from ngsgd.launcher.mlflow import store
from ngsgd.launcher.ray.probe import require_cluster
from ngsgd.launcher.screen import SCREEN
from ngsgd.launcher.why import failed_commands
from ngsgd.masking import masked
from ngsgd.runs import trust as permission
from ngsgd.runs.run_folder import Place, RunFolder, find_run, run_to_continue

if TYPE_CHECKING:
    from ngsgd.config import RunConfig
    from ngsgd.training.records import FinalReport


def train(arguments: Sequence[str]) -> int:
    """Check all settings, then run Hydra; return the worst exit code of all runs."""
    parser = _parser()
    if "--help" in arguments or "-h" in arguments:
        sections = [word for word in arguments if not word.startswith("-") and "=" not in word]
        flags = {", ".join(one.option_strings): one.help or "" for one in parser.flags.values()}
        print(texts.train(sections[0] if sections else "", flags), end="")
        return EXIT_OK
    options = parser.parse_with_settings(arguments)
    options.words = [word for word in arguments if word != "--debug"]
    _require_one_command(options)
    if options.shell_completion:
        return _completion(options.overrides)
    trains = not (options.cfg or options.info or options.multirun or options.hydra_help)
    if SCREEN.is_terminal and trains and not options.quiet:
        # imports take seconds; a log needs no line for them
        SCREEN.phase("loading ngsgd")
    options.sources = sources = Sources.of(options)
    lines = compose.normalized(options.overrides, sources)
    is_sweep = options.multirun or any(text.upper() == "HYDRA.MODE=MULTIRUN" for text in lines)
    configs: list[RunConfig] = []
    with compose.initialized(sources) as hydra:
        if options.hydra_help:
            hydra.hydra_help(None, parser, argparse.Namespace(overrides=[]))
        elif options.info:
            hydra.show_info(options.info, sources.primary().name, lines)
        elif is_sweep:
            for job in compose.jobs_of_sweep(lines, sources, None if options.cfg else compose.MOST_CHECKED):
                configs.append(job.config)
                if options.cfg:
                    print("---")
                    _show(hydra, job, options)
            return EXIT_OK if options.cfg else _sweep(hydra, lines, options, configs)
        else:
            composed = compose.composition(lines, sources)
            if options.cfg:
                _show(hydra, composed, options)
            elif composed.is_sweep:
                return _sweep(hydra, lines, options, [composed.config])
            else:
                return _run(hydra, composed, options)
    return EXIT_OK


def _completion(words: Sequence[str]) -> int:
    """`-sc install=SHELL` of Hydra: print the script of `ngsgd completion SHELL`."""
    action, _, shell = " ".join(words).partition("=")
    if action != "install":
        raise ConfigError(f"--shell-completion {' '.join(words)} is not supported; install with: "
                          'eval "$(ngsgd completion bash)"; uninstall by removing that line.')
    return completion.command([shell])


def _show(hydra: Any, composed: compose.Composition, options: argparse.Namespace) -> None:
    """Print the settings; references to the node of Hydra are resolved before it is removed."""
    from omegaconf import OmegaConf
    for name in [name for name in composed.hydra if name != "hydra" and options.resolve]:
        if OmegaConf.is_config(value := composed.hydra[name]):
            OmegaConf.resolve(value)
        composed.hydra[name] = value
    compose.give(hydra, composed.hydra)
    hydra.show_cfg(None, [], options.cfg, options.package, options.resolve)


def _run(hydra: Any, composed: compose.Composition, options: argparse.Namespace) -> int:
    """Train a run in a job of Hydra, with environment, logging and callbacks of its settings."""
    from hydra.core.utils import configure_log
    codes: list[int] = []
    node = composed.hydra.hydra
    has_notes = node.output_subdir is not None
    # the folder of the run gets these files, not that of Hydra
    node.output_subdir = None
    configure_log(node.hydra_logging, node.verbose)
    compose.give(hydra, composed.hydra)
    hydra.run(node.job.config_name, lambda job: codes.append(_train_one(job, options, composed.config, has_notes=has_notes)[0]), [])
    return codes[0]


def _sweep(hydra: Any, lines: Sequence[str], options: argparse.Namespace, configs: Sequence[RunConfig]) -> int:
    """Let the sweeper of Hydra start the runs; return their worst exit code."""
    from hydra.types import RunMode
    name = options.sources.primary().name
    with (tempfile.TemporaryDirectory(prefix="ngsgd-sweep-") as scratch,
          store.sweep(configs, lambda line: print(f"ngsgd: {line}", file=sys.stderr)) as parent):
        given = [*lines, *parent, "hydra.mode=MULTIRUN"]
        composed = hydra.compose_config(name, given, RunMode.MULTIRUN, with_log_configuration=True)
        has_notes = composed.hydra.output_subdir is not None
        composed.hydra.overrides.hydra.append("hydra.output_subdir=null")
        compose.give(hydra, composed)
        # a file, because joblib and submitit run the jobs of a sweep in other processes
        codes = Path(scratch) / "exit-codes"
        codes.touch()

        def task(job: Any) -> float | None:
            _mask_overrides()
            code, value = _train_one(job, options, has_notes=has_notes)
            # a job on another machine cannot write the file, and its code is not needed
            with contextlib.suppress(OSError), codes.open("a") as file:
                file.write(f"{code}\n")
            if code == EXIT_INTERRUPTED:
                # end the sweep
                sys.exit(EXIT_INTERRUPTED)
            return value

        hydra.multirun(name, task, [])
        return max(map(int, codes.read_text().split()), default=EXIT_OK)


def resume(arguments: Sequence[str]) -> int:
    parser = Parser("resume")
    parser.declare({
        "RUN": RUN,
        "--address HOST:PORT": "Ray cluster to join, or auto (default: that of the run)",
        "--workers N": (int, "number of workers; results stay the same (default: that of the run)"),
        "--accept-changed-config": "accept a config.yaml that was edited after the start of the run",
        "--allow-other-bits": OTHER_BITS,
        "--quiet -q": "print incidents and the result only",
        "--trust": TRUST})
    options = parser.parse_args(arguments)
    if problems := out_of_range(options, {"workers": 1}):
        raise ConfigError(problems)
    run = find_run(options.run, to_write=True)
    if SCREEN.is_terminal and not options.quiet:
        SCREEN.phase("loading ngsgd")
    from ngsgd.launcher.commands import train as service
    return service.resume(
        run, quiet=options.quiet, address=options.address, num_workers=options.workers,
        accept_changed_config=options.accept_changed_config, trust=options.trust, allow_other_bits=options.allow_other_bits)


def _parser() -> Parser:
    parser = Parser("train")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"],
                        help="print the composed settings (job) and exit; with -m, of each run")
    parser.declare({
        "--resolve": "--cfg also resolves references", "--run -r": "run once, the default",
        "--multirun -m": "run all combinations of the values given as KEY=A,B", **CONFIG,
        "--experimental-rerun RUN": (Path, "start a new run with the settings of RUN (of Hydra: RUN/.hydra/config.pickle)")})
    parser.add_argument("--continue", dest="continues", action="store_true",
                        help="resume the newest run of this name= in output_dir, or start it; for requeued jobs")
    parser.declare({
        "--trust": "import the custom module that init_model= or the resumed run names",
        "--allow-other-bits": OTHER_BITS,
        "--quiet -q": "print incidents and the result only",
        "--debug": "print the traceback of an error"})
    parser.add_argument("--info", "-i", nargs="?", const="all", help="of Hydra",
                        choices=["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"])
    parser.declare({"--package -p NAME": "of Hydra", "--hydra-help": "of Hydra",
                    "--shell-completion -sc": "install=bash prints the script of ngsgd completion bash"})
    return parser


def _require_one_command(options: argparse.Namespace) -> None:
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve goes with --cfg: ngsgd train --cfg job --resolve.")
    given = [f"--{name.replace('_', '-')}" for name in ("run", "multirun", "cfg", "info", "shell_completion", "hydra_help")
             if getattr(options, name)]
    if len(given) > 1 and given != ["--multirun", "--cfg"]:
        raise ConfigError(f"Give only one of {' and '.join(given)}.")


def _mask_overrides() -> None:
    """Mask passwords in the file with all overrides that Hydra writes for a sweep."""
    from hydra.core.hydra_config import HydraConfig
    sweep = Path(HydraConfig.get().sweep.dir) / "multirun.yaml"
    with contextlib.suppress(OSError, UnicodeError):
        text = sweep.read_text(encoding="utf-8")
        if masked(text) != text:
            write_text(sweep, masked(text))


def _place(job: Any, *, has_notes: bool) -> Place:
    """Return the folder by hydra.run.dir or hydra.sweep.subdir, and the files of `.hydra`."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    node = HydraConfig.get()
    chosen = node.sweep.subdir if node.mode == RunMode.MULTIRUN else node.run.dir
    tree = {"config": job, "hydra": HydraConfig.instance().cfg, "overrides": node.overrides.task} if has_notes else {}
    return Place(Path(node.runtime.output_dir) if str(chosen) != "." else None,
                 {f"{HYDRA}/{name}.yaml": masked(OmegaConf.to_yaml(part)) for name, part in tree.items()})


def _train_one(job: Any, options: argparse.Namespace, checked: RunConfig | None = None, *,
               has_notes: bool) -> tuple[int, float | None]:
    """Train or, with --continue, resume a run; return exit code and what a sweeper minimizes."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    reports: list[FinalReport] = []

    def run() -> int:
        config = checked
        if config is None:
            values: Any = OmegaConf.to_container(job, resolve=True)
            config, problems = config_builder.build_checked(values, compose.given_by(HydraConfig.get().overrides.task))
            if problems:
                raise ConfigError(problems)
        require_paths(config)
        if options.sources.run:
            permission.require_run(RunFolder(options.sources.run), permission.absolute(config), trust=options.trust)
        if config.cluster.address != "auto":
            # Ray itself resolves auto, after its import
            require_cluster(config.cluster)
        # heavy imports, which take seconds
        from ngsgd.launcher.commands import train as service
        place = _place(job, has_notes=has_notes)
        begun = run_to_continue(config, place.path) if options.continues else None
        if begun:
            return service.resume(begun, quiet=options.quiet, address=config.cluster.address,
                                  num_workers=config.cluster.num_workers, trust=options.trust,
                                  given=config, allow_other_bits=options.allow_other_bits)
        place.require_empty()
        reports.append(service.train(config, quiet=options.quiet, trust=options.trust, place=place,
                                     allow_other_bits=options.allow_other_bits))
        return EXIT_OK

    code = run_guarded(run, debug=options.debug, on_error=lambda error: failed_commands.keep(["train", *options.words], error))
    if not reports:
        return code, None
    # the WER of the validation set in percent; without words, the negative objective
    errors = reports[0].valid_errors
    return code, errors.wer if errors and errors.num_words else -reports[0].valid.objf
