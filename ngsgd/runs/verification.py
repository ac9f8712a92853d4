"""`ngsgd verify`: jobs of a run are repeated in this process and compared with its ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ngsgd.cluster.in_process import InProcessPool
from ngsgd.config import RunConfig
from ngsgd.counting import counted
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.parameter_vector import FlatLayout, Vector
from ngsgd.training.storage.checkpoint import CheckpointStore
from ngsgd.training.storage.event_log import read_events
from ngsgd.training.task import Task, TaskSpec, seeded_model
from ngsgd.training.verification.repetition import Check, Sample, Starts, Verification, counted_jobs, require_any, verify


@dataclass(frozen=True)
class Request:
    """A sample of jobs, and the function that receives each check."""

    sample: Sample
    seed: int = 0
    report: Callable[[Check], object] = lambda _check: None


def verify_run(config: RunConfig, folder: RunFolder, spec: TaskSpec, task: Task, initial: Vector, request: Request,
               report: Callable[[str], None]) -> Verification:
    """Repeat a sample of the jobs of a run; CheckpointError if no job can be repeated."""
    # The folder is locked, and the task is on the CPU.
    done = counted_jobs(folder.ledger)
    layout = FlatLayout.of(seeded_model(task, config.seed))
    starts = Starts(task, spec.settings, CheckpointStore(folder.checkpoints, layout, config.checkpoint.num_to_keep),
                    task.shards().schedule(config.schedule), initial)
    jobs = require_any(done, starts)
    line = f"{len(jobs)} of {counted(len(done), 'counted job')} can be repeated"
    if len(jobs) < len(done):
        line += (", because the checkpoints that the others started from are not on disk; "
                 f"checkpoint.num_to_keep={config.checkpoint.num_to_keep} keeps the last ones, and "
                 "a larger number keeps more")
    report(line)
    fingerprint = FingerprintCheck.of_resumed_run(config, folder, report, allow_other_bits=True)
    torch.set_num_threads(fingerprint.num_threads)
    pool = InProcessPool(spec, 1, fingerprint.num_threads)
    pool.start()
    try:
        differences: Sequence[str] = fingerprint.differences
        if not differences and pool.device.type != "cpu":
            differences = (f"{pool.device} adds in no fixed order",)
        for line in differences:
            report(f"compared with a tolerance, because bits may differ: {line}")
        # (outer iteration, job) -> objective per frame during training
        objectives = {(event["outer_iter"], job["job"]): job["objf"] for event in read_events(folder.events)
                      if event["event"] == "outer_iteration" for job in event["jobs"]}
        checks = verify(request.sample.of(jobs, len(done), request.seed), starts, pool, objectives,
                        is_bitwise=not differences, report=request.report)
    finally:
        pool.close()
    return Verification(len(done), len(jobs), tuple(differences), tuple(checks))
