"""Time and memory of preparing Kaldi data directories of several sizes, and kills during it.

    python benchmarks/preparation.py --hours 2 8 32 [--folder FOLDER] [--kills 5] [--flat-hours 2]

The program writes corpora of recordings of ten minutes: digits of the synthesizer at 8 kHz, which
are repeated in other noise under other names. Each stage runs in a separate process:

- features: filterbanks in shards, normalized per speaker;
- flat start: an alignment of all frames from the transcripts, for sizes up to `--flat-hours`;
- archives: labels of a given alignment, and archives of training examples. The alignment consists
  of equal parts of each utterance; another process writes it, which is not measured.

Then the stage of features is killed `--kills` times with SIGKILL at random times and started again.
The result must have the bytes of the first.

Memory is the peak resident memory (VmHWM) of the process of a stage, and of the largest process
that it started. Mapped pages of files count. CPU seconds are those of all processes. The files of
one size are removed before the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from ngsgd.asr.align import forced_alignment
from ngsgd.asr.corpora import alignments, digits
from ngsgd.asr.corpora.corpus import prepare
from ngsgd.asr.utterance import SAMPLE_RATE_HZ, Utterance
from ngsgd.config import AlignConfig, DataConfig, EgsConfig, FeatureConfig, RunConfig
from ngsgd.data.archives import prepare_archives
from ngsgd.pipeline import align

FEATURES = FeatureConfig(sample_rate_hz=SAMPLE_RATE_HZ, cmvn="speaker")
RECORDING_S, HELD_OUT_S = 600.0, 120.0
NOISE = 200.0
STAGES = ("features", "flat start", "archives")


def main() -> None:
    """Measure all sizes, or run one stage in this process."""
    options = _options()
    if options.stage:
        _run_stage(options.stage, options.folder)
        return
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    spoken = _spoken()
    try:
        for hours in options.hours:
            _measure(hours, spoken, folder / f"{hours:g}", options)
            shutil.rmtree(folder / f"{hours:g}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hours", type=float, nargs="+", default=[2.0, 8.0], help="sizes in hours of training speech")
    parser.add_argument("--flat-hours", type=float, default=2.0, help="maximum size for a flat start")
    parser.add_argument("--kills", type=int, default=5, help="number of kills of the stage of features")
    parser.add_argument("--folder", default=None, help="parent of the temporary files")
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(hours: float, spoken: Sequence[Utterance], folder: Path, options: argparse.Namespace) -> None:
    write_corpus(folder / "data", spoken, hours)
    for stage in STAGES:
        if stage == "flat start" and hours > options.flat_hours:
            continue
        if stage == "archives":
            _result_of(_command("alignment", folder))
        found = _result_of(_command(stage, folder))
        print(f"| {hours:g} | {stage} | {found['seconds'] / hours:.1f} | {found['cpu_s'] / hours:.1f} | "
              f"{found['peak_mb']:.0f} | {found['child_mb']:.0f} |", flush=True)
        if stage == "features":
            seconds, digest = found["seconds"], found["digest"]
    shutil.rmtree(folder / "cache")
    digests = {_killed(folder, seconds, options.kills)} if options.kills else {digest}
    print(f"| {hours:g} | {options.kills} kills: {'equal bytes' if digests == {digest} else 'OTHER BYTES'} | | | | |", flush=True)


def _result_of(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _command(stage: str, folder: Path) -> list[str]:
    return [sys.executable, __file__, "--stage", stage, "--folder", str(folder)]


def _killed(folder: Path, seconds: float, num_kills: int) -> str:
    """Kill the computation of features at random times; return the digest of the last attempt."""
    source = random.Random(0)
    for _ in range(num_kills):
        process = subprocess.Popen(_command("features", folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(source.uniform(0.0, seconds * 2 / num_kills))
        process.send_signal(signal.SIGKILL)
        process.wait()
        shards = [path.suffix for path in folder.glob("cache/*.shards/*")]
        print(f"killed: {shards.count('.safetensors')} shards, {shards.count('.tmp')} incomplete files", file=sys.stderr)
    return str(_result_of(_command("features", folder))["digest"])


# Synthetic corpora --------------------------------------------------------------------------------


def _spoken() -> list[Utterance]:
    data = DataConfig(corpus="digits")
    return list(digits.utterances("train", data, minutes=RECORDING_S / 60, num_at_once=os.cpu_count() or 1,
                                      is_clean=lambda _utt_id: True))


def write_corpus(folder: Path, spoken: Sequence[Utterance], hours: float) -> None:
    """Write train, valid, test and a lexicon; each recording has its own noise and speaker."""
    folder.mkdir(parents=True)
    lexicon = [f"{word} {' '.join(phones)}" for word, readings in digits.TOPOLOGY.lexicon.items() for phones in readings]
    (folder / "lexicon.txt").write_text("\n".join(lexicon) + "\n")
    for number, (name, seconds) in enumerate((("train", hours * 3600), ("valid", HELD_OUT_S), ("test", HELD_OUT_S))):
        (folder / name).mkdir()
        _write_set(folder / name, name, spoken, seconds, np.random.default_rng(number))


def _write_set(folder: Path, name: str, spoken: Sequence[Utterance], seconds: float, rng: np.random.Generator) -> None:
    tables: dict[str, list[str]] = {"text": [], "utt2spk": [], "wav.scp": [], "segments": []}
    for number, some in enumerate(_recordings(spoken, seconds)):
        recording = f"{name}{number:04d}"
        samples = np.concatenate([one.samples for one in some]).astype(np.float32)
        samples += NOISE * rng.standard_normal(len(samples), np.float32)
        soundfile.write(folder / f"{recording}.wav", np.clip(samples, -32768, 32767).astype(np.int16), SAMPLE_RATE_HZ)
        tables["wav.scp"].append(f"{recording} {folder / recording}.wav")
        ends = np.cumsum([len(one.samples) for one in some]) / SAMPLE_RATE_HZ
        for i, (one, start, end) in enumerate(zip(some, [0.0, *ends], ends, strict=False)):
            utt_id = f"{recording}-{i:04d}"
            tables["text"].append(f"{utt_id} {' '.join(one.words)}")
            tables["utt2spk"].append(f"{utt_id} {recording}")
            tables["segments"].append(f"{utt_id} {recording} {start:.6f} {end:.6f}")
    for table, lines in tables.items():
        (folder / table).write_text("\n".join(lines) + "\n")


def _recordings(spoken: Sequence[Utterance], seconds: float) -> Iterator[list[Utterance]]:
    """Yield the utterances of each recording; all together last about `seconds`."""
    while seconds > 0:
        some, length_s = [], 0.0
        for one in spoken:
            if length_s < min(seconds, RECORDING_S):
                some.append(one)
                length_s += len(one.samples) / SAMPLE_RATE_HZ
        yield some
        seconds -= length_s


# One stage ----------------------------------------------------------------------------------------


def _run_stage(stage: str, folder: str) -> None:
    begun = time.monotonic()
    children = _Children()
    children.start()
    about = {"features": _features, "flat start": _flat_start, "alignment": _alignment, "archives": _archives}[stage](Path(folder))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"seconds": time.monotonic() - begun, "peak_mb": _peak_mb(os.getpid()), "child_mb": children.peak_mb,
                      "cpu_s": sum(one.ru_utime + one.ru_stime for one in used), **about}))


class _Children(threading.Thread):
    """Samples the peak memory of the processes that this one starts.

    ru_maxrss would include the memory of this process, which a child has before it runs a program.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_mb = 0.0

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            for path in Path("/proc/self/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    self.peak_mb = max([self.peak_mb, *(_peak_mb(int(pid)) for pid in path.read_text().split())])
            time.sleep(0.2)


def _peak_mb(pid: int) -> float:
    """VmHWM of a process; 0 before it runs its program, and after it ended."""
    with contextlib.suppress(OSError):
        if b"ngsgd" in Path(f"/proc/{pid}/cmdline").read_bytes() or pid == os.getpid():
            found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            return int(found[1]) / 1024 if found else 0.0
    return 0.0


def _data(folder: Path, alignment: str = "") -> DataConfig:
    return DataConfig(corpus="kaldi", source=str(folder / "data"), alignment=alignment)


def _features(folder: Path) -> dict[str, Any]:
    return {"digest": prepare(_data(folder), FEATURES, folder / "cache", _quiet).digest}


def _flat_start(folder: Path) -> dict[str, Any]:
    config = RunConfig(data=_data(folder), features=FEATURES, align=AlignConfig())
    align.make(config, folder / "cache", _quiet)
    return {}


def _alignment(folder: Path) -> dict[str, Any]:
    corpus = prepare(_data(folder), FEATURES, folder / "cache", _quiet)
    alignments.write(folder / "equal.npz", forced_alignment.flat_start(corpus, ""))
    return {}


def _archives(folder: Path) -> dict[str, Any]:
    corpus = prepare(_data(folder, str(folder / "equal.npz")), FEATURES, folder / "cache", _quiet)
    prepare_archives(corpus.train.frames, corpus.valid.frames, EgsConfig(), num_classes=corpus.num_pdfs, digest=corpus.digest,
                     cache_root=folder / "cache", groups=corpus.train.speakers, report=_quiet)
    return {}


def _quiet(_line: str) -> None:
    pass


if __name__ == "__main__":
    main()
