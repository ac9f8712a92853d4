"""Checks of a run's health: color, reason and threshold of each, and one verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ngsgd.config.build import flatten
from ngsgd.counting import counted
from ngsgd.errors import ConfigError
from ngsgd.launcher.reports.history import FAULTS, RunHistory
from ngsgd.masking import masked

if TYPE_CHECKING:
    from ngsgd.config import RunConfig

# the checks that make a run a failed one
_FATAL = ("Run", "Objective", "NaN and infinity")
GREEN, AMBER, RED, GRAY = "green", "amber", "red", "gray"
# a run of one seed differs from the mean of seeds; %WER points beyond its own interval
_SEED_SPREAD = 0.5
# settings that say where a run lies and who watches it
PLACES = ("name", "output_dir", "data.source", "data.cache_dir", "cluster.address", "task.search_path")
# settings that change the speed of a run, not its expected result, which each optimizer has
_NO_EFFECT = (*PLACES, "seed", "optimizer.kind", "cluster.kind")
_CHOICES = ("optimizer.kind", "model.kind", "outer.kind", "cluster.num_workers")
# thresholds: (amber, red)
_GAP = (0.25, 0.75)
# of the first validation loss
_SOLVED = 0.05
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


# color, reason and threshold
_Found = tuple[str, str, str]


def checks_of(run: RunHistory) -> list[Check]:
    checks: dict[str, Callable[[RunHistory], _Found | None]] = {
        "Run": _ending, "Objective": _objective, "NaN and infinity": _finite,
        "Train/validation gap": _gap, "WER": _wer, "Clipped updates": _clipping,
        "Dead ReLUs": _dead, "Rejected jobs": _rejected, "Speed of workers": _speed,
        "Faults": _faults, "Interruptions": _interruptions}
    return [Check(name, *found) for name, check in checks.items()
            if (run.iterations or name == "Run") and (found := check(run))]


def verdict_of(run: RunHistory, checks: Sequence[Check]) -> Verdict:
    """Failed: the run, its objective or its numbers are red.  Look at: others are not green."""
    if fatal := [check for check in checks if check.level == RED and check.name in _FATAL]:
        return Verdict(RED, "failed", fatal[0].reason)
    colored = [check for check in checks if check.level != GRAY]
    doubtful = [check for check in colored if check.level in (AMBER, RED)]
    start = "Still running. " if run.state["state"] in ("RUNNING", "PENDING") else ""
    if doubtful:
        names = ", ".join(check.name.lower() for check in doubtful)
        share = f"{len(doubtful)} of {len(colored)}"
        return Verdict(AMBER, "look at", f"{start}Checks with a finding: {names} ({share}).")
    return Verdict(GREEN, "healthy", f"{start}All {counted(len(colored), 'check')} passed.")


def _ending(run: RunHistory) -> _Found:
    total = run.state["num_outer_iters"] or "?"
    done = f"outer iteration {run.state['outer_iter']} of {total}"
    resume = f"resume it with: {run.state['resume']}"
    match run.state["state"]:
        case "SUCCEEDED":
            return GREEN, f"It finished all {counted(len(run.iterations), 'outer iteration')}.", ""
        case "RUNNING" | "PENDING" | "UNKNOWN":
            return GRAY, f"It is at {done}.", ""
        case "STOPPED":
            return AMBER, f"It was stopped at {done}; {resume}.", ""
        case "LOST":
            return RED, f"Its process is gone without an error message, at {done}; {resume}.", ""
    reason = "see its console output"
    if error := run.state["error"]:
        reason = f"exit code {error['exit_code']}: {error['message']}"
    return RED, f"It ended with an error at {done}: {masked(reason).rstrip('.')}.", ""


def _objective(run: RunHistory) -> _Found:
    loss = [-event["valid"]["objf"] for event in run.iterations]
    first, last, best = loss[0], loss[-1], min(loss)
    limit = f"amber: {_BEHIND_BEST[0]:.0%} of the improvement lost again; red: all of it"
    if len(loss) == 1:
        return GRAY, f"One outer iteration, validation loss {first:.4g}.", limit
    lost = (last - best) / (first - best) if first > best else float(last > best)
    # at the limit itself all is lost
    level = _above(lost, _BEHIND_BEST) if lost < _BEHIND_BEST[1] else RED
    return level, f"Validation loss went from {first:.4g} to {last:.4g}, best {best:.4g}.", limit


def _finite(run: RunHistory) -> _Found:
    limit = "amber: a skipped minibatch; red: a score that is not finite"
    for event in run.iterations:
        if not math.isfinite(event["train"]["objf"] + event["valid"]["objf"]):
            number = event["outer_iter"] + 1
            return RED, f"The objective is not finite at outer iteration {number}.", limit
    if skipped := sum(job["num_skipped"] for event in run.iterations for job in event["jobs"]):
        number = counted(skipped, "minibatch was", "minibatches were")
        return AMBER, f"{number} skipped, their gradients were not finite.", limit
    return GREEN, "All scores and gradients are finite.", limit


def _gap(run: RunHistory) -> _Found:
    scores = run.final or run.iterations[-1]
    model = "final model" if run.final else "last outer iteration"
    train, valid = -scores["train"]["objf"], -scores["valid"]["objf"]
    limit = f"amber: {_GAP[0]:.0%} above; red: {_GAP[1]:.0%}"
    first = -run.iterations[0]["valid"]["objf"]
    if 0.0 <= valid < _SOLVED * first:
        # the ratio of two losses near 0 has no meaning
        return GREEN, f"Validation loss {valid:.4g} is below {_SOLVED:.0%} of its first value, {model}.", limit
    share = (valid - train) / abs(train) if train else 0.0
    return (_above(share, _GAP), f"Validation loss {valid:.4g} is {abs(share):.0%} {'above' if share > 0 else 'below'} "
            f"training loss {train:.4g}, {model}.", limit)


def _wer(run: RunHistory) -> _Found | None:
    from ngsgd.pipeline.recipes import expected_wer
    if not run.test_errors:
        return None
    wer = low = run.test_errors.wer
    of_run = f"{wer:.2f}%"
    if run.interval:
        low, high = run.interval
        of_run += f" (95% interval {low:.2f} to {high:.2f})"
    recipe, changed = user_settings(run.config)
    expected = expected_wer(recipe).get(run.config.optimizer.label) if recipe else None
    relevant = [path for path in changed if path not in _NO_EFFECT and not path.startswith("tracking.")]
    if expected is None or relevant:
        why = f"{', '.join(relevant[:3])} differ from the recipe" if relevant else "this recipe has no recorded result"
        return GRAY, f"Test WER {of_run}. Not compared: {why}.", ""
    return (GREEN if low <= expected else AMBER if low <= expected + _SEED_SPREAD else RED,
            f"Test WER {of_run}; expected {expected:.2f}% (recipe {recipe}, mean of three seeds).",
            f"amber: the interval lies above the expected WER; red: by more than {_SEED_SPREAD:g} points")


def _clipping(run: RunHistory) -> _Found:
    half = run.iterations[len(run.iterations) // 2:]
    share = statistics.fmean(event.get("max_change_share", math.nan) for event in half)
    limit = f"amber: {_CLIPPED[0]:.0%}; red: {_CLIPPED[1]:.0%}, where the limit and not the learning rate sets the step"
    if math.isnan(share):
        return GRAY, "Not recorded.", limit
    return (_above(share, _CLIPPED), f"max_change clipped {share:.0%} of the layers' updates in "
            "the second half of training.", limit)


def _dead(run: RunHistory) -> _Found | None:
    shares = {name.removeprefix("dead_units/"): value for name, value in run.iterations[-1].get("diagnostics", {}).items()
              if name.startswith("dead_units/")}
    if not shares:
        return None
    worst = max(shares, key=lambda name: shares[name])
    return (_above(shares[worst], _DEAD), f"At most {shares[worst]:.0%} of the units of a layer are always 0 "
            f"({worst}, last outer iteration).", f"amber: {_DEAD[0]:.0%} of a layer; red: {_DEAD[1]:.0%}")


def _rejected(run: RunHistory) -> _Found:
    jobs = sum(len(event["jobs"]) for event in run.iterations)
    # a result that is not used because another one was better is not rejected for a fault
    rejected = sum(incident["what"] == "job_rejected" for incident in run.incidents)
    return (_above(rejected / max(jobs, 1), _REJECTED),
            f"{rejected} of {counted(jobs, 'result was', 'results were')} rejected.", f"amber: any; red: {_REJECTED[1]:.0%}")


def _speed(run: RunHistory) -> _Found | None:
    rows = run.workers()
    # jobs of one process run one after another: their speed is not that of a worker
    if len(rows) < 2 or run.config.cluster.kind == "in_process":
        return None
    median = statistics.median(row.frames_per_s for row in rows)
    share = rows[0].frames_per_s / max(median, 1e-9)
    return (GREEN if share >= _SLOW[0] else AMBER if share >= _SLOW[1] else RED,
            f"The slowest, worker {rows[0].worker}, runs at {share:.0%} of the median speed.",
            f"amber: below {_SLOW[0]:.0%}; red: below {_SLOW[1]:.0%}")


def _faults(run: RunHistory) -> _Found:
    whats = [incident["what"] for incident in run.incidents]
    lost, failed = sum(what in _LOSSES for what in whats), sum(what in FAULTS for what in whats)
    jobs = counted(failed, "job failed", "jobs failed")
    limit = "amber: a job or a worker was lost and replaced; red: data was skipped or an outer iteration ran again"
    if lost:
        return (RED, f"{counted(lost, 'time')} data was skipped or an outer iteration ran again; {jobs}.", limit)
    if failed:
        return (AMBER, f"{jobs} or lost their worker; each ran again with the same result.", limit)
    return GREEN, "No job failed and no worker was lost.", limit


def _interruptions(run: RunHistory) -> _Found:
    stops, limit = run.stops(), "amber: a process of the run ended unexpectedly"
    if not stops:
        return GREEN, "Training ran without a stop.", limit
    hard = sum(not stop.is_clean for stop in stops)
    places = ", ".join(str(stop.outer_iter + 1) for stop in stops[:5])
    times = "once" if len(stops) == 1 else counted(len(stops), "time")
    return (AMBER if hard else GREEN, f"Training was resumed {times}, after outer iteration "
            f"{places}; unexpected stops: {hard}.", limit)


def _above(value: float, limits: tuple[float, float]) -> str:
    """The color of a value that should be low; NaN is red."""
    return RED if not value <= limits[1] else AMBER if value > limits[0] else GREEN


def user_settings(config: RunConfig) -> tuple[str, dict[str, tuple[Any, Any]]]:
    """The recipe that explains most settings, and the settings that differ: (value, recipe's).

    The recipe of a run is not recorded; "" for a task with a module of the user.
    """
    from ngsgd.config import RunConfig
    from ngsgd.launcher.config.compose import groups
    values, plain = flatten(config), flatten(RunConfig())
    names = [] if config.task._target_ else groups()["recipe"]
    found = {name: _of_recipe(name, config, plain) for name in names}
    bases = {name: base for name, base in found.items() if base.get("data.corpus") == config.data.corpus} or {"": plain}
    differ = {name: {path for path, value in values.items() if value != base.get(path)} for name, base in bases.items()}
    name = min(differ, key=lambda one: len(differ[one]))
    # these are the user's choice, though the rest is compared with a recipe of the same choice
    chosen = {path for path in _CHOICES if values[path] != plain[path]}
    return name, {path: (value, plain[path] if path in chosen else bases[name].get(path)) for path, value in values.items()
                  if path in differ[name] | chosen and path not in PLACES}


def _of_recipe(name: str, config: RunConfig, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a recipe with the choices of a run; empty where these make no run of it."""
    from ngsgd.pipeline.recipes import recipe
    kinds = {of: {"kind": getattr(config, of).kind} for of in ("optimizer", "model", "outer")}
    data = {"source": config.data.source} if config.data.source else {}
    try:
        base = recipe(name, data=data, cluster={"num_workers": config.cluster.num_workers}, **kinds)
    except ConfigError:
        return {}
    # without Hydra a recipe has other defaults of these sections
    return flatten(base) | {path: value for path, value in plain.items() if path.startswith(("cluster.kind", "tracking."))}
