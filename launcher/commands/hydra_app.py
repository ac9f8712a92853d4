"""`ngsgd train`, a Hydra application with --cfg, --multirun and --info, and `ngsgd resume`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher import help as texts
from ngsgd.launcher.arguments import OTHER_BITS, TRUST, Parser
from ngsgd.launcher.config import compose, config_builder
from ngsgd.launcher.config.paths import require_paths
from ngsgd.launcher.config.tuned_file import expanded
from ngsgd.launcher.console import run_guarded
from ngsgd.launcher.ray.probe import require_cluster
from ngsgd.launcher.screen import SCREEN
from ngsgd.launcher.text import masked
from ngsgd.launcher.why import failed_commands
from ngsgd.runs.run_folder import find_run, run_to_continue

if TYPE_CHECKING:
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
    if SCREEN.is_terminal and not (options.quiet or options.cfg or options.info or options.multirun or options.hydra_help):
        # imports take seconds; a log needs no line for them
        SCREEN.phase("loading ngsgd")
    options.overrides = compose.as_settings(expanded(options.overrides))
    if not (options.hydra_help or options.info):
        sweep = options.multirun or any(text.upper() == "HYDRA.MODE=MULTIRUN"
                                        for text in options.overrides)
        validate = compose.check_sweep if sweep else compose.compose
        validate(options.overrides,
                 config_dir=Path(options.config_dir) if options.config_dir else None)
    arguments = _hydra_arguments(options)
    import hydra

    with tempfile.TemporaryDirectory(prefix="ngsgd-sweep-") as scratch:
        # a file, because joblib and submitit run the jobs of a sweep in other processes
        codes = Path(scratch) / "exit-codes"
        codes.touch()

        def task(composed: Any) -> float | None:
            return _train_one(composed, codes, quiet=options.quiet, debug=options.debug,
                              continues=options.continues, trust=options.trust,
                              allow_other_bits=options.allow_other_bits)

        compose.register_schema()
        decorate = hydra.main(version_base="1.3", config_path=str(compose.conf_dir()),
                              config_name="config")
        with _command_line(arguments):
            decorate(task)()
        return max(map(int, codes.read_text().split()), default=EXIT_OK)


def resume(arguments: Sequence[str]) -> int:
    """`ngsgd resume`."""
    parser = Parser("resume")
    parser.add_argument("run", metavar="RUN", help="run folder, or its name under runs/")
    parser.add_argument("--address", metavar="HOST:PORT",
                        help="Ray cluster to join, or auto (default: that of the run)")
    parser.add_argument("--workers", type=int, metavar="N",
                        help="number of workers; results stay the same (default: that of the run)")
    parser.add_argument("--accept-changed-config", action="store_true",
                        help="accept a config.yaml that was edited after the start of the run")
    parser.add_argument("--allow-other-bits", action="store_true", help=OTHER_BITS)
    parser.add_argument("--quiet", "-q", action="store_true",
                        help="print incidents and the result only")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    options = parser.parse_args(list(arguments))
    if options.workers is not None and options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; it must be at least 1.")
    run = find_run(options.run, to_write=True)
    if SCREEN.is_terminal and not options.quiet:
        SCREEN.phase("loading ngsgd")
    from ngsgd.launcher.commands import train as service

    return service.resume(run, quiet=options.quiet, address=options.address, num_workers=options.workers,
                          accept_changed_config=options.accept_changed_config, trust=options.trust,
                          allow_other_bits=options.allow_other_bits)


def _parser() -> Parser:
    """The flags of Hydra that apply here, and those of ngsgd."""
    parser = Parser("train")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"],
                        help="print the composed settings (job) and exit")
    parser.add_argument("--resolve", action="store_true", help="--cfg also resolves references")
    parser.add_argument("--multirun", "-m", action="store_true",
                        help="run all combinations of the values given as KEY=A,B")
    parser.add_argument("--config-dir", "-cd", metavar="DIR",
                        help="folder of custom YAML files; DIR/recipe/mine.yaml is recipe=mine")
    parser.add_argument("--continue", dest="continues", action="store_true",
                        help="resume the newest run of this name= in output_dir, or start it; for "
                             "requeued jobs")
    parser.add_argument("--trust", action="store_true",
                        help="import the custom module that init_model= or the resumed run names")
    parser.add_argument("--allow-other-bits", action="store_true", help=OTHER_BITS)
    parser.add_argument("--quiet", "-q", action="store_true",
                        help="print incidents and the result only")
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    parser.add_argument("--info", "-i", nargs="?", const="all", help="of Hydra",
                        choices=["all", "config", "defaults", "defaults-tree", "plugins",
                                 "searchpath"])
    parser.add_argument("--package", "-p", help="of Hydra")
    parser.add_argument("--hydra-help", action="store_true", help="of Hydra")
    return parser


def _hydra_arguments(options: argparse.Namespace) -> list[str]:
    """Flags before settings, because Hydra's parser rejects settings on both sides of a flag."""
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve goes with --cfg: ngsgd train --cfg job --resolve.")
    if sum([options.multirun, options.cfg is not None, options.info is not None]) > 1:
        raise ConfigError("Give only one of --multirun, --cfg and --info.")
    valued = [f"--{flag}={value}" for flag in ("cfg", "package", "config-dir", "info")
              if (value := getattr(options, flag.replace("-", "_"))) is not None]
    plain = [f"--{flag}" for flag in ("multirun", "resolve", "hydra-help")
             if getattr(options, flag.replace("-", "_"))]
    return [*valued, *plain, *options.overrides]


def _train_one(composed: Any, codes: Path, *, quiet: bool, debug: bool, continues: bool,
               trust: bool = False, allow_other_bits: bool = False) -> float | None:
    """Train a run, or with `continues` resume one; return the value that a sweeper minimizes."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    reports: list[FinalReport] = []
    _mask_file_of_sweep()

    def run() -> int:
        given = compose.given_by(HydraConfig.get().overrides.task)
        config = config_builder.build(OmegaConf.to_container(composed, resolve=True), given)  # type: ignore[arg-type]
        require_paths(config)
        if config.cluster.address != "auto":
            # Ray itself resolves auto, after its import
            require_cluster(config.cluster)
        # heavy imports, which take seconds
        from ngsgd.launcher.commands import train as service

        begun = run_to_continue(config) if continues else None
        if begun:
            return service.resume(begun, quiet=quiet, address=config.cluster.address,
                                  num_workers=config.cluster.num_workers,
                                  trust=trust, given=config, allow_other_bits=allow_other_bits)
        reports.append(service.train(config, quiet=quiet, trust=trust,
                                     allow_other_bits=allow_other_bits))
        return EXIT_OK

    code = run_guarded(run, debug=debug, on_error=lambda error: failed_commands.keep(["train", *sys.argv[1:]], error))
    # a job on another machine cannot write the file, and its code is not needed
    with contextlib.suppress(OSError), codes.open("a") as file:
        file.write(f"{code}\n")
    if code == EXIT_INTERRUPTED:
        # end the sweep
        sys.exit(EXIT_INTERRUPTED)
    return to_minimize(reports[0]) if reports else None


def _mask_file_of_sweep() -> None:
    """Mask passwords in multirun.yaml, to which Hydra writes all overrides of a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    file = Path(HydraConfig.get().sweep.dir) / "multirun.yaml"
    with contextlib.suppress(OSError, UnicodeError):
        text = file.read_text(encoding="utf-8")
        if masked(text) != text:
            write_text(file, masked(text))


def to_minimize(report: FinalReport) -> float:
    """Return the WER of the validation set in percent; without words, the negative objective."""
    errors = report.valid_errors
    return errors.wer if errors and errors.num_words else -report.valid.objf


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Set sys.argv, the only command line that @hydra.main reads."""
    saved = sys.argv
    sys.argv = ["ngsgd", *arguments]
    try:
        yield
    finally:
        sys.argv = saved
