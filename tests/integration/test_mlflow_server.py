"""An MLflow server that is killed during a run and started again has all of the event log."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from ngsgd.files import read_json_lines
from ngsgd.launcher.config import compose
from ngsgd.launcher.mlflow import tracker as mlflow_tracker
from ngsgd.launcher.mlflow.store import read_tracking
from ngsgd.launcher.mlflow.tracker import MlflowTracker
from ngsgd.runs import config_file
from ngsgd.runs.final_model import open_final, save_final
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.storage.event_log import EventLog
from tests import toy
from tests.launcher.records import final_report, outer_iteration

pytestmark = pytest.mark.services


class Server:
    """`mlflow server` on SQLite."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder, self.uri = folder, f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
                 "--backend-store-uri", f"sqlite:///{self.folder}/store.db",
                 "--artifacts-destination", str(self.folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "server.log").open("a") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
        for _ in range(240):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=3):
                return
            time.sleep(0.5)
        raise AssertionError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


# not for users
@pytest.mark.filterwarnings("error:.*(Type hint used|Add type hints|input example was not):UserWarning")
def test_nothing_is_lost_when_the_server_is_killed_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_tracker, "CLOSE_TIMEOUT_S", 120.0)  # a shared machine
    monkeypatch.chdir(tmp_path)
    run, server, said = tmp_path / "runs" / "first-20260101-000000", Server(tmp_path), list[str]()
    run.mkdir(parents=True)
    (tmp_path / "toy").mkdir()
    small = toy.Run(tmp_path / "toy")
    save_final(RunFolder(run), small.config, small.model.eval(), small.reader)
    config = compose.compose([f"output_dir={tmp_path}", f"tracking.uri={server.uri}", "tracking.registered_model_name=toy"])
    (run / "config.yaml").write_text(config_file.to_yaml(config))
    try:
        server.start()
        log, tracker = EventLog(run / "events.jsonl"), MlflowTracker(config, run, said.append)
        for number in range(12):
            record = outer_iteration(number, num_outer_iters=12, valid_objf=-2.0 + number / 40)
            log.outer_iteration(record)
            tracker.outer_iteration(record)
            if number == 4:
                while not tracker.run_id:
                    time.sleep(0.1)
                server.kill()
            if number == 8:
                server.start()
        tracker.finished(final_report())
        tracker.close("FINISHED")
        # none, where the request that met no server was still being repeated when it came back
        assert len(said) <= 1 and all(one.startswith("MLflow cannot be written") for one in said), said

        import mlflow
        from mlflow import MlflowClient

        client, run_id = MlflowClient(server.uri), read_tracking(run)["run_id"]
        told = [event for event in read_json_lines(run / "events.jsonl") if event["event"] == "outer_iteration"]
        stored = client.get_metric_history(run_id, "1_objf/valid")
        assert [(point.step, point.value) for point in stored] == [(e["frames_processed"], e["valid"]["objf"]) for e in told]
        assert client.get_run(run_id).info.status == "FINISHED"
        assert client.get_run(run_id).data.tags["registered_as"] == "toy version 1"
        mlflow.set_tracking_uri(server.uri)
        model, _ = open_final(run / "final")
        x_ND = np.random.default_rng(0).standard_normal((3, small.reader.info.num_inputs)).astype(np.float32)
        for uri in (f"runs:/{run_id}/model", "models:/toy/1"):
            loaded = mlflow.pyfunc.load_model(uri)
            expected_NP = model(torch.from_numpy(x_ND)).log_softmax(dim=1).detach().numpy()
            np.testing.assert_array_equal(loaded.predict(x_ND), expected_NP)
    finally:
        server.kill()
