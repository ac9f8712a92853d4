"""Compressed moves on the way through an object store: the worker's end and the coordinator's.

Both ends make the same float32 vector of the model that the job was given and the decoded move, so the worker's checksum and
its look for NaN hold for what the coordinator averages.
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
    """What a worker sends in place of its vector."""

    encoded: Encoded
    is_here = True

    def read(self) -> Vector:
        raise AssertionError("`unpacked` turns this into the vector")


class MoveEncoder:
    """In a worker: encodes what its jobs send; what that loses of a job's move is added to the same job's next one."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lanes: dict[int, ErrorFeedback] = {}   # by job number

    def packed(self, result: JobResult) -> JobResult:
        """The result with its move encoded; as it is where only a fragment travels, or where it will be rejected."""
        job = result.job
        if job.send != (0, 1) or result.rejection_reason:
            return result
        lane = self._lanes.setdefault(job.job, ErrorFeedback(self._codec))
        sent = result.sent.read()
        encoded = lane.encode(sent if job.returns == "move" else sent - job.start.model.read())
        return replace(result, sent=_EncodedRef(encoded), digest=digest(_vector(job, encoded)))


def unpacked(result: JobResult) -> JobResult:
    """In the coordinator: the result with the vector that its move leads to, if it was encoded."""
    if not isinstance(result.sent, _EncodedRef):
        return result
    sent = LocalRef(_vector(result.job, result.sent.encoded))
    return replace(result, sent=sent, own=sent if result.job.keep_own else None)


def _vector(job: Job, encoded: Encoded) -> Vector:
    move = decode(encoded)
    return move if job.returns == "move" else np.add(move, job.start.model.read(), out=move)
