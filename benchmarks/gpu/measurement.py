"""The interface of a part: the device, clocks, and a file that receives each figure as soon as it
is measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# last lines of a failure that are kept
_MAX_MESSAGE = 600


class Skipped(Exception):
    """A case cannot run here; the message is the reason."""


class Failed(Exception):
    """A case ran and its result is wrong; the message states the difference."""


class Measurement:
    """The device and the results of one part.

    Args:
        path: file that gets one line of JSON per case; a crash of the process keeps the lines
        before it.
            None writes nothing.
        dry_run: run on the CPU with small sizes.
    """

    def __init__(self, path: Path | None, *, dry_run: bool) -> None:
        self.dry_run = dry_run
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.rows: list[dict[str, Any]] = []
        self._path = path
        # results are compared with float64, and timings are of float32
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        """Record one case; the block fills in the figures.  Exceptions become its status and are
        not raised.
        """
        figures: dict[str, Any] = {}
        status, message = "passed", ""
        start = time.perf_counter()
        try:
            yield figures
            self.synchronize()
        except Skipped as reason:
            status, message = "skipped", str(reason)
        except Failed as reason:
            status, message = "failed", str(reason)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            found = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
            status, message = "failed", found[:_MAX_MESSAGE]
        row = {
            "case": name,
            "status": status,
            **figures,
            "wall_s": round(time.perf_counter() - start, 3),
        }
        self._keep(row | ({"message": message} if message else {}))

    def _keep(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def need(self, *packages: str) -> None:
        """Raise Skipped with the names of packages that are not installed."""
        missing = [name for name in packages if importlib.util.find_spec(name) is None]
        if missing:
            raise Skipped(f"not installed: {', '.join(missing)}")

    def need_gpu(self, what: str) -> None:
        """Raise Skipped on a CPU."""
        if not self.on_gpu:
            raise Skipped(f"{what} needs a GPU")

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], object], repeat: int) -> float:
        """Seconds of one call on the device: by CUDA events, or by the clock on a CPU."""
        if not self.on_gpu:
            start = time.perf_counter()
            for _ in range(repeat):
                run()
            return (time.perf_counter() - start) / repeat
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / repeat
