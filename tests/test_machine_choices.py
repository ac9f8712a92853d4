"""No process makes a choice by its machine, in silence, that decides results.

Each place of the library that looks at the machine, its packages or its programs has a reason here.
Either the numeric fingerprint holds the choice, or no result depends on it, or the user sees it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from ngsgd.cluster.fingerprint import Fingerprint

ROOT = Path(__file__).resolve().parent.parent / "ngsgd"
_LOOKS = re.compile(r"shutil\.which|find_spec\(|except (?:ImportError|ModuleNotFoundError)|cpu_count\(|sched_getaffinity"
                    r"|get_cpu_capability|/proc/cpuinfo|(?:cuda|mkldnn)\.is_available\(|device_count\(|platform\.(?:machine|processor)"
                    r"|environ\.get\(\"CXX\"|\btimeout=")
FINGERPRINT, NO_RESULT, SHOWN = "in the fingerprint", "no result depends on it", "an error or a line"
KNOWN = {
    # the compiler, the processor and their kernels
    "ops/kernels/native.py": FINGERPRINT, "ops/gemm.py": FINGERPRINT, "cluster/fingerprint.py": FINGERPRINT,
    "ops/device/triton_kernels.py": FINGERPRINT,
    # the device, the backend of ranks, and the threads
    "training/worker.py": FINGERPRINT, "cluster/groups.py": FINGERPRINT, "runs/fingerprint_check.py": FINGERPRINT,
    # numbers of processes and threads of work in a fixed order
    "asr/corpora/corpus.py": NO_RESULT, "asr/corpora/shard_processes.py": NO_RESULT,
    "data/archives.py": NO_RESULT,
    "pipeline/base_run.py": NO_RESULT, "planning/probe.py": NO_RESULT,
    # waits of threads and connections
    "training/sites/site_average.py": NO_RESULT, "cluster/exchange/authentication.py": NO_RESULT,
    "cluster/replicas/rank_group.py": NO_RESULT, "asr/corpora/fsdd.py": SHOWN, "asr/corpora/digits.py": SHOWN,
    # packages that are missing
    "imports.py": SHOWN, "object_storage/client.py": SHOWN, "__init__.py": SHOWN, "pipeline/api.py": NO_RESULT,
    # the start of `ngsgd tune` shows the search
    "pipeline/tuning.py": SHOWN}


def test_every_place_that_looks_at_the_machine_has_a_reason() -> None:
    found = set()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if name.split("/")[0] == "launcher":
            continue
        text = path.read_text(encoding="utf-8")
        if _LOOKS.search(text):
            tree = ast.parse(text)
            # without comments and docstrings
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                    node.body[0] = ast.Pass()
            if _LOOKS.search(ast.unparse(tree).replace("'", '"')):
                found.add(name)
    assert found == KNOWN.keys()


@pytest.mark.entry("Nc1")
def test_workers_whose_ranks_are_summed_differently_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _device: "GPU")
    nccl, gloo, alone = (Fingerprint.of_this_process(1, torch.device("cuda"), "", backend) for backend in ("nccl", "gloo", ""))
    assert len(nccl.differences(gloo)) == len(nccl.differences(alone)) == 1
    assert Fingerprint.of_this_process(1, torch.device("cpu"), "", "gloo").device == "cpu"
