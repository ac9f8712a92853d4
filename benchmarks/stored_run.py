"""Wall time of a run in object storage, compared with the same run in a folder.

    python benchmarks/stored_run.py [--pairs 4] [SETTING...]

The default run (`recipe=digits`, 2 workers) is trained and decoded, alternately in a folder and in
a bucket of an S3 service on this machine (moto, in its own process, on the same cores). The data
are prepared before. The network adds nothing here; each commit makes about four requests one after
the other, so a service with 30 ms per request adds 0.1 s per outer iteration.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.object_storage.service import BUCKET, Service

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def _service() -> Iterator[dict[str, str]]:
    """The service in a separate process; yields the environment of its users."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-m", "tests.object_storage.service", "127.0.0.1", str(port)], cwd=ROOT,
                               stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout and process.stdout.readline() == "ready\n"
        yield Service.environment_of(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def _train(output_dir: str, folder: Path, settings: list[str], environment: dict[str, str]) -> float:
    """Seconds of `ngsgd train`."""
    words = [sys.executable, "-m", "ngsgd", "train", "--quiet", "cluster=local", "tracking.kind=none",
             f"output_dir={output_dir}", f"data.cache_dir={folder / 'data'}", *settings]
    began = time.perf_counter()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env={
        **os.environ, **environment, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)})
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/stored_run.py", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    options = parser.parse_intermixed_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="ngsgd-stored-") as name, _service() as environment:
        folder = Path(name)
        _train(str(folder / "warm"), folder, [*options.settings, "schedule.num_epochs=0.1"], environment)
        for pair in range(options.pairs):
            places = [str(folder / "runs"), f"s3://{BUCKET}/runs"]
            # the order changes from pair to pair
            took = {place: _train(place, folder, options.settings, environment) for place in places[::1 - 2 * (pair % 2)]}
            ratios.append(took[places[1]] / took[places[0]])
            print(f"folder {took[places[0]]:.1f} s, URL {took[places[1]]:.1f} s: {ratios[-1]:.3f}", flush=True)
    print(f"URL / folder: median {statistics.median(ratios):.3f} of {len(ratios)} pairs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
