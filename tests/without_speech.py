"""Run tests of engine, optimizers and examples in a copy of the tree without `ngsgd.asr`.

    python -m tests.without_speech                              # all tests of these folders
    python -m tests.without_speech tests/cluster -k groups      # arguments of pytest
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("tests/training", "tests/cluster", "tests/optim", "tests/examples")


def run(arguments: Sequence[str] = FOLDERS) -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("ngsgd", "launcher", "conf", "tests", "examples"):
            # ngsgd/launcher and ngsgd/conf are links
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("asr", "__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:] or FOLDERS))
