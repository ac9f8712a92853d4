"""The way from `optimizer.step()` to the arithmetic, counted by a profile."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import ngsgd

ROOT = str(Path(ngsgd.__file__).parent)


def test_a_step_calls_at_most_25_functions() -> None:
    model = nn.Sequential(nn.Linear(36, 104), nn.ReLU(), nn.Linear(104, 40))
    optimizer = ngsgd.NGSGD(model, lr=1e-3, loss_reduction="sum")
    seen: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOT):
            # a nested function counts with the function around it
            seen.add((code.co_filename, code.co_qualname.partition(".<locals>")[0]))

    # step 22: no update of the estimates, and no power of two, at which limits are reported
    for step in range(22):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.randn(64, 36)), torch.arange(64) % 40, reduction="sum").backward()
        sys.setprofile(note if step == 21 else None)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    assert any(name == "Sgd.step" for _, name in seen)
    assert len(seen) <= 25, sorted(name for _, name in seen)
