"""Time per frame with more workers than cores: `ngsgd train` with 2 and with 4 workers,
interleaved.

    python benchmarks/workers.py [ROUNDS] [SETTING ...]

The program prints, per number of workers, the seconds of computing per million frames (outer
iterations only, without start-up and decoding), and the ratio of the medians.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ngsgd.files import read_json_lines

WORKERS = (2, 4)


def seconds_per_million_frames(num_workers: int, output_dir: Path, settings: list[str]) -> float:
    """One run; the first outer iteration is skipped, because workers warm up in it."""
    before = set(output_dir.glob("*/events.jsonl"))
    subprocess.run([Path(sys.executable).with_name("ngsgd"), "train", "--quiet", f"cluster.num_workers={num_workers}",
                    f"output_dir={output_dir}", "tracking.kind=none", *settings], check=True, stdout=subprocess.DEVNULL)
    (events,) = set(output_dir.glob("*/events.jsonl")) - before
    lines = read_json_lines(events)
    steps = [line for line in lines if line["event"] == "outer_iteration"]
    frames = steps[-1]["frames_processed"] - steps[0]["frames_processed"]
    return 1e6 * float(sum(step["compute_s"] for step in steps[1:])) / float(frames)


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    settings = sys.argv[2:]
    seconds: dict[int, list[float]] = {number: [] for number in WORKERS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for number in WORKERS:
                seconds[number].append(seconds_per_million_frames(number, Path(folder), settings))
                print(f"{number} workers: {seconds[number][-1]:.1f} s per million frames", flush=True)
    medians = {number: statistics.median(values) for number, values in seconds.items()}
    print(f"ratio {WORKERS[1]} to {WORKERS[0]} workers: {medians[WORKERS[1]] / medians[WORKERS[0]]:.2f} "
          f"(medians of {rounds}; spread {', '.join(f'{n}: {min(v):.1f}-{max(v):.1f}' for n, v in seconds.items())})")


if __name__ == "__main__":
    main()
