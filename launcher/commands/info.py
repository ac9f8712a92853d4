"""`ngsgd info`: the state of a run, the contents of a folder of examples, or installed versions."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd import process_identity
from ngsgd.config import TaskConfig
from ngsgd.errors import EXIT_OK
from ngsgd.files import read_json, read_regular_text, unsealed
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.text import duration, masked, printable
from ngsgd.pipeline.runs.run_folder import RunFolder, find_run, resume_command
from ngsgd.training.storage.event_log import read_events
from ngsgd.training.storage.lock import holder_of

# MLflow's state of a run -> that of a Ray job
_STATES = {"FINISHED": "SUCCEEDED", "FAILED": "FAILED", "KILLED": "STOPPED"}
_PACKAGES = ("ngsgd", "torch", "numpy", "ray", "hydra-core", "mlflow", "kaldi-native-fbank",
             "kaldi-decoder", "espeakng-loader")
# a run of another machine counts as lost after this time without an event
_ALIVE_S = 600.0


def command(arguments: Sequence[str]) -> int:
    """`ngsgd info`."""
    parser = Parser("info")
    parser.add_argument("run", nargs="?", metavar="RUN",
                        help="run folder, or its name under runs/; or a folder of examples, "
                             "runs/data/egs-... (default: installed versions)")
    parser.add_argument("--json", action="store_true", help=JSON)
    options = parser.parse_args(list(arguments))
    if options.run and (Path(options.run) / "info.json").is_file():
        about, lines = examples(Path(options.run))
    elif options.run:
        about = state_of(find_run(options.run))
        lines = describe_run(about)
    else:
        about = {package: version(package) for package in _PACKAGES}
        lines = [f"{package:20}{found}" for package, found in about.items()]
    print(masked(json.dumps(about, indent=1) if options.json else printable("\n".join(lines))))
    return EXIT_OK


def state_of(run_dir: Path) -> dict[str, Any]:
    """Return state and progress of a run from the files in its folder; unknown figures are None."""
    folder = RunFolder(run_dir)
    events = read_events(folder.events)
    nothing: dict[str, Any] = {}
    last = next((event for event in reversed(events) if event.get("event") == "outer_iteration"),
                nothing)
    end = next((event for event in reversed(events) if event.get("event") == "finished"), nothing)
    incidents = [str(event.get("message")) for event in events if event.get("event") == "incident"]
    valid, task = last.get("valid", {}), _task_of(folder)
    return {
        "run": str(run_dir), "state": _state(folder, events), "process": _process(folder),
        "silent_s": _silent_s(folder),
        "outer_iter": last["outer_iter"] + 1 if last else 0,
        "num_outer_iters": last.get("num_outer_iters"),
        "epoch": last.get("epoch", 0.0), "num_epochs": last.get("num_epochs"),
        "frames_processed": last.get("frames_processed", 0),
        "metrics": end.get("metrics") or None, "is_speech": not task._target_,
        "valid_objf": valid.get("objf"), "valid_accuracy": valid.get("accuracy"),
        "left_s": last.get("left_s"),
        "wer": end.get("wer") or None,
        "wer_percent": end.get("wer_percent") if end.get("wer") else None,
        "fingerprint": _fingerprint(folder),
        "error": folder.last_error() or None, "resume": resume_command(task, run_dir),
        "is_finished": bool(end), "examples": _examples_of(folder),
        "num_incidents": len(incidents), "incidents": incidents[-5:]}


def describe_run(state: Mapping[str, Any]) -> list[str]:
    """Return the state of a run as lines of text."""
    lines = [f"run        {state['run']}", *end_lines(state)]
    if state["num_outer_iters"]:
        lines.append(f"progress   {progress_line(state)}")
    if state["is_finished"]:
        if state["is_speech"]:
            result = state["wer"] or "not decoded"
        else:
            metrics = state["metrics"] or {}
            result = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        lines.append(f"result     {result}")
    if state["examples"]:
        lines.append(f"examples   {state['examples']}")
    if state["fingerprint"]:
        lines += _fingerprint_lines(state["fingerprint"])
    lines += [f"incidents  {state['num_incidents']}"] + [f"  ! {message}"
                                                         for message in state["incidents"]]
    return lines


def end_lines(state: Mapping[str, Any]) -> list[str]:
    """Return the state of a run and, after a failure or a stop, its last error."""
    lines = [f"state      {_state_line(state)}"]
    if state["error"] and state["state"] in ("FAILED", "STOPPED"):
        lines.append(f"error      exit code {state['error']['exit_code']}: {state['error']['message']}")
    return lines


def progress_line(state: Mapping[str, Any]) -> str:
    """Return the progress of training as one line."""
    objf, accuracy = (math.nan if state[name] is None else state[name]
                      for name in ("valid_objf", "valid_accuracy"))
    where = f"iter {state['outer_iter']}/{state['num_outer_iters']}, epoch {state['epoch']:.2f}/{state['num_epochs']:g}, "
    if not state["is_speech"]:
        return f"{where}{state['frames_processed']} examples, valid loss {-objf:.4g}"
    return (f"{where}{state['frames_processed']} frames, valid objf {objf:.3f}, accuracy "
            f"{100 * accuracy:.1f}%")


def _task_of(folder: RunFolder) -> TaskConfig:
    """The custom task of a run; config.yaml is not parsed completely, which is slow."""
    try:
        text = read_regular_text(folder.config)
    except (OSError, ValueError):
        return TaskConfig()
    found = re.search(r"^task:\n  _target_: (?:''|[\"']?([^\"'\n]*)[\"']?)$", text, re.MULTILINE)
    return TaskConfig(_target_=found[1] or "") if found else TaskConfig()


def _state(folder: RunFolder, events: Sequence[Mapping[str, Any]]) -> str:
    """The state in Ray's terms; LOST: the process ended without a final event; UNKNOWN: unclear."""
    process = _process(folder)
    if process_identity.is_alive(process):
        return "RUNNING" if events else "PENDING"
    if not events:
        return ("UNKNOWN"
                if may_be_alive(process) else "LOST") if folder.process.exists() else "PENDING"
    status = events[-1].get("status")
    if status in _STATES:
        return _STATES[status]
    if _silent_s(folder) <= _ALIVE_S:
        if is_elsewhere(process):
            return "RUNNING"
        if may_be_alive(process):
            return "UNKNOWN"
    return "LOST"


def _state_line(state: Mapping[str, Any]) -> str:
    if state["state"] == "LOST":
        return ("LOST: its process ended without a result, last event "
                f"{duration(state['silent_s'])} ago; continue with: {state['resume']}")
    if state["state"] == "UNKNOWN":
        return (f"UNKNOWN: process.json names process {state['process']['process_id']} without its "
                "start time, so that it may be another program; last event "
                f"{duration(state['silent_s'])} ago")
    return f"{state['state']}{' (no event yet)' if state['state'] == 'PENDING' else ''}"


def _process(folder: RunFolder) -> dict[str, Any]:
    """The identity of the process that trains; empty if there is none."""
    held = holder_of(folder.lock)
    if held and held.get("purpose") != "decode":
        return _as_identity(held.get("holder"))
    try:
        return _as_identity(read_json(folder.process))
    except (OSError, ValueError):
        return {}


def _as_identity(stored: object) -> dict[str, Any]:
    return stored if isinstance(stored, dict) and stored.keys() >= {"host", "process_id"} else {}


def is_elsewhere(process: Mapping[str, Any]) -> bool:
    """Return whether a process belongs to another machine or container."""
    if not process:
        return False
    if process["host"] != socket.gethostname():
        return True
    # a container on this machine; a process of another boot has ended
    return (process_identity.is_complete(process)
            and process["boot_id"] == process_identity.current()["boot_id"]
            and not process_identity.is_here(process))


def may_be_alive(process: Mapping[str, Any]) -> bool:
    """Return whether a process of this machine has the id of a record without a start time.

    It may be another process.
    """
    process_id = process.get("process_id")
    if not process or is_elsewhere(process) or process_identity.is_complete(process) or type(process_id) is not int:
        return False
    return process_id > 1 and process_identity.exists(process_id)


def _silent_s(folder: RunFolder) -> float:
    return max(0.0, time.time() - folder.events.stat().st_mtime) if folder.events.is_file() else 0.0


def _examples_of(folder: RunFolder) -> str | None:
    try:
        return str(read_json(folder.data)["egs"])
    except (OSError, ValueError, KeyError, TypeError):
        # the run has not started
        return None


def _fingerprint(folder: RunFolder) -> dict[str, Any] | None:
    """The stored numeric fingerprint; the module that compares it imports torch."""
    try:
        return dict(unsealed(read_json(folder.fingerprint))[0]["history"][-1]["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        # the run has not started, or is of an earlier version
        return None


def _fingerprint_lines(found: Mapping[str, Any]) -> list[str]:
    compiled = [name for name, origin in (found.get("kernels") or {}).items()
                if not str(origin).startswith("none")]
    settings = "".join(f", {name}={value}" for name, value in (found.get("settings") or {}).items())
    return [f"computed   torch {found.get('torch')}, numpy {found.get('numpy')}, code "
            f"{str(found.get('code'))[:12]}, threads per worker {found.get('threads')}, on "
            f"{found.get('device')}",
            f"processor  {found.get('processor')} ({found.get('capability')}), kernels "
            f"{', '.join(compiled) or 'none'}{settings}"]


def examples(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Describe archives of examples and how well they are shuffled; reads their labels."""
    from dataclasses import asdict

    from ngsgd.data.reader import EgsReader
    from ngsgd.data.shuffle_quality import mixing

    reader = EgsReader(directory)
    info = reader.info
    few, many = min(info.num_examples), max(info.num_examples)
    sizes = f"{few:,}" if few == many else f"{few:,} to {many:,}"
    lines = [f"examples   {directory}",
             f"archives   {info.num_archives}, of {sizes} examples; {info.num_frames:,} frames of "
             f"{info.feature_dim} "
             f"features{f' and {info.side_dim} side values' if info.side_dim else ''}, "
             f"{info.num_classes} classes{', with weights' if info.has_weights else ''}",
             f"an example {info.frames_per_eg} frames, context -{info.left_context} "
             f"+{info.right_context}"]
    found = mixing(reader)
    for one in found:
        low, high = one.entropy_A.min(), one.entropy_A.max()
        lines.append(f"{one.what:10} entropy {low:.4f} to {high:.4f} nats; random order: "
                     f"{one.expected_A.mean():.4f} +- {one.deviation_A.mean():.4f}, farthest "
                     f"{one.farthest:.1f} deviations; divergence {one.divergence:.2f} (random "
                     f"order: 1): {'well mixed' if one.is_well_mixed else 'NOT well mixed'}")
    about = {**asdict(info), "mixing": {one.what: {"is_well_mixed": bool(one.is_well_mixed),
                                                   "divergence": float(one.divergence)}
                                        for one in found}}
    return about, lines if found else [*lines, "mixing     a single archive holds all examples"]
