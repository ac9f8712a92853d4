"""benchmarks/gpu/RESULTS.md, written from the JSON files in benchmarks/gpu/results."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS.parent / "RESULTS.md"
_HIDDEN = ("case", "status", "wall_s", "message", "net", "batch", "optimizer")
_HEAD = """\
# What ran on which device

This page is written by `python -m benchmarks.gpu --page` from the files in
[results](results); a test compares them.

    make gpu                    # all parts, at most 8 minutes on one GPU
    make gpu ARGS=--dry-run     # the same program on the CPU, with small sizes; CI runs it
    python -m benchmarks.gpu    # without make and .venv: torch with CUDA and numpy are enough

Each part runs in a separate process with a time limit. A part whose packages are missing is
skipped with its reason. Results are written after each part, and a second call skips the parts that
passed with the same code, device and torch.
"""

Run = dict[str, Any]


def write(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Write the page from all files of results."""
    page.write_text(text(read(results)), encoding="utf-8")


def read(results: Path = RESULTS) -> list[Run]:
    """Recorded runs, those on GPUs first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    return sorted(runs, key=lambda run: bool(run["dry_run"]))


def text(runs: Sequence[Run]) -> str:
    """The page as Markdown."""
    on_gpus = [run for run in runs if not run["dry_run"]]
    lines = [_HEAD, "## Status", ""]
    if on_gpus:
        lines.append(f"{len(on_gpus)} {'run' if len(on_gpus) == 1 else 'runs'} on GPUs.")
    else:
        lines.append(
            "No run on a GPU has been recorded. The program has run on a CPU with `--dry-run` only:\n"
            "code paths that need CUDA (CUDA graphs, NCCL, streams, pinned memory) have not run anywhere."
        )
    lines += [
        "",
        "| device | torch | CUDA | date | commit | passed | failed | skipped or not run |",
        "|---|---|---|---|---|---|---|---|",
        *map(_line, runs),
        "",
    ]
    for run in on_gpus:
        lines += _sections(run)
    return "\n".join(lines).rstrip() + "\n"


def _line(run: Run) -> str:
    about, parts = run["machine"], run["parts"]
    passed: list[str] = []
    failed: list[str] = []
    rest: list[str] = []
    lists = {"passed": passed, "failed": failed, "crashed": failed, "timed out": failed}
    for name in PARTS:
        lists.get(parts.get(name, {}).get("status", ""), rest).append(name)
    dates = sorted(part["date"] for part in parts.values()) or [""]
    commits = sorted({part["commit"] for part in parts.values()})
    device = about["device"] + (" (dry run)" if run["dry_run"] else "")
    cells = [
        device,
        about["torch"],
        about.get("cuda", "-"),
        dates[-1],
        ", ".join(commits),
        *map(", ".join, (passed, failed, rest)),
    ]
    return f"| {' | '.join(cell or '-' for cell in cells)} |"


def _sections(run: Run) -> Iterator[str]:
    about = run["machine"]
    yield f"## {about['device']}, torch {about['torch']}"
    yield ""
    names = ("capability", "memory_gib", "driver", "cudnn", "nccl", "cores", "load")
    words = ", ".join(f"{name} {about[name]}" for name in names if about.get(name))
    yield from textwrap.wrap(f"{words}.", 100)
    yield ""
    for name, part in PARTS.items():
        found = run["parts"].get(name)
        if found is None:
            continue
        yield f"### {part.title}"
        yield ""
        yield f"{found['status'].capitalize()}{_because(found)}"
        yield ""
        yield from _steps(found["cases"]) if name == "steps" else _cases(found.get("cases", []))


def _because(found: dict[str, Any]) -> str:
    return f": {found['message']}." if found.get("message") else "."


def _cases(rows: Sequence[Run]) -> Iterator[str]:
    """A line per case; cases that passed without figures are only counted."""
    plain = [row for row in rows if row["status"] == "passed" and not _figures(row)]
    if plain:
        yield f"{len(plain)} cases passed."
        yield ""
    rest = [row for row in rows if row not in plain]
    if rest:
        yield "| case | status | figures |"
        yield "|---|---|---|"
        for row in rest:
            yield f"| {row['case']} | {row['status']} | {_figures(row) or _cell(row.get('message', ''))} |"
        yield ""


def _steps(rows: Sequence[Run]) -> Iterator[str]:
    """Milliseconds of SGD, and the other optimizers relative to it."""
    timed = [row for row in rows if "step_ms" in row]
    names = list(dict.fromkeys(row["optimizer"] for row in timed))
    yield (
        "| network | batch | "
        + " | ".join(f"{name}, ms (ratio; of roofline)" for name in names)
        + " |"
    )
    yield "|---|---|" + "---|" * len(names)
    for net, batch in dict.fromkeys((row["net"], row["batch"]) for row in timed):
        found = {
            row["optimizer"]: row for row in timed if (row["net"], row["batch"]) == (net, batch)
        }
        cells = [
            f"{found[name]['step_ms']:.3g} ({found[name]['ratio']}; {100 * found[name]['of_roofline']:.0f} %)"
            if name in found
            else "-"
            for name in names
        ]
        yield f"| {net} | {batch} | {' | '.join(cells)} |"
    yield ""
    yield from _cases(
        [
            row
            for row in rows
            if ("step_ms" not in row and not row["case"].endswith("warm-up"))
            or row["status"] != "passed"
        ]
    )


def _figures(row: Run) -> str:
    return _cell(", ".join(f"{name} {value}" for name, value in row.items() if name not in _HIDDEN))


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")
