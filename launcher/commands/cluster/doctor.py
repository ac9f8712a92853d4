"""`ngsgd doctor`: check this machine, and a cluster if one is given, and suggest fixes."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ngsgd.errors import EXIT_OK, EXIT_RUN_FAILED, ConfigError
from ngsgd.launcher.arguments import JSON, Parser, out_of_range
from ngsgd.launcher.doctor import machine
from ngsgd.launcher.screen import loading
from ngsgd.object_storage.urls import is_url, local_root


def command(arguments: Sequence[str]) -> int:
    """Print a line per check; return exit code 1 if a check fails."""
    parser = Parser("doctor")
    parser.declare({
        "--output-dir DIR": ("runs", "folder of the planned runs"),
        "--address HOST:PORT": ("", "Ray cluster to check (default: none)"),
        "--tracking-uri URI": ("", "MLflow server to check (default: MLFLOW_TRACKING_URI, or the database in the folder "
                                   "of the runs)"),
        "--workers N": (2, "planned number of workers on this machine"),
        "--json": JSON, "--quiet -q": "print warnings and failures only"})
    options = parser.parse_args(arguments)
    if problems := out_of_range(options, {"workers": 1}):
        raise ConfigError(problems)
    with loading("" if options.quiet else f"checking {options.address or 'this machine'}"):
        findings = list(examine(options.output_dir, options.workers, options.address,
                                options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")))
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


def examine(output_dir: str, num_workers: int, address: str = "", tracking_uri: str = "") -> Iterator[machine.Finding]:
    """Yield all findings, causes before effects."""
    root = local_root(output_dir)
    checks = [machine.python(), machine.packages(), machine.shadows(), machine.threads(num_workers),
              machine.memory(), machine.gpus(), machine.compiled(), machine.storage(root),
              machine.tracking(root, tracking_uri), machine.ports(with_dashboard=not address),
              machine.ray_traps()]
    if is_url(output_dir):
        checks.append(machine.object_storage(output_dir))
    if address:
        from ngsgd.launcher.doctor import cluster
        checks.append(cluster.nodes(address, root))
    return itertools.chain.from_iterable(checks)
