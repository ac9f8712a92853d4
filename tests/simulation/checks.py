"""Properties of a trial after its end, checked from its files and from observations."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ngsgd.files import read_json_lines
from ngsgd.training.storage.audit import OuterIterationLines, read
from ngsgd.training.storage.ledger import pieces_of
from tests import judge
from tests.simulation import models
from tests.simulation.trial import Life, Trial

# an error is one message that names the next step
_NEXT_STEP = re.compile(r"\b(resume|restart|retry|free|fix|restore|choose|lower|raise|reduce|wait|check|start|follow|inspect|"
                        r"find out|continue|remove|make room)\b", re.IGNORECASE)


def problems(trial: Trial) -> list[str]:
    """All violations of a trial."""
    found = list(trial.world.problems)
    found += _errors(trial)
    found += _lost_commits(trial)
    if trial.has_no_data:
        found += _data_left(trial)
    elif trial.is_finished:
        found += _of_finished_run(trial)
    found += [f"thread {thread.name} is left" for thread in threading.enumerate()
              if thread.name.startswith("ngsgd") and thread not in trial.older_threads]
    return found


def _of_finished_run(trial: Trial) -> list[str]:
    try:
        done = read(trial.folder / "ledger.jsonl")
    except Exception as error:
        return [f"the ledger cannot be audited: {type(error).__name__}: {error}"]
    # without locks it is unknown whether the writer of a temporary file lives, and the ledger may
    # hold lines of two processes for one outer iteration
    found = judge.finished_run(trial.folder, of_two_processes=trial.was_taken_over,
                               keeps_temporary=not trial.scenario.has_locks or not _is_removable(trial))
    if not trial.was_taken_over:
        found += [*_shards(trial, done), *_given_up(trial, done), *_without_data(done)]
    return [*found, *models.problems(trial), *_leftovers(trial), *false_alarms(trial)]


def faulty_workers(trial: Trial) -> set[int]:
    """Workers with faulty arithmetic."""
    return {fault.at for fault in trial.faults if fault.where == "worker"}


def num_audited(trial: Trial) -> int:
    """Number of audits that ended with a verdict."""
    return sum(line["outcome"] in ("agreed", "decided") for line in _audit_lines(trial))


def _audit_lines(trial: Trial) -> list[dict[str, Any]]:
    path = trial.folder / "ledger.jsonl"
    return [line for line in read_json_lines(path) if line["event"] == "audited"] if path.exists() else []


def false_alarms(trial: Trial) -> Iterator[str]:
    """Only workers with faulty arithmetic are named, and no wrong result that was found counts."""
    faulty = faulty_workers(trial)
    # a result that is not finite is wrong, too
    has_others = any(fault.what == "not finite" for fault in trial.world.occurred)
    right = set()
    for line in _audit_lines(trial):
        # two workers, one of them faulty, cannot be distinguished
        is_false = line["outcome"] == "not_reproducible" or (line["outcome"] == "undecided" and not faulty)
        if not has_others and (set(line["faulty"]) - faulty or is_false):
            yield (f"the audit of job {line['job']} of outer iteration {line['outer_iter']} ended with {line['outcome']} and "
                   f"named {line['faulty']}")
        if line["outcome"] == "agreed":
            right |= {worker for worker, _ in line["runs"]}
    for event in read_json_lines(trial.folder / "events.jsonl"):
        if event.get("what") == "worker_quarantined" and not event["message"].startswith(f"worker {event['worker']} "):
            yield f"worker {event['worker']} is in quarantine, and the message says: {event['message']}"
    # with compression rounding may remove a wrong bit from all that a job contributes
    if not has_others and right & faulty and trial.config.cluster.codec is None:
        yield f"wrong results of workers {sorted(right & faulty)} agreed with right ones"


def _errors(trial: Trial) -> Iterator[str]:
    for life in trial.lives:
        if life.ending in ("error", "locked", "stopped", "no data") and not _NEXT_STEP.search(_message(life)):
            yield f"an error without a next step: {type(life.error).__name__}: {life.error}"


def _message(life: Life) -> str:
    # errors of the disk before the run begins get their next step from the command line
    return "retry" if isinstance(life.error, OSError) else str(life.error)


def _lost_commits(trial: Trial) -> Iterator[str]:
    """A process must continue after the newest durable commit with the state of jobs."""
    interval = trial.scenario.job_states_interval
    for life in trial.lives:
        first = life.first_job
        if first and first.outer_iter <= life.acknowledged // interval * interval:
            yield (f"process {life.number} repeated outer iteration {first.outer_iter}, and {life.acknowledged} was "
                   "committed")


def _shards(trial: Trial, done: list[OuterIterationLines]) -> Iterator[str]:
    """Every pass of the schedule must be planned once, in order."""
    schedule = trial.task.shards().schedule(trial.config.schedule)
    own = trial.config.sites.own_jobs or slice(None)
    wanted = [shard for one in schedule.outer_iterations() for shard in one.shards[own]]
    fresh = [piece for one in done for _, entry in sorted(one.planned.items()) for piece in entry["pieces"]
             if piece[2] == one.outer_iter]
    passes = {(outer_iter, job): (archive, frame) for archive, frame, outer_iter, job, _, _ in fresh}
    planned = [shard for _, shard in sorted(passes.items())]
    if planned != [(shard.archive, shard.frame) for shard in wanted]:
        yield f"{len(planned)} passes were planned, and the schedule has {len(wanted)}; or they differ"
    if trial.scenario.policy != "drop" and not _may_lose_data(done):
        sizes = sum(trial.task.num_batches(shard, 1) for shard in wanted)
        frames = done[-1].commit["frames_processed"] if done else 0
        if frames != 4 * sizes:
            yield f"{frames} examples were counted, and the schedule has {4 * sizes}"


def _without_data(done: list[OuterIterationLines]) -> Iterator[str]:
    """An outer iteration without data leaves the model unchanged."""
    for one in done:
        if one.settled and one.has_no_data and one.commit["model"] != one.commit["parent"]:
            yield f"outer iteration {one.outer_iter} changed the model without data"


def _data_left(trial: Trial) -> Iterator[str]:
    """A run may end without a final model only if every shard was quarantined."""
    lines = [line for line in read_json_lines(trial.folder / "ledger.jsonl") if line["event"] == "quarantined"]
    grid = trial.task.shards()
    wanted = {(archive, frame) for archive in range(grid.num_archives) for frame in range(grid.shards_per_archive)}
    damaged = {line["pieces"][0][0] for line in lines if "damaged" in line["reason"]}
    gone = {tuple(piece[:2]) for line in lines for piece in line["pieces"]}
    left = [shard for shard in wanted - gone if shard[0] not in damaged]
    if left:
        yield f"the run ended without data, although {len(left)} shards were not in quarantine"


def _may_lose_data(done: list[OuterIterationLines]) -> bool:
    return any(entry["event"] in ("rejected", "dropped", "quarantined") for one in done for entry in one.settled)


def _given_up(trial: Trial, done: list[OuterIterationLines]) -> Iterator[str]:
    """Work is given up only for a reason."""
    failure = trial.scenario.settings["failure"]
    occurred = Counter(fault.what for fault in trial.world.occurred)
    quarantined = {tuple(piece[:2]) for one in done for entry in one.settled if entry["event"] == "quarantined"
                   for piece in entry["pieces"] if "quarantine" not in entry["reason"]}
    for one in done:
        for entry in one.settled:
            where = f"job {entry['job']} of outer iteration {one.outer_iter}"
            match entry["event"]:
                case "deferred" if failure["policy"] == "retry" and trial.config.schedule.load_balancing != "time":
                    yield f"{where} was deferred under the policy retry"
                case "quarantined" if "in quarantine" in entry["reason"]:
                    if not quarantined & {tuple(piece[:2]) for piece in entry["pieces"]}:
                        yield f"{where} was skipped, and its shard was not in quarantine"
                case "dropped" | "quarantined" if failure["policy"] == "retry" and not occurred["damaged archive"]:
                    # workers that the coordinator killed are no evidence against data
                    (piece,) = pieces_of(entry["pieces"][:1])
                    hangs = trial.history.num_hangs[piece] if entry["event"] == "quarantined" else 0
                    num_failures = trial.history.num_failures[piece]
                    # a result that is lost before it is averaged is a failed attempt
                    if num_failures - hangs + occurred["lose results"] + trial.history.num_lost < failure["max_attempts"]:
                        yield f"{where} was given up after {num_failures} failures ({entry['reason']})"


def _is_removable(trial: Trial) -> bool:
    """Whether the disk never refused to read or to remove a file, for which some need space."""
    return not any(fault.what in ("EIO", "ENOSPC") and fault.where in ("operation", "read") for fault in trial.world.occurred)


def _leftovers(trial: Trial) -> Iterator[str]:
    """Files that nobody needs after the end."""
    kept = [path.name for path in (trial.folder / "checkpoints").glob("iter-*")]
    # a process that ended before it removed the oldest one leaves it
    # a power cut may bring back removed files
    is_removable = _is_removable(trial) and not any(fault.what.startswith("power cut") for fault in trial.world.occurred)
    # the newest two with the state of jobs may be older
    num_to_keep = trial.config.checkpoint.num_to_keep + 2 * (trial.scenario.job_states_interval > 1)
    if len(kept) > num_to_keep + len(trial.lives) - 1 and is_removable:
        yield f"{len(kept)} checkpoints are left"
    manifest = trial.folder / "final" / "model.json"
    if not manifest.exists() or not json.loads(manifest.read_text()):
        yield "the final model has no description"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(trial.disk.root + os.sep):
            yield f"{os.path.basename(target)} is still open"
