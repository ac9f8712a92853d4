"""`ngsgd why` after typical errors of users: a table of errors, answers and next commands."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shlex
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import ngsgd
from ngsgd import errors
from ngsgd.errors import CheckpointError, ObjectStorageError, RayStartError
from ngsgd.files import read_json
from ngsgd.launcher import cli
from ngsgd.launcher.why.causes import of_error
from ngsgd.object_storage.folder import StoredFolder
from ngsgd.runs import stored_run, trust
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.storage import checkpoint
from ngsgd.training.storage.lock import RunLock
from tests.launcher.records import Command, final_report
from tests.tasks import blobs, faulty

ROOT = Path(__file__).resolve().parents[3]
TASK = ["task=tests.tasks.faulty:make_task", f"task.search_path={ROOT}", "name=run", "cluster=in_process", "tracking.kind=none",
        "schedule.num_epochs=2", "schedule.minibatch_size=16", "--quiet"]


@dataclass
class User:
    """What a user does: commands in an empty folder."""

    folder: Path
    patch: pytest.MonkeyPatch
    # of a user whose run finished
    finished: Path | None = None
    # URLs of runs
    stored: list[str] = field(default_factory=list)

    def train(self, fault: str, *settings: str) -> int:
        return cli.main(["train", *TASK, f"task.args={{fault: {fault}}}", *settings])

    def run(self) -> Path:
        (config,) = self.folder.glob("runs/*/config.yaml")
        return config.parent

    def trained(self) -> Path:
        """A run that finished."""
        if self.finished is None:
            assert self.train("plain") == 0
        else:
            shutil.copytree(self.finished, self.folder, dirs_exist_ok=True)
        return self.run()

    def killed(self, run: Path | None = None) -> Path:
        """A run that got kill -9, which leaves an event log without an end."""
        run = run or self.trained()
        events = RunFolder(run).events
        lines = events.read_text().splitlines(keepends=True)
        events.write_text("".join(line for line in lines if json.loads(line)["event"] not in ("finished", "closed")))
        return run

    def resume_killed(self) -> int:
        return cli.main(["resume", str(self.run()), "--quiet"])

    def corrected(self) -> None:
        """Correct the program, or a signal that does not come again."""
        for fault in faulty.LOSSES:
            self.patch.setitem(faulty.LOSSES, fault, faulty.plain)


def full_disk(user: User, number: int = errno.ENOSPC) -> int:
    """From the second checkpoint on."""
    save_file, calls = safetensors.torch.save_file, [0]

    def broken(*arguments: Any, **named: Any) -> None:
        calls[0] += 1
        if calls[0] > 2:
            raise OSError(number, os.strerror(number), str(arguments[1]))
        save_file(*arguments, **named)
    user.patch.setattr(checkpoint, "save_file", broken)
    return user.train("plain")


def repaired_disk(user: User) -> None:
    user.patch.setattr(checkpoint, "save_file", safetensors.torch.save_file)


def unwilling_storage(user: User) -> int:
    """A write of a run in object storage is refused, such as after a conflict."""
    from tests.object_storage.test_readers import URL, Bucket

    bucket = Bucket()
    user.patch.setenv("XDG_CACHE_HOME", str(user.folder / "cache"))
    user.patch.setattr(stored_run, "ObjectStore", bucket.store)
    publish, calls = StoredFolder.publish, [0]

    def refuse(folder: StoredFolder) -> None:
        calls[0] += 1
        if calls[0] > 3:
            raise ObjectStorageError("the object changed while it was written; repeat the command.")
        publish(folder)
    user.patch.setattr(StoredFolder, "publish", refuse)
    code = user.train("plain", f"output_dir={URL}")
    user.patch.setattr(StoredFolder, "publish", publish)
    user.stored = [url for url in bucket.stores if "/run-" in url]
    return code


def unwritable_run(user: User) -> int:
    """A CheckpointError that is about no checkpoint."""
    run = user.killed()
    (run / "data.json").unlink(missing_ok=True)
    with user.patch.context() as patch:
        patch.setattr(RunLock, "acquire", _raise(CheckpointError("the lock cannot be written.")))
        return user.resume_killed()


def _raise(error: Exception) -> Callable[..., None]:
    def raising(*_arguments: Any, **_named: Any) -> None:
        raise error
    return raising


def no_ray(user: User) -> int:
    import ray

    from ngsgd.launcher.ray import session

    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "OMP_WAIT_POLICY", "RAY_USAGE_STATS_ENABLED"):
        # restored at the end
        user.patch.setenv(name, "token")
    user.patch.setattr(ray, "is_initialized", lambda: False)
    user.patch.setattr(ray, "shutdown", lambda: None)
    user.patch.setattr(session, "scratch_folder", lambda: str(user.folder))
    user.patch.setattr(ray, "init", _raise(Exception("The current node timed out during startup; some of the raylet failed")))
    return user.train("plain", "cluster=ray")


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


def dashboard(user: User, *, has_package: bool) -> int:
    """Without its package, or with a port in use."""
    (user.folder / "runs").mkdir()
    (user.folder / "runs" / "mlflow.db").touch()
    if not has_package:
        user.patch.setattr("importlib.util.find_spec", lambda name: None)
        return cli.main(["ui", "--port", "0"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        return cli.main(["ui", "--port", str(server.getsockname()[1])])


def damaged_corpus(user: User) -> int:
    (user.folder / "fsdd.tar.gz").write_bytes(b"this is no archive")
    return cli.main(["train", "recipe=fsdd", "data.source=fsdd.tar.gz", "tracking.kind=none", "cluster=in_process"])


def second_coordinator(user: User) -> int:
    with RunLock(RunFolder(user.killed()).lock, "train"):
        return user.resume_killed()


def other_fingerprint(user: User) -> int:
    user.killed()
    user.patch.setenv("MKL_CBWR", "COMPATIBLE")
    return user.resume_killed()


def edited_config(user: User) -> int:
    config = user.killed() / "config.yaml"
    config.write_text(config.read_text().replace("num_epochs: 2.0", "num_epochs: 5.0"))
    return user.resume_killed()


def removed_checkpoints(user: User) -> int:
    run = user.killed()
    (run / "checkpoints").rename(user.folder / "backup")
    (run / "checkpoints").mkdir()
    return user.resume_killed()


def restored_checkpoints(user: User) -> None:
    shutil.rmtree(user.run() / "checkpoints")
    (user.folder / "backup").rename(user.run() / "checkpoints")


def damaged_record(user: User) -> int:
    """A checkpoint is damaged, and the previous one is used."""
    run = user.killed()
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


W, INFRA, NO, MAY, UNKNOWN = "workload", "infrastructure", "cannot help", "may help", "unknown"


@dataclass(frozen=True)
class Row:
    """An error, the answer, and the next command."""

    # what the user does
    make: Callable[[User], int]
    culprit: str
    domain: str
    # of a retry
    outlook: str
    # what a person does before the next command; the reason where a test cannot do it
    person: Callable[[User], None] | str = ""


_CORPUS = "a person has to provide a corpus"
_SERVER = "the next command is a server, which does not end"
_HEAD = "a person has to start a Ray head"
ERRORS: dict[str, Row] = {
    "wrong path": Row(_command("train", "recipe=kaldi", "data.source=/nosuch/folder"), "data", W, NO, _CORPUS),
    "wrong data.source": Row(damaged_corpus, "data", W, NO, _CORPUS),
    "unknown setting": Row(_command("train", "lr=0.1"), "settings", W, NO),
    "unknown command": Row(_command("trane"), "settings", W, NO),
    "unknown flag": Row(_command("tune", "--no-such-flag"), "settings", W, NO),
    "value out of range": Row(_command("train", "cluster.num_workers=0"), "settings", W, NO),
    "task that does not exist": Row(_task("plain", "task=tests.tasks.faulty:nothing"), "settings", W, NO),
    "output_dir that cannot be written": Row(_command("train", "output_dir=/dev/null/runs"), "settings", W, NO),
    "full disk": Row(full_disk, "disk", INFRA, MAY, repaired_disk),
    "failing disk": Row(lambda user: full_disk(user, errno.EIO), "disk", INFRA, MAY, repaired_disk),
    "object storage": Row(unwilling_storage, "object storage", INFRA, MAY),
    "run folder that cannot be locked": Row(unwritable_run, "run folder", INFRA, UNKNOWN),
    "wrong token": Row(wrong_token, "token", INFRA, NO, _HEAD),
    "dead head node": Row(_task("plain", "cluster=ray", "cluster.address=127.0.0.1:1"), "cluster", INFRA, MAY, _HEAD),
    "Ray does not start": Row(no_ray, "cluster", INFRA, MAY, "a person has to wait, or to use cluster=local"),
    "diverging learning rate": Row(diverging, "learning rate", W, NO),
    "NaN in the data": Row(_task("not_finite"), "data", W, NO),
    "missing package extra": Row(lambda user: dashboard(user, has_package=False), "package", INFRA, NO, _SERVER),
    "port in use": Row(lambda user: dashboard(user, has_package=True), "port", INFRA, MAY, _SERVER),
    # the process that it met has ended before the question
    "second coordinator": Row(second_coordinator, "coordinator", INFRA, MAY),
    "other fingerprint": Row(other_fingerprint, "numeric fingerprint", INFRA, NO),
    "edited config.yaml": Row(edited_config, "config.yaml", W, NO),
    "removed checkpoints": Row(removed_checkpoints, "checkpoint", INFRA, NO, restored_checkpoints),
    "damaged checkpoint": Row(damaged_record, "checkpoint", INFRA, MAY),
    "no memory in a worker": Row(_task("no_memory"), "memory", INFRA, MAY, User.corrected),
    "exception in loss_fn": Row(_task("wrong_type"), "code", W, NO, User.corrected),
    "Ctrl-C": Row(_task("interrupted"), "operator", INFRA, MAY, User.corrected),
    "SIGTERM": Row(_task("terminated"), "stop request", INFRA, MAY, User.corrected),
    "SIGTERM by Slurm": Row(slurm, "scheduler", INFRA, MAY, User.corrected),
    "kill -9 of the coordinator": Row(lambda user: 137 if user.killed() else 0, "coordinator", INFRA, MAY),
}
# faults that leave a run which does not train
FAULTS = ("kill -9 of the coordinator", "full disk", "object storage", "diverging learning rate", "other fingerprint",
          "removed checkpoints", "exception in loss_fn", "no memory in a worker", "Ctrl-C", "SIGTERM", "Ray does not start")
# wrong steps of a user after which the run is as before
WRONG_STEPS: tuple[tuple[str, ...], ...] = (
    ("resume", "RUN", "--workers", "0"), ("resume", "RUN", "--no-such-flag"), ("resume", "RUN", "one more word"), ("decode", "RUN"),
    ("transcribe", "RUN", "nosuch.wav"), ("export", "RUN"), ("align", "RUN"),
    ("report", "RUN", "--output", "/dev/null/report.html"), ("submit", "RUN", "--no-such-flag"), ("tune", "RUN"))


def user_in(folder: Path, patch: pytest.MonkeyPatch, finished: Path | None = None) -> User:
    patch.chdir(folder)
    patch.setenv("XDG_STATE_HOME", str(folder / "state"))
    patch.setattr(trust, "allowed_modules", set())
    # no pictures
    patch.setattr("ngsgd.launcher.commands.train.draw", lambda *_, **__: None)
    return User(folder, patch, finished)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        user = user_in(tmp_path_factory.mktemp("finished"), patch)
        user.trained()
    return user.folder


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> User:
    return user_in(tmp_path, monkeypatch, finished)


def answer(command: Command, *words: str) -> dict[str, Any]:
    command("why", *words, "--json")
    text = command("why", *words, "--json").out
    assert command("why", *words, "--json").out == text, "the answer is not deterministic"
    found: dict[str, Any] = json.loads(text)
    return found


# runs that finish, with a fault
_FINISH = ("NaN in the data",)
# those without a trained model, which take no time
_QUICK = ("wrong path", "unknown setting", "unknown command", "unknown flag", "value out of range",
          "output_dir that cannot be written", "missing package extra", "port in use", "wrong token")


def words_of(user: User, error: str = "") -> list[str]:
    """The arguments of `ngsgd why`."""
    runs = user.stored or [str(config.parent) for config in user.folder.glob("runs/*/config.yaml")]
    return runs[:1] or (["--output-dir", "/dev/null/runs"] if "output_dir" in error else [])


@pytest.mark.entry("Nc6", "`ngsgd why` after a typical error, also after a wrong step that follows it (a refused `resume`, wrong "
                          "settings)", "works",
                   "The newest event is the cause, and a refused command is a note. `next` is a command that works after `first`, "
                   "the part of a person. The error of a first network in the cache is found")
@pytest.mark.parametrize("error", [pytest.param(error, marks=() if error in _QUICK else pytest.mark.slow) for error in ERRORS])
def test_the_error_of_a_user_is_explained(error: str, user: User, command: Command) -> None:
    row = ERRORS[error]
    assert row.make(user) or error in _FINISH, "the command did not fail"
    words = words_of(user, error)
    found = answer(command, *words)
    expected = [row.culprit, row.domain, row.outlook]
    assert [found["culprit"], found["domain"], found["outlook"]] == expected, found
    assert found["evidence"] and found["next"] and found["summary"]
    assert bool(found["note"]) == (error == "second coordinator")
    assert bool(found["first"]) or not row.person or row.person is User.corrected
    text = command("why", *words).out
    assert all(word in text for word in expected) and found["next"] in text and found["first"] in text
    if words and "output_dir" not in error:
        assert f"why        {row.culprit}" in command("status", words[0]).out
    if not isinstance(row.person, str):
        row.person(user)
    if callable(row.person) or not row.person:
        _run_next(found["next"], user, command)


def _run_next(line: str, user: User, command: Command) -> None:
    """The next command works, and a run that is finished afterwards has no fault that stays."""
    program, *words = shlex.split(line)
    assert program == "ngsgd" and cli.main(words) == 0
    if runs := words_of(user):
        found = answer(command, *runs)
        assert words[0] != "resume" or found["state"] == "SUCCEEDED"
        if found["state"] == "SUCCEEDED" and found["culprit"] != "data":
            assert found["outlook"] != NO and not found["note"]


@pytest.mark.slow
@pytest.mark.entry("Nc6")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_step_after_a_fault_is_a_note(fault: str, user: User, command: Command) -> None:
    assert ERRORS[fault].make(user)
    (run,) = words_of(user)
    before = answer(command, run)
    assert before.pop("note") == ""
    for step in WRONG_STEPS:
        if user.stored and step[0] == "decode":
            # fetches the newest commit, which lacks the error that could not be published
            continue
        assert cli.main([run if word == "RUN" else word for word in step]), f"{step} did not fail"
        after = answer(command, run)
        assert step[0] in after.pop("note") and after == before, step


@pytest.mark.slow
@pytest.mark.entry("Nc6")
@pytest.mark.parametrize("step", WRONG_STEPS)
def test_a_wrong_step_with_a_finished_run_is_a_note(step: Sequence[str], user: User, command: Command) -> None:
    run = str(user.trained())
    before = answer(command, run)
    if cli.main([run if word == "RUN" else word for word in step]):
        after = answer(command, run)
        assert step[0] in after.pop("note") and after == {name: text for name, text in before.items() if name != "note"}
    assert before["culprit"] is None


@pytest.mark.slow
@pytest.mark.entry("Nc6")
def test_a_fault_after_a_refused_command_is_the_cause(user: User, command: Command) -> None:
    assert other_fingerprint(user)
    (run,) = words_of(user)
    user.patch.delenv("MKL_CBWR")
    user.patch.setattr(checkpoint, "load_file", _raise(OSError(errno.EIO, "Input/output error")))
    assert cli.main(["resume", run, "--quiet"])
    assert answer(command, run)["culprit"] != "numeric fingerprint"


@pytest.mark.slow
@pytest.mark.entry("Nc6")
def test_the_call_that_continues_a_run_of_python_is_next(user: User, command: Command) -> None:
    ngsgd.train(blobs.make_task, cluster="in_process", name="run", num_epochs=2, batch_size=16)
    user.killed(user.run())
    assert cli.main(["resume", "run"]) == 2
    found = answer(command, "run")
    assert (found["culprit"], found["outlook"]) == ("coordinator", MAY) and "resume" in found["note"]
    call, _, where = found["next"].rpartition(" in ")
    assert where == "Python"
    eval(call, {"ngsgd": ngsgd, "make_task": blobs.make_task})
    assert answer(command, "run")["state"] == "SUCCEEDED"


@pytest.mark.entry("Nc6")
def test_an_error_in_the_folder_of_another_run_is_found(user: User, command: Command) -> None:
    """The first network of data.labels=ladder has a run folder in the cache."""
    network = user.folder / "runs" / "data" / "networks" / "first"
    network.mkdir(parents=True)

    def fail(*_arguments: Any, **_named: Any) -> None:
        with RunFolder(network).error_recorded():
            raise RayStartError("Ray could not be started.")
    assert cli.main(["train", "lr=0.1"]) == 2
    assert answer(command)["culprit"] == "settings"
    user.patch.setattr("ngsgd.launcher.commands.train.train", fail)
    assert user.train("plain") == 5
    found = answer(command)
    assert found["culprit"] == "cluster" and any(one["text"] == str(network) for one in found["evidence"])
    program, *words = shlex.split(found["next"])
    user.patch.setattr("ngsgd.launcher.commands.train.train", lambda *_arguments, **_named: final_report())
    assert program == "ngsgd" and cli.main(words) == 0


@pytest.mark.parametrize("kind", [kind for _, kind in inspect.getmembers(errors, inspect.isclass)
                                  if issubclass(kind, errors.NgsgdError) and kind.exit_code not in (1, 130)])
def test_every_class_of_error_has_a_cause(kind: type[errors.NgsgdError]) -> None:
    found = of_error({"kind": kind.__name__, "exit_code": kind.exit_code, "message": "."})
    assert found.culprit != "code"
    # a subclass that the table does not list
    assert of_error({"kind": "Another", "exit_code": kind.exit_code, "message": "."}).culprit != "code"


@pytest.mark.slow
def test_a_run_without_faults_has_no_culprit(user: User, command: Command) -> None:
    run = user.trained()
    found = answer(command, str(run))
    assert found["culprit"] is None and found["state"] == "SUCCEEDED" and not found["faults"]
    # without a name: the newest run
    assert answer(command) == found
    assert not list(run.glob("error.json"))


def _content(run: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.entry("Nc14", "`ngsgd resume` of a finished run; a run in object storage without its time stamp; exit codes in the "
                           "help; 1 worker", "works",
                   "The command reports that the run is finished and starts nothing (exit code 0), unless its settings or results "
                   "changed. The newest run of the name is found. `ngsgd --help` lists all exit codes; numbers agree with nouns")
def test_a_finished_run_stays_as_it_is(user: User, command: Command) -> None:
    run = user.trained()
    before = _content(run)
    for more in ([], ["--quiet"], ["--workers", "3"]):
        assert "ngsgd report" in command("resume", str(run), *more).out
        assert _content(run) == before
    assert user.train("plain", "--continue") == 0 and _content(run) == before and len(before) > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metrics.json", "final/model.safetensors", "finished.json"])
def test_a_finished_run_with_other_results_is_resumed(name: str, user: User) -> None:
    run = user.trained()
    before = (run / name).read_bytes()
    (run / name).write_bytes(before[:-2])
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    assert (run / name).read_bytes() == before


@pytest.mark.slow
def test_an_accepted_change_continues_a_finished_run(user: User, command: Command) -> None:
    run = user.trained()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("num_epochs: 2.0", "num_epochs: 3.0"))
    assert cli.main(["resume", str(run), "--quiet"]) == 6
    # accepted, and refused afterwards: the next command continues
    assert cli.main(["resume", str(run), "--accept-changed-config", "--address", "127.0.0.1:1"]) == 5
    num_lines = len(RunFolder(run).events.read_text().splitlines())
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    assert len(RunFolder(run).events.read_text().splitlines()) > num_lines


@pytest.mark.slow
def test_a_later_start_makes_a_failed_command_irrelevant(user: User, command: Command) -> None:
    run = other_fingerprint(user) and user.run()
    assert isinstance(run, Path)
    assert answer(command, str(run))["culprit"] == "numeric fingerprint"
    user.patch.delenv("MKL_CBWR")
    assert cli.main(["resume", str(run), "--quiet"]) == 0
    found = answer(command, str(run))
    assert (found["state"], found["culprit"], found["outlook"], found["note"]) == ("SUCCEEDED", "coordinator", MAY, "")


@pytest.mark.slow
def test_a_damaged_record_is_not_believed(user: User, command: Command) -> None:
    full_disk(user)
    run = user.run()
    about = read_json(run / "error.json")
    (run / "error.json").write_text(json.dumps({**about, "errno": "EIO"}))
    assert RunFolder(run).last_error() == {}
    # the event log has the error as well
    assert answer(command, str(run))["culprit"] == "disk"


def test_nothing_to_explain_is_an_error(user: User) -> None:
    assert cli.main(["why"]) == 2
