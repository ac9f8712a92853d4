"""The numeric fingerprint of a run, compared with the processes that resume it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from ngsgd.cluster.fingerprint import Agreement, Fingerprint, FingerprintFile, why_no_kernels
from ngsgd.config import RunConfig
from ngsgd.errors import FingerprintError
from ngsgd.ops.kernels import native
from ngsgd.runs.run_folder import RunFolder, resume_command
from ngsgd.training.worker import resolve_threads


@dataclass(frozen=True)
class FingerprintCheck:
    """Requirements on all processes that compute for a run."""

    # per worker, constant for the complete run
    num_threads: int
    agreement: Agreement
    file: FingerprintFile
    # differences from the earlier fingerprint of the run, accepted by the user
    differences: list[str] = field(default_factory=list)
    # why all processes of the run use torch operations instead of the C++ kernels
    no_kernels: str = ""

    @classmethod
    def of_new_run(cls, config: RunConfig, folder: RunFolder, *, allow_other_bits: bool) -> FingerprintCheck:
        num_threads = resolve_threads(config.cluster, os.cpu_count() or 1)
        no_kernels = why_no_kernels(lambda _line: None)
        here = _of_coordinator(config, num_threads, no_kernels)
        agreement = Agreement(here, allow_other_bits=allow_other_bits, has_kernels=not no_kernels)
        return cls(num_threads, agreement, FingerprintFile(folder.fingerprint), no_kernels=no_kernels)

    @classmethod
    def of_resumed_run(cls, config: RunConfig, folder: RunFolder, report: Callable[[str], None], *, allow_other_bits: bool
                       ) -> FingerprintCheck:
        """Compare this machine with a started run, using its number of threads.

        `config` is the stored one. FingerprintError unless results are bitwise identical.
        """
        file = FingerprintFile(folder.fingerprint)
        if (stored := file.newest()) is None:
            found = cls.of_new_run(config, folder, allow_other_bits=allow_other_bits)
            # a run that was stopped before its first job has no results to compare with
            if not any(folder.checkpoints.glob("iter-*")):
                return found
            lost = f"{file.path.name} is missing, which holds the numeric fingerprint of the results so far"
            if not allow_other_bits:
                raise FingerprintError(
                    f"{folder.path} has checkpoints, but {lost}, so the rest may not be bitwise identical; restore the file "
                    f"from a copy, or accept other results with: "
                    f"{resume_command(config.task, folder.path, allow_other_bits=True)}")
            return replace(found, differences=[lost])
        num_threads = stored.threads or resolve_threads(config.cluster, os.cpu_count() or 1)
        # every machine has torch operations
        no_kernels = "the run began without them" if stored.is_without_kernels else why_no_kernels(report)
        here = _of_coordinator(config, num_threads, no_kernels)
        differences = stored.differences(here)
        if differences and not allow_other_bits:
            listed = "\n  ".join(differences)
            raise FingerprintError(
                f"{folder.path} was trained with another numeric fingerprint, so the rest would not be bitwise identical:\n"
                f"  {listed}\nRestore these values before resuming, or accept other results with: "
                f"{resume_command(config.task, folder.path, allow_other_bits=True)}")
        agreement = Agreement(here if differences else stored, allow_other_bits=allow_other_bits, has_kernels=not no_kernels)
        return cls(num_threads, agreement, file, differences, no_kernels)

    def in_effect(self) -> AbstractContextManager[None]:
        """Use the C++ kernels, or torch operations, as all processes of the run do."""
        return native.in_torch_operations() if self.no_kernels else contextlib.nullcontext()

    def keep(self, outer_iter: int) -> None:
        """Store the fingerprint of the workers before they compute outer iteration `outer_iter`."""
        stored, found = self.file.newest(), self.agreement.found
        if found is not None and found != stored:
            self.file.append(found, outer_iter, stored.differences(found) if stored else ())


def _of_coordinator(config: RunConfig, num_threads: int, no_kernels: str) -> Fingerprint:
    with native.in_torch_operations() if no_kernels else contextlib.nullcontext():
        here = Fingerprint.of_this_process(num_threads, precision=config.cluster.precision)
    if no_kernels:
        here = replace(here, problems=dict.fromkeys(here.kernels, no_kernels))
    # the coordinator of a Ray cluster may run on another kind of machine than the workers
    return here.without_machine() if config.cluster.kind == "ray" else here
