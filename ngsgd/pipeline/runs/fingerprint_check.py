"""The numeric fingerprint of a run: kept in its folder, and compared with the processes that resume it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from ngsgd.cluster.fingerprint import OVERRIDE, Agreement, Fingerprint, FingerprintFile
from ngsgd.config import RunConfig
from ngsgd.errors import CheckpointError
from ngsgd.pipeline.runs.run_folder import RunFolder
from ngsgd.training.worker import resolve_threads


@dataclass(frozen=True)
class FingerprintCheck:
    """What all processes that compute for a run must have in common."""

    # of a worker, for as long as the run lasts
    num_threads: int
    agreement: Agreement
    file: FingerprintFile
    # to the run's fingerprint of before, accepted by the user
    differences: list[str] = field(default_factory=list)

    @classmethod
    def of_new_run(cls, config: RunConfig, folder: RunFolder, *, allow_other_bits: bool) -> FingerprintCheck:
        num_threads = resolve_threads(config.cluster, os.cpu_count() or 1)
        here = _of_coordinator(config, num_threads)
        return cls(num_threads, Agreement(here, allow_other_bits=allow_other_bits), FingerprintFile(folder.fingerprint))

    @classmethod
    def of_resumed_run(cls, config: RunConfig, folder: RunFolder, report: Callable[[str], None], *, allow_other_bits: bool
                       ) -> FingerprintCheck:
        """With the number of threads that the run began with; `config` is the run's own, before another number of workers.

        Raises CheckpointError where this machine would compute other bits, unless they are allowed.
        """
        file = FingerprintFile(folder.fingerprint)
        stored = file.newest()
        if stored is None:
            report("this run was begun by a version of ngsgd that kept no numeric fingerprint: nothing is known of the bits before")
            return cls.of_new_run(config, folder, allow_other_bits=allow_other_bits)
        num_threads = stored.threads or resolve_threads(config.cluster, os.cpu_count() or 1)
        here = _of_coordinator(config, num_threads)
        differences = stored.differences(here)
        if differences and not allow_other_bits:
            raise CheckpointError(f"{folder.path} was trained with another numeric fingerprint, so the rest would not be bitwise "
                                  f"identical:\n  " + "\n  ".join(differences) + "\nResume where these are as they were, or accept "
                                  f"other bits with {OVERRIDE}.")
        wanted = here if differences else stored
        return cls(num_threads, Agreement(wanted, allow_other_bits=allow_other_bits), file, differences)

    def keep(self, outer_iter: int) -> None:
        """Write down what the workers have, before they compute outer iteration `outer_iter`."""
        stored, found = self.file.newest(), self.agreement.found
        if found is not None and found != stored:
            self.file.append(found, outer_iter, stored.differences(found) if stored else ())


def _of_coordinator(config: RunConfig, num_threads: int) -> Fingerprint:
    here = Fingerprint.of_this_process(num_threads, precision=config.cluster.precision)
    # the machine that coordinates a Ray cluster may be of another kind than those that compute
    return here.without_machine() if config.cluster.kind == "ray" else here
