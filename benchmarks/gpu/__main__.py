"""Check and measure ngsgd on one GPU in at most 8 minutes; one JSON file per machine and version.

    python -m benchmarks.gpu                       all parts; finished parts of the same code are
    skipped
    python -m benchmarks.gpu --dry-run             the same program on the CPU, with small sizes
    python -m benchmarks.gpu --only steps memory   these parts, also where they are finished
    python -m benchmarks.gpu --page                write benchmarks/gpu/RESULTS.md from benchmarks/gpu/results

Needs torch and numpy.  A part whose packages are missing is skipped with its reason.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.gpu import page
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.runner import RESULTS, run

_DRY_RESULTS = Path("runs/gpu")


def main() -> None:
    options = _options()
    if options.part:
        # the process of one part
        PARTS[options.part].run(Measurement(options.output, dry_run=options.dry_run))
        return
    if options.page:
        page.write()
        return
    folder = options.output or (_DRY_RESULTS if options.dry_run else RESULTS)
    code = run(
        options.only or list(PARTS),
        folder,
        dry_run=options.dry_run,
        seconds=60.0 * options.minutes,
        again=bool(options.only),
    )
    # the page of the docs for results that are kept, otherwise one next to the results
    if folder.is_dir():
        where = page.PAGE if folder == RESULTS else folder / page.PAGE.name
        page.write(folder, where)
        print(f"page: {where}")
    sys.exit(code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dry-run", action="store_true", help="small sizes on the CPU")
    parser.add_argument(
        "--only", nargs="+", metavar="PART", choices=list(PARTS), help=f"parts: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=8.0,
        help="limit on all parts together (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder of the JSON file (default: benchmarks/gpu/results; runs/gpu with --dry-run)",
    )
    parser.add_argument("--page", action="store_true", help="write benchmarks/gpu/RESULTS.md and end")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
