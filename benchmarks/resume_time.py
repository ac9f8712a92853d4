"""Seconds from `ngsgd resume` to the first minibatch, for data sets of several sizes.

    python benchmarks/resume_time.py [--millions 1 10 100] [--rounds 5] [--folder FOLDER]

The program writes Kaldi data directories with features of dimension 4 and utterances of 1000
frames, and an alignment. `ngsgd train` prepares the archives and trains half an epoch; then it is
killed with SIGKILL. Each round copies that run folder, resumes it, and measures the time until a
worker has finished the first minibatch. CPU time is that of the coordinator alone. The resumed run
is killed there. Sizes are interleaved.

100 million frames take 7 GB of disk and 10 minutes to prepare.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ngsgd.asr.corpora import alignments
from ngsgd.files import read_json_lines
from ngsgd.training.worker import Worker

DIM, UTTERANCE, NUM_PDFS = 4, 1000, 5
NUM_JOBS = 8
# file that a worker creates after its first minibatch
_MARK = "NGSGD_BENCHMARK_MARK"
_POLL_S, _TIMEOUT_S = 0.002, 900.0
_PATIENCE_S = 0.05


def write_set(folder: Path, name: str, num_frames: int) -> dict[str, np.ndarray]:
    """Write a data directory with random features; return its labels."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(num_frames)
    labels = {}
    tables = {table: (folder / table).open("w") for table in ("text", "utt2spk", "feats.scp")}
    with (folder / "feats.ark").open("wb") as archive:
        for number in range(num_frames // UTTERANCE):
            utt_id = f"{name}{number:06d}"
            archive.write(f"{utt_id} ".encode())
            for table, value in (("text", "one"), ("utt2spk", f"{name}{number // 100}"),
                                 ("feats.scp", f"{folder / 'feats.ark'}:{archive.tell()}")):
                tables[table].write(f"{utt_id} {value}\n")
            archive.write(b"\0BFM " + struct.pack("<bibi", 4, UTTERANCE, 4, DIM))
            archive.write(random.standard_normal((UTTERANCE, DIM), np.float32).tobytes())
            labels[utt_id] = random.integers(0, NUM_PDFS, UTTERANCE).astype(np.int32)
    for file in tables.values():
        file.close()
    return labels


def write_data(folder: Path, num_frames: int) -> None:
    """Write train, valid and test, the lexicon and the alignment."""
    found = {}
    for name, number in (("train", num_frames), ("valid", 20 * UTTERANCE), ("test", 20 * UTTERANCE)):
        found.update(write_set(folder / name, name, number))
    (folder / "lexicon.txt").write_text("one w ah n\ntwo t uw\n")
    alignments.write(folder / "labels.npz", found)


def train_half(folder: Path, num_frames: int) -> Path:
    """Prepare the data and train half an epoch; return the folder of the killed run."""
    half = num_frames // 2
    settings = ["data.corpus=kaldi", f"data.source={folder / 'data'}", f"data.alignment={folder / 'data/labels.npz'}",
                "features.kind=given", "features.cmvn=none", "egs.left_context=1", "egs.right_context=1",
                "model.hidden_dim=16", "model.num_layers=1", "optimizer=sgd", "schedule.minibatch_size=1000",
                "schedule.num_epochs=20", f"schedule.num_jobs_initial={NUM_JOBS}", f"schedule.num_jobs_final={NUM_JOBS}",
                "cluster=local", "cluster.num_workers=2", "tracking.kind=none", f"output_dir={folder / 'runs'}"]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen([sys.executable, "-m", "ngsgd", "train", "--quiet", *settings], stdout=output,
                                   stderr=subprocess.STDOUT)
        while process.poll() is None:
            time.sleep(_PATIENCE_S)
            runs = list((folder / "runs").glob("*/events.jsonl"))
            events = read_json_lines(runs[0]) if runs else []
            done = [line["frames_processed"] for line in events if line["event"] == "outer_iteration"]
            if done and done[-1] >= half:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return runs[0].parent
    raise RuntimeError(f"the run ended before the middle of its first epoch:\n{(folder / 'output').read_text()[-3000:]}")


def resume_s(run: Path, folder: Path) -> tuple[float, float]:
    """Resume a copy of a run; return the seconds until the end of the first minibatch, and the CPU
    seconds of the coordinator.
    """
    copy, mark = folder / "copy", folder / "mark"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    began = time.time()
    process = subprocess.Popen([sys.executable, __file__, "--resume", str(copy)], env={**os.environ, _MARK: str(mark)},
                               stdout=subprocess.DEVNULL)
    while not mark.exists():
        time.sleep(_POLL_S)
        if process.poll() is not None or time.time() - began > _TIMEOUT_S:
            process.kill()
            raise RuntimeError(f"{copy} was not resumed")
    seconds, cpu_s = mark.stat().st_mtime - began, _cpu_s(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    mark.unlink()
    shutil.rmtree(copy)
    return seconds, cpu_s


def _cpu_s(process_id: int) -> float:
    user, system = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def mark_first_minibatch() -> None:
    """Let workers of this process create the file after their first minibatch."""
    train = Worker._train

    def marked(worker: Worker, *arguments: Any) -> None:
        train(worker, *arguments)
        Worker._train = train  # type: ignore[method-assign]
        Path(os.environ[_MARK]).touch()
    Worker._train = marked  # type: ignore[method-assign, assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="sizes in million frames")
    parser.add_argument("--rounds", type=int, default=5, help="resumed runs per size")
    parser.add_argument("--folder", type=Path, default=None, help="parent of the temporary files")
    parser.add_argument("--kept", type=Path, default=None, help="folder of prepared data and killed runs, kept for the next call")
    parser.add_argument("--resume", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resume:
        from ngsgd.launcher.cli import main as command

        sys.argv = ["ngsgd", "resume", options.resume, "--quiet"]
        sys.exit(command())
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = options.kept or Path(temporary)
        runs = {size: prepared(folder / f"{size:g}", size) for size in options.millions}
        found: dict[float, list[tuple[float, float]]] = {size: [] for size in runs}
        # the first round fills the page cache
        for number, (size, run) in itertools.product(range(options.rounds + 1), runs.items()):
            seconds, cpu_s = resume_s(run, folder / f"{size:g}")
            print(f"{size:g} M frames: {seconds:.2f} s, {cpu_s:.2f} s of CPU time{'' if number else ' (warm-up)'}, "
                  f"load {os.getloadavg()[0]:.1f}", flush=True)
            found[size] += [(seconds, cpu_s)] if number else []
    print("| frames | seconds to the first minibatch, median (range) | CPU seconds of the coordinator |\n|---|---|---|")
    for size, pairs in found.items():
        print(f"| {size:g} M | {_shown([one for one, _ in pairs])} | {_shown([one for _, one in pairs])} |")


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def prepared(folder: Path, millions: float) -> Path:
    """Return the killed run of a size, after preparing it if needed."""
    kept = folder / "run"
    if not kept.exists():
        began = time.perf_counter()
        num_frames = round(1e6 * millions)
        if not (folder / "data/labels.npz").exists():
            write_data(folder / "data", num_frames)
        kept.symlink_to(train_half(folder, num_frames))
        print(f"{millions:g} M frames: prepared and trained for half an epoch in {time.perf_counter() - began:.0f} s", flush=True)
    return kept.resolve()


# the fork server imports this file as __mp_main__ before it starts workers
if os.environ.get(_MARK) and __name__ == "__mp_main__":
    mark_first_minibatch()

if __name__ == "__main__":
    main()
