"""The numeric fingerprint of a process: everything that determines its results bitwise.

The settings and the data of the run are not part of it. Two processes with equal fingerprints
compute bitwise identical results from equal inputs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ngsgd.counting import counted
from ngsgd.errors import CheckpointError
from ngsgd.files import read_json, sealed, unsealed, write_text
from ngsgd.interface import option
from ngsgd.ops import fisher_projection, nonlinearities
from ngsgd.ops.device import triton_kernels
from ngsgd.ops.kernels import native

_Device = torch.device  # `Fingerprint` has a field with the name of the module
NO_KERNEL = "none: torch operations"
_TOLD = f"{native.VARIABLE} is torch"
# environment variables that make MKL, oneDNN, ATen or CUDA run other code
_SETTINGS = (
    "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_DYNAMIC", "OMP_DYNAMIC",
    "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
# kernel source -> (whether this process uses it, path), for `kernels`
_KERNELS: Mapping[str, tuple[Callable[[], bool], Path]] = {
    module.SOURCE.name: (module.is_native, module.SOURCE)
    for module in (fisher_projection, nonlinearities)}
_ROUNDING = "results agree only up to rounding"
_MEANINGS = {
    "code": "the same settings may train another model",
    "torch": f"its operations may sum in another order, {_ROUNDING}",
    "numpy": "its random numbers and sums may differ",
    "processor": f"MKL and oneDNN select code by processor, {_ROUNDING}",
    "capability": f"sums use vectors of another width, {_ROUNDING}",
    "device": f"other devices sum in another order, {_ROUNDING}",
    "threads": f"sums are divided among the threads differently, {_ROUNDING}",
    "precision": "GEMMs use another number format, so results differ"}
_SHOWN = 12   # characters of a digest


@dataclass(frozen=True)
class Fingerprint:
    """Values that determine results bitwise; an empty field is unknown and equals any value."""

    code: str = ""  # SHA-256 of the *.py and *.cpp files of this package
    torch: str = ""       # version
    numpy: str = ""       # version
    processor: str = ""  # vendor, family and model
    capability: str = ""  # vector instructions that ATen uses: AVX512, AVX2, DEFAULT, ...
    settings: Mapping[str, str] | None = None  # set variables of `_SETTINGS`, and settings of torch
    # C++ file -> source, flags and compiler, or NO_KERNEL
    kernels: Mapping[str, str] = field(default_factory=dict)
    # cpu, or the name of the GPU, versions of CUDA and Triton, and the backend that sums over ranks
    device: str = ""
    threads: int = 0      # per worker
    precision: str = ""  # cluster.precision
    # C++ file -> why this process cannot use it; for messages
    problems: Mapping[str, str] = field(default_factory=dict, compare=False)

    @classmethod
    def of_this_process(cls, num_threads: int, device: _Device | None = None, precision: str = "",
                        summed_by: str = "") -> Fingerprint:
        """Return the fingerprint, and load the kernels before the first job.

        `summed_by` is the backend that sums gradients of the ranks of a worker on GPUs.
        """
        used = kernels()
        problems = {name: native.problems.get(name, "" if native.is_allowed() else _TOLD) for name in used}
        settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
        # workers set it for tf32, and the coordinator does not
        if precision != "tf32" and (matmul := torch.get_float32_matmul_precision()) != "highest":
            settings["float32_matmul_precision"] = matmul
        if not torch.backends.mkldnn.enabled:
            settings["torch.backends.mkldnn.enabled"] = "False"
        name = "" if device is None else device.type
        if device is not None and name == "cuda":
            ranks = f", ranks by {summed_by}" if summed_by else ""
            kernels_of_gpu = f"Triton {triton_kernels.version() or 'none'}"
            name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}, {kernels_of_gpu}{ranks}"
        return cls(code_digest(), torch.__version__, np.__version__, processor(),
                   native.capability(), settings, used, name, num_threads, precision,
                   {file: problem for file, problem in problems.items() if problem})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Fingerprint:
        """Read values of `to_json`, without unknown fields; raise TypeError for other types."""
        known = {spec.name: values[spec.name] for spec in fields(cls) if spec.compare and spec.name in values}
        for name, value in known.items():
            kind = {"threads": int, "settings": dict, "kernels": dict}.get(name, str)
            if type(value) is not kind and not (name == "settings" and value is None):
                raise TypeError(f"{name} is {value!r}")
            if isinstance(value, dict) and not all(isinstance(one, str) for one in value.values()):
                raise TypeError(f"{name} is {value!r}")
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "problems"}

    @property
    def is_without_kernels(self) -> bool:
        """Whether torch operations compute instead of every C++ kernel."""
        return bool(self.kernels) and set(self.kernels.values()) == {NO_KERNEL}

    def digest(self) -> str:
        """Return a digest; processes with equal digests compute bitwise identical results."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def without_machine(self) -> Fingerprint:
        """Return the part that the coordinator shares with workers on other machines."""
        return replace(self, processor="", capability="", settings=None, kernels={}, device="")

    def completed_by(self, other: Fingerprint) -> Fingerprint:
        """Fill unknown values from another fingerprint."""
        own = {spec.name: getattr(self, spec.name) for spec in fields(self)}
        return replace(other, **{name: mine for name, mine in own.items() if mine})

    def differences(self, other: Fingerprint, there: str = "in the run", here: str = "here") -> list[str]:
        """Return one line for each difference: both values, and the consequence.

        `there` names this fingerprint, `here` the other.
        """
        found = list[tuple[str, str, str, str]]()
        for name, meaning in _MEANINGS.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine and theirs and mine != theirs:
                found.append((name, _shown(name, mine), _shown(name, theirs), meaning))
        if self.settings is not None and other.settings is not None:
            for name in sorted(self.settings.keys() | other.settings.keys()):
                mine, theirs = self.settings.get(name, "unset"), other.settings.get(name, "unset")
                if mine != theirs:
                    found.append((name, mine, theirs, f"libraries run other code, {_ROUNDING}"))
        for name in sorted(self.kernels.keys() & other.kernels.keys()):
            if self.kernels[name] != other.kernels[name]:
                mine = _compilation(self.kernels[name], self.problems.get(name))
                theirs = _compilation(other.kernels[name], other.problems.get(name))
                meaning = f"sums run in another order, {_ROUNDING}"
                found.append((f"kernel {name}", mine, theirs, meaning))
        return [f"{what}: {mine} {there}, {theirs} {here}: {meaning}" for what, mine, theirs, meaning in found]


class Agreement:
    """The fingerprint required of all workers of a run; the first worker sets unknown values.

    Args:
        wanted: the known values.
        allow_other_bits: accept other values.
        has_kernels: whether the coordinator uses its C++ kernels; without them no worker uses its
            own. Default: None, each process decides.
    """

    def __init__(self, wanted: Fingerprint | None = None, *, allow_other_bits: bool = False,
                 has_kernels: bool | None = None) -> None:
        self.wanted = wanted or Fingerprint()
        self.has_kernels = has_kernels
        self.found: Fingerprint | None = None   # of the first worker
        self._allow_other_bits = allow_other_bits
        self._accepted: list[str] = []

    def refusal(self, worker: Fingerprint, here: str = "here") -> str:
        """Return why a worker, named `here`, is rejected; empty if it is accepted."""
        self.found = self.found or worker
        differences = self.wanted.differences(worker, here=here)
        if self.has_kernels:
            # the processor of another machine decides which kernels it has, but not whether
            differences += [f"kernel {name}: compiled by the coordinator, {_compilation(NO_KERNEL, problem)} {here}: sums run in "
                            f"another order, {_ROUNDING}"
                            for name, problem in worker.problems.items() if name not in self.wanted.kernels]
        if differences and not self._allow_other_bits:
            return "; ".join(differences)
        if differences:
            self._accepted += differences
            self.wanted = worker
        self.wanted = self.wanted.completed_by(worker)
        return ""

    def accepted(self) -> list[str]:
        """Return the differences that were accepted since the last call."""
        accepted, self._accepted = self._accepted, []
        return accepted


class FingerprintFile:
    """fingerprint.json of a run: the fingerprints of its results, the newest last."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def newest(self) -> Fingerprint | None:
        """Return the newest fingerprint; None if the run has not begun or has no record."""
        history = self._history()
        return Fingerprint.from_json(history[-1]["fingerprint"]) if history else None

    def append(self, fingerprint: Fingerprint, outer_iter: int, differences: Sequence[str] = ()) -> None:
        """Add the fingerprint that is valid from outer iteration `outer_iter`."""
        entry = {"since": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "outer_iter": outer_iter,
                 "differences": list(differences), "fingerprint": fingerprint.to_json()}
        content = sealed("fingerprint", {"history": [*self._history(), entry]})
        write_text(self.path, json.dumps(content, indent=1) + "\n")

    def _history(self) -> list[dict[str, Any]]:
        try:
            history = unsealed("fingerprint", read_json(self.path))["history"]
            for entry in history:
                Fingerprint.from_json(entry["fingerprint"]).differences(Fingerprint())
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{self.path} is damaged; restore it from a copy, or remove it and resume with "
                                  f"{option('allow-other-bits')}, which compares neither machine nor versions with those "
                                  "of the start of the run.") from error
        return list(history)


@functools.cache
def code_digest() -> str:
    """SHA-256 of the Python and C++ sources of this package at the first call in this process."""
    found = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.cpp")]):
        if path.relative_to(root).parts[0] in ("launcher", "conf"):
            # a link in the source tree and a folder in a wheel; no result depends on it
            continue
        found.update(str(path.relative_to(root)).encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def version_digest() -> str:
    """SHA-256 of the torch version and the sources of this package, to compare installations."""
    return hashlib.sha256(f"{torch.__version__}{code_digest()}".encode()).hexdigest()


def kernels() -> dict[str, str]:
    """Load each kernel that jobs may call; return its source, flags and compiler, or NO_KERNEL."""
    is_allowed = native.is_allowed()
    return {name: native.origin(source) if is_allowed and is_native() else NO_KERNEL
            for name, (is_native, source) in _KERNELS.items()}


def why_no_kernels(report: Callable[[str], object]) -> str:
    """Load or compile the kernels before a run, and report that it compiles.

    Returns:
        Why the run must use torch operations; empty if this processor can use every kernel.
    """
    if not native.is_allowed():
        return _TOLD
    with native.reported_to(report):
        kernels()
    found = {name: native.problems[name] for name in _KERNELS if name in native.problems}
    return "; ".join(f"{', '.join(name for name in found if found[name] == problem)}: {problem}"
                     for problem in dict.fromkeys(found.values()))


@functools.cache
def processor() -> str:
    """Vendor, family and model of the processor, by which MKL and oneDNN select code."""
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


def _shown(name: str, value: Any) -> str:
    if name == "threads":
        return counted(value, "thread")
    return str(value)[:_SHOWN] if name == "code" else str(value)


def _compilation(origin: str, problem: str | None = None) -> str:
    used = "torch operations" + (f" ({problem})" if problem else "")
    return used if origin == NO_KERNEL else f"compiled ({origin})"
