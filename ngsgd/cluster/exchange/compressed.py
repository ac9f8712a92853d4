"""Compressed parameter deltas for transfer through an object store: worker and coordinator side.

Both ends compute the same float32 vector from the initial model of the job and the decoded delta.
The checksum of the worker and its check for NaN therefore apply to the vector that the coordinator
averages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ngsgd.ops.compression import Codec, Encoded, ErrorFeedback, decode
from ngsgd.training.job import Job, JobResult, LocalRef
from ngsgd.training.parameter_vector import Vector
from ngsgd.training.validation.checksums import digest


@dataclass(frozen=True)
class _EncodedRef:
    """The compressed substitute for the vector of a result."""

    encoded: Encoded
    is_here = True

    def read(self) -> Vector:
        raise AssertionError("`unpacked` must convert this to a vector")


class MoveEncoder:
    """Encodes the deltas of a worker's jobs with error feedback.

    The encoding error of a delta is added to the next delta of the same job slot.
    """

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lanes: dict[int, ErrorFeedback] = {}   # by job number

    def packed(self, result: JobResult) -> JobResult:
        """Encode the delta of a result; fragments and rejected results are unchanged."""
        job = result.job
        if job.send != (0, 1) or result.rejection_reason:
            return result
        lane = self._lanes.setdefault(job.job, ErrorFeedback(self._codec))
        sent = result.sent.read()
        encoded = lane.encode(sent if job.returns == "move" else sent - job.start.model.read())
        return replace(result, sent=_EncodedRef(encoded), digest=digest(_vector(job, encoded)))


def unpacked(result: JobResult) -> JobResult:
    """Decode a result in the coordinator, if it was encoded."""
    if not isinstance(result.sent, _EncodedRef):
        return result
    sent = LocalRef(_vector(result.job, result.sent.encoded))
    return replace(result, sent=sent, own=sent if result.job.keep_own else None)


def _vector(job: Job, encoded: Encoded) -> Vector:
    move = decode(encoded)
    return move if job.returns == "move" else np.add(move, job.start.model.read(), out=move)
