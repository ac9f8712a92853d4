"""What `ngsgd info` prints: the state of a run, what a folder of examples holds, or the versions of what is installed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.console import version
from launcher.progress import duration
from ngsgd.files import read_json_lines

# MLflow's word for how a run ended -> Ray's, which `ray job` users know
_STATES = {"FINISHED": "SUCCEEDED", "FAILED": "FAILED", "KILLED": "STOPPED"}
_PACKAGES = ("ngsgd", "torch", "numpy", "ray", "hydra-core", "mlflow", "kaldi-native-fbank", "kaldi-decoder",
             "espeakng-loader")


def versions() -> list[str]:
    return [f"{package:20}{version(package)}" for package in _PACKAGES]


def describe_run(run_dir: Path) -> list[str]:
    """A few lines on how far the run has come."""
    log = run_dir / "events.jsonl"
    events = read_json_lines(log) if log.is_file() else []
    iterations = [event for event in events if event.get("event") == "outer_iteration"]
    incidents = [event for event in events if event.get("event") == "incident"]
    ends = [event for event in events if event.get("event") == "finished"]
    lines = [f"run        {run_dir}", f"state      {_state(run_dir, events)}"]
    if iterations:
        lines.append(f"progress   {_progress(iterations[-1])}")
    if ends:
        lines.append(f"result     {ends[-1].get('wer') or 'nothing was decoded'}")
    lines += _examples_of(run_dir)
    lines += [f"incidents  {len(incidents)}"] + [f"  ! {event.get('message')}" for event in incidents[-5:]]
    return lines


def describe_examples(directory: Path) -> list[str]:
    """What archives of examples hold, and whether they are well mixed; reads their labels."""
    from ngsgd.egs.mixing import mixing
    from ngsgd.egs.reader import EgsReader

    reader = EgsReader(directory)
    info = reader.info
    few, many = min(info.num_examples), max(info.num_examples)
    sizes = f"{few:,}" if few == many else f"{few:,} to {many:,}"
    lines = [f"examples   {directory}",
             f"archives   {info.num_archives}, of {sizes} examples; {info.num_frames:,} frames "
             f"of {info.feature_dim} features, {info.num_classes} classes{', with weights' if info.has_weights else ''}",
             f"an example {info.frames_per_eg} frames, context -{info.left_context} +{info.right_context}"]
    found = mixing(reader)
    for one in found:
        low, high = one.entropy_A.min(), one.entropy_A.max()
        lines.append(f"{one.what:10} entropy {low:.4f} to {high:.4f} nats; random order: {one.expected_A.mean():.4f} +- "
                     f"{one.deviation_A.mean():.4f}, farthest {one.farthest:.1f} deviations; divergence {one.divergence:.2f} "
                     f"(random order: 1): {'well mixed' if one.is_well_mixed else 'NOT well mixed'}")
    return lines if found else [*lines, "mixing     a single archive holds everything"]


def _examples_of(run_dir: Path) -> list[str]:
    try:
        return [f"examples   {json.loads((run_dir / 'data.json').read_text())['egs']}"]
    except (OSError, ValueError, KeyError):  # a run that has not begun
        return []


def _state(run_dir: Path, events: list[dict[str, Any]]) -> str:
    if not events:
        return "PENDING (no event yet)"
    status = events[-1].get("status")
    if status in _STATES:
        return _STATES[status]
    age = time.time() - (run_dir / "events.jsonl").stat().st_mtime
    return f"RUNNING, or lost: the last event came {duration(age)} ago; a lost run goes on with: ngsgd resume {run_dir}"


def _progress(event: Mapping[str, Any]) -> str:
    valid = event.get("valid", {})
    return (f"iter {event['outer_iter'] + 1}/{event['num_outer_iters']}, "
            f"epoch {event['epoch']:.2f}/{event['num_epochs']:g}, "
            f"{event['frames_processed']} frames, valid objf {valid.get('objf', float('nan')):.3f}, "
            f"accuracy {100 * valid.get('accuracy', float('nan')):.1f}%")
