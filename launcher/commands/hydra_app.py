"""`ngsgd train` as a Hydra application: --cfg, --multirun, --info and shell completion work as in
any other.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.config import compose, config_builder
from ngsgd.launcher.config.tuned_file import expanded
from ngsgd.launcher.console import Parser, run_guarded
from ngsgd.launcher.ray.probe import require_cluster
from ngsgd.launcher.screen import SCREEN
from ngsgd.launcher.text import masked
from ngsgd.pipeline.runs.run_folder import check_output_dir, run_to_continue

if TYPE_CHECKING:
    from ngsgd.training.records import FinalReport


def train(arguments: list[str], *, debug: bool) -> int:
    """Checks every setting first, then lets Hydra do what its flags ask for; the worst exit code of
    all runs.
    """
    options = _parser().parse_intermixed_args(arguments)
    if not (options.quiet or options.cfg or options.info or options.multirun or options.hydra_help
            or options.shell_completion):
        # imports take seconds
        SCREEN.phase("loading ngsgd")
    options.overrides = compose.with_current_names(expanded(options.overrides))
    if not (options.shell_completion or options.hydra_help or options.info):
        sweep = options.multirun or any(text.upper() == "HYDRA.MODE=MULTIRUN"
                                        for text in options.overrides)
        validate = compose.check_sweep if sweep else compose.compose
        validate(options.overrides,
                 config_dir=Path(options.config_dir) if options.config_dir else None)
    arguments = _hydra_arguments(options)
    import hydra

    with tempfile.TemporaryDirectory(prefix="ngsgd-sweep-") as scratch:
        # a file, since joblib and submitit run a sweep's jobs in other processes
        codes = Path(scratch) / "exit-codes"
        codes.touch()

        def task(composed: Any) -> float | None:
            return _train_one(composed, codes, quiet=options.quiet, verbose=options.verbose, debug=debug,
                              goes_on=options.goes_on, trust=options.trust,
                              allow_other_bits=options.allow_other_bits)

        compose.register_schema()
        decorate = hydra.main(version_base="1.3", config_path=str(compose.conf_dir()),
                              config_name="config")
        with _command_line(arguments):
            decorate(task)()
        return max(map(int, codes.read_text().split()), default=EXIT_OK)


def complete(arguments: list[str]) -> int:
    """Hydra's completion of settings; COMP_LINE has what was typed."""
    return train(["--quiet", "--shell-completion", *arguments], debug=False)


def _parser() -> Parser:
    """The flags of Hydra that make sense here, and ours."""
    parser = Parser("train", add_help=False)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--quiet", "-q", action="store_true")
    parser.add_argument("--verbose", "-v", action="store_true")
    parser.add_argument("--continue", dest="goes_on", action="store_true")
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--allow-other-bits", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--package", "-p")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--info", "-i", nargs="?", const="all",
                        choices=["all", "config", "defaults", "defaults-tree", "plugins",
                                 "searchpath"])
    for flags in (["--multirun", "-m"], ["--resolve"], ["--hydra-help"],
                  ["--shell-completion", "-sc"]):
        parser.add_argument(*flags, action="store_true")
    return parser


def _hydra_arguments(options: argparse.Namespace) -> list[str]:
    """Flags first: Hydra's own parser does not take settings on both sides of a flag."""
    if options.resolve and not options.cfg:
        raise ConfigError("--resolve goes with --cfg: ngsgd train --cfg job --resolve.")
    if sum([options.multirun, options.cfg is not None, options.info is not None,
            options.shell_completion]) > 1:
        raise ConfigError("Give only one of --multirun, --cfg, --info and --shell-completion.")
    valued = [f"--{flag}={value}" for flag in ("cfg", "package", "config-dir", "info")
              if (value := getattr(options, flag.replace("-", "_"))) is not None]
    plain = [f"--{flag}" for flag in ("multirun", "resolve", "hydra-help", "shell-completion")
             if getattr(options, flag.replace("-", "_"))]
    return [*valued, *plain, *options.overrides]


def _train_one(composed: Any, codes: Path, *, quiet: bool, verbose: bool, debug: bool, goes_on: bool,
               trust: bool = False, allow_other_bits: bool = False) -> float | None:
    """A run of its own, or with `goes_on` the rest of one; what a sweeper minimises, or None where
    there is nothing to say.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    reports: list[FinalReport] = []
    _mask_file_of_sweep()

    def run() -> int:
        given = compose.given_by(HydraConfig.get().overrides.task)
        config = config_builder.build(OmegaConf.to_container(composed, resolve=True), given)  # type: ignore[arg-type]
        # before the imports, which take seconds
        check_output_dir(config)
        require_cluster(config.cluster)
        from ngsgd.launcher.commands import train as service

        begun = run_to_continue(config) if goes_on else None
        if begun:
            return service.resume(begun, quiet=quiet, verbose=verbose, address=config.cluster.address,
                                  num_workers=config.cluster.num_workers,
                                  trust=trust, given=config, allow_other_bits=allow_other_bits)
        reports.append(service.train(config, quiet=quiet, verbose=verbose, trust=trust,
                                     allow_other_bits=allow_other_bits))
        return EXIT_OK

    code = run_guarded(run, debug=debug)
    # another machine does not have it, and does not need it
    with contextlib.suppress(OSError), codes.open("a") as file:
        file.write(f"{code}\n")
    if code == EXIT_INTERRUPTED:
        # no further run of a sweep
        sys.exit(EXIT_INTERRUPTED)
    return to_minimise(reports[0]) if reports else None


def _mask_file_of_sweep() -> None:
    """Hydra writes all overrides to a sweep's multirun.yaml before the first run begins, passwords
    as well.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return
    file = Path(HydraConfig.get().sweep.dir) / "multirun.yaml"
    with contextlib.suppress(OSError, UnicodeError):
        text = file.read_text(encoding="utf-8")
        if masked(text) != text:
            write_text(file, masked(text))


def to_minimise(report: FinalReport) -> float:
    """Word errors of valid in per cent, never of test; without decoding, the held-out objf with its
    sign changed.
    """
    found = re.search(r"%WER\s+([0-9.]+)", report.valid_wer)
    return float(found[1]) if found else -report.valid.objf


@contextlib.contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """@hydra.main reads sys.argv and nothing else."""
    saved = sys.argv
    sys.argv = ["ngsgd", *arguments]
    try:
        yield
    finally:
        sys.argv = saved
