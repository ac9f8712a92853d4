"""Make docs/mlflow-run.png and docs/mlflow-comparison.png from real runs.

    ngsgd train optimizer=ngsgd schedule.num_epochs=0.4 tracking.registered_model_name=digits
    ngsgd train optimizer=sgd schedule.num_epochs=0.4 tracking.registered_model_name=digits
    python docs/mlflow_pictures.py runs

It starts `ngsgd ui` on the folder of the runs and takes the pictures with Chromium.  The run is the
oldest one of the folder.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parent
# MLflow's menu on the left and its assistant on the right are not part of the pictures
MENU, ASSISTANT_SHARE = 190, 0.26
SIZE = {"mlflow-run": (915, 1100), "mlflow-comparison": (1000, 1000)}


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUNS")
    folder = parser.parse_args().folder
    tracking = min(folder.glob("*/tracking.json"), key=lambda file: file.stat().st_mtime)
    run = json.loads(tracking.read_text(encoding="utf-8"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ngsgd.launcher", "ui", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        # "Ctrl-C" is in its last line, which follows the first answer of the server
        next(line for line in server.stdout if "Ctrl-C" in line)
        experiment = f"http://127.0.0.1:{port}/#/experiments/{run['experiment_id']}/runs"
        page = "workflowType=machine_learning"
        _screenshot(f"{experiment}/{run['run_id']}?{page}", "mlflow-run")
        _screenshot(f"{experiment}?{page}&compareRunsMode=CHART", "mlflow-comparison")
        server.terminate()


def _screenshot(address: str, name: str) -> None:
    width, height = SIZE[name]
    window = int((MENU + width) / (1 - ASSISTANT_SHARE))
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "page.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += [f"--user-data-dir={folder}/browser", f"--window-size={window},{height}"]
        # the page loads its charts with several requests
        flags += ["--virtual-time-budget=60000", f"--screenshot={whole}"]
        command = ["chromium", *flags, address]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=300)
        picture = Image.open(whole).crop((MENU, 0, MENU + width, height))
        picture.quantize(128).save(DOCS / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
