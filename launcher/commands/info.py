"""`ngsgd info`: the state of a run, the contents of a folder of examples, or installed versions."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd.counting import counted
from ngsgd.errors import EXIT_OK
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.run_state import state_of
from ngsgd.launcher.text import duration, masked, printable
from ngsgd.runs.run_folder import find_run

__all__ = ["command", "describe_run", "end_lines", "examples", "progress_line", "state_of"]

_PACKAGES = ("ngsgd", "torch", "numpy", "ray", "hydra-core", "mlflow", "kaldi-native-fbank",
             "kaldi-decoder", "espeakng-loader")


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
        about = state_of(find_run(options.run, with_models=False))
        lines = describe_run(about)
    else:
        about = {package: version(package) for package in _PACKAGES}
        lines = [f"{package:20}{found}" for package, found in about.items()]
    print(masked(json.dumps(about, indent=1) if options.json else printable("\n".join(lines))))
    return EXIT_OK


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
    since = f" since outer iteration {state['incidents_since_outer_iter'] + 1}" if state["incidents_since_outer_iter"] else ""
    lines += [f"incidents  {state['num_incidents']}{since}"] + [f"  ! {message}"
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
        return f"{where}{counted(state['frames_processed'], 'example')}, valid loss {-objf:.4g}"
    return (f"{where}{counted(state['frames_processed'], 'frame')}, valid objf {objf:.3f}, accuracy "
            f"{100 * accuracy:.1f}%")


def _state_line(state: Mapping[str, Any]) -> str:
    if state["state"] == "LOST":
        return ("LOST: its process ended without a result, last event "
                f"{duration(state['silent_s'])} ago; continue with: {state['resume']}")
    if state["state"] == "UNKNOWN":
        return (f"UNKNOWN: process.json names process {state['process']['process_id']} without its "
                "start time, so that it may be another program; last event "
                f"{duration(state['silent_s'])} ago")
    return f"{state['state']}{' (no event yet)' if state['state'] == 'PENDING' else ''}"


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
             f"{counted(info.num_classes, 'class', 'classes')}{', with weights' if info.has_weights else ''}",
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
