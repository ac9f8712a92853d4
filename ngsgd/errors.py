"""Errors that users can act on, and their exit codes.

Every message states the problem, its location, and the next step.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from enum import StrEnum

EXIT_OK = 0
EXIT_RUN_FAILED = 1
# 128 + SIGINT, the convention of the shell
EXIT_INTERRUPTED = 130
# 128 + SIGPIPE
EXIT_BROKEN_PIPE = 141
# all exit codes of `ngsgd`, for its help
EXIT_CODES = {
    EXIT_OK: "success", EXIT_RUN_FAILED: "failure", 2: "wrong command line or settings", 3: "data", 4: "divergence",
    5: "cluster", 6: "checkpoint or run folder", 7: "object storage", EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "the reader of a pipe ended"}


class FailureKind(StrEnum):
    """Why an attempt at a job failed or a worker ended, in the ledger and the event log."""

    UNKNOWN = ""
    BAD_INPUT = "bad input"                  # an input is not finite
    DAMAGED_ARCHIVE = "damaged archive"
    DAMAGED_RESULT = "damaged result"        # in transfer
    QUARANTINED = "worker in quarantine"     # the audit found the worker at fault
    EXCEPTION = "exception"                  # of a job
    ACCESS = "access"                        # to a file or a connection
    MEMORY = "memory"
    START_EXCEPTION = "exception at start"
    START = "start"
    STOPPED = "stopped"                      # SIGSTOP
    ASKED_TO_END = "asked to end"            # SIGTERM, SIGINT or SIGHUP
    KILLED = "killed"                        # SIGKILL
    CRASHED = "crashed"                      # another signal
    EXITED = "exited"
    HUNG = "hung"
    FORK_SERVER = "fork server"
    ENDED = "ended"  # Ray does not report how
    NODE = "node"
    HEAD = "Ray head"                        # of the cluster: none answers


_OF_ACCESS = ("OSError", "ConnectionError", "ConnectionResetError", "TimeoutError", "BlockingIOError")
# torch raises a RuntimeError for memory of the processor
_OF_MEMORY = ("allocate memory", "out of memory")


def reason_of(error: BaseException, longest: int = 300) -> str:
    """Return the first line of the message of an error, of at most `longest` characters."""
    return str(error).strip().partition("\n")[0][:longest]


def failure_kind(name: str, message: str) -> FailureKind:
    """Classify an exception of the system or of a user's code by its class and message."""
    if name == "MemoryError" or "OutOfMemory" in name or any(words in message for words in _OF_MEMORY):
        return FailureKind.MEMORY
    return FailureKind.ACCESS if name in _OF_ACCESS else FailureKind.EXCEPTION


class NgsgdWarning(UserWarning):
    """A warning of this package, for filters."""


class NgsgdError(Exception):
    """Base of all errors that a user can act on; never raised directly."""

    exit_code = EXIT_RUN_FAILED


class ConfigError(NgsgdError):
    """One or more settings are wrong; `problems` lists all of them."""

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PortInUseError(ConfigError):
    """Another program listens on the port of a server to be started."""


class ArgumentError(ConfigError, ValueError, TypeError):
    """An argument of a call from Python has a wrong type or value.

    It is also a ValueError and a TypeError, which torch raises for such arguments.
    """


class DataError(NgsgdError):
    """Audio, alignments, features or archives are missing, damaged or inconsistent."""

    exit_code = 3


class DamagedArchiveError(DataError):
    """An archive of examples is missing, truncated or altered; `archive` is its number."""

    def __init__(self, message: str, archive: int) -> None:
        super().__init__(message, archive)
        self.archive = archive

    def __str__(self) -> str:
        return str(self.args[0])


class QuarantineError(DataError):
    """All shards of the data are in quarantine, so that nothing is left to train on."""


class NodeCacheError(DataError):
    """The cache of fetched data on a node has no room for a file, or its disk is full."""


class BadBatchError(DataError):
    """A minibatch has a non-finite loss or gradient, and failure.on_bad_batch is stop."""


class DivergenceError(NgsgdError):
    """Parameters or losses are not finite, or every job of an outer iteration was rejected."""

    exit_code = 4


class ReversalError(NgsgdError):
    """Training could not be reversed bitwise.

    `step`, from 1, is the first with a difference, and `why` the reason.
    """

    def __init__(self, step: int, why: str) -> None:
        super().__init__(f"step {step} could not be reversed: {why}; compute both passes with the "
                         "same data, random numbers and number of threads, or choose "
                         "engine=\"checkpoint\".")
        self.step, self.why = step, why


class ClusterError(NgsgdError):
    """Workers could not be started, or too few of them are alive.

    `failure` is how the last worker failed, where that is the cause.
    """

    exit_code = 5

    def __init__(self, message: str, *, failure: FailureKind = FailureKind.UNKNOWN) -> None:
        super().__init__(message)
        self.failure = failure


class RayStartError(ClusterError):
    """Ray did not start on this machine."""


class WorkerFingerprintError(ClusterError):
    """Workers would not compute results that are bitwise identical to those of the run."""


class ClusterTokenError(ClusterError):
    """A Ray head answers, but rejects the token or the version of this process."""


class AuditError(ClusterError):
    """Workers compute different results of the same job, and nothing decides which is right."""


class CrashingShardError(ClusterError):
    """A shard of data ended every worker that tried it, and the settings stop the run."""


class CheckpointError(NgsgdError):
    """A checkpoint is missing, damaged, or belongs to another model."""

    exit_code = 6


class NoCheckpointError(CheckpointError):
    """The run was trained before, and no checkpoint of it can be used."""


class OptimizerStateError(CheckpointError, ValueError):
    """The state of an optimizer belongs to another model or another kind of optimizer."""


class FingerprintError(CheckpointError):
    """This machine would not compute results that are bitwise identical to those of the run."""


class ConfigChangedError(CheckpointError):
    """config.yaml of the run was changed since its start."""


class RunLockedError(CheckpointError):
    """Another process writes to the run folder."""


class ObjectStorageError(NgsgdError):
    """An object of a bucket cannot be read or written; repeating the request did not help.

    `is_denied`: the credentials are missing, wrong or expired.
    """

    exit_code = 7

    def __init__(self, message: str, *, is_denied: bool = False) -> None:
        super().__init__(message)
        self.is_denied = is_denied


class MissingExtraError(ConfigError):
    """A feature needs packages of an optional extra that is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        # a command
        self.install = f"pip install 'ngsgd[{extra}]'"
        super().__init__(f"{purpose} needs the package {package}, which is not installed: {self.install}")


class RunInterrupted(NgsgdError):
    """The user or the cluster asked the run to stop; the last checkpoint is complete."""

    exit_code = EXIT_INTERRUPTED


def warn(message: str) -> None:
    """Warn at the first frame outside of this package and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("ngsgd", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, NgsgdWarning, stacklevel=level)


def has_grown(count: int, reported: int) -> bool:
    """Return whether a count is worth a warning: above 0, and ten times the last one reported.

    Example:
        >>> [has_grown(count, 3) for count in (3, 29, 30)]
        [False, False, True]
    """
    return count >= max(1, 10 * reported)
