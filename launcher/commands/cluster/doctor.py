"""`ngsgd doctor`: check this machine, and a cluster if one is given, and suggest fixes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from ngsgd.errors import EXIT_OK, EXIT_RUN_FAILED, ConfigError
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.launcher.doctor import machine
from ngsgd.launcher.doctor.machine import Finding
from ngsgd.object_storage.urls import is_url, local_root


def command(arguments: Sequence[str]) -> int:
    """Print a line per check; return exit code 1 if a check fails."""
    options = _parser().parse_args(list(arguments))
    if options.workers < 1:
        raise ConfigError(f"--workers is {options.workers}; it must be at least 1.")
    findings = list(examine(options.output_dir, options.workers, options.address,
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


def _parser() -> Parser:
    parser = Parser("doctor")
    parser.add_argument("--output-dir", default="runs", metavar="DIR",
                        help="folder of the planned runs (default: %(default)s)")
    parser.add_argument("--address", default="", metavar="HOST:PORT",
                        help="Ray cluster to check (default: none)")
    parser.add_argument("--tracking-uri", default="", metavar="URI",
                        help="MLflow server to check (default: the database in the folder of the "
                             "runs)")
    parser.add_argument("--workers", type=int, default=2, metavar="N",
                        help="planned number of workers on this machine (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help=JSON)
    parser.add_argument("--quiet", "-q", action="store_true",
                        help="print warnings and failures only")
    return parser


def examine(output_dir: str, num_workers: int, address: str = "",
            tracking_uri: str = "") -> Iterator[Finding]:
    """Yield all findings, causes before effects."""
    root = local_root(output_dir)
    checks: list[Callable[[], Iterator[Finding]]] = [
        machine.python, machine.packages, machine.shadows, lambda: machine.threads(num_workers),
        machine.memory, machine.gpus,
        machine.compiled, lambda: machine.storage(root),
        lambda: machine.tracking(root, tracking_uri), lambda: machine.ports(with_dashboard=not address),
        machine.ray_traps]
    if is_url(output_dir):
        checks.append(lambda: machine.object_storage(output_dir))
    if address:
        from ngsgd.launcher.doctor import cluster

        checks.append(lambda: cluster.nodes(address, root))
    for check in checks:
        yield from check()
