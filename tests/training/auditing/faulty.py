"""A worker whose arithmetic is wrong by one bit in every job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ngsgd.training.job import Job, JobResult, LocalRef
from ngsgd.training.validation.checksums import digest
from ngsgd.training.worker import Place, Worker, never, np_empty

FAULTY = 1


class WrongBit(Worker):
    """Worker 1 flips the lowest bit of one parameter in each job."""

    def run(self, job: Job, place: Place = np_empty, should_stop: Callable[[], bool] = never) -> JobResult:
        result = super().run(job, place, should_stop)
        if self.index != FAULTY:
            return result
        assert isinstance(result.sent, LocalRef)
        result.sent.vector.view(np.uint32)[job.job] ^= np.uint32(1)
        return replace(result, digest=digest(result.sent.vector))
