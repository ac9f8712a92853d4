"""A trace of a run in the JSON format of Chrome and Perfetto (`ngsgd report --trace`).

Tracks are the coordinator and the workers. Times are microseconds on the clock of training, which
stands still between two processes of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_PROCESS = 1
_COORDINATOR = 0
_US = 1e6


def trace_of(name: str, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Convert the events of a run to a trace: jobs, averaging, checkpoints, evaluation, faults."""
    iterations = [event for event in events if event.get("event") == "outer_iteration"]
    incidents = [event for event in events if event.get("event") == "incident"]
    workers = sorted({job["worker"] for event in iterations for job in event["jobs"]}
                     | {event["worker"] for event in incidents if event.get("worker", -1) >= 0})
    found = [*_names(name, workers)]
    for event in iterations:
        found += [*_of_coordinator(event), *_of_jobs(event)]
    found += [*_of_incidents(incidents), *_of_processes(events)]
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"run": name}}


def _names(name: str, workers: Sequence[int]) -> Iterator[dict[str, Any]]:
    tracks = {_COORDINATOR: "coordinator", **{_track(worker): f"worker {worker}" for worker in workers}}
    yield {"ph": "M", "name": "process_name", "pid": _PROCESS, "tid": 0, "args": {"name": name}}
    for track, title in tracks.items():
        yield {"ph": "M", "name": "thread_name", "pid": _PROCESS, "tid": track, "args": {"name": title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": _PROCESS, "tid": track, "args": {"sort_index": track}}


def _of_coordinator(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The phases of an outer iteration: elapsed_s is between the evaluation and the checkpoint."""
    about = {"outer_iter": event["outer_iter"]}
    end_s = event["elapsed_s"]
    spans = (("evaluation", event["diagnostics_s"]), ("averaging", event["average_s"]), ("jobs", event["compute_s"]))
    for name, seconds in spans:
        yield _span(name, _COORDINATOR, end_s - seconds, seconds, about)
        end_s -= seconds
    yield _span("checkpoint", _COORDINATOR, event["elapsed_s"], event["checkpoint_s"], about)


def _of_jobs(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for job in event["jobs"]:
        about = {"outer_iter": event["outer_iter"], "job": job["job"], "attempt": job["attempt"], "num_frames": job["num_frames"],
                 "accepted": job["accepted"], **({"reason": job["reason"]} if job["reason"] else {})}
        yield _span(f"job {job['job']}", _track(job["worker"]), job["ended_s"] - job["seconds"], job["seconds"], about)


def _of_incidents(incidents: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in incidents:
        worker = event.get("worker", -1)
        yield _instant(str(event.get("what", "incident")), _track(worker) if worker >= 0 else _COORDINATOR,
                       float(event.get("elapsed_s", 0.0)), {"outer_iter": event["outer_iter"], "message": event["message"]})


def _of_processes(events: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Starts and ends of the processes of the run, at the last time that is known."""
    last_s = 0.0
    for event in events:
        last_s = max(last_s, float(event.get("elapsed_s") or 0.0))
        if event.get("event") in ("opened", "error", "closed"):
            about = {key: value for key, value in event.items() if key != "event"}
            yield _instant(str(event["event"]), _COORDINATOR, last_s, about)


def _track(worker: int) -> int:
    return worker + 1


def _span(name: str, track: int, start_s: float, seconds: float, about: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": "training", "pid": _PROCESS, "tid": track, "ts": start_s * _US, "dur": seconds * _US,
            "args": dict(about)}


def _instant(name: str, track: int, at_s: float, about: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "cat": "fault", "pid": _PROCESS, "tid": track, "ts": at_s * _US, "args": dict(about)}
