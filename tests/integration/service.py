"""Runs the `ngsgd` command as a user does, on a corpus that takes seconds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ngsgd.launcher import cli
from tests import process_state
from tests.tiers import HANGS_S

TINY = ["data.train_minutes=1.5", "data.valid_minutes=0.3", "data.test_minutes=0.3", "data.snr_db_low=30",
        "data.snr_db_high=30", "egs.samples_per_iter=400", "egs.num_diagnostic_frames=300", "model.num_layers=2",
        "model.hidden_dim=64", "schedule.num_epochs=1", "schedule.minibatch_size=64", "tracking.kind=none"]


class Service:
    """The command, with one output directory for data and runs."""

    def __init__(self, output_dir: Path) -> None:
        self.output_dir = output_dir

    def words(self, command: str, *arguments: str) -> list[str]:
        if command != "train":
            return [command, *arguments]
        said = " ".join(arguments)
        usual = [setting for setting in TINY if setting.split("=")[0] not in said]
        if "model._target_=" in said:   # whose layers are its own
            usual = [setting for setting in usual if not setting.startswith("model.")]
        return [command, *arguments, f"output_dir={self.output_dir}", *usual]

    def start(self, *arguments: str, command: str = "train") -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "ngsgd", *self.words(command, *arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
                                cwd=self.output_dir)

    def call(self, *arguments: str, command: str = "train", timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments, command=command)
        out, err = process.communicate(timeout=timeout_s)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def here(self, *arguments: str, command: str = "train") -> subprocess.CompletedProcess[str]:
        """The same in this process."""
        words, out, err, state = self.words(command, *arguments), io.StringIO(), io.StringIO(), process_state.taken()
        try:
            with contextlib.chdir(self.output_dir), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = cli.main(words)
        finally:
            process_state.restore(state)
        return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())

    def output(self, *arguments: str, command: str = "train") -> str:
        """The output of a command that succeeds; workers or many runs need a process."""
        is_alone = "cluster=in_process" in arguments and "-m" not in arguments
        done = (self.here if is_alone or command not in ("train", "resume") else self.call)(*arguments, command=command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def trained(self, name: str, *settings: str) -> Path:
        """The folder of a finished run."""
        self.output("cluster=in_process", f"name={name}", *settings)
        (run,) = self.runs(name)
        return run

    def stop_and_resume(self, name: str, outer_iter: int, *settings: str) -> Path:
        """The folder of a run that got Ctrl-C after that outer iteration and was then resumed."""
        process = self.start("cluster=local", f"name={name}", *settings)
        run = self.wait_for_outer_iteration(outer_iter, name, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=HANGS_S)
        assert process.returncode == 130
        self.output(str(run), command="resume")
        return run

    def runs(self, name: str) -> list[Path]:
        return [path.parent for path in self.output_dir.glob(f"{name}-*/config.yaml")]

    def wait_for_outer_iteration(self, outer_iter: int, name: str, process: subprocess.Popen[str]) -> Path:
        """The folder of the run of that name, once it has committed that outer iteration."""
        deadline = time.monotonic() + HANGS_S
        while time.monotonic() < deadline and process.poll() is None:
            for run in self.runs(name):
                if any(entry["outer_iter"] >= outer_iter for entry in events(run, "outer_iteration")):
                    return run
            time.sleep(0.05)
        raise AssertionError(f"outer iteration {outer_iter} did not come; exit code {process.poll()}")


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "events.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["event"] == kind]


def final_hash(run: Path) -> str:
    """Of the last committed model."""
    (newest,) = sorted((run / "checkpoints").iterdir())[-1:]
    return str(json.loads((newest / "manifest.json").read_text())["files"]["model.safetensors"])


def wers(output: str) -> dict[str, str]:
    """The WER of valid and test in the output of a command, by set."""
    return dict(re.findall(rf"^(valid|test)\s+({WER_LINE.pattern})", output, re.MULTILINE))


WER_LINE = re.compile(r"%WER \d+\.\d\d \[ \d+ / \d+, \d+ ins, \d+ del, \d+ sub \]")
