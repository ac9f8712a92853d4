"""Checks of a run's health: color, reason and threshold of each, and one verdict."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ngsgd.config.build import flatten
from ngsgd.counting import counted
from ngsgd.errors import ConfigError
from ngsgd.launcher.reports.history import FAULTS, RunHistory
from ngsgd.launcher.text import masked

if TYPE_CHECKING:
    from ngsgd.config import RunConfig

# the names of the checks that make a run a failed one
_RUN, _OBJECTIVE, _FINITE = _FATAL = ("Run", "Objective", "NaN and infinity")
GREEN, AMBER, RED, GRAY = "green", "amber", "red", "gray"
# a run of one seed differs from the mean of seeds; %WER points beyond its own interval
_SEED_SPREAD = 0.5
# settings that say where a run lies and who watches it
PLACES = (
    "name",
    "output_dir",
    "data.source",
    "data.cache_dir",
    "cluster.address",
    "task.search_path",
)
# settings that change the speed of a run, not its expected result
_NO_EFFECT = (*PLACES, "seed")
_CHOICES = ("optimizer.kind", "model.kind", "outer.kind", "cluster.num_workers")
# thresholds: (amber, red)
_GAP = (0.25, 0.75)
_CLIPPED = (0.5, 0.9)
_REJECTED = (0.0, 0.1)
_DEAD = (0.1, 0.5)
_SLOW = (0.8, 0.5)
# share of the improvement that the last model may lose to the best one
_BEHIND_BEST = (0.1, 1.0)
# incidents after which data was not trained on, or an outer iteration ran again
_LOSSES = ("job_dropped", "shard_quarantined", "archive_quarantined", "rolled_back")


@dataclass(frozen=True)
class Check:
    """One answer; gray where a run has no basis for it."""

    name: str
    level: str
    reason: str
    threshold: str = ""


@dataclass(frozen=True)
class Verdict:
    """The first line of a report."""

    level: str
    # healthy | look at | failed
    word: str
    sentence: str


def checks_of(run: RunHistory) -> list[Check]:
    """All checks, in the order of the page."""
    checks = [_ending(run)]
    if not run.iterations:
        return checks
    return [
        *checks,
        _objective(run),
        _finite(run),
        _gap(run),
        *_wer(run),
        _clipping(run),
        *_dead(run),
        _rejected(run),
        *_speed(run),
        _faults(run),
        _interruptions(run),
    ]


def verdict_of(run: RunHistory, checks: Sequence[Check]) -> Verdict:
    """Failed: the run, its objective or its numbers are red.  Look at: others are not green."""
    fatal = [check for check in checks if check.level == RED and check.name in _FATAL]
    if fatal:
        return Verdict(RED, "failed", fatal[0].reason)
    colored = [check for check in checks if check.level != GRAY]
    doubtful = [check for check in colored if check.level in (AMBER, RED)]
    start = "Still running. " if run.state["state"] in ("RUNNING", "PENDING") else ""
    if doubtful:
        names = ", ".join(check.name.lower() for check in doubtful)
        share = f"{len(doubtful)} of {len(colored)}"
        return Verdict(AMBER, "look at", f"{start}Checks with a finding: {names} ({share}).")
    return Verdict(GREEN, "healthy", f"{start}All {counted(len(colored), 'check')} passed.")


# Checks -------------------------------------------------------------------------------------------


def _ending(run: RunHistory) -> Check:
    state, total = run.state["state"], run.state["num_outer_iters"] or "?"
    done = f"outer iteration {run.state['outer_iter']} of {total}"
    resume = f"resume it with: {run.state['resume']}"
    match state:
        case "SUCCEEDED":
            return Check(_RUN, GREEN, f"It finished all {counted(len(run.iterations), 'outer iteration')}.")
        case "RUNNING" | "PENDING" | "UNKNOWN":
            return Check(_RUN, GRAY, f"It is at {done}.")
        case "STOPPED":
            return Check(_RUN, AMBER, f"It was stopped at {done}; {resume}.")
        case "LOST":
            return Check(
                _RUN, RED, f"Its process is gone without an error message, at {done}; {resume}."
            )
    error = run.state["error"]
    reason = f"exit code {error['exit_code']}: {error['message']}" if error else "see its console output"
    return Check(_RUN, RED, f"It ended with an error at {done}: {masked(reason).rstrip('.')}.")


def _objective(run: RunHistory) -> Check:
    loss = [-event["valid"]["objf"] for event in run.iterations]
    first, last, best = loss[0], loss[-1], min(loss)
    limit = f"amber: {_BEHIND_BEST[0]:.0%} of the improvement lost again; red: all of it"
    lost = (last - best) / (first - best) if first > best else float(last > best)
    reason = f"Validation loss went from {first:.4g} to {last:.4g}, best {best:.4g}."
    if len(loss) == 1:
        return Check(_OBJECTIVE, GRAY, f"One outer iteration, validation loss {first:.4g}.", limit)
    return Check(_OBJECTIVE, _above(lost, _BEHIND_BEST, at_least=True), reason, limit)


def _finite(run: RunHistory) -> Check:
    limit = "amber: a skipped minibatch; red: a score that is not finite"
    wrong = [
        event["outer_iter"] + 1
        for event in run.iterations
        if not (math.isfinite(event["train"]["objf"]) and math.isfinite(event["valid"]["objf"]))
    ]
    if wrong:
        reason = f"The objective is not finite at outer iteration {wrong[0]}."
        return Check(_FINITE, RED, reason, limit)
    skipped = sum(job["num_skipped"] for event in run.iterations for job in event["jobs"])
    if skipped:
        reason = f"{counted(skipped, 'minibatch was', 'minibatches were')} skipped, their gradients were not finite."
        return Check(_FINITE, AMBER, reason, limit)
    return Check(_FINITE, GREEN, "All scores and gradients are finite.", limit)


def _gap(run: RunHistory) -> Check:
    scores, model = run.iterations[-1], "last outer iteration"
    if run.final:
        scores, model = run.final, "final model"
    train, valid = -scores["train"]["objf"], -scores["valid"]["objf"]
    share = (valid - train) / abs(train) if train else 0.0
    side = "above" if share > 0 else "below"
    return Check(
        "Train/validation gap",
        _above(share, _GAP),
        f"Validation loss {valid:.4g} is {abs(share):.0%} {side} training loss {train:.4g}, "
        f"{model}.",
        f"amber: {_GAP[0]:.0%} above; red: {_GAP[1]:.0%}",
    )


def _wer(run: RunHistory) -> Iterator[Check]:
    """Nothing for a task without words."""
    from ngsgd.pipeline.recipes import expected_wer

    if not run.test_errors:
        return
    name, wer = "WER", run.test_errors.wer
    of_run = f"{wer:.2f}%"
    if run.interval:
        of_run += f" (95% interval {run.interval[0]:.2f} to {run.interval[1]:.2f})"
    recipe, changed = user_settings(run.config)
    expected = expected_wer(recipe).get(run.config.optimizer.kind) if recipe else None
    relevant = [
        path
        for path in changed
        if path not in _NO_EFFECT
        and not path.startswith("tracking.")
        and path not in ("optimizer.kind", "cluster.kind")
    ]
    if expected is None or relevant:
        why = (
            f"{', '.join(relevant[:3])} differ from the recipe"
            if relevant
            else "this recipe has no recorded result"
        )
        yield Check(name, GRAY, f"Test WER {of_run}. Not compared: {why}.")
        return
    low = run.interval[0] if run.interval else wer
    level = GREEN if low <= expected else AMBER if low <= expected + _SEED_SPREAD else RED
    yield Check(
        name,
        level,
        f"Test WER {of_run}; expected {expected:.2f}% (recipe {recipe}, mean of three seeds).",
        "amber: the interval lies above the expected WER; "
        f"red: by more than {_SEED_SPREAD:g} points",
    )


def _clipping(run: RunHistory) -> Check:
    half = run.iterations[len(run.iterations) // 2 :]
    share = statistics.fmean(event.get("max_change_share", math.nan) for event in half)
    limit = (
        f"amber: {_CLIPPED[0]:.0%}; red: {_CLIPPED[1]:.0%}, "
        "where the limit and not the learning rate sets the step"
    )
    if math.isnan(share):
        return Check("Clipped updates", GRAY, "Not recorded.", limit)
    return Check(
        "Clipped updates",
        _above(share, _CLIPPED),
        f"max_change clipped {share:.0%} of the layers' updates in the second half of training.",
        limit,
    )


def _dead(run: RunHistory) -> Iterator[Check]:
    shares = {
        name.removeprefix("dead_units/"): value
        for name, value in run.iterations[-1].get("diagnostics", {}).items()
        if name.startswith("dead_units/")
    }
    if shares:
        worst = max(shares, key=lambda name: shares[name])
        yield Check(
            "Dead ReLUs",
            _above(shares[worst], _DEAD),
            f"At most {shares[worst]:.0%} of the units of a layer are always 0 "
            f"({worst}, last outer iteration).",
            f"amber: {_DEAD[0]:.0%} of a layer; red: {_DEAD[1]:.0%}",
        )


def _rejected(run: RunHistory) -> Check:
    jobs = sum(len(event["jobs"]) for event in run.iterations)
    # a result that is not used because another one was better is not rejected for a fault
    rejected = sum(incident["what"] == "job_rejected" for incident in run.incidents)
    return Check(
        "Rejected jobs",
        _above(rejected / max(jobs, 1), _REJECTED),
        f"{rejected} of {counted(jobs, 'result was', 'results were')} rejected.",
        f"amber: any; red: {_REJECTED[1]:.0%}",
    )


def _speed(run: RunHistory) -> Iterator[Check]:
    rows = run.workers()
    # jobs of one process run one after another: their speed is not that of a worker
    if len(rows) > 1 and run.config.cluster.kind != "in_process":
        slowest, median = rows[0], statistics.median(row.frames_per_s for row in rows)
        share = slowest.frames_per_s / max(median, 1e-9)
        level = GREEN if share >= _SLOW[0] else AMBER if share >= _SLOW[1] else RED
        yield Check(
            "Speed of workers",
            level,
            f"The slowest, worker {slowest.worker}, runs at {share:.0%} of the median speed.",
            f"amber: below {_SLOW[0]:.0%}; red: below {_SLOW[1]:.0%}",
        )


def _faults(run: RunHistory) -> Check:
    whats = [incident["what"] for incident in run.incidents]
    lost, failed = sum(what in _LOSSES for what in whats), sum(what in FAULTS for what in whats)
    limit = (
        "amber: a job or a worker was lost and replaced; "
        "red: data was skipped or an outer iteration ran again"
    )
    if lost:
        return Check(
            "Faults",
            RED,
            f"{counted(lost, 'time')} data was skipped or an outer iteration ran again; "
            f"{counted(failed, 'job failed', 'jobs failed')}.",
            limit,
        )
    if failed:
        return Check(
            "Faults",
            AMBER,
            f"{counted(failed, 'job failed', 'jobs failed')} or lost their worker; each ran again with the same result.",
            limit,
        )
    return Check("Faults", GREEN, "No job failed and no worker was lost.", limit)


def _interruptions(run: RunHistory) -> Check:
    stops = run.stops()
    limit = "amber: a process of the run ended unexpectedly"
    if not stops:
        return Check("Interruptions", GREEN, "Training ran without a stop.", limit)
    hard = sum(not stop.is_clean for stop in stops)
    places = ", ".join(str(stop.outer_iter + 1) for stop in stops[:5])
    times = "once" if len(stops) == 1 else counted(len(stops), "time")
    return Check(
        "Interruptions",
        AMBER if hard else GREEN,
        f"Training was resumed {times}, after outer iteration {places}; "
        f"unexpected stops: {hard}.",
        limit,
    )


def _above(value: float, limits: tuple[float, float], *, at_least: bool = False) -> str:
    """The color of a value that should be low; NaN is red."""
    amber, red = limits
    if not value < red if at_least else not value <= red:
        return RED
    return AMBER if value > amber else GREEN


# Settings -----------------------------------------------------------------------------------------


def user_settings(config: RunConfig) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The recipe that explains most settings, and the settings that differ: (value, recipe's).

    The recipe of a run is not recorded; "" for a task with a module of the user.
    """
    from ngsgd.launcher.config.compose import groups

    values, plain = flatten(config), flat_defaults()
    bases = (
        {"": plain}
        if config.task._target_
        else {
            name: base
            for name in groups()["recipe"]
            if (
                base := _flat_recipe(
                    name,
                    config.data.source,
                    config.optimizer.kind,
                    config.model.kind,
                    config.outer.kind,
                    config.cluster.num_workers,
                )
            )
            and base["data.corpus"] == config.data.corpus
        }
    )
    bases = bases or {"": plain}
    differ = {
        name: {path for path, value in values.items() if value != base.get(path)}
        for name, base in bases.items()
    }
    name = min(differ, key=lambda one: len(differ[one]))
    # these are the user's choice, though the rest is compared with a recipe of the same choice
    chosen = {path for path in _CHOICES if values[path] != plain[path]}
    return name, {
        path: (value, plain[path] if path in chosen else bases[name].get(path))
        for path, value in values.items()
        if path in differ[name] | chosen and path not in PLACES
    }


@functools.cache
def flat_defaults() -> dict[str, Any]:
    from ngsgd.config import RunConfig

    return flatten(RunConfig())


@functools.cache
def _flat_recipe(
    name: str, source: str, optimizer: str, model: str, outer: str, num_workers: int
) -> dict[str, Any]:
    """Empty where these settings make no run of the recipe."""
    from ngsgd.pipeline.recipes import recipe

    try:
        base = flatten(
            recipe(
                name,
                data={"source": source} if source else {},
                optimizer={"kind": optimizer},
                model={"kind": model},
                outer={"kind": outer},
                cluster={"num_workers": num_workers},
            )
        )
    except ConfigError:
        return {}
    # without Hydra a recipe has other defaults of these sections
    return base | {
        path: value
        for path, value in flat_defaults().items()
        if path.startswith(("cluster.kind", "tracking."))
    }
