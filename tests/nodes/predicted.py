"""`ngsgd plan` compared with runs over a slow network: time and cost of five runs.

    python -m tests.nodes.predicted [--bandwidth 6.25e6] [--latency 0.02]

Two machines made of namespaces have a worker each; the coordinator is on a third one, behind the
same slow links. The five runs differ in compression, length of the jobs and preemptions. Each is
predicted before it begins, from a measurement on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from ngsgd.files import read_json_lines
from ngsgd.launcher.reports.efficiency import efficiency_of
from tests.integration.service import events
from tests.nodes import lab as labs
from tests.nodes.lab import Lab, lab
from tests.nodes.network import missing

_PRICE = 1.5
_REPLACE_S = 3.0  # of a preempted worker, until its replacement trains; measured by `make storm`
_WORKERS = 2


@dataclass(frozen=True)
class Trial:
    """A run: its settings, and preemptions of a worker per hour."""

    name: str
    settings: tuple[str, ...]
    preemptions_per_hour: float = 0.0


TRIALS = (
    Trial("plain", ()),
    Trial("sparse", ("cluster.compression=sparse",)),
    Trial("long", ("egs.samples_per_iter=32000",)),
    Trial("int8", ("cluster.compression=int8",)),
    Trial("preempted", ("cluster.compression=sparse",), preemptions_per_hour=120.0),
)


def settings_of(trial: Trial, output_dir: Path) -> list[str]:
    return ["recipe=digits", "tracking.kind=none", f"output_dir={output_dir}", f"cluster.num_workers={_WORKERS}",
            "cluster.threads_per_worker=1", f"cluster.price_per_hour={_PRICE}", f"schedule.num_jobs_initial={_WORKERS}",
            f"schedule.num_jobs_final={_WORKERS}", "outer=average", "schedule.num_epochs=4", *trial.settings]


def predicted(trial: Trial, output_dir: Path, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds and cost of training."""
    words = [sys.executable, "-m", "ngsgd", "plan", "--json", "--workers", str(_WORKERS), "--cores-per-node", "1",
             "--bandwidth", str(options.bandwidth), "--latency", str(options.latency), "--failures-per-worker-hour",
             str(trial.preemptions_per_hour), "--replace-s", str(_REPLACE_S), "cluster=local", *settings_of(trial, output_dir)]
    [row] = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)["rows"]
    return row["total_s"], row["cost"]


def measured(trial: Trial, cluster: Lab) -> tuple[float, float]:
    """Seconds and cost of training."""
    over = threading.Event()
    process = cluster.train(cluster.network.nodes[0], trial.name, *settings_of(trial, cluster.output_dir))
    thread = threading.Thread(target=_preempt, args=(trial, cluster, over), daemon=True)
    thread.start()
    try:
        run = cluster.finish(process, trial.name)
    finally:
        over.set()
        thread.join()
    found = efficiency_of(read_json_lines(run / "events.jsonl"))
    return found.wall_s, found.cost(_PRICE)


def _preempt(trial: Trial, cluster: Lab, over: threading.Event) -> None:
    """Kill a worker at random times, once training has begun."""
    if not trial.preemptions_per_hour:
        return
    chance = random.Random(0)
    while not over.wait(1.0) and not ((run := cluster.run(trial.name)) and events(run, "outer_iteration")):
        pass
    while not over.wait(chance.expovariate(_WORKERS * trial.preemptions_per_hour / 3600.0)):
        workers = [process for node in cluster.network.nodes[1:] for process in node.programs("ray::RayWorker")]
        if workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(workers), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nodes.predicted", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--bandwidth", type=float, default=6.25e6, help="bytes per second of a link")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds of a link, one way")
    parser.add_argument("trials", nargs="*", metavar="TRIAL", help="names of trials (default: all)")
    options = parser.parse_args()
    reason = missing()
    if reason:
        print(f"no nodes can be made here: {reason}")
        return 2
    labs._RUN_S = 900.0
    labs.SETTINGS.clear()
    worst = 0.0
    with tempfile.TemporaryDirectory(prefix="ngsgd-nodes-") as folder:
        told = {trial.name: predicted(trial, Path(folder), options) for trial in TRIALS
                if not options.trials or trial.name in options.trials}
        with lab(3, Path(folder), rate=options.bandwidth, latency_s=options.latency) as cluster:
            for trial in TRIALS:
                if trial.name in told:
                    (told_s, told_cost), (took_s, cost) = told[trial.name], measured(trial, cluster)
                    worst = max(worst, abs(took_s / told_s - 1), abs(cost / told_cost - 1))
                    print(f"{trial.name:10} predicted {told_s:.1f} s, cost {told_cost:.4f}; measured {took_s:.1f} s "
                          f"({took_s / told_s - 1:+.1%}), cost {cost:.4f} ({cost / told_cost - 1:+.1%})", flush=True)
    print(f"largest difference: {worst:.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
