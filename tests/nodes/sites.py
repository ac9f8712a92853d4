"""Two sites with a slow network between them, on machines made of namespaces.

    python -m tests.nodes.sites speed [--runs 3] [SETTING...]  # with and without the limit, in turn
    python -m tests.nodes.sites cut [SETTING...]               # one site is cut off for a while

Each site has a worker, and the object storage is on a third machine. The limit holds for the cable
of every machine, so both sites share 50 Mbit/s to the storage, with 20 ms between site and storage.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.errors import EXIT_OK
from ngsgd.files import read_json_lines, sha256
from ngsgd.launcher.reports.efficiency import sites_of
from ngsgd.training.storage.audit import audit
from tests.nodes.lab import wait_until
from tests.nodes.network import missing
from tests.nodes.stored import Machines, machines_with_service
from tests.object_storage.service import BUCKET

SITES = ("east", "west")
_RUN_S = 1200.0
_CUT_S = 60.0
_NO_LIMIT = 1.25e9  # bytes per second
_SETTINGS = ("recipe=digits", "cluster=local", "cluster.num_workers=1", "cluster.threads_per_worker=1", "tracking.kind=none",
             "sites.jobs={east: 1, west: 1}")


@dataclass
class Sites:
    """The machines of the sites; node 0 has the storage."""

    machines: Machines
    folder: Path

    def start(self, site: str, name: str, *settings: str) -> subprocess.Popen[bytes]:
        node = self.machines.network.nodes[1 + SITES.index(site)]
        words = [*_SETTINGS, f"name={name}-{site}", f"output_dir={self.folder / site}", f"data.cache_dir={self.folder / 'cache'}",
                 f"sites.name={site}", f"sites.exchange=s3://{BUCKET}/{name}", *settings]
        return self.machines.start(node, f"{name}-{site}", "-m", "ngsgd", "train", *words)

    def run(self, site: str, name: str) -> Path | None:
        return next((path.parent for path in (self.folder / site).glob(f"{name}-{site}-*/config.yaml")), None)

    def events(self, site: str, name: str, kind: str = "outer_iteration") -> list[dict[str, Any]]:
        run = self.run(site, name)
        there = run is not None and (run / "events.jsonl").exists()
        return [one for one in read_json_lines(run / "events.jsonl") if one["event"] == kind] if there and run else []

    def end(self, site: str, name: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait(_RUN_S)
        assert code == EXIT_OK, f"{name} at {site} ended with {code}:\n{self.machines.log(f'{name}-{site}').read_text()[-2000:]}"

    def last_model(self, site: str, name: str) -> str:
        """SHA-256 of the model after the last average."""
        run = self.run(site, name)
        assert run
        return sha256(sorted((run / "checkpoints").glob("iter-*"))[-1] / "model.safetensors")


@contextmanager
def sites(folder: Path, bandwidth: float, latency_s: float) -> Iterator[Sites]:
    """Machines with this network."""
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    with machines_with_service(1 + len(SITES), logs, bandwidth, latency_s) as machines:
        yield Sites(machines, folder)


def train(two: Sites, name: str, *settings: str) -> None:
    """Train at both sites at the same time."""
    processes = {site: two.start(site, name, *settings) for site in SITES}
    for site, process in processes.items():
        two.end(site, name, process)


def seconds(two: Sites, name: str) -> float:
    """From the first average over sites to the end of training, of the slower site."""
    found: list[float] = []
    for site in SITES:
        records = two.events(site, name)
        first = next(record for record in records if record["sites"])
        found.append(records[-1]["elapsed_s"] - first["elapsed_s"])
    return max(found)


def speed(folder: Path, options: argparse.Namespace) -> None:
    """Throughput with the limit relative to that without, and what the sites exchanged."""
    # prepares the data
    with sites(folder, 0.0, 0.0) as two:
        process = two.start("east", "warm", *options.settings, "sites.wait_s=0.1", "schedule.num_epochs=0.5")
        two.end("east", "warm", process)
    took: dict[bool, list[float]] = {False: [], True: []}
    for number in range(options.runs):
        for is_slow in (False, True):
            name = f"{'slow' if is_slow else 'fast'}{number}"
            # both in user space, whose forwarding takes time of the processors
            with sites(folder, options.bandwidth if is_slow else _NO_LIMIT, options.latency if is_slow else 0.0) as two:
                train(two, name, *options.settings)
                took[is_slow].append(seconds(two, name))
                waits = [sites_of(two.events(site, name)).wait_s for site in SITES]
                print(f"{name}: {took[is_slow][-1]:.2f} s, waits {waits[0]:.2f} and {waits[1]:.2f} s; "
                      f"objf {[two.events(s, name)[-1]['valid']['objf'] for s in SITES]}; "
                      f"model {two.last_model('east', name)[:12]} {two.last_model('west', name)[:12]}; "
                      f"{sites_of(two.events('east', name)).text}", flush=True)
    ratios = [fast / slow for fast, slow in zip(took[False], took[True], strict=True)]
    print(f"throughput with the limit: {statistics.median(ratios):.3f} of that without (pairs {[f'{r:.3f}' for r in ratios]})")


def cut(folder: Path, options: argparse.Namespace) -> None:
    """Cut one site off: it continues, and is averaged again. It ends later than the other one."""
    with sites(folder, options.bandwidth, options.latency) as two:
        west = two.machines.network.nodes[2]
        processes = {site: two.start(site, "cut", "sites.wait_s=15", *options.settings) for site in SITES}
        wait_until(lambda: any(one["sites"] for one in two.events("west", "cut")), _RUN_S, "no average over sites")
        west.cut()
        before, began = len(two.events("west", "cut")), time.monotonic()
        time.sleep(options.cut_s)
        alone = len(two.events("west", "cut")) - before
        west.join()
        cut_s = time.monotonic() - began
        for site, process in processes.items():
            two.end(site, "cut", process)
        assert alone > 0, "the site that was cut off did not continue"
        for site in SITES:
            run = two.run(site, "cut")
            assert run and audit(run / "ledger.jsonl") == []
        incidents = {site: [one["what"] for one in two.events(site, "cut", "incident")] for site in SITES}
        assert "site_returned" in incidents["west"] and "site_absent" in incidents["east"], incidents
        for site in SITES:
            print(f"{site}: {sites_of(two.events(site, 'cut')).text}; objf {two.events(site, 'cut')[-1]['valid']['objf']:.4f}; "
                  f"{sorted(set(incidents[site]))}")
        print(f"west was cut off for {cut_s:.0f} s and computed {alone} outer iterations in that time")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nodes.sites", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("trial", choices=("speed", "cut"))
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="more settings of the runs")
    parser.add_argument("--bandwidth", type=float, default=6.25e6, help="bytes per second of a cable")
    parser.add_argument("--latency", type=float, default=0.01, help="seconds of a cable, one way")
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs")
    parser.add_argument("--cut-s", type=float, default=_CUT_S, help="seconds without a connection")
    options = parser.parse_intermixed_args()
    reason = missing()
    if reason:
        print(f"no machines can be made here: {reason}")
        return 2
    with tempfile.TemporaryDirectory(prefix="ngsgd-sites-") as folder:
        (speed if options.trial == "speed" else cut)(Path(folder), options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
