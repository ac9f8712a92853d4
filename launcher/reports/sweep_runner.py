"""Training of the runs that `ngsgd compare` gets settings for, each in a separate process.

The peak memory of that process and of its workers is written to `<run>/measured.json`.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ngsgd.errors import ConfigError
from ngsgd.files import write_text
from ngsgd.launcher.config import compose
from ngsgd.object_storage.urls import local_root
from ngsgd.runs.run_folder import RunFolder

if TYPE_CHECKING:
    import psutil

# costs a thousandth of a core; a shorter peak may be missed
_LOOK_EVERY_S = 0.1


def trained(settings: Sequence[str], report: Callable[[str], None]) -> list[RunFolder]:
    """Return the folders of the runs of a sweep, such as optimizer=ngsgd,kfac, without failed runs.

    Raises:
        ConfigError: a setting is wrong, or all runs failed.
    """
    compose.check_sweep(settings)
    runs = compose.each_of_sweep(settings)
    folders = []
    for number, (lines, swept) in enumerate(runs, start=1):
        name = run_name(swept)
        report(f"run {number} of {len(runs)}: {name}")
        folder = _train(lines if any(line.startswith("name=") for line in lines) else [*lines, f"name={name}"])
        if folder is None:
            report(f"{name} failed and is skipped; run ngsgd train {' '.join(lines)} to see why")
        else:
            folders.append(folder)
    if not folders:
        raise ConfigError("all runs failed, so there is nothing to compare.")
    return folders


def run_name(swept: Sequence[str]) -> str:
    """The name of a run: the values in which it differs."""
    words = [line.partition("=")[2] if not line.startswith("seed=") else f"s{line.partition('=')[2]}" for line in swept]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(words)) or "run"


def _train(lines: Sequence[str]) -> RunFolder | None:
    config = compose.compose(list(lines))
    root, pattern = local_root(config.output_dir), f"{config.name}-[0-9]*/config.yaml"
    before = set(root.glob(pattern))
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "ngsgd.launcher", "train", "--quiet", *lines], stdout=subprocess.DEVNULL)
    peak_bytes = _watched(process)
    made = sorted(set(root.glob(pattern)) - before)
    if process.returncode or not made:
        return None
    folder = RunFolder.open(made[-1].parent)
    write_text(folder.measured, json.dumps({"peak_resident_mib": round(peak_bytes / 2**20),
                                            "whole_s": round(time.monotonic() - began, 2)}, indent=1))
    return folder


def _watched(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end; return the largest sum of resident bytes of it and its descendants."""
    import psutil

    peak = 0
    while process.poll() is None:
        # it ends while it is looked at
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            peak = max(peak, sum(_resident(one) for one in (root, *root.children(recursive=True))))
        time.sleep(_LOOK_EVERY_S)
    return peak


def _resident(process: psutil.Process) -> int:
    import psutil

    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
