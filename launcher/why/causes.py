"""Tables of causes, by class, exit code and errno of an error and by kind of a recorded failure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ngsgd.errors import FailureKind

WORKLOAD, INFRASTRUCTURE, UNKNOWN = "workload", "infrastructure", "unknown"
CANNOT_HELP, MAY_HELP = "cannot help", "may help"


@dataclass(frozen=True)
class Cause:
    """Classification of one failure."""

    # the component at fault, such as "worker", "disk", "learning rate"
    culprit: str
    # failure domain: WORKLOAD (program, settings, data), INFRASTRUCTURE (machine, disk, network,
    # scheduler, operator) or UNKNOWN
    domain: str
    # whether the same command, repeated unchanged, can succeed: CANNOT_HELP, MAY_HELP or UNKNOWN
    outlook: str
    # a sentence
    meaning: str
    # the part of a person, before `next`; empty: nothing
    first: str = ""
    # a command that works after that. {resume} continues the run, {repeat} does that or is the
    # command that failed, and {help} is the help of that command
    next: str = "{resume}"
    # option of that command
    option: str = ""


# a worker whose results the audit found wrong (failure.audit_every)
WRONG_MACHINE = Cause("machine", INFRASTRUCTURE, CANNOT_HELP,
                      "The audit found a worker that computes wrong results, and it is not used any more.",
                      "check the processor, the memory and the GPU of the worker that the evidence names; ngsgd verify repeats "
                      "its jobs")

_LOOK = "read the log of the worker (workers/ or ray.log in {run}), and correct the cause"
# reason of a failed attempt -> its cause
_OF_WORKER: dict[str, Cause] = {
    FailureKind.DAMAGED_RESULT: Cause("transfer", INFRASTRUCTURE, MAY_HELP, "A result was damaged in memory or on the network.",
                                      "check the memory and the network of the worker's machine"),
    FailureKind.QUARANTINED: WRONG_MACHINE,
    FailureKind.STOPPED: Cause("worker", INFRASTRUCTURE, MAY_HELP, "A worker was stopped from outside (SIGSTOP)."),
    FailureKind.FORK_SERVER: Cause("worker", INFRASTRUCTURE, MAY_HELP, "A worker ended together with its fork server."),
    FailureKind.MEMORY: Cause("memory", INFRASTRUCTURE, MAY_HELP, "A worker had too little memory.",
                              "use fewer cluster.num_workers, a smaller model or a larger machine"),
    FailureKind.START_EXCEPTION: Cause("code", WORKLOAD, UNKNOWN, "A worker could not start because of an exception.", _LOOK),
    FailureKind.START: Cause("worker", WORKLOAD, UNKNOWN, "A worker could not start.", _LOOK),
    FailureKind.KILLED: Cause("worker", INFRASTRUCTURE, MAY_HELP,
                              "A worker process was killed from outside: by a scheduler, a user or the out-of-memory killer.",
                              "look for the out-of-memory killer (dmesg | grep -i oom)"),
    FailureKind.ASKED_TO_END: Cause("worker", INFRASTRUCTURE, MAY_HELP, "A worker process was asked to end by a signal."),
    FailureKind.CRASHED: Cause("worker", UNKNOWN, UNKNOWN, "A worker process crashed in compiled code.", _LOOK),
    FailureKind.HUNG: Cause("worker", UNKNOWN, UNKNOWN, "A worker hung and was killed.", _LOOK),
    FailureKind.ENDED: Cause("worker", INFRASTRUCTURE, MAY_HELP, "A worker process ended under Ray.", _LOOK),
    FailureKind.NODE: Cause("node", INFRASTRUCTURE, MAY_HELP, "A worker was lost with its machine or its Ray process.",
                            "check the machines (ray status)"),
    FailureKind.HEAD: Cause("cluster", INFRASTRUCTURE, MAY_HELP, "No head of a Ray cluster answers.",
                            "start it with ray start --head, and then the other machines", "{repeat}"),
    FailureKind.EXITED: Cause("worker", WORKLOAD, UNKNOWN, "A worker process exited by itself.", _LOOK),
    FailureKind.ACCESS: Cause("worker", INFRASTRUCTURE, MAY_HELP, "A worker could not use a file or a connection.", _LOOK),
    FailureKind.EXCEPTION: Cause("code", WORKLOAD, UNKNOWN, "A job raised an exception.", _LOOK)}
_WORKER = Cause("worker", UNKNOWN, UNKNOWN, "A job failed.", _LOOK)


def of_worker(kind: str) -> Cause:
    """The cause of one failed attempt, from its `FailureKind` in the ledger."""
    return _OF_WORKER.get(kind, _WORKER)


_FULL = Cause("disk", INFRASTRUCTURE, MAY_HELP, "The disk is full.", "make room (df -h {run})", "{repeat}")
_BROKEN = Cause("disk", INFRASTRUCTURE, MAY_HELP, "The disk fails.", "check the disk (dmesg)", "{repeat}")
_RIGHTS = Cause("permissions", INFRASTRUCTURE, CANNOT_HELP, "A file or folder cannot be used with the permissions of this user.",
                "fix the permissions", "{repeat}")
_OF_ERRNO = {"ENOSPC": _FULL, "EDQUOT": _FULL, "EIO": _BROKEN, "EROFS": _RIGHTS, "EACCES": _RIGHTS, "EPERM": _RIGHTS}
_SETTINGS = Cause("settings", WORKLOAD, CANNOT_HELP, "Settings or arguments are wrong.",
                  "correct the settings or arguments that the message names", "{help}")
_CODE = Cause("code", WORKLOAD, CANNOT_HELP, "The program raised an exception.",
              "correct the program; --debug shows where the exception was raised", "{repeat}")
_MEMORY = Cause("memory", INFRASTRUCTURE, MAY_HELP, "The machine had too little memory.",
                "use fewer cluster.num_workers, a smaller model or a larger machine", "{repeat}")
_CLUSTER = Cause("cluster", INFRASTRUCTURE, MAY_HELP, "The cluster did not provide the workers.",
                 "start the missing machines, or ask for fewer workers; ngsgd doctor checks the cluster", "{repeat}")
_RATE = Cause("learning rate", WORKLOAD, CANNOT_HELP, "Training diverged.",
              "start a new run with schedule.lr_initial={half_lr}", "ngsgd report {run}")
_DATA = Cause("data", WORKLOAD, CANNOT_HELP, "Data are missing, or have another form than expected.",
              "correct the data or data.source", "{repeat}")
_RUN_FOLDER = Cause("run folder", INFRASTRUCTURE, UNKNOWN, "A file of the run cannot be used, or the run cannot be written.",
                    "follow the message", "{repeat}")
_BAD_BATCH = Cause("data", WORKLOAD, CANNOT_HELP, "Examples give a loss or gradient that is not finite.",
                   "correct the examples that the evidence names, or set failure.on_bad_batch=quarantine")
_STORAGE = Cause("object storage", INFRASTRUCTURE, MAY_HELP, "The object storage did not serve a request.",
                 "check the network, the bucket and the credentials", "{repeat}")
_OF_KIND = {
    "RunLockedError": Cause("other process", INFRASTRUCTURE, MAY_HELP, "Another process writes to the run.",
                            next="ngsgd status {run}"),
    "PortInUseError": Cause("port", INFRASTRUCTURE, MAY_HELP, "Another program listens on the port.",
                            "end that program (ss -ltnp shows it), or choose another port", "{repeat}"),
    "MissingExtraError": Cause("package", INFRASTRUCTURE, CANNOT_HELP, "A package is not installed.",
                               "install it: {install}", "{repeat}"),
    "ModuleNotFoundError": Cause("package", INFRASTRUCTURE, CANNOT_HELP, "A module is not installed.",
                                 "install the module", "{repeat}"),
    "QuarantineError": Cause("data", WORKLOAD, CANNOT_HELP, "All data of the run are in quarantine.",
                             "restore damaged archives, or start a new run"),
    "DamagedArchiveError": Cause("archive", INFRASTRUCTURE, CANNOT_HELP, "An archive of examples is missing or damaged.",
                                 "restore the archive", "{repeat}"),
    "DivergenceError": _RATE, "ConfigError": _SETTINGS, "ArgumentError": _SETTINGS, "DataError": _DATA,
    "BadBatchError": _BAD_BATCH,
    "FingerprintError": Cause("numeric fingerprint", INFRASTRUCTURE, CANNOT_HELP,
                              "This machine or installation computes other bits than the run so far.",
                              "use the earlier kind of machine, or allow other bits", option="allow-other-bits"),
    "WorkerFingerprintError": Cause("numeric fingerprint", INFRASTRUCTURE, CANNOT_HELP,
                                    "The workers' machines or installations compute other bits than the run.",
                                    "install the same versions everywhere, or allow other bits", option="allow-other-bits"),
    "ConfigChangedError": Cause("config.yaml", WORKLOAD, CANNOT_HELP, "config.yaml was changed since the start of the run.",
                                "restore the file, or accept the change", option="accept-changed-config"),
    "ClusterTokenError": Cause("token", INFRASTRUCTURE, CANNOT_HELP, "The Ray head rejects the token of this shell.",
                               "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the token of the head", "{repeat}"),
    "AuditError": Cause("machine", INFRASTRUCTURE, UNKNOWN,
                        "Machines compute different results of the same job, and nothing decides which is right.",
                        "check the machines that the message names, and use at least three workers"),
    "CrashingShardError": Cause("data", WORKLOAD, CANNOT_HELP, "A shard of data ended every worker that tried it.",
                                "inspect the archive that the message names", "{repeat}"),
    "RayStartError": Cause("cluster", INFRASTRUCTURE, MAY_HELP, "Ray did not start on this machine.",
                           "wait until the machine is less busy, or use cluster=local", "{repeat}"),
    "NodeCacheError": Cause("disk", INFRASTRUCTURE, MAY_HELP, "The cache of fetched data on a node has no room.",
                            "make room there, or set data.node_cache_gb", "{repeat}"),
    "NoCheckpointError": Cause("checkpoint", INFRASTRUCTURE, CANNOT_HELP, "No checkpoint of the run can be used.",
                               "restore the checkpoints of {run}, or start a new run"),
    "ClusterError": _CLUSTER,
    "MemoryError": _MEMORY, "OutOfMemory": _MEMORY, "OutOfMemoryError": _MEMORY,
    "FileNotFoundError": Cause("path", WORKLOAD, CANNOT_HELP, "A file does not exist.", "correct the path", "{repeat}")}
# of other classes
_OF_EXIT_CODE = {2: _SETTINGS, 3: _DATA, 4: _RATE, 5: _CLUSTER, 6: _RUN_FOLDER, 7: _STORAGE}
_STOPPED = Cause("operator", INFRASTRUCTURE, MAY_HELP, "The run was stopped on request.")
_OF_SIGNAL = {
    "SIGTERM": Cause("stop request", INFRASTRUCTURE, MAY_HELP,
                     "SIGTERM asked the run to end: from `ngsgd stop`, a scheduler or a user."),
    "SIGINT": Cause("operator", INFRASTRUCTURE, MAY_HELP, "Ctrl-C stopped the run.")}
# the coordinator ended without a last event: nothing in the process had time to report a reason
KILLED = Cause("coordinator", INFRASTRUCTURE, MAY_HELP,
               "The training process ended without a last event: it was killed, or its machine went down.")


def of_error(about: Mapping[str, Any]) -> Cause:
    """The cause of the end of a process, from error.json or an event."""
    kind, code = about.get("kind", ""), about.get("exit_code")
    if about.get("signal") or code == 130:
        # the signal and the environment show by whom
        number, scheduler = about.get("signal", ""), about.get("scheduler", "")
        if number == "SIGTERM" and scheduler:
            return Cause("scheduler", INFRASTRUCTURE, MAY_HELP, f"The scheduler asked the run to end ({number}, {scheduler}).")
        return _OF_SIGNAL.get(number, _STOPPED)
    if about.get("errno") in _OF_ERRNO:
        return _OF_ERRNO[about["errno"]]
    cause = _OF_KIND.get(kind) or _OF_EXIT_CODE.get(code or 0, _CODE)
    return _OF_WORKER.get(str(about.get("failure")), cause) if cause in (_CLUSTER, _CODE) else cause


# severities: a replaced worker costs nothing, a retry costs time, an interruption needs a command,
# lost work changes the result
REPLACED, RETRIED, INTERRUPTED, LOST_WORK = 1, 2, 3, 4

CRASHING = Cause("data", WORKLOAD, CANNOT_HELP, "A shard of data ended every worker that tried it, and was quarantined.",
                  "inspect the archive that the evidence names")
ARCHIVE = Cause("archive", INFRASTRUCTURE, CANNOT_HELP, "A damaged archive was quarantined.", "restore the archive")
REJECTED = Cause("result", UNKNOWN, UNKNOWN, "A result was rejected: diverging training, invalid data, or a faulty machine.",
                  "compare the workers and shards of the rejected jobs in the report", "ngsgd report {run}")
# incident -> (severity, cause)
INCIDENTS = {
    "checkpoint_skipped": (INTERRUPTED, Cause("checkpoint", INFRASTRUCTURE, MAY_HELP,
                                              "A damaged checkpoint was skipped, and the previous one was used.",
                                              "check the disk of {run}")),
    "archive_quarantined": (LOST_WORK, ARCHIVE),
    "outer_iteration_skipped": (LOST_WORK, Cause("data", WORKLOAD, CANNOT_HELP,
                                                 "All data of an outer iteration were in quarantine.",
                                                 "inspect the archives that the evidence names")),
    "worker_retired": (INTERRUPTED, Cause("worker", UNKNOWN, UNKNOWN, "A worker died too often and is not replaced.",
                                          "check its machine, then ngsgd stop {run}")),
    "worker_refused": (RETRIED, Cause("numeric fingerprint", INFRASTRUCTURE, CANNOT_HELP,
                                      "A replacement worker would compute other bits, and was rejected.",
                                      "install the same versions on every machine")),
    "worker_quarantined": (LOST_WORK, WRONG_MACHINE),
    "audit_ended": (RETRIED, Cause("code", WORKLOAD, CANNOT_HELP, "A job gives another result each time, so the audit ended.",
                                   "use random numbers of the job's seed only, or set failure.audit_every=0")),
    "rolled_back": (LOST_WORK, Cause("learning rate", WORKLOAD, CANNOT_HELP,
                                     "An outer iteration diverged and was repeated at half the learning rate.",
                                     "start the next run with schedule.lr_initial={half_lr}", "ngsgd report {run}")),
    "bad_batch": (LOST_WORK, _BAD_BATCH),
    "exchange_failed": (RETRIED, Cause("transfer", INFRASTRUCTURE, MAY_HELP, "Averaging among the workers failed.",
                                       "check the network between the workers"))}
