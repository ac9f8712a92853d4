"""`ngsgd doctor`: looks at this machine, and at the cluster if one is named, before a run does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from ngsgd.errors import EXIT_OK, EXIT_RUN_FAILED, ConfigError
from ngsgd.launcher.console import Parser
from ngsgd.launcher.doctor import machine
from ngsgd.launcher.doctor.machine import Finding


def command(arguments: Sequence[str]) -> int:
    """Prints a line for everything that was looked at; exit code 1 if anything fails."""
    parser = Parser("doctor")
    parser.add_argument("--output-dir", default="runs",
                        help="where runs will be written (default: %(default)s)")
    parser.add_argument("--address", default="",
                        help="a Ray cluster to look at, host:port (default: none)")
    parser.add_argument("--tracking-uri", default="",
                        help="MLflow server to look at (default: the store in the output folder)")
    parser.add_argument("--workers", type=int, default=2,
                        help="that a run shall have here (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--quiet", "-q", action="store_true", help="only what is not ok")
    options = parser.parse_args(list(arguments))
    if options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; it must be at least 1.")
    findings = list(examine(Path(options.output_dir), options.workers, options.address,
                            options.tracking_uri))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        for finding in findings:
            if finding.verdict != "ok" or not options.quiet:
                print(f"{finding.verdict:5}{finding.what:19}{finding.found}")
                if finding.fix:
                    print(f"{'':24}-> {finding.fix}")
        counts = Counter(finding.verdict for finding in findings)
        print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("ok", "warn", "fail")))
    return EXIT_RUN_FAILED if any(finding.verdict == "fail" for finding in findings) else EXIT_OK


def examine(output_dir: Path, num_workers: int, address: str = "",
            tracking_uri: str = "") -> Iterator[Finding]:
    """Everything, in an order in which an early fault explains a later one."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        machine.python, machine.packages, machine.shadows, lambda: machine.threads(num_workers),
        machine.memory, machine.gpus,
        machine.compiled, lambda: machine.storage(output_dir),
        lambda: machine.tracking(output_dir, tracking_uri), machine.ports, machine.ray_traps]
    if address:
        from ngsgd.launcher.doctor import cluster

        checks.append(lambda: cluster.nodes(address, output_dir))
    for check in checks:
        yield from check()
