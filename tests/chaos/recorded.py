"""A run of the chaos cases with the files of a service run: configuration, events and errors."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ngsgd.config import RunConfig
from ngsgd.launcher.why.explain import explain
from ngsgd.runs.config_file import to_yaml
from ngsgd.runs.run_folder import RunFolder, with_digest
from ngsgd.training.storage.checkpoint import Checkpoint
from ngsgd.training.storage.event_log import EventLog
from ngsgd.training.worker_pool import WorkerPool
from tests.chaos.cases import Case
from tests.chaos.storage import PowerCut
from tests.toy import Recorder, Run

# the answers of `ngsgd why` to all cases, a line each
_TABLE = Path(__file__).with_name("answers.csv")
_NOTED = "answer.json"


class EventRecorder(Recorder):
    """Records calls, and writes events.jsonl where it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.events: EventLog | None = None

    def outer_iteration(self, record: Any) -> None:
        super().outer_iteration(record)
        if self.events:
            self.events.outer_iteration(record)

    def incident(self, incident: Any) -> None:
        super().incident(incident)
        if self.events:
            self.events.incident(incident)


class RecordedRun(Run):
    """Records the events and the error of each `train`, as `ngsgd.pipeline.base_run` does."""

    def __init__(self, folder: Path, run_config: RunConfig | None = None) -> None:
        super().__init__(folder, run_config)
        self.recorder: EventRecorder = EventRecorder()
        self.files = RunFolder(folder)
        if not self.files.config.exists():
            self.files.config.write_text(with_digest(to_yaml(self.config)))

    @contextlib.contextmanager
    def process(self, stop: object = None) -> Iterator[None]:
        """Record the start and the end of a process that trains."""
        events = self.recorder.events = EventLog(self.files.events, is_speech=True)
        status, num_lines = "FAILED", None
        try:
            with self.files.error_recorded(lambda: getattr(stop, "signal_name", ""), events.failed):
                events.opened("train")
                yield
            status = "FINISHED"
        except PowerCut:
            # a machine without power writes neither the error nor "closed"
            self.files.error.unlink(missing_ok=True)
            num_lines = len(self.files.events.read_text().splitlines()) - 1
            raise
        except BaseException as error:
            status = "KILLED" if getattr(error, "exit_code", 0) == 130 else "FAILED"
            raise
        finally:
            self.recorder.events = None
            events.close(status)
            if num_lines is not None:
                kept = self.files.events.read_text().splitlines(keepends=True)[:num_lines]
                self.files.events.write_text("".join(kept))

    def train(self, pool: WorkerPool | None = None, stop: Any = None) -> Checkpoint:
        if self.recorder.events is not None:
            return super().train(pool, stop)
        with self.process(stop):
            return super().train(pool, stop)


def note_answer(run: Path, folder: Path | None = None) -> None:
    """Keep the answer of `ngsgd why` at this moment, when a person would ask."""
    answer = explain(run)
    assert answer == explain(run), "two answers differ"
    text = json.dumps(answer.as_json())
    # of a user: evidence and a next step for whatever failed
    assert answer.culprit is None or (answer.evidence and answer.next and answer.summary), text
    ((folder or run) / _NOTED).write_text(text)


def check_answer(case: Case, folder: Path, run: Path | None = None) -> None:
    """Compare the answer with the table."""
    if not (folder / _NOTED).exists():
        note_answer(run or folder, folder)
    answer = json.loads((folder / _NOTED).read_text())
    found = tuple(str(answer[name] or "none") for name in ("culprit", "domain", "outlook"))
    expected = expected_answers()[str(case)]
    assert found in expected, f"{case}: ngsgd why answers {found}, expected {expected}: {answer}"


def expected_answers() -> dict[str, list[tuple[str, ...]]]:
    """Case -> acceptable answers (culprit, domain, outlook); more than one where chance decides."""
    found: dict[str, list[tuple[str, ...]]] = {}
    with _TABLE.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["case"], []).append((row["culprit"], row["domain"], row["outlook"]))
    return found
