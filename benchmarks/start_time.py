"""CPU seconds from `ngsgd train` to the first minibatch, with Ray and with local processes.

    python benchmarks/start_time.py [--pairs 4] [SETTING...]

The default run (`recipe=digits`, 2 workers, MLflow) starts alternately with `cluster=ray` and
without a choice of the cluster. The data are prepared before. A run is stopped when a worker has
finished the first minibatch. CPU time and memory (PSS) are those of all processes of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch

# file that a worker creates after its first minibatch
_MARK = "NGSGD_BENCHMARK_MARK"
_KINDS = {"Ray": ["cluster=ray"], "default": []}
_POLL_S, _TIMEOUT_S = 0.005, 600.0


class Network(torch.nn.Module):
    """The hidden layers of the recipe, which create the file where the second minibatch begins."""

    def __init__(self, *, num_inputs: int, num_classes: int, **_others: Any) -> None:
        sizes = [num_inputs, 256, 256, 256]
        hidden = [part for pair in itertools.pairwise(sizes) for part in (torch.nn.Linear(*pair), torch.nn.ReLU())]
        super().__init__()
        self.layers = torch.nn.Sequential(*hidden, torch.nn.Linear(sizes[-1], num_classes))
        self.num_minibatches = 0

    def forward(self, x_NI: torch.Tensor) -> torch.Tensor:
        self.num_minibatches += self.training and torch.is_grad_enabled()
        if self.num_minibatches == 2 and _MARK in os.environ:
            Path(os.environ[_MARK]).write_text(str(os.getpid()))
        logits: torch.Tensor = self.layers(x_NI)
        return logits


def start(folder: Path, settings: list[str]) -> tuple[float, float, float]:
    """CPU seconds, wall seconds and MB of all processes of a command at its first minibatch."""
    mark = folder / "mark"
    words = [sys.executable, "-m", "ngsgd", "train", "--quiet", f"model._target_={Path(__file__).stem}:Network",
             f"model.search_path={Path(__file__).resolve().parent}", f"output_dir={folder / 'runs'}", *settings]
    began = time.perf_counter()
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(words, env={**os.environ, _MARK: str(mark)}, cwd=folder, stdout=output, stderr=output)
    while not mark.exists():
        time.sleep(_POLL_S)
        if process.poll() is not None or time.perf_counter() - began > _TIMEOUT_S:
            process.kill()
            raise RuntimeError(f"no minibatch:\n{(folder / 'output').read_text()[-3000:]}")
    wall_s, main, cpu_s, mb = time.perf_counter() - began, psutil.Process(process.pid), 0.0, 0.0
    processes = [main, *main.children(recursive=True)]
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            # with the times of children that ended
            cpu_s += sum(one.cpu_times()[:4])
            mb += one.memory_full_info().pss / 1e6
    process.terminate()
    process.wait(timeout=_TIMEOUT_S)
    psutil.wait_procs(processes[1:], timeout=_TIMEOUT_S)
    mark.unlink()
    return cpu_s, wall_s, mb


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, metavar="N", help="runs of each kind (default: %(default)s)")
    parser.add_argument("settings", nargs="*", metavar="SETTING")
    options = parser.parse_intermixed_args()
    found: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in _KINDS}
    with tempfile.TemporaryDirectory(prefix="ngsgd-start-", ignore_cleanup_errors=True) as name:
        # prepares the data and fills the page cache
        for number in range(options.pairs + 1):
            for kind, chosen in _KINDS.items():
                one = start(Path(name), [*chosen, *options.settings])
                print(f"{kind:8}{one[0]:6.1f} CPU s, {one[1]:6.1f} s, {one[2]:5.0f} MB{'' if number else ' (warm-up)'}, "
                      f"load {os.getloadavg()[0]:.1f}", flush=True)
                found[kind] += [one] if number else []
    print("| cluster | CPU seconds, median (range) | seconds | MB of all processes |\n|---|---|---|---|")
    for kind, rows in found.items():
        cells = [f"{statistics.median(column):.{digits}f} ({min(column):.{digits}f} to {max(column):.{digits}f})"
                 for column, digits in zip(zip(*rows, strict=True), (1, 1, 0), strict=True)]
        print(f"| {kind} | {' | '.join(cells)} |")
    ratios = [default[0] / ray[0] for ray, default in zip(found["Ray"], found["default"], strict=True)]
    print(f"default / Ray, CPU seconds: median {statistics.median(ratios):.2f} of {len(ratios)} pairs")


if __name__ == "__main__":
    main()
