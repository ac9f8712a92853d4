"""The runs that `ngsgd compare` is given settings for: trained one after the other, each in a process of its own.

What only that process's end tells, the largest memory of it and of the processes it waited for, goes to `<run>/measured.json`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from launcher import compose
from launcher.run_folder import RunFolder
from ngsgd.errors import ConfigError
from ngsgd.files import write_text

_UNITS_IN_MIB = 1024 if sys.platform == "linux" else 1024**2   # of ru_maxrss: KiB, elsewhere bytes


def trained(settings: Sequence[str], report: Callable[[str], None]) -> list[RunFolder]:
    """The folders of the runs that a sweep over the settings makes, such as preconditioner=none,kfac; one that fails is left out.

    Raises:
        ConfigError: a setting is wrong, or no run came to its end.
    """
    compose.check_sweep(settings)
    runs = compose.each_of_sweep(settings)
    folders = []
    for number, (lines, swept) in enumerate(runs, start=1):
        name = _name(swept)
        report(f"run {number} of {len(runs)}: {name}")
        folder = _train(lines if any(line.startswith("name=") for line in lines) else [*lines, f"name={name}"])
        if folder is None:
            report(f"{name} did not come to its end and is left out; run ngsgd train {' '.join(lines)} to see why")
        else:
            folders.append(folder)
    if not folders:
        raise ConfigError("none of the runs came to its end, so there is nothing to compare.")
    return folders


def _name(swept: Sequence[str]) -> str:
    """What a run is called: the values in which it differs."""
    words = [line.partition("=")[2] if not line.startswith("seed=") else f"s{line.partition('=')[2]}" for line in swept]
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", "-".join(words)) or "run"


def _train(lines: Sequence[str]) -> RunFolder | None:
    config = compose.compose(list(lines))
    root, pattern = Path(config.output_dir), f"{config.name}-[0-9]*/config.yaml"
    before = set(root.glob(pattern))
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "launcher", "train", "--quiet", *lines], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    made = sorted(set(root.glob(pattern)) - before)
    if process.returncode or not made:
        return None
    folder = RunFolder.open(made[-1].parent)
    write_text(folder.measured, json.dumps({"peak_resident_mib": round(usage.ru_maxrss / _UNITS_IN_MIB),
                                            "process_s": round(usage.ru_utime + usage.ru_stime, 2),
                                            "whole_s": round(time.monotonic() - began, 2)}, indent=1))
    return folder
