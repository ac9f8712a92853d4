"""`ngsgd verify`: repeat jobs of a run and compare them with its ledger."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK
from ngsgd.launcher.arguments import JSON, TRUST, Parser
from ngsgd.runs.run_folder import find_run

# import torch, which would slow down --help
if TYPE_CHECKING:
    from ngsgd.training.verification.repetition import Check, Verification


def command(arguments: Sequence[str]) -> int:
    """`ngsgd verify`."""
    parser = Parser("verify")
    parser.add_argument("run", metavar="RUN", help="folder of a finished or stopped run, or its name under runs/")
    parser.add_argument("--sample", default="5%", metavar="P%|N",
                        help="jobs to repeat: a percentage of all counted jobs, or a number (default: 5%%)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sample (default: %(default)s)")
    parser.add_argument("--trust", action="store_true", help=TRUST)
    parser.add_argument("--quiet", "-q", action="store_true", help="print the result only")
    parser.add_argument("--json", action="store_true", help=JSON)
    options = parser.parse_args(list(arguments))
    run = find_run(options.run, to_write=True)
    from ngsgd.launcher.commands import train as service
    from ngsgd.runs.verification import Request
    from ngsgd.training.verification.repetition import Sample

    is_quiet = options.quiet or options.json

    def report(check: Check) -> None:
        results = {"identical": "bitwise identical", "failed": f"not repeated: {check.reason}",
                   "close": f"objective differs by {check.distance:.2g} relative"}
        if not is_quiet:
            print(f"outer iteration {check.job.outer_iter + 1}, job {check.job.job}, worker {check.job.worker}: "
                  f"{results.get(check.outcome, check.outcome)}")
    found = service.verify(run, Request(Sample.parse(options.sample), options.seed, report), quiet=is_quiet, trust=options.trust)
    print(json.dumps(asdict(found), indent=1) if options.json else _summary(found))
    found.require_equal()
    return EXIT_OK


def _summary(found: Verification) -> str:
    counts = {"bitwise identical": found.count("identical"), "equal within the tolerance": found.count("close"),
              "different": found.count("differs"), "not reproducible": found.count("not reproducible"),
              "not repeated": found.count("failed")}
    shown = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{len(found.checks)} of {counted(found.num_counted, 'counted job')}: {shown}"
