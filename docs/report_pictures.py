"""Make the pictures of the report and of MLflow from real runs.

    python docs/report_pictures.py --report RUN
    python docs/report_pictures.py --mlflow RUNS
    python -m tools.pictures docs/report.png docs/mlflow-run.png

docs/report.png is the upper part of the page of `ngsgd report`, as Chromium shows it, and its
figure. docs/mlflow-run.png is a page of `ngsgd ui` on a folder with a run of
`tracking.registered_model_name=digits`.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
REPORT_SIZE = (1000, 1190)
MLFLOW_SIZE = (915, 800)
# MLflow's menu on the left and its assistant on the right are not part of the pictures
MENU, ASSISTANT_SHARE = 190, 0.26
# all other sections would make the picture too long to read
_SHORT = """<style>
h2, h3, .note, .columns, .card:not(:has(.checks)) { display: none }
</style>"""


def main() -> None:
    """Write the pictures that the options ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", metavar="RUN")
    parser.add_argument("--mlflow", type=Path, metavar="RUNS")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        if options.report:
            _ngsgd("report", options.report, "-o", str(page))
            text = page.read_text(encoding="utf-8")
            page.write_text(_shortened(text), encoding="utf-8")
            _screenshot(page.as_uri(), DOCS / "report.png", REPORT_SIZE)
    if options.mlflow:
        _mlflow(options.mlflow)


def _shortened(text: str) -> str:
    """The page without its folder, which is that of this machine, and without long sections."""
    text = re.sub(r'(<p class="lead">\w+) - [^<]*', r"\1", text)
    return text.replace("</head>", f"{_SHORT}</head>")


def _ngsgd(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "ngsgd", *words], check=True)


def _mlflow(runs: Path) -> None:
    """Picture of the oldest run of a folder."""
    tracking = min(runs.glob("*/tracking.json"), key=lambda file: file.stat().st_mtime)
    run = json.loads(tracking.read_text(encoding="utf-8"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ngsgd", "ui", str(runs), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        # "Ctrl-C" is in its last line, which follows the first answer of the server
        next(line for line in server.stdout if "Ctrl-C" in line)
        experiment = f"http://127.0.0.1:{port}/#/experiments/{run['experiment_id']}/runs"
        kind = "workflowType=machine_learning"
        _mlflow_page(f"{experiment}/{run['run_id']}?{kind}", "mlflow-run")
        server.terminate()


def _mlflow_page(address: str, name: str) -> None:
    width, height = MLFLOW_SIZE
    target, window = DOCS / f"{name}.png", int((MENU + width) / (1 - ASSISTANT_SHARE))
    # the page loads its charts with several requests
    _screenshot(address, target, (window, height), "--virtual-time-budget=60000")
    picture = Image.open(target).crop((MENU, 0, MENU + width, height))
    picture.quantize(128).save(target, optimize=True)


def _screenshot(address: str, target: Path, size: tuple[int, int], *more: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *more]
        flags += [f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}"]
        command = ["chromium", *flags, f"--screenshot={target}", address]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=300)


if __name__ == "__main__":
    main()
