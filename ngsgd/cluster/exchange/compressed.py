"""Transfer of a compressed parameter delta through an object store.

Both ends compute the same float32 vector from the initial model of the job and the decoded delta.
The checksum of the worker therefore applies to the vector that the coordinator averages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ngsgd.training.delta_compression import decompress
from ngsgd.training.job import JobResult, LocalRef
from ngsgd.training.parameter_vector import Vector


class _NotSentRef:
    """Substitute for a vector that the receiver decodes."""

    is_here = True

    def read(self) -> Vector:
        raise AssertionError("`unpacked` must convert this to a vector")


def packed(result: JobResult) -> JobResult:
    """Return the result of a worker without its vector if it contains a code of it."""
    return result if result.encoded is None else replace(result, sent=_NotSentRef())


def unpacked(result: JobResult) -> JobResult:
    """Decode a result in the coordinator, if its vector was not sent."""
    if result.encoded is None:
        return result
    move = decompress(result.encoded, result.exact)
    if result.job.returns == "parameters":
        np.add(move, result.job.start.model.read(), out=move)
    return replace(result, sent=LocalRef(move), encoded=None, exact=())
