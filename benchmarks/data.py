"""Speed of writing and reading examples, of training and of feature extraction.

    python benchmarks/data.py [--hours 5] [--folder FOLDER] [--seconds 5]

The program makes `--hours` of synthetic frames (100 per second, 40 features) in FOLDER.  It writes
their archives with one process and with one per core, and reads them from 1 and from 8 concurrent
processes.  It trains the default model on them with and without prefetching, and extracts features,
also with lhotse if that is installed.  Rates are per second of wall-clock time.

"From memory" means from the page cache, where an archive is after its first pass unless all
archives are larger than memory. Memory of a reader is private memory beyond Python and torch (Pss
without mapped files).  Pages of archives do not count, because the system can drop them at any
time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ngsgd.config import ClusterConfig, EgsConfig, FeatureConfig, RunConfig
from ngsgd.data.archives import archive_name, prepare_archives
from ngsgd.data.frames import FrameSet
from ngsgd.data.reader import EgsReader
from ngsgd.schedules import Shard
from ngsgd.tasks.speech import SpeechTaskSpec
from ngsgd.training.job import Job, JobInit, LocalRef, WorkItem
from ngsgd.training.worker import Worker

DIM, NUM_CLASSES, FRAMES_PER_HOUR, UTTERANCE = 40, 100, 360_000, 500
MINIBATCH = 128
RATE_HZ = 16_000
ROUNDS = 5  # runs with and without prefetching, interleaved


def synthetic(num_frames: int, path: Path) -> FrameSet:
    """Random frames in a file, as prepared corpora have them."""
    random = np.random.default_rng(0)
    features_TD = np.lib.format.open_memmap(path, "w+", np.float32, (num_frames, DIM))
    for begin in range(0, num_frames, FRAMES_PER_HOUR):
        part = features_TD[begin:begin + FRAMES_PER_HOUR]
        part[:] = random.standard_normal(part.shape, np.float32)
    features_TD.flush()
    pdf_T = random.integers(0, NUM_CLASSES, num_frames).astype(np.int32)
    offsets = np.append(np.arange(0, num_frames, UTTERANCE), num_frames)
    return FrameSet(np.load(path, mmap_mode="r"), pdf_T, offsets, tuple(f"utt{u}" for u in range(len(offsets) - 1)))


def writing(frames: FrameSet, config: EgsConfig, folder: Path) -> Path:
    """Write the archives with one process and with one per core; return the latter's directory."""
    directory = folder
    for num_writers in (1, 0):
        began = time.perf_counter()
        shutil.rmtree(folder / "egs", ignore_errors=True)
        directory = prepare_archives(frames, frames, config, num_writers=num_writers or None, num_classes=NUM_CLASSES,
                                     digest="synthetic", cache_root=folder / "egs")
        seconds = time.perf_counter() - began
        size = sum(path.stat().st_size for path in directory.iterdir())
        peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) / 1024
        who = "one process" if num_writers else "one per core"
        print(f"writing    {who:14} {size / 1e9:.2f} GB, {size / seconds / 1e6:,.0f} MB/s, "
              f"{frames.num_frames / seconds:,.0f} frames/s, peak resident {peak:,.0f} MB (pages of files included)", flush=True)
    return directory


def read_for(directory: Path, index: int, num_readers: int, seconds: float, cold: bool) -> None:
    """The body of a reader process: rows per second, and private memory beyond that of Python and
    torch, as JSON.
    """
    torch.set_num_threads(1)
    before_mb = _own_mb()
    reader = EgsReader(directory)
    info = reader.info
    passes = [Shard(archive, frame) for frame in range(info.frames_per_eg) for archive in range(info.num_archives)]
    own = passes[index::num_readers] or passes
    # checksum of the first archive
    list(reader.minibatches(own[0], MINIBATCH, seed=0, outer_iter=0, job=index))
    num_rows, number, began = 0, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        if cold:
            _forget(directory / archive_name(own[number % len(own)].archive))
        for minibatch in reader.minibatches(own[number % len(own)], MINIBATCH, seed=0, outer_iter=number, job=index):
            num_rows += len(minibatch.pdf_N)
        number += 1
    print(json.dumps({"rows_per_s": num_rows / (time.perf_counter() - began), "own_mb": _own_mb() - before_mb}))


def reading(directory: Path, seconds: float) -> dict[int, float]:
    """Rows per second of all readers together, by their number."""
    rates = {}
    for num_readers, where in ((1, "memory"), (1, "disk"), (8, "memory")):
        command = [sys.executable, __file__, "--read", str(directory)]
        arguments = [[str(index), str(num_readers), str(seconds), where] for index in range(num_readers)]
        processes = [subprocess.Popen([*command, *rest], stdout=subprocess.PIPE, text=True) for rest in arguments]
        answers = [json.loads(process.communicate()[0]) for process in processes]
        rate = sum(answer["rows_per_s"] for answer in answers)
        own = [answer["own_mb"] for answer in answers]
        print(f"reading    {num_readers} at once, from {where:6} {rate:,.0f} examples/s together, "
              f"{max(own):.1f} MB of private memory each", flush=True)
        if where == "memory":
            rates[num_readers] = rate
    return rates


def training(directory: Path, config: EgsConfig) -> float:
    """Frames per second of one worker with one thread and the default model."""
    torch.set_num_threads(1)
    rates: list[float] = []
    worker = Worker(SpeechTaskSpec(RunConfig(egs=config, cluster=ClusterConfig(device="auto")), str(directory)), 0)
    for number in range(1 + ROUNDS):
        start = worker.layout.flatten(worker.model.state_dict())
        piece = WorkItem(Shard(number % worker.task.shards().num_archives, 0), number, 0)
        result = worker.run(Job(number, 0, 1, (piece,), JobInit(LocalRef(start)), lr=0.005, lr_factor=1.0))
        if number:  # the first run is a warm-up
            rates.append(result.num_frames / result.seconds)
    print(f"training   {statistics.median(rates):,.0f} frames/s (median of {len(rates)}; {min(rates):,.0f} to {max(rates):,.0f}), "
          f"device {worker.device}", flush=True)
    return statistics.median(rates)


def extraction(seconds: float) -> None:
    """Seconds of audio converted to 80 filterbanks per second on one thread; also lhotse's where it
    is installed.
    """
    random = np.random.default_rng(0)
    utterances = [(3000 * random.standard_normal(RATE_HZ * 10)).astype(np.int16) for _ in range(20)]
    ours = _ours()
    if ours:
        _extraction("ngsgd (kaldi-native-fbank)", ours, utterances, seconds)
    else:
        print("extraction ngsgd: not measured: run pip install 'ngsgd[asr]'")
    try:
        from lhotse import Fbank, FbankConfig
    except ImportError as error:
        print(f"extraction lhotse: not measured: not installed ({error})")
        return
    theirs = Fbank(FbankConfig(sampling_rate=RATE_HZ, num_mel_bins=80, dither=0.0))
    _extraction("lhotse Fbank", lambda samples: theirs.extract(samples.astype(np.float32) / 32768.0, RATE_HZ), utterances, seconds)


def _ours() -> Callable[[np.ndarray], object] | None:
    try:
        from ngsgd.asr.features import filterbank

        filterbank.toolkit()
    except Exception:
        return None
    config = FeatureConfig(num_mel_bins=80)
    return lambda samples: filterbank.extract(samples, config)


def _extraction(name: str, extract: Callable[[np.ndarray], object], utterances: list[np.ndarray], seconds: float) -> None:
    extract(utterances[0])
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        extract(utterances[done % len(utterances)])
        done += 1
    took = time.perf_counter() - began
    audio_s = done * len(utterances[0]) / RATE_HZ
    print(f"extraction {name:27} {audio_s / took:,.0f} times real time ({took / done * 1000:.1f} ms for 10 s of audio)", flush=True)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _own_mb() -> float:
    rollup = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return float(rollup["Pss_Anon"].split()[0]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per measurement")
    parser.add_argument("--folder", type=Path, default=None, help="folder with 4.8 GB per 10 hours of free space")
    parser.add_argument("--read", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        directory, index, num_readers, seconds, where = options.read
        read_for(Path(directory), int(index), int(num_readers), float(seconds), where == "disk")
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder, config = Path(temporary), EgsConfig()
        frames = synthetic(int(options.hours * FRAMES_PER_HOUR), folder / "features.npy")
        directory = writing(frames, config, folder)
        rates = reading(directory, options.seconds)
        rate = training(directory, config)
        print(f"           one reader supplies {rates[1] / rate:.0f} times the examples of one worker; 8 workers on separate cores "
              f"would consume {8 * rate / rates[8]:.2f} of the output of 8 readers")
    extraction(options.seconds)


if __name__ == "__main__":
    main()
