"""Steady cost of fault tolerance: `ngsgd train` compared with a bare training loop.

    python benchmarks/steady_cost.py [--workers 1] [--jobs 8] [--frames 170000] [--folder FOLDER]

`ngsgd train` runs with checkpoints, ledger, checksums, heartbeats and MLflow. The bare loop is one
process per worker that trains the same minibatches with the same model, loss and optimizer, and
stores nothing. With one worker the program compares the parameters of both: they are bitwise
identical.

Both run interleaved, 0.4 s at a time: the processes of one are stopped (SIGSTOP) while those of the
other run. Both therefore see the same load of the machine. Time is that of the turns. It is
measured from the end of the first job, so start and decoding do not count. `--frames` is the length
of a job.

Costs:

- wall: time of the turns per job, compared with the bare loop;
- CPU: CPU time of all processes per job without the diagnostics, compared with the bare loop;
- diagnostics: CPU time of the objective on held-out frames, in a thread of low priority of the
  coordinator. A bare loop that is evaluated as often has the same;
- between jobs: time of an outer iteration outside of the minibatches of its slowest job.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.config import RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.files import read_json_lines
from ngsgd.launcher.commands.train import services_of
from ngsgd.launcher.config.compose import compose
from ngsgd.pipeline.base_run import BaseRun, Training
from ngsgd.pipeline.runs.config_file import to_yaml
from ngsgd.pipeline.runs.fingerprint_check import FingerprintCheck
from ngsgd.pipeline.runs.run_folder import RunFolder
from ngsgd.schedules import Schedule
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.parameter_vector import FlatLayout
from ngsgd.training.records import FinalReport
from ngsgd.training.storage.checkpoint import Checkpoint
from ngsgd.training.task import Task, TaskSpec, seeded_model
from ngsgd.training.worker import make_optimizer

DIM, NUM_CLASSES, UTTERANCE = 40, 100, 500
TURN_S, POLL_S = 0.4, 0.01


def prepared(folder: Path, config: RunConfig, num_archives: int, num_frames: int) -> Path:
    """Write archives of random frames; a job is one position of the examples of an archive."""
    random = np.random.default_rng(0)

    def frames(number: int) -> FrameSet:
        offsets = np.append(np.arange(0, number, UTTERANCE), number)
        return FrameSet(random.standard_normal((number, DIM), np.float32), random.integers(0, NUM_CLASSES, number).astype(np.int32),
                        offsets, tuple(f"utt{u}" for u in range(len(offsets) - 1)))
    return prepare_archives(frames(num_archives * num_frames), frames(20 * UTTERANCE), config.egs, num_classes=NUM_CLASSES,
                            digest="synthetic", cache_root=folder)


def configured(options: argparse.Namespace, folder: Path) -> RunConfig:
    """The default recipe, with jobs of `--frames` frames."""
    return compose([f"cluster.num_workers={options.workers}", "cluster=local", "cluster.threads_per_worker=1", "outer=average",
                    f"schedule.num_jobs_initial={options.workers}", f"schedule.num_jobs_final={options.workers}",
                    f"egs.samples_per_iter={options.frames}", "egs.frames_per_eg=1", "schedule.num_epochs=1000",
                    f"output_dir={folder / 'runs'}", "name=steady"])


class ArchiveRun(BaseRun):
    """A run on given archives: all that `ngsgd train` does from the first job to the last."""

    egs: Path

    @property
    def model(self) -> torch.nn.Module:
        raise NotImplementedError

    @property
    def metrics(self) -> dict[str, Any]:
        raise NotImplementedError

    def _spec(self) -> TaskSpec:
        return SpeechTaskSpec(self.config, str(self.egs))

    def _kept_models(self, task: Task, schedule: Schedule) -> Sequence[int]:
        return ()

    def _finish(self, training: Training, end: Checkpoint) -> FinalReport:
        raise NotImplementedError


def train_run(config: RunConfig, egs: Path) -> None:
    """Train until the process is killed, with the services of the command line."""
    folder = RunFolder.create(config, to_yaml(config))
    check = FingerprintCheck.of_new_run(config, folder, allow_other_bits=False)
    run = ArchiveRun(config, folder, services_of(config, quiet=True), check, is_new=True)
    run.egs = egs
    run.train_only()


def train_bare(config: RunConfig, egs: Path, job: int, log: Path, num_jobs: int) -> None:
    """The bare loop; writes the time of each job and the parameters at the end."""
    torch.set_num_threads(1)
    task = SpeechTaskSpec(config, str(egs)).task(torch.device("cpu"))
    schedule = task.shards().schedule(config.schedule)
    model = seeded_model(task, config.seed)
    layout = FlatLayout.of(model)
    with log.open("w") as file:
        for outer_iteration in schedule.outer_iterations():
            optimizer = make_optimizer(model, config.optimizer, outer_iteration.lr, outer_iteration.lr_factor)
            for batch in task.batches(outer_iteration.shards[job], config.schedule.minibatch_size,
                                      seed=(config.seed, outer_iteration.outer_iter, job)):
                optimizer.zero_grad(set_to_none=True)
                loss = task.loss(model, batch.data).total
                loss.backward()
                optimizer.step(num_samples=batch.num_examples)
            if outer_iteration.outer_iter + 1 == num_jobs:
                np.save(log.with_suffix(".npy"), layout.flatten(model.state_dict()))
            file.write(f"{outer_iteration.outer_iter}\n")
            file.flush()


# Turns ------------------------------------------------------------------------------------------


@dataclass
class Side:
    """The processes of one variant, and the time and CPU time of their turns at each job's end."""

    name: str
    commands: list[list[str]]
    active_s: float = 0.0
    at: list[tuple[float, float, float]] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, folder: Path) -> None:
        for number, command in enumerate(self.commands):
            output = (folder / f"{self.name}-{number}.log").open("w")
            self.processes.append(subprocess.Popen(command, stdout=output, stderr=output))

    def tree(self) -> list[int]:
        found = [process.pid for process in self.processes]
        for pid in found:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += [int(child) for child in path.read_text().split()]
        return found

    def signal(self, number: signal.Signals) -> None:
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds of all threads, and of those of low priority among them; from the scheduler,
        in nanoseconds.
        """
        total = background = 0.0
        for pid in self.tree():
            normal = _niceness(Path(f"/proc/{pid}"))
            for path in Path(f"/proc/{pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    seconds = int((path / "schedstat").read_text().split()[0]) / 1e9
                    total += seconds
                    background += seconds * (_niceness(path) > normal)
        return total, background

    def mark(self, num_done: int) -> None:
        """Record the time of jobs that have ended since the last call."""
        while len(self.at) < num_done:
            self.at.append((self.active_s, *self.cpu_s()))

    def per_job(self) -> list[list[float]]:
        """Of the jobs after the first: seconds, CPU seconds, and those of threads of low priority.
        """
        return [[after[i] - before[i] for before, after in itertools.pairwise(self.at)] for i in range(3)]


def _niceness(process: Path) -> int:
    return int((process / "stat").read_text().rpartition(")")[2].split()[16])


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run both variants interleaved, and print the costs."""
    config = configured(options, folder)
    egs = prepared(folder, config, 2 * options.workers, options.frames)
    own = [sys.executable, __file__, "--workers", str(options.workers), "--frames", str(options.frames),
           "--jobs", str(options.jobs), "--folder", str(folder), "--egs", str(egs)]
    run = Side("ngsgd", [[*own, "--part", "run"]])
    bare = Side("bare", [[*own, "--part", str(job)] for job in range(options.workers)])
    try:
        for side in (run, bare):
            side.start(folder)
        take_turns(run, bare, folder, options)
    finally:
        for side in (run, bare):
            side.signal(signal.SIGKILL)
            for process in side.processes:
                process.wait()
    show(run, bare, folder, options)


def take_turns(run: Side, bare: Side, folder: Path, options: argparse.Namespace) -> None:
    """Let each side run alone for a turn, until both have ended all jobs."""
    sides = (run, bare)
    # both start at once, and then wait for the other
    while not all(num_done(side, folder, options) for side in sides):
        time.sleep(POLL_S)
        for side in sides:
            side.signal(signal.SIGSTOP if num_done(side, folder, options) else signal.SIGCONT)
            if any(process.poll() is not None for process in side.processes):
                raise RuntimeError(f"{side.name} ended: {(folder / f'{side.name}-0.log').read_text()[-2000:]}")
    turn = 0
    while min(len(side.at) for side in sides) <= options.jobs:
        side = sides[turn % 2]
        turn += 1
        if len(side.at) > options.jobs:
            continue
        side.signal(signal.SIGCONT)
        began = time.perf_counter()
        before = side.active_s
        while (passed := time.perf_counter() - began) < TURN_S:
            time.sleep(POLL_S)
            side.active_s = before + passed
            side.mark(num_done(side, folder, options))
        side.signal(signal.SIGSTOP)
        side.active_s = before + time.perf_counter() - began


def num_done(side: Side, folder: Path, options: argparse.Namespace) -> int:
    """Jobs that have ended; in an outer iteration with several, all of them."""
    if side.name == "bare":
        logs = [folder / f"job-{job}.txt" for job in range(options.workers)]
        return min((path.read_text().count("\n") if path.exists() else 0) for path in logs)
    return sum(line["event"] == "committed" for path in folder.glob("runs/*/ledger.jsonl") for line in read_json_lines(path))


def show(run: Side, bare: Side, folder: Path, options: argparse.Namespace) -> None:
    """Print the costs; those of a job are compared with the bare job of the same minibatches."""
    (run_s, run_cpu_s, background_s), (bare_s, bare_cpu_s, _) = run.per_job(), bare.per_job()
    own_cpu_s = [all_s - one for all_s, one in zip(run_cpu_s, background_s, strict=True)]
    print(f"{len(run_s)} jobs of {statistics.median(bare_s):.1f} s on {options.workers} worker(s), load {os.getloadavg()[0]:.1f}")
    for name, ours, theirs in (("wall", run_s, bare_s), ("CPU", own_cpu_s, bare_cpu_s)):
        ratios = [100 * (a / b - 1) for a, b in zip(ours, theirs, strict=False)]
        print(f"{name:5} {100 * (sum(ours) / sum(theirs) - 1):+.2f} % (jobs: median {statistics.median(ratios):+.2f} %, "
              f"{min(ratios):+.2f} to {max(ratios):+.2f})")
    print(f"diagnostics, in a thread of low priority: {100 * sum(background_s) / sum(bare_cpu_s):.2f} % of CPU time")
    lines = [line for path in folder.glob("runs/*/events.jsonl") for line in read_json_lines(path)]
    gaps = [between(line) for line in lines if line["event"] == "outer_iteration"][1:]
    if gaps:
        typical = statistics.median(gaps)
        print(f"between jobs {1000 * typical:.1f} ms an outer iteration ({1000 * min(gaps):.1f} to {1000 * max(gaps):.1f}), "
              f"{100 * typical / statistics.median(bare_s):.3f} % of a job")
    if options.workers == 1:
        compare_bits(next(folder.glob("runs/steady*")), folder, options)


def between(event: dict[str, Any]) -> float:
    """Seconds of an outer iteration outside of the minibatches of its slowest job."""
    steps = sum(event[name] for name in ("compute_s", "average_s", "checkpoint_s", "diagnostics_s"))
    return float(steps - max(job["seconds"] for job in event["jobs"]))


def compare_bits(run: Path, folder: Path, options: argparse.Namespace) -> None:
    """Compare the parameters after the last job with those of the checkpoint."""
    from ngsgd.training.storage.checkpoint import CheckpointStore

    expected = np.load(folder / "job-0.npy")
    config = configured(options, folder)
    task = SpeechTaskSpec(config, str(next(folder.glob("egs-*")))).task(torch.device("cpu"))
    store = CheckpointStore(run / "checkpoints", FlatLayout.of(seeded_model(task, config.seed)), 3)
    found = store.model_after(options.jobs - 1)
    print(f"parameters after job {options.jobs}: {'bitwise identical' if found.tobytes() == expected.tobytes() else 'OTHER BITS'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    parser.add_argument("--jobs", type=int, default=8, help="measured jobs per worker")
    parser.add_argument("--frames", type=int, default=170_000, help="frames of a job; the default takes about 20 s of CPU time")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary files")
    parser.add_argument("--egs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "run":
        train_run(configured(options, options.folder), options.egs)
    elif options.part:
        train_bare(configured(options, options.folder), options.egs, int(options.part), options.folder / f"job-{options.part}.txt",
                   options.jobs)
    else:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            measure(options, Path(folder))


if __name__ == "__main__":
    main()
