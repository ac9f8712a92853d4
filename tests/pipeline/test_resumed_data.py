"""Data of a resumed run: not read again, and compared with those of the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ngsgd.errors import CheckpointError, RunInterrupted
from ngsgd.pipeline.prepare import prepare
from ngsgd.pipeline.recipes import recipe
from ngsgd.pipeline.run import build_run
from ngsgd.pipeline.services import Services
from tests.asr.made_up_speech import write_data
from tests.toy import StopAfter

pytest.importorskip("kaldi_native_fbank")


@pytest.mark.slow
def test_a_resumed_run_prepares_no_data_unless_they_were_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(
        "kaldi", output_dir=tmp_path / "runs", features={"kind": "mfcc", "num_mel_bins": 23},
        data={"source": write_data(tmp_path / "speech"), "alignment": "flat", "labels": "one_step"},
        egs={"left_context": 1, "right_context": 1, "samples_per_iter": 400}, model={"hidden_dim": 8, "num_layers": 1},
        cluster={"kind": "in_process", "num_workers": 1})
    run = build_run(config, Services(stop=StopAfter(3)))
    with pytest.raises(RunInterrupted):
        run.train_only()
    num_prepared = 0

    def counted(*arguments: Any) -> Any:
        nonlocal num_prepared
        num_prepared += 1
        return prepare(*arguments)
    monkeypatch.setattr("ngsgd.pipeline.run.prepare", counted)

    def resume() -> int:
        with pytest.raises(RunInterrupted):
            build_run(config, Services(stop=StopAfter(1)), folder=run.folder).train_only()
        return num_prepared
    assert resume() == 0
    text = tmp_path / "speech/train/text"
    os.utime(text)
    # compared once, and then known again
    assert resume() == resume() == 1
    # the note of the data is lost
    run.folder.data.unlink()
    assert resume() == resume() == 2
    # one word less
    text.write_text(text.read_text().rstrip("\n").rpartition(" ")[0] + "\n")
    with pytest.raises(CheckpointError):
        build_run(config, folder=run.folder).train_only()
