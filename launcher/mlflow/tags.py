"""Tags of a run in MLflow: user, version of the code, and color."""

from __future__ import annotations

import subprocess
from pathlib import Path

from ngsgd.launcher.console import version

# MLflow's default colors of two runs may be two shades of one color
_COLORS = ("#1f6fb4", "#e07b1a", "#2f8f4e", "#c0392b", "#7d4fb0", "#8c6d31", "#17a2b8", "#d6499e")


def versions() -> dict[str, str]:
    """Versions of the packages that compute, and the commit of ngsgd in a checkout."""
    tags = {f"version.{package}": version(package) for package in ("ngsgd", "torch", "ray")}
    source = Path(__file__).parent
    commit = _git(source, "rev-parse", "HEAD")
    return tags | ({"mlflow.source.git.commit": commit,
                    "git.dirty": str(bool(_git(source, "status", "--porcelain"))).lower()} if commit else {})


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command; empty outside a checkout or without git."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""


def origin(index: int) -> dict[str, str]:
    """The tags that MLflow itself would set; `index` chooses the color."""
    import getpass

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # a container without a name for its user
        user = "unknown"
    return {"mlflow.source.name": "ngsgd train", "mlflow.source.type": "LOCAL", "mlflow.user": user,
            "mlflow.runColor": _COLORS[index % len(_COLORS)]}
