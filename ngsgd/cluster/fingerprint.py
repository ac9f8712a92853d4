"""The numeric fingerprint of a process: everything that decides the bits of its results, apart from
the run's settings and data.

Two processes with equal fingerprints compute bitwise identical results from equal inputs.  Where
fingerprints differ, results agree to rounding only, or are those of other code;
`Fingerprint.differences` says which.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.errors import CheckpointError
from ngsgd.files import read_json, sealed, unsealed, write_text
from ngsgd.ops import fisher_projection, nonlinearities, packed_gemm
from ngsgd.ops.kernels import native

# in `Fingerprint` the module's name is a field's
_Device = torch.device
NO_KERNEL = "none: torch operations"
OVERRIDE = "--allow-other-bits"
# environment variables that make MKL, oneDNN, ATen or CUDA run other code
_SETTINGS = (
    "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "OMP_DYNAMIC",
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "CUBLAS_WORKSPACE_CONFIG")
# what `kernels` loads: whether this process uses it, and its source
_KERNELS: Mapping[str, tuple[Callable[[], bool], Path]] = {
    module.SOURCE.name: (module.is_native, module.SOURCE)
    for module in (fisher_projection, nonlinearities, packed_gemm)}
_ROUNDING = "results agree to rounding only"
_MEANINGS = {
    "code": "the same settings may train another model",
    "torch": f"its operations may sum in another order, {_ROUNDING}",
    "numpy": "its random numbers and sums may differ",
    "processor": f"MKL and oneDNN choose their code by it, {_ROUNDING}",
    "capability": f"sums run over vectors of another width, {_ROUNDING}",
    "device": f"other devices sum in another order, {_ROUNDING}",
    "threads": f"sums are divided among the threads in another way, {_ROUNDING}",
    "precision": "matrix products have other digits, so results differ"}
_SHOWN = 12   # characters of a digest


@dataclass(frozen=True)
class Fingerprint:
    """What decides the bits; an empty field is unknown and equals any."""

    # SHA-256 of this package's *.py and *.cpp
    code: str = ""
    torch: str = ""       # version
    numpy: str = ""       # version
    # maker, family and model
    processor: str = ""
    # vector instructions that ATen uses: AVX512, AVX2, DEFAULT, ...
    capability: str = ""
    # those of `_SETTINGS` that are set, and torch's own
    settings: Mapping[str, str] | None = None
    # C++ file -> source, flags and compiler, or NO_KERNEL
    kernels: Mapping[str, str] = field(default_factory=dict)
    # cpu, or the GPU's name and the version of CUDA
    device: str = ""
    threads: int = 0      # of one worker
    # cluster.precision
    precision: str = ""

    @classmethod
    def of_this_process(cls, num_threads: int, device: _Device | None = None, precision: str = "") -> Fingerprint:
        """Loads the kernels, so that none is resolved later, in the middle of a job."""
        return cls(code_digest(), torch.__version__, np.__version__, processor(),
                   native.capability(), _settings(precision), kernels(),
                   "" if device is None else _name_of(device), num_threads, precision)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Of `to_json`; fields that another version wrote are ignored, and those that it did not
        write are unknown.

        Raises TypeError where a value has another type.
        """
        known = {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}
        for name, value in known.items():
            kind = {"threads": int, "settings": dict, "kernels": dict}.get(name, str)
            if type(value) is not kind and not (name == "settings" and value is None):
                raise TypeError(f"{name} is {value!r}")
            if isinstance(value, dict) and not all(isinstance(one, str) for one in value.values()):
                raise TypeError(f"{name} is {value!r}")
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def without_machine(self) -> Fingerprint:
        """The part that the coordinator shares with workers on other machines."""
        return replace(self, processor="", capability="", settings=None, kernels={}, device="")

    def completed_by(self, other: Fingerprint) -> Fingerprint:
        """With the other's values where ours are unknown."""
        return replace(other,
                       **{spec.name: mine for spec in fields(self)
                          if (mine := getattr(self, spec.name))})

    def differences(self, other: Fingerprint, there: str = "in the run",
                    here: str = "here") -> list[str]:
        """One line for each difference: both values, and what it means.  `there` names this one,
        `here` the other.
        """
        return [f"{what}: {mine} {there}, {theirs} {here}: {meaning}"
                for what, mine, theirs, meaning in self._compared(other)]

    def _compared(self, other: Fingerprint) -> Iterator[tuple[str, str, str, str]]:
        for name, meaning in _MEANINGS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                yield name, _shown(name, mine), _shown(name, theirs), meaning
        if self.settings is not None and other.settings is not None:
            for name in sorted(self.settings.keys() | other.settings.keys()):
                mine, theirs = self.settings.get(name, "unset"), other.settings.get(name, "unset")
                if mine != theirs:
                    yield name, mine, theirs, f"libraries run other code, {_ROUNDING}"
        for name in sorted(self.kernels.keys() & other.kernels.keys()):
            mine, theirs = self.kernels[name], other.kernels[name]
            if mine != theirs:
                yield f"kernel {name}", _compilation(mine), _compilation(theirs), f"sums run in another order, {_ROUNDING}"


class Agreement:
    """The fingerprint that all workers of a run must have; the first worker decides where nothing
    is known.
    """

    def __init__(self, wanted: Fingerprint | None = None, *,
                 allow_other_bits: bool = False) -> None:
        self.wanted = wanted or Fingerprint()
        self.found: Fingerprint | None = None   # the first worker's
        self._allow_other_bits = allow_other_bits
        self._accepted: list[str] = []

    def refusal(self, worker: Fingerprint, here: str = "here") -> str:
        """Why a worker with this fingerprint must not compute for the run; empty if it may.  `here`
        names the worker.
        """
        self.found = self.found or worker
        differences = self.wanted.differences(worker, here=here)
        if differences and not self._allow_other_bits:
            return "; ".join(differences)
        if differences:
            self._accepted += differences
            self.wanted = worker
        self.wanted = self.wanted.completed_by(worker)
        return ""

    def accepted(self) -> list[str]:
        """Differences that were accepted since the last call."""
        accepted, self._accepted = self._accepted, []
        return accepted


class FingerprintFile:
    """fingerprint.json of a run: the fingerprints that its results were computed with, the newest
    last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest(self) -> Fingerprint | None:
        """None where the run has not begun, or was begun by a version that kept none."""
        history = self._history()
        return Fingerprint.from_json(history[-1]["fingerprint"]) if history else None

    def append(self, fingerprint: Fingerprint, outer_iter: int,
               differences: Sequence[str] = ()) -> None:
        """From the outer iteration of this number on; keeps those before."""
        entry = {"since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "outer_iter": outer_iter,
                 "differences": list(differences), "fingerprint": fingerprint.to_json()}
        write_text(self.path, json.dumps(sealed({"history": [*self._history(), entry]}),
                                         indent=1) + "\n")

    def _history(self) -> list[dict[str, Any]]:
        try:
            history = unsealed(read_json(self.path))[0]["history"]
            for entry in history:
                Fingerprint.from_json(entry["fingerprint"]).differences(Fingerprint())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is damaged; remove it to resume without a "
                                  "comparison of machine and versions "
                                  "with those that the run began on.") from error
        return list(history)


@functools.cache
def code_digest() -> str:
    """SHA-256 of this package's sources, Python and C++, as they were when this process first asked."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp")]):
        if path.relative_to(root).parts[0] in ("launcher", "conf"):
            # a link in the source tree and a folder in a wheel; no number depends on it
            continue
        found.update(str(path.relative_to(root)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def version_digest() -> str:
    """SHA-256 of torch's version and this package's sources: whether two machines have the same
    ones installed.
    """
    return hashlib.sha256(f"{torch.__version__}{code_digest()}".encode()).hexdigest()


def kernels() -> dict[str, str]:
    """Load each kernel that jobs may call, and return its source, flags and compiler, or NO_KERNEL."""
    is_allowed = native.is_allowed()
    return {name: native.origin(source) if is_allowed and is_native() else NO_KERNEL
            for name, (is_native, source) in _KERNELS.items()}


@functools.cache
def processor() -> str:
    """Maker, family and model: MKL and oneDNN choose their code by these."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        lines = ""
    found = dict(re.findall(r"^([\w ]+?)\s*:\s*(.*)$", lines, re.MULTILINE))
    if "vendor_id" in found:
        return f"{found['vendor_id']} family {found.get('cpu family')} model {found.get('model')}"
    if "CPU implementer" in found:
        return f"{platform.machine()} implementer {found['CPU implementer']} part {found.get('CPU part')}"
    return f"{platform.machine()} {platform.processor()}".strip()


def _settings(precision: str) -> dict[str, str]:
    found = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    # workers set it for tf32, and the coordinator does not
    if precision != "tf32" and (matmul := torch.get_float32_matmul_precision()) != "highest":
        found["float32_matmul_precision"] = matmul
    if not torch.backends.mkldnn.enabled:
        found["torch.backends.mkldnn.enabled"] = "False"
    return found


def _name_of(device: _Device) -> str:
    if device.type != "cuda":
        return device.type
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"


def _shown(name: str, value: object) -> str:
    if name == "threads":
        return f"{value} thread{'' if int(str(value)) == 1 else 's'}"
    return str(value)[:_SHOWN] if name == "code" else str(value)


def _compilation(origin: str) -> str:
    return "torch operations" if origin == NO_KERNEL else f"compiled ({origin})"
