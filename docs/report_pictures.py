"""Make docs/report.png and docs/compare.png from real runs.

    python docs/report_pictures.py --report RUN --compare RUN RUN RUN RUN

The first is the upper part of the page of `ngsgd report`, as Chromium shows it, and its timeline.
The second is the picture of `ngsgd compare --png`. The commands print the figures that the text of
docs/reports.md quotes.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
WIDTH, HEIGHT = 1000, 1190
# the sections between the checks and the timeline would make the picture too long to read
_SHORT = """<style>
h2, h3, .note, .columns, .card:not(:has(.checks)) { display: none }
figure:not(:has([aria-label^=Timeline])) { display: none }
</style>"""


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", required=True, metavar="RUN")
    parser.add_argument("--compare", required=True, nargs="+", metavar="RUN")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        _ngsgd("report", options.report, "-o", str(page))
        text = page.read_text(encoding="utf-8")
        page.write_text(_shortened(text), encoding="utf-8")
        _screenshot(page, DOCS / "report.png", Path(folder))
        compared = [
            "compare",
            *options.compare,
            "-o",
            str(page),
            "--png",
            str(DOCS / "compare.png"),
        ]
        _ngsgd(*compared)


def _shortened(text: str) -> str:
    """The page without its folder, which is that of this machine, and without long sections."""
    text = re.sub(r'(<p class="lead">\w+) - [^<]*', r"\1", text)
    return text.replace("</head>", f"{_SHORT}</head>")


def _ngsgd(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "ngsgd.launcher", *words], check=True)


def _screenshot(page: Path, target: Path, folder: Path) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    flags += [f"--user-data-dir={folder / 'browser'}", f"--window-size={WIDTH},{HEIGHT}"]
    command = ["chromium", *flags, f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=120)


if __name__ == "__main__":
    main()
