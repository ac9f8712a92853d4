"""Tags of a run in MLflow: who made it, of which code, and its colour."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ngsgd.launcher.console import version

# MLflow draws runs in colours of its own that may be two shades of one; ours are told apart
_COLOURS = ("#1f6fb4", "#e07b1a", "#2f8f4e", "#c0392b", "#7d4fb0", "#8c6d31", "#17a2b8", "#d6499e")


def versions() -> dict[str, str]:
    """Versions of what computes, and the commit of our code where it is a checkout."""
    tags = {f"version.{package}": version(package) for package in ("ngsgd", "torch", "ray")}
    source = Path(__file__).parent
    commit = _git(source, "rev-parse", "HEAD")
    return tags | ({"mlflow.source.git.commit": commit,
                    "git.dirty": str(bool(_git(source, "status", "--porcelain"))).lower()} if commit else {})


def _git(folder: Path, *arguments: str) -> str:
    """What git says, or nothing when this is no checkout or git is missing."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


def origin(index: int) -> dict[str, str]:
    """The tags that MLflow itself would set; `index` tells the colours of runs apart."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # a container without a name for its user
        user = "unknown"
    return {"mlflow.source.name": "ngsgd train", "mlflow.source.type": "LOCAL", "mlflow.user": user,
            "mlflow.runColor": _COLOURS[index % len(_COLOURS)]}
