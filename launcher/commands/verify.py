"""`ngsgd verify`: repeat jobs of a run and compare them with its ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import JSON, TRUST, Parser
from ngsgd.launcher.reports.progress import ProgressTracker
from ngsgd.runs.config_file import read_config
from ngsgd.runs.run_folder import SIMULATION, RunFolder, find_run, require_unchanged

# imports torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.training.verification.repetition import Check


def command(arguments: Sequence[str]) -> int:
    parser = Parser("verify")
    parser.declare({
        "RUN": "folder of a finished or stopped run, or its name under runs/",
        "--sample P%|N": ("5%", "jobs to repeat: a percentage of all counted jobs, or a number (default: 5%%)"),
        "--seed S": (0, "seed of the sample"),
        "--trust": TRUST, "--quiet -q": "print the result only", "--json": JSON})
    options = parser.parse_args(arguments)
    folder = RunFolder.open(find_run(options.run, to_write=True))
    config, path = read_config(folder.config), folder.path
    if config.task.from_python:
        raise ConfigError("the task of this run came from a Python program, so no command can "
                          f"repeat its jobs; call ngsgd.load({str(path)!r}, task).verify(Request(Sample.parse('5%'))) there.")
    if (path / SIMULATION).exists():
        raise ConfigError(f"{path} is a simulation, which has no real jobs; verify a run of ngsgd train.")
    require_unchanged(folder.config)
    from ngsgd.pipeline.run import build_run
    from ngsgd.pipeline.services import Services
    from ngsgd.runs.fingerprint_check import FingerprintCheck
    from ngsgd.runs.verification import Request
    from ngsgd.training.verification.repetition import Sample
    is_quiet = options.quiet or options.json

    def report(check: Check) -> None:
        results = {"identical": "bitwise identical", "failed": f"not repeated: {check.reason}",
                   "close": f"objective differs by {check.distance:.2g} relative"}
        if not is_quiet:
            print(f"outer iteration {check.job.outer_iter + 1}, job {check.job.job}, worker "
                  f"{check.job.worker}: {results.get(check.outcome, check.outcome)}")

    progress = ProgressTracker(quiet=is_quiet, is_speech=not config.task._target_)
    fingerprint = FingerprintCheck.of_resumed_run(config, folder, lambda _line: None, allow_other_bits=True)
    run = build_run(config, Services(progress.report, progress.warn), folder=folder,
                    fingerprint=fingerprint, trust=options.trust)
    found = run.verify(Request(Sample.parse(options.sample), options.seed, report))
    names: dict[Any, str] = {
        "identical": "bitwise identical", "close": "equal within the tolerance",
        "differs": "different", "not reproducible": "not reproducible", "failed": "not repeated"}
    counts = Counter(check.outcome for check in found.checks)
    shown = [f"{counts[outcome]} {name}" for outcome, name in names.items() if counts[outcome]]
    print(json.dumps(asdict(found), indent=1) if options.json else
          f"{len(found.checks)} of {counted(found.num_counted, 'counted job')}: {', '.join(shown)}")
    found.require_equal()
    return EXIT_OK
