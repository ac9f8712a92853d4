"""Wrong command lines with exit code and next step, for docs/reference/mistakes.md and its test."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.entries import ROOT

PAGE: Path = ROOT / "docs" / "reference" / "mistakes.md"


@dataclass(frozen=True)
class Mistake:
    """A wrong command line."""

    situation: str
    # as typed, without quotes; a test replaces 5000 by a port in use
    line: str
    exit_code: int
    # keys, flags and commands that the message must hold
    suggested: tuple[str, ...]
    # Python package that is missing
    missing: str = ""


MISTAKES = (
    Mistake("unknown key", "ngsgd train optimizer.max_chnage=1", 2, ("optimizer.max_change=1",)),
    Mistake("name of PyTorch", "ngsgd train lr=0.1", 2, ("schedule.lr_initial=0.1",)),
    Mistake("name of PyTorch in a section", "ngsgd train optimizer.learning_rate=0.1", 2, ("schedule.lr_initial=0.1",)),
    Mistake("flag of another trainer", "ngsgd train --epochs 5", 2, ("schedule.num_epochs=5",)),
    Mistake("flag of Kaldi", "ngsgd train --trainer.optimization.minibatch-size=512", 2, ("schedule.minibatch_size=512",)),
    Mistake("flag of Kaldi", "ngsgd train --nj=4", 2, ("cluster.num_workers=4",)),
    Mistake("name of Lightning", "ngsgd train grad_clip=1", 2, ("optimizer.max_param_change",)),
    Mistake("value of Lightning", "ngsgd train amp=true", 2, ("cluster.precision=bf16",)),
    Mistake("number of GPUs", "ngsgd train gpus=2", 2, ("cluster.device=cuda", "cluster.num_workers=2")),
    Mistake("other name of a group", "ngsgd train optim=adamw", 2, ("optimizer=adamw",)),
    Mistake("other spelling of a choice", "ngsgd train optimizer=AdamW", 2, ("optimizer=adamw",)),
    Mistake("unknown choice of a group", "ngsgd train augment=rain", 2, ("rooms", "spec")),
    Mistake("unknown group in --help", "ngsgd train --help nosuch", 2, ("ngsgd settings",)),
    Mistake("wrong type", "ngsgd train schedule.num_epochs=ten", 2, ("schedule.num_epochs",)),
    Mistake("value out of range", "ngsgd train cluster.num_workers=0", 2, ("cluster.num_workers",)),
    Mistake("setting without effect", "ngsgd train outer=average outer.gain=2", 2, ("outer.gain",)),
    Mistake("several values", "ngsgd train seed=1,2", 2, ("--multirun",)),
    Mistake("several errors at once", "ngsgd train lr=0.1 seed=x --epochs 5 augment=rain", 2,
            ("schedule.lr_initial=0.1", "seed", "schedule.num_epochs=5", "augment")),
    Mistake("unknown flag", "ngsgd train --multirn", 2, ("--multirun",)),
    Mistake("missing data folder", "ngsgd train recipe=kaldi data.source=/nosuch/folder", 3, ("data.source",)),
    Mistake("folder that cannot be written", "ngsgd train output_dir=/dev/null/runs", 2, ("output_dir",)),
    Mistake("unknown command", "ngsgd trian", 2, ("ngsgd train",)),
    Mistake("unknown run", "ngsgd resume nosuch", 2, ("ngsgd status",)),
    Mistake("flag without the flag that it needs", "ngsgd decode RUN --lm words.arpa", 2, ("--data",)),
    Mistake("unknown format", "ngsgd export RUN model --format tflite", 2, ("onnx",)),
    Mistake("no Ray cluster at the address", "ngsgd train cluster.address=127.0.0.1:1", 5, ("cluster.address", "ray start --head")),
    Mistake("address of Ray's client", "ngsgd train cluster.address=ray://127.0.0.1:10001", 2, ("cluster.address", "HOST:PORT")),
    Mistake("no dashboard at the address", "ngsgd status --dashboard-url http://127.0.0.1:1", 5, ("--dashboard-url",)),
    Mistake("port in use", "ngsgd ui --port 5000", 2, ("--port",)),
    Mistake("missing extra", "ngsgd ui", 2, ("ngsgd[service]",), missing="mlflow"),
)


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| situation | command line | exit code | named in the message |", "|---|---|---|---|"]
    for one in MISTAKES:
        situation = f"{one.situation} ({one.missing})" if one.missing else one.situation
        suggested = ", ".join(f"`{word}`" for word in one.suggested)
        lines.append(f"| {situation} | `{one.line}` | {one.exit_code} | {suggested} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    """Return the page with its table written again, between two marks."""
    marks = r"(<!-- mistakes -->\n).*?(<!-- end of mistakes -->)"
    changed, count = re.subn(marks, lambda found: f"{found[1]}{table()}\n{found[2]}", text, count=1, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{PAGE} has no place for the table")
    return changed
