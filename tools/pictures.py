"""Check that the pictures of the documentation show what the code makes now.

    python -m tools.pictures                     # pictures older than their code
    python -m tools.pictures docs/report.png     # record that these were made again just now

docs/pictures.json has a digest of the code that each picture was made with. Comments and layout of
the code do not count. A picture that is made again and did not change needs a new record only.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = Path("docs/pictures.json")
# pictures and the code whose output they show
PICTURES = {
    "docs/report.png": "launcher/reports",
    "docs/curvature-optimisers.png": "benchmarks/damped_update.py",
    "docs/results-an4-relu.png": "benchmarks/paper/report.py",
    "docs/results-digits.png": "benchmarks/paper/report.py",
    "docs/mlflow-run.png": "launcher/mlflow",
}


def main(pictures: list[str]) -> int:
    """Record pictures, or print the old ones; the exit code is 1 if there are any."""
    if unknown := [one for one in pictures if one not in PICTURES]:
        raise SystemExit(f"{unknown[0]} is not one of {', '.join(PICTURES)}.")
    if pictures:
        known = {**_record(ROOT), **{one: digest(ROOT, PICTURES[one]) for one in pictures}}
        (ROOT / RECORD).write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")
        return 0
    found = [*old(ROOT)]
    for picture, code in found:
        print(f"{picture} was made by earlier code of {code}")
    return int(bool(found))


def old(root: Path) -> Iterator[tuple[str, str]]:
    """The pictures whose code has changed since, each with its code."""
    known = _record(root)
    return ((picture, code) for picture, code in PICTURES.items() if known.get(picture) != digest(root, code))


def digest(root: Path, code: str) -> str:
    """Digest of the syntax trees of a file or a folder."""
    path = root / code
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    trees = [f"{file.relative_to(root).as_posix()} {ast.unparse(ast.parse(file.read_text(encoding='utf-8')))}" for file in files]
    return hashlib.sha256("\n".join(trees).encode()).hexdigest()[:16]


def _record(root: Path) -> dict[str, str]:
    path = root / RECORD
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
