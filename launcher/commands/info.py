"""`ngsgd info`: a run, a folder of examples, or installed versions; `ngsgd settings`: options."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngsgd.counting import counted, duration
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import JSON, RUN, Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.run_state import state_of
from ngsgd.masking import masked, printable
from ngsgd.runs.run_folder import find_run

__all__ = ["command", "describe_run", "end_lines", "examples", "progress_line", "state_of"]

_PACKAGES = ("ngsgd", "torch", "numpy", "ray", "hydra-core", "mlflow", "kaldi-native-fbank", "kaldi-decoder", "espeakng-loader")


def command(arguments: Sequence[str]) -> int:
    parser = Parser("info")
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{RUN}; or a folder of examples, runs/data/egs-... (default: "
                             "installed versions)")
    parser.declare({"--json": JSON})
    options = parser.parse_args(arguments)
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


def settings(arguments: Sequence[str]) -> int:
    """`ngsgd settings`: print the options of a run that match a pattern."""
    parser = Parser("settings")
    parser.add_argument("pattern", metavar="PATTERN", nargs="?", default="",
                        help="section (optimizer); part of a name (lr); name in another trainer (batch_size); word of a help text, "
                             "default or value (bmuf); shell pattern (schedule.lr*) (default: all settings)")
    parser.declare({"--json": JSON})
    chosen = parser.parse_args(arguments)
    from ngsgd.launcher.config import describe
    if not (found := describe.matching(chosen.pattern)):
        raise ConfigError(f"no setting matches {chosen.pattern!r}; list all of them with: ngsgd settings")
    print(json.dumps([vars(one) for one in found], indent=1) if chosen.json else describe.text(found))
    return EXIT_OK


def describe_run(state: Mapping[str, Any]) -> list[str]:
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
    if found := state["fingerprint"]:
        compiled = [name for name, origin in (found.get("kernels") or {}).items() if not str(origin).startswith("none")]
        settings = [f", {name}={value}" for name, value in (found.get("settings") or {}).items()]
        lines += [f"computed   torch {found.get('torch')}, numpy {found.get('numpy')}, code "
                  f"{str(found.get('code'))[:12]}, threads per worker {found.get('threads')}, on {found.get('device')}",
                  f"processor  {found.get('processor')} ({found.get('capability')}), kernels "
                  f"{', '.join(compiled) or 'none'}{''.join(settings)}"]
    since = state["incidents_since_outer_iter"]
    start = f" since outer iteration {since + 1}" if since else ""
    return [*lines, f"incidents  {state['num_incidents']}{start}", *(f"  ! {message}" for message in state["incidents"])]


def end_lines(state: Mapping[str, Any]) -> list[str]:
    """Return the state of a run and, after a failure or a stop, its last error."""
    word, ago, error = state["state"], f"{duration(state['silent_s'])} ago", state["error"]
    shown = {
        "LOST": f"LOST: its process ended without a result, last event {ago}; continue with: {state['resume']}",
        "UNKNOWN": f"UNKNOWN: process.json names process {state['process'].get('process_id')} "
                   f"without its start time, so that it may be another program; last event {ago}",
        "PENDING": "PENDING (no event yet)"}
    lines = [f"state      {shown.get(word, word)}"]
    if error and word in ("FAILED", "STOPPED"):
        lines.append(f"error      exit code {error['exit_code']}: {error['message']}")
    return lines


def progress_line(state: Mapping[str, Any]) -> str:
    objf, accuracy = (math.nan if state[name] is None else state[name] for name in ("valid_objf", "valid_accuracy"))
    where = f"iter {state['outer_iter']}/{state['num_outer_iters']}, epoch {state['epoch']:.2f}/{state['num_epochs']:g}, "
    if not state["is_speech"]:
        return f"{where}{counted(state['frames_processed'], 'example')}, valid loss {-objf:.4g}"
    return f"{where}{counted(state['frames_processed'], 'frame')}, valid objf {objf:.3f}, accuracy {100 * accuracy:.1f}%"


def examples(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """Describe archives of examples; DamagedArchiveError if one is missing or altered."""
    from dataclasses import asdict

    from ngsgd.data.reader import EgsReader
    reader = EgsReader(directory)
    info = reader.info
    few, many = min(info.num_examples), max(info.num_examples)
    sizes = f"{few:,}" if few == many else f"{few:,} to {many:,}"
    side = f" and {info.side_dim} side values" if info.side_dim else ""
    lines = [f"examples   {directory}", f"archives   {info.num_archives}, of {sizes} examples; {info.num_frames:,} frames of "
             f"{info.feature_dim} features{side}, {counted(info.num_classes, 'class', 'classes')}"
             f"{', with weights' if info.has_weights else ''}",
             f"an example {info.frames_per_eg} frames, context -{info.left_context} +{info.right_context}"]
    for archive in range(info.num_archives):
        reader.archive_arrays(archive)
    return asdict(info), lines
