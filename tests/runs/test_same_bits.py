"""A run's numeric fingerprint, in its folder and when it is resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ngsgd import interface
from ngsgd.config import ClusterConfig, RunConfig
from ngsgd.errors import CheckpointError, FingerprintError
from ngsgd.launcher.commands import info
from ngsgd.runs.fingerprint_check import FingerprintCheck
from ngsgd.runs.run_folder import RunFolder
from tests.toy import config


def _begun(tmp_path: Path, run_config: RunConfig) -> RunFolder:
    """The folder of a run whose workers became ready."""
    folder = RunFolder(tmp_path)
    bits = FingerprintCheck.of_new_run(run_config, folder, allow_other_bits=False)
    assert bits.agreement.refusal(bits.agreement.wanted) == ""
    bits.keep(0)
    return folder


def _resumed(run_config: RunConfig, folder: RunFolder, *, allow: bool = False) -> tuple[FingerprintCheck, list[str]]:
    told: list[str] = []
    return FingerprintCheck.of_resumed_run(run_config, folder, told.append, allow_other_bits=allow), told


def _with_workers(num_workers: int, kind: Any = "local") -> RunConfig:
    return config(cluster=ClusterConfig(kind, num_workers=num_workers))


def test_threads_stay_those_of_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    run_config = _with_workers(4)
    folder = _begun(tmp_path, run_config)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    bits, told = _resumed(run_config, folder)
    assert bits.num_threads == 2 and not told


@pytest.mark.parametrize("kind", ["local", "in_process", "ray"])
def test_a_resume_under_the_same_conditions_keeps_one_entry(kind: Any, tmp_path: Path) -> None:
    folder = _begun(tmp_path, _with_workers(2, kind))
    bits, _ = _resumed(_with_workers(2, kind), folder)
    assert bits.agreement.refusal(bits.agreement.wanted) == ""
    bits.keep(3)
    assert len(json.loads(folder.fingerprint.read_text())["history"]) == 1


def test_a_difference_is_refused_unless_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _begun(tmp_path, _with_workers(2))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    with pytest.raises(CheckpointError, match=r"(?s)MKL_CBWR.*--allow-other-bits"):
        _resumed(_with_workers(2), folder)
    bits, _ = _resumed(_with_workers(2), folder, allow=True)
    (line,) = bits.differences
    assert "MKL_CBWR" in line
    bits.agreement.refusal(bits.agreement.wanted)
    bits.keep(5)
    assert [entry["outer_iter"] for entry in json.loads(folder.fingerprint.read_text())["history"]] == [0, 5]
    again, _ = _resumed(_with_workers(2), folder)
    assert again.differences == []


def test_other_code_is_refused_with_ray_too_but_another_machine_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _begun(tmp_path, _with_workers(2, "ray"))
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert _resumed(_with_workers(2, "ray"), folder)[0].differences == []
    monkeypatch.setattr("ngsgd.cluster.fingerprint.code_digest", lambda: "other code")
    with pytest.raises(CheckpointError, match="other code"):
        _resumed(_with_workers(2, "ray"), folder)


def test_checkpoints_without_a_fingerprint_are_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    folder = _begun(tmp_path, _with_workers(2))
    (folder.checkpoints / "iter-000003").mkdir(parents=True)
    folder.fingerprint.unlink()
    with pytest.raises(FingerprintError, match="allow-other-bits"), interface.command_line():
        _resumed(_with_workers(2), folder)
    bits, _ = _resumed(_with_workers(2), folder, allow=True)
    # reported as an incident, and known from here on
    assert len(bits.differences) == 1
    bits.agreement.refusal(bits.agreement.wanted)
    bits.keep(4)
    assert _resumed(_with_workers(2), folder)[0].differences == []


def test_a_run_without_results_is_resumed_without_a_notice(tmp_path: Path) -> None:
    assert _resumed(_with_workers(2), RunFolder(tmp_path))[1] == []


def test_info_shows_it(tmp_path: Path) -> None:
    folder = _begun(tmp_path, replace(_with_workers(2), seed=1))
    state = info.state_of(folder.path)
    assert state["fingerprint"]["torch"] in "\n".join(info.describe_run(state))
    folder.fingerprint.write_text("damaged")
    assert info.state_of(folder.path)["fingerprint"] is None
