"""The numeric fingerprint: contents, comparison, and storage in a run."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ngsgd.cluster import fingerprint
from ngsgd.cluster.fingerprint import NO_KERNEL, Agreement, Fingerprint, FingerprintFile, code_digest, kernels, version_digest
from ngsgd.errors import CheckpointError
from ngsgd.ops.kernels import native

SOME = Fingerprint("c0de", "2.9.0", "2.2.0", "GenuineIntel family 6 model 85", "AVX512", {},
                   {"fisher_projection.cpp": "ab12 GCC: (x) 13"}, "cpu", 2, "float32")
CHANGES: dict[str, Any] = {
    "code": "0ther", "torch": "2.8.0", "numpy": "2.1.0", "processor": "AuthenticAMD family 26 model 2", "capability": "AVX2",
    "settings": {"MKL_CBWR": "COMPATIBLE"}, "kernels": {"fisher_projection.cpp": NO_KERNEL},
    "device": "NVIDIA H200, CUDA 12.8", "threads": 1, "precision": "bf16"}


def test_every_field_is_compared() -> None:
    assert CHANGES.keys() == {spec.name for spec in fields(Fingerprint) if spec.compare}
    assert SOME.differences(SOME) == []
    for name, value in CHANGES.items():
        (line,) = SOME.differences(replace(SOME, **{name: value}))
        assert name in line or "MKL_CBWR" in line or "fisher_projection.cpp" in line


def test_unknown_fields_equal_any() -> None:
    assert SOME.differences(Fingerprint()) == [] == Fingerprint().differences(SOME)
    other_machine = replace(SOME, processor="another", device="another", settings={"MKL_CBWR": "AVX2"})
    assert SOME.without_machine().differences(other_machine) == []
    assert SOME.without_machine().differences(replace(SOME, threads=1)) != []
    assert SOME.without_machine().completed_by(SOME) == SOME


def test_json_keeps_everything_and_ignores_unknown_entries() -> None:
    stored = json.loads(json.dumps(SOME.to_json()))
    assert Fingerprint.from_json(stored) == SOME
    assert Fingerprint.from_json(stored | {"a field of later versions": 1}) == SOME


def test_the_fingerprint_of_this_process_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Fingerprint.of_this_process(3, torch.device("cpu"))
    assert found.torch == torch.__version__ and found.threads == 3 and found.device == "cpu" and found.processor
    assert found.kernels.keys() == {"fisher_projection.cpp", "nonlinearities.cpp"}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    (line,) = found.differences(Fingerprint.of_this_process(3, torch.device("cpu")))
    assert "MKL_CBWR" in line
    with native.in_torch_operations():
        assert set(kernels().values()) == {NO_KERNEL}


@pytest.mark.parametrize("suffix", [".py", ".cpp"])
def test_the_code_is_python_and_cpp(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "__file__", str(tmp_path / "training" / "fingerprint.py"))
    (tmp_path / "ops").mkdir()
    found = set()
    for text in ("one", "two"):
        (tmp_path / "ops" / f"file{suffix}").write_text(text)
        found.add(code_digest.__wrapped__())
    assert len(found) == 2
    assert len(version_digest()) == 64 and version_digest() == version_digest()


def test_the_first_worker_decides_unknown_values() -> None:
    agreement = Agreement(SOME.without_machine())
    assert agreement.refusal(SOME) == "" and agreement.found == SOME
    assert "fisher_projection.cpp" in agreement.refusal(replace(SOME, kernels={"fisher_projection.cpp": NO_KERNEL}))
    assert agreement.refusal(SOME) == "" and agreement.accepted() == []


def test_other_bits_can_be_allowed() -> None:
    agreement = Agreement(SOME, allow_other_bits=True)
    assert agreement.refusal(replace(SOME, threads=1)) == ""
    (line,) = agreement.accepted()
    assert "threads" in line and agreement.accepted() == []


def test_the_history_is_kept(tmp_path: Path) -> None:
    file = FingerprintFile(tmp_path / "fingerprint.json")
    assert file.newest() is None
    file.append(SOME, 0)
    other = replace(SOME, threads=1)
    file.append(other, 7, SOME.differences(other))
    assert file.newest() == other
    history = json.loads(file.path.read_text())["history"]
    assert [entry["outer_iter"] for entry in history] == [0, 7] and len(history[1]["differences"]) == 1


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"history": 5}', '{"history": [{}]}', '{"history": [{"fingerprint": 5}]}',
                                  '{"history": [{"fingerprint": {"settings": 5, "kernels": 7}}]}'])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "fingerprint.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"fingerprint\.json"):
        FingerprintFile(tmp_path / "fingerprint.json").newest()
