"""The answer of `ngsgd why`: culprit, failure domain, outlook of a retry, evidence, next command.

It is a function of the files of the run and of whether a process trains it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ngsgd.errors import FailureKind, failure_kind
from ngsgd.files import read_json
from ngsgd.launcher.registry import COMMANDS
from ngsgd.launcher.run_state import state_of
from ngsgd.launcher.why.causes import INTERRUPTED, KILLED, LOST_WORK, MAY_HELP, WORKLOAD, of_error, of_worker
from ngsgd.launcher.why.facts import Evidence, Line, cut, lines_of, log_tail, quoted
from ngsgd.launcher.why.faults import Fault, bad_examples, faults_of, wait_of
from ngsgd.masking import masked
from ngsgd.runs import stored_run
from ngsgd.runs.failure_record import failed_command
from ngsgd.runs.run_folder import RunFolder
from ngsgd.yaml_text import read_entry

_MAX_EVIDENCE = 8
# bad examples that the text lists; JSON has all
_MAX_BAD = 20
_IN_PYTHON = ") in Python"
_ENDED = ("FAILED", "STOPPED")


@dataclass(frozen=True)
class Answer:
    # run folder, or folder of runs for a command that failed before there was a run
    run: str
    # as in `ngsgd status`; NOT STARTED for a command
    state: str
    # component at fault; None: nothing failed
    culprit: str | None = None
    # workload, infrastructure or unknown
    domain: str | None = None
    # whether the same command can succeed unchanged: cannot help, may help or unknown
    outlook: str | None = None
    summary: str = ""
    evidence: tuple[Evidence, ...] = ()
    # what a person does before `next`; empty: nothing
    first: str = ""
    # a command that works then; a call for a run of a Python program
    next: str = ""
    # a command about the run that was refused since, and why; not the cause of the state
    note: str = ""
    # all recorded faults: culprit -> number
    faults: dict[str, int] = field(default_factory=dict)
    # utterance ids or indices of examples with a non-finite loss or gradient -> reason
    bad_examples: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def short(self) -> str:
        """One line for `ngsgd status`; empty if nothing failed."""
        return f"{self.culprit} ({self.domain}; a retry {_RETRY[self.outlook or '']}): {self.summary}" if self.culprit else ""

    @property
    def lines_of_next(self) -> list[str]:
        return [f"{name:10} {text}" for name, text in (("first", self.first), ("next", self.next)) if text]


_RETRY = {"cannot help": "cannot help", "may help": "may help", "unknown": "has an unknown outcome", "": ""}


def explain(run: Path) -> Answer:
    """Explain the state of a run: the newest event counts."""
    run = stored_run.with_newest_events(run)
    folder = RunFolder(run)
    state = state_of(run)
    events, ledger = lines_of(folder.events), lines_of(folder.ledger)
    faults = faults_of(events, ledger, is_alive=state["state"] in ("RUNNING", "PENDING", "UNKNOWN"))
    record, wrong = failed_command(run) if state["state"] != "SUCCEEDED" else {}, failed_command(run, "note")
    if record.get("kind") == "RunLockedError" and state["state"] not in _AFTER_CALM:
        # the process that it met has ended
        record, wrong = {}, wrong or record
    note = f"{wrong['command']}: {cut(str(wrong['message']))}" if wrong else ""
    end = _command_fault(record) if record else _end_of_process(folder, state, events, ledger, faults)
    fault = end or max(faults, key=lambda one: one.severity, default=None)
    counts = dict(Counter(one.cause.culprit for one in faults))
    lr, resume = read_entry(folder.config, "schedule", "lr_initial"), str(state["resume"])
    half_lr = f"{lr / 2:g}" if isinstance(lr, float) else "half of the present value"
    values = {**_of_command(record), "run": shlex.quote(masked(folder.address)), "resume": resume,
              "repeat": resume, "help": "ngsgd train --help", "half_lr": half_lr}
    if fault is None:
        return Answer(folder.address, state["state"], summary=_CALM.get(state["state"], "No fault was recorded."), note=note,
                      next=_AFTER_CALM.get(state["state"], "").format(**values))
    fault = _with_exception(folder, fault)
    is_over = bool(end) or (state["state"] not in ("SUCCEEDED", "RUNNING") and fault.severity >= INTERRUPTED)
    needs_action = is_over or fault.severity >= LOST_WORK
    cause = fault.cause
    waits = wait_of(events, ledger) if state["state"] in ("RUNNING", "UNKNOWN") else ""
    evidence = tuple(dict.fromkeys([*fault.evidence, *log_tail(folder, fault.workers)]))
    return Answer(folder.address, state["state"], cause.culprit, cause.domain,
                  # the run continued
                  cause.outlook if needs_action else MAY_HELP, _sentence(fault), evidence[:_MAX_EVIDENCE],
                  cause.first.format(**values) if needs_action else f"nothing to do: {waits or 'the run recovered'}",
                  _step(fault, state, values), note, counts, bad_examples(line.fields for line in events))


def explain_command(output_dir: Path) -> Answer | None:
    """Explain the last command that failed before a run in `output_dir`; None without one since."""
    record = failed_command(output_dir)
    if not record:
        return None
    found = _command_fault(record)
    cause = found.cause
    run = record["runs"][-1] if record.get("runs") else str(output_dir)
    values = {**_of_command(record), "run": shlex.quote(run), "resume": record["command"], "half_lr": "VALUE"}
    return Answer(str(output_dir), "NOT STARTED", cause.culprit, cause.domain, cause.outlook, _sentence(found), found.evidence,
                  cause.first.format(**values), cause.next.format(**values))


def _command_fault(record: Mapping[str, Any]) -> Fault:
    told = [Evidence("last command", cut(str(record["command"]))),
            *(Evidence("recorded in", folder) for folder in record.get("runs", ())),
            *(Evidence("its error", cut(line)) for line in str(record["message"]).splitlines()[:4])]
    return Fault(INTERRUPTED, of_error(record), tuple(told))


def _of_command(record: Mapping[str, Any]) -> dict[str, str]:
    words = [*record.get("words", ()), "", ""]
    # of a wrong command, there is no help
    name = words[1] if words[1] in {one.name for one in COMMANDS} else ""
    return {"repeat": str(record.get("command", "")), "help": f"ngsgd {name} --help".replace("  ", " "),
            "install": str(record.get("install", "pip install PACKAGE"))}


def _end_of_process(folder: RunFolder, state: Mapping[str, Any], events: Sequence[Line], ledger: Sequence[Line],
                    faults: Sequence[Fault]) -> Fault | None:
    about = folder.last_error()
    # error.json is that of the last process, which may have failed before its first event
    if state["state"] in _ENDED or (about and state["state"] not in ("RUNNING", "UNKNOWN")):
        lines = [line for line in events if line.event == "error"]
        about = about or (lines[-1].fields if lines else {"kind": "", "exit_code": 1, "message": ""})
        evidence = [Evidence("error.json", cut(line)) for line in str(about["message"]).splitlines()[:3]]
        found = Fault(INTERRUPTED, of_error(about), tuple(evidence))
        return _behind_divergence(found, ledger, faults) if about.get("exit_code") == 4 else found
    if state["state"] == "LOST":
        return next((fault for fault in reversed(faults) if fault.cause is KILLED), None) or Fault(
            INTERRUPTED, KILLED, (Evidence(events[-1].source, f"{events[-1].event} is the last event"),) if events else ())
    if state["state"] == "PENDING" and not state["process"]:
        with contextlib.suppress(OSError, ValueError):
            if isinstance(lock := read_json(folder.lock), dict) and "holder" in lock:
                return Fault(INTERRUPTED, KILLED, (Evidence("lock", "its holder ended without releasing it"),))
    return None


def _with_exception(folder: RunFolder, fault: Fault) -> Fault:
    """Replace "exited" by the exception in the last line of the worker's log."""
    if fault.kind != FailureKind.EXITED:
        return fault
    # the last line of a traceback
    found = [line.text.partition(":") for line in log_tail(folder, fault.workers, 1)]
    found = [(name, colon, message) for name, colon, message in found
             if name.replace(".", "").isidentifier() and name.endswith(("Error", "Exception"))]
    if not found:
        return fault
    name, _, message = found[-1]
    cause = of_worker(failure_kind(name.rpartition(".")[2], message))
    # the ledger decides about the retry
    domain = fault.cause.domain if cause.domain == WORKLOAD else cause.domain
    return replace(fault, cause=replace(cause, domain=domain, outlook=fault.cause.outlook))


def _behind_divergence(found: Fault, ledger: Sequence[Line], faults: Sequence[Fault]) -> Fault:
    """Replace "diverged" by the reason for which no job of the outer iteration was usable."""
    last = max((line.job[0] for line in ledger if line.event == "planned"), default=-1)
    lines = [line for line in ledger if line.job[0] == last and line.event in ("rejected", "dropped", "quarantined", "rolled_back")]
    # diverging training does not change inputs
    if data := [fault for fault in faults if fault.kind == FailureKind.BAD_INPUT]:
        return Fault(INTERRUPTED, data[0].cause, (*found.evidence, *data[0].evidence, *data[-1].evidence), data[0].workers)
    lost = {line.source for line in lines if line.event in ("dropped", "quarantined")}
    behind = [fault for fault in faults if any(one.source in lost for one in fault.evidence)]
    if behind and not any(line.event == "rejected" for line in lines):
        return Fault(INTERRUPTED, behind[-1].cause, (*found.evidence, *behind[-1].evidence), behind[-1].workers)
    return Fault(INTERRUPTED, found.cause, (*found.evidence, *map(quoted, lines)), found.workers)


def _step(fault: Fault, state: Mapping[str, Any], values: Mapping[str, str]) -> str:
    """The next command; a run that finished, or that trains, cannot be resumed."""
    cause = fault.cause
    if state["state"] in _AFTER_CALM and ("{resume}" in cause.next or "{repeat}" in cause.next):
        return _AFTER_CALM[state["state"]].format(**values)
    step = cause.next.format(**values)
    if not cause.option:
        return step
    # of a run of a Python program the step is a call
    call, _, _ = step.partition(_IN_PYTHON)
    return f"{step} --{cause.option}" if call == step else f"{call}, {cause.option.replace('-', '_')}=True{_IN_PYTHON}"


def _sentence(fault: Fault) -> str:
    workers = sorted(set(fault.workers))
    who = f" ({'worker' if len(workers) == 1 else 'workers'} {', '.join(map(str, workers))})" if workers else ""
    return fault.cause.meaning.rstrip(".") + who + "."


# state -> next command where nothing is to be repaired
_AFTER_CALM = {"SUCCEEDED": "ngsgd report {run}", "RUNNING": "ngsgd status {run}", "UNKNOWN": "ngsgd status {run}"}


_CALM = {"SUCCEEDED": "The run finished, and no fault was recorded.",
         "PENDING": "The run prepares data or waits for its first workers, and no error was recorded.",
         "RUNNING": "The run is training, and no fault was recorded."}


def lines_about(answer: Answer) -> list[str]:
    lines = [f"run        {answer.run}", f"state      {answer.state}"]
    if answer.culprit:
        lines += [f"culprit    {answer.culprit}", f"domain     {answer.domain}", f"retry      {answer.outlook}"]
    lines.append(f"summary    {answer.summary}")
    lines += [f"{'evidence' if not index else '':10} {one.source}: {one.text}" for index, one in enumerate(answer.evidence)]
    if len(answer.faults) > 1 or any(number > 1 for number in answer.faults.values()):
        lines.append(f"faults     {', '.join(f'{culprit} {number}' for culprit, number in answer.faults.items())}")
    bad = [f"{name}: {reason}" for name, reason in answer.bad_examples.items()]
    bad[_MAX_BAD:] = [f"and {len(bad) - _MAX_BAD} more"] if len(bad) > _MAX_BAD else []
    lines += [f"{'' if index else 'examples':10} {line}" for index, line in enumerate(bad)]
    return [*lines, *([f"note       {answer.note}"] if answer.note else []), *answer.lines_of_next]
