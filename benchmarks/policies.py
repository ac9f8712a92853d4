"""Curvature state under parameter averaging: every method and policy on recipe=digits with 4 jobs.

    ngsgd train recipe=digits data.train_minutes=10 data.valid_minutes=2 cluster=in_process data.cache_dir=FOLDER
    python benchmarks/policies.py sweep RESULTS.jsonl --egs FOLDER/egs-.. [--seeds 0 1] [--methods METHOD ..]
    python benchmarks/policies.py table RESULTS.jsonl

`sweep` trains everything that is not in RESULTS.jsonl: a network of two layers of 64, 3 epochs,
plain averaging, each method with the settings of `optimizer=NAME` and `CHANGES`.  Figures are of
the validation frames after the last outer iteration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import RunConfig
from ngsgd.config.sections.optimizer import WITHOUT_MEAN
from ngsgd.data.reader import EgsReader
from ngsgd.errors import NgsgdError
from ngsgd.files import read_json_lines
from ngsgd.launcher.config.compose import compose
from ngsgd.models.statistics import model_for
from ngsgd.preconditioners import METHODS
from ngsgd.tasks.speech import SpeechTaskSpec, schedule_of
from ngsgd.training.coordinator import Coordinator, RunStorage
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import FinalReport, Incident, OuterIterationRecord
from ngsgd.training.storage.checkpoint import CheckpointStore, first_checkpoint
from ngsgd.training.storage.ledger import Ledger

POLICIES = ("reset", "keep", "average")
NUM_JOBS = 4
SETTINGS = ["recipe=digits", "model.hidden_dim=64", "model.num_layers=2", "cluster=in_process", f"cluster.num_workers={NUM_JOBS}",
            "schedule.num_epochs=3", "outer=average", "tracking.kind=none"]
# matrices of a complete layer or model fit for the second layer alone, once in a job
CHANGES = {name: ["optimizer.skip='affine1,output'", "optimizer.curvature_interval=100",
                  "optimizer.inverse_interval=100"] for name in ("full", "layer")}


class Listener:
    """Collects the events of a run."""

    def __init__(self) -> None:
        self.records: list[OuterIterationRecord] = []

    def outer_iteration(self, record: OuterIterationRecord) -> None:
        self.records.append(record)

    def incident(self, incident: Incident) -> None:
        print(incident, flush=True)

    def finished(self, report: FinalReport) -> None:
        pass

    def close(self, status: str) -> None:
        pass


def train(config: RunConfig, egs: Path, folder: Path) -> list[OuterIterationRecord]:
    """All outer iterations of one run in this process."""
    reader = EgsReader(egs)
    model = model_for(config, reader)
    layout = FlatLayout.of(model)
    store = CheckpointStore(folder, layout, num_to_keep=1)
    spec = SpeechTaskSpec(config, str(egs))
    pool = InProcessPool(spec, config.cluster.num_workers, 1, lambda: False)
    ledger, listener = Ledger(folder / "ledger.jsonl"), Listener()
    try:
        pool.start()
        coordinator = Coordinator(spec.task(), model, schedule_of(config, reader), pool, RunStorage(store, ledger, listener),
                                  spec.settings)
        coordinator.train(first_checkpoint(layout.flatten(model.state_dict())))
    finally:
        ledger.close()
        pool.close()
    return listener.records


def run(cell: dict[str, Any], egs: Path) -> dict[str, Any]:
    """One cell with its figures, or with `failure` if a method raises an error or every job
    diverged.
    """
    own = ["optimizer=sgd"] if cell["method"] == "sgd" else [f"optimizer={cell['method']}",
                                                             f"optimizer.curvature_state={cell['policy']}"]
    config = compose([*SETTINGS, *own, *CHANGES.get(cell["method"], []), f"seed={cell['seed']}"])
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            records = train(config, egs, Path(folder))
        except NgsgdError as error:
            return {**cell, "failure": " ".join(str(error).split())[:160]}
    last = records[-1]
    return {**cell, "outer_iters": len(records), "rejected": sum(one.num_jobs - one.num_accepted for one in records),
            "valid_objf": last.valid.objf, "valid_accuracy": last.valid.accuracy, "cpu_s": time.process_time() - began}


def cells(methods: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """Seed by seed, so that an interrupted sweep has results of every method."""
    found: list[dict[str, Any]] = []
    for seed in seeds:
        found.append({"method": "sgd", "policy": "-", "seed": seed})
        found += [{"method": method, "policy": policy, "seed": seed} for method in methods for policy in POLICIES
                  if policy != "average" or method not in WITHOUT_MEAN]
    return found


def sweep(results: Path, egs: Path, methods: list[str], seeds: list[int], limit_s: float) -> None:
    """Stop after the run in which the time is over; several sweeps may share a file."""
    began = time.monotonic()
    for cell in cells(methods, seeds):
        done = {_key(line) for line in read_json_lines(results)} if results.exists() else set()
        if _key(cell) not in done and time.monotonic() - began < limit_s:
            line = run(cell, egs)
            print(line, flush=True)
            with results.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["method"], line["policy"], line["seed"]


def table(results: Path) -> None:
    """Objf of every method under each policy, mean over seeds with the range; rejected jobs."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in read_json_lines(results):
        found[line["method"], line["policy"]].append(line)
    print(f"| method | {' | '.join(POLICIES)} | jobs rejected |\n|{' --- |' * (len(POLICIES) + 2)}")
    for method in dict.fromkeys(method for method, _ in found):
        policies = ("-", "", "") if method == "sgd" else POLICIES
        told = [_told(found.get((method, policy), [])) for policy in policies]
        rejected = sum(line.get("rejected", 0) for policy in policies for line in found.get((method, policy), []))
        print(f"| {method} | {' | '.join(told)} | {rejected} |")


def _told(lines: list[dict[str, Any]]) -> str:
    values = [line["valid_objf"] for line in lines if "failure" not in line]
    if len(values) < len(lines):
        return str(next(line["failure"] for line in lines if "failure" in line))
    if not values:
        return ""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else f"{values[0]:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "table"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--egs", type=Path, help="the folder of examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start no run after so many seconds")
    options = parser.parse_args()
    if options.what == "table":
        table(options.results)
        return
    if options.egs is None:
        parser.error("sweep needs --egs")
    torch.set_num_threads(1)
    sweep(options.results, options.egs, options.methods, options.seeds, options.limit_s)


if __name__ == "__main__":
    main()
