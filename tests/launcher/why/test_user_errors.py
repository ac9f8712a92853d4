"""`ngsgd why` after typical errors of users: a table of errors and answers."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from ngsgd.files import read_json
from ngsgd.launcher import cli
from ngsgd.pipeline.runs import trust
from ngsgd.pipeline.runs.run_folder import RunFolder
from ngsgd.training.storage import checkpoint
from ngsgd.training.storage.lock import RunLock

ROOT = Path(__file__).resolve().parents[3]
TASK = ["task=tests.tasks.faulty:make_task", f"task.search_path={ROOT}", "name=run", "cluster=in_process", "tracking.kind=none",
        "schedule.num_epochs=4", "schedule.minibatch_size=16", "--quiet"]


@dataclass
class User:
    """What a user does: commands in an empty folder."""

    folder: Path
    patch: pytest.MonkeyPatch

    def train(self, fault: str, *settings: str) -> int:
        return cli.main(["train", *TASK, f"task.args={{fault: {fault}}}", *settings])

    def run(self) -> Path:
        (config,) = self.folder.glob("runs/*/config.yaml")
        return config.parent

    def trained(self) -> Path:
        """A run that finished."""
        assert self.train("plain") == 0
        return self.run()


def full_disk(user: User) -> int:
    return _failing_disk(user, errno.ENOSPC)


def failing_disk(user: User) -> int:
    return _failing_disk(user, errno.EIO)


def _failing_disk(user: User, number: int) -> int:
    """From the second checkpoint on."""
    save_file, calls = safetensors.torch.save_file, [0]

    def broken(*arguments: Any, **named: Any) -> None:
        calls[0] += 1
        if calls[0] > 4:
            raise OSError(number, os.strerror(number), str(arguments[1]))
        save_file(*arguments, **named)
    user.patch.setattr(checkpoint, "save_file", broken)
    return user.train("plain")


def diverging(user: User) -> int:
    return user.train("plain", "optimizer=sgd", "schedule.lr_initial=1e30", "schedule.lr_final=1e30", "optimizer.max_change=0",
                      "optimizer.max_param_change=0")


def slurm(user: User) -> int:
    user.patch.setenv("SLURM_JOB_ID", "4711")
    return user.train("terminated")


def wrong_token(user: User) -> int:
    """The head answers, and rejects this process."""
    import ray

    from ngsgd.launcher.ray import cluster, probe

    def refuse(address: str) -> None:
        raise ConnectionError(f"Failed to connect to Ray cluster at {address}")
    user.patch.setattr(ray, "is_initialized", lambda: False)
    for module in (cluster, probe):
        user.patch.setattr(module, "require_head", lambda address: None)
    user.patch.setattr(cluster, "_join", refuse)
    return user.train("plain", "cluster=ray", "cluster.address=10.0.0.1:6379")


def missing_extra(user: User) -> int:
    (user.folder / "runs").mkdir()
    (user.folder / "runs" / "mlflow.db").touch()
    user.patch.setattr("importlib.util.find_spec", lambda name: None)
    return cli.main(["ui", "--port", "0"])


def port_in_use(user: User) -> int:
    (user.folder / "runs").mkdir()
    (user.folder / "runs" / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        return cli.main(["ui", "--port", str(server.getsockname()[1])])


def damaged_corpus(user: User) -> int:
    (user.folder / "fsdd.tar.gz").write_bytes(b"this is no archive")
    return cli.main(["train", "recipe=fsdd", "data.source=fsdd.tar.gz", "tracking.kind=none", "cluster=in_process"])


def second_coordinator(user: User) -> int:
    run = user.trained()
    with RunLock(RunFolder(run).lock, "train"):
        return cli.main(["resume", str(run), "--quiet"])


def other_fingerprint(user: User) -> int:
    run = user.trained()
    user.patch.setenv("MKL_CBWR", "COMPATIBLE")
    return cli.main(["resume", str(run), "--quiet"])


def edited_config(user: User) -> int:
    run = user.trained()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("num_epochs: 4.0", "num_epochs: 9.0"))
    return cli.main(["resume", str(run), "--quiet"])


def removed_checkpoints(user: User) -> int:
    run = user.trained()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    return cli.main(["resume", str(run), "--quiet"])


def killed(user: User) -> int:
    """kill -9 leaves an event log without an end."""
    events = RunFolder(user.trained()).events
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in lines if json.loads(line)["event"] not in ("finished", "closed")))
    return 137


def damaged_record(user: User) -> int:
    """A checkpoint is damaged, and the previous one is used."""
    run = user.trained()
    newest = max((run / "checkpoints").iterdir())
    (newest / "manifest.json").write_text("{")
    events = RunFolder(run).events
    before = events.read_text()
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    assert len(events.read_text()) > len(before)
    return 1


def _command(*words: str) -> Callable[[User], int]:
    return lambda user: cli.main(list(words))


def _task(fault: str, *settings: str) -> Callable[[User], int]:
    return lambda user: user.train(fault, *settings)


W, INFRA, NO, MAY = "workload", "infrastructure", "cannot help", "may help"
# error -> (what the user does, culprit, failure domain, outlook of a retry)
ERRORS: dict[str, tuple[Callable[[User], int], str, str, str]] = {
    "wrong path": (_command("train", "recipe=kaldi", "data.source=/nosuch/folder"), "data", W, NO),
    "wrong data.source": (damaged_corpus, "data", W, NO),
    "unknown setting": (_command("train", "lr=0.1"), "settings", W, NO),
    "value out of range": (_command("train", "cluster.num_workers=0"), "settings", W, NO),
    "task that does not exist": (_task("plain", "task=tests.tasks.faulty:nothing"), "settings", W, NO),
    "output_dir that cannot be written": (_command("train", "output_dir=/dev/null/runs"), "settings", W, NO),
    "full disk": (full_disk, "disk", INFRA, MAY),
    "failing disk": (failing_disk, "disk", INFRA, MAY),
    "wrong token": (wrong_token, "token", INFRA, NO),
    "dead head node": (_task("plain", "cluster=ray", "cluster.address=127.0.0.1:1"), "cluster", INFRA, MAY),
    "diverging learning rate": (diverging, "learning rate", W, NO),
    "NaN in the data": (_task("not_finite"), "data", W, NO),
    "missing package extra": (missing_extra, "package", INFRA, NO),
    "port in use": (port_in_use, "port", INFRA, MAY),
    "second coordinator": (second_coordinator, "other process", INFRA, MAY),
    "other fingerprint": (other_fingerprint, "numeric fingerprint", INFRA, NO),
    "edited config.yaml": (edited_config, "config.yaml", W, NO),
    "removed checkpoints": (removed_checkpoints, "checkpoint", INFRA, NO),
    "damaged checkpoint": (damaged_record, "checkpoint", INFRA, MAY),
    "no memory in a worker": (_task("no_memory"), "memory", INFRA, MAY),
    "exception in loss_fn": (_task("wrong_type"), "code", W, NO),
    "Ctrl-C": (_task("interrupted"), "operator", INFRA, MAY),
    "SIGTERM": (_task("terminated"), "stop request", INFRA, MAY),
    "SIGTERM by Slurm": (slurm, "scheduler", INFRA, MAY),
    "kill -9 of the coordinator": (killed, "coordinator", INFRA, MAY),
}


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "allowed_modules", set())
    return User(tmp_path, monkeypatch)


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert cli.main(["why", *words, "--json"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["why", *words, "--json"]) == 0
    assert capsys.readouterr().out == text, "the answer is not deterministic"
    found: dict[str, Any] = json.loads(text)
    return found


# runs that finish, with a fault
_FINISH = ("NaN in the data",)
# those without a trained model, which take no time
_QUICK = ("wrong path", "unknown setting", "value out of range", "output_dir that cannot be written", "missing package extra",
          "port in use", "wrong token")


@pytest.mark.parametrize("error", [pytest.param(error, marks=() if error in _QUICK else pytest.mark.slow) for error in ERRORS])
def test_the_error_of_a_user_is_explained(error: str, user: User, capsys: pytest.CaptureFixture[str]) -> None:
    make, *expected = ERRORS[error]
    assert make(user) or error in _FINISH, "the command did not fail"
    runs = [config.parent for config in user.folder.glob("runs/*/config.yaml")]
    words = [str(runs[0])] if runs else ["--output-dir", "/dev/null/runs"] if "output_dir" in error else []
    found = answer(capsys, *words)
    assert [found["culprit"], found["domain"], found["outlook"]] == expected, found
    assert found["evidence"] and found["next"] and found["summary"]
    assert cli.main(["why", *words]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in expected) and found["next"] in text
    if runs:
        assert cli.main(["status", words[0]]) == 0
        assert f"why        {expected[0]}" in capsys.readouterr().out


def test_the_table_has_at_least_twenty_errors() -> None:
    assert len(ERRORS) >= 20


@pytest.mark.slow
def test_a_run_without_faults_has_no_culprit(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    run = user.trained()
    found = answer(capsys, str(run))
    assert found["culprit"] is None and found["state"] == "SUCCEEDED" and not found["faults"]
    # without a name: the newest run
    assert answer(capsys) == found
    assert not list(run.glob("error.json"))


@pytest.mark.slow
def test_a_later_start_makes_a_failed_command_irrelevant(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    run = other_fingerprint(user) and user.run()
    assert isinstance(run, Path)
    assert answer(capsys, str(run))["culprit"] == "numeric fingerprint"
    user.patch.delenv("MKL_CBWR")
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    assert answer(capsys, str(run))["culprit"] is None


@pytest.mark.slow
def test_a_damaged_record_is_not_believed(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    full_disk(user)
    run = user.run()
    about = read_json(run / "error.json")
    (run / "error.json").write_text(json.dumps({**about, "errno": "EIO"}))
    assert RunFolder(run).last_error() == {}
    # the event log has the error as well
    assert answer(capsys, str(run))["culprit"] == "disk"


def test_nothing_to_explain_is_an_error(user: User) -> None:
    assert cli.main(["why"]) == 2
