"""Several runs: what differs between them, and which one is better, with a 95% interval."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.asr.decode.scoring import UtteranceErrors, read_per_utterance
from ngsgd.config.build import flatten
from ngsgd.counting import counted
from ngsgd.errors import ConfigError
from ngsgd.files import log_lines, parse_json, read_json, read_log
from ngsgd.launcher.reports.checks import PLACES
from ngsgd.launcher.text import masked
from ngsgd.runs.run_folder import RunFolder
from ngsgd.runs.saved_config import read_config
from ngsgd.word_errors import WordErrors

# settings of places and names, or that follow from others
_NO_DIFFERENCE = (*PLACES, "tracking.uri", "tracking.experiment_name", "schedule.num_jobs_initial")
# groups whose difference to the best one is tested
MAX_TESTED = 10
_MAX_IN_NAME = 4


@dataclass(frozen=True)
class Point:
    """One outer iteration."""

    epoch: float
    frames_processed: int
    elapsed_s: float
    train_objf: float
    valid_objf: float
    accuracy: float
    num_jobs: int


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs."""

    folder: RunFolder
    points: tuple[Point, ...]
    settings: dict[str, Any]
    # percent, and its 95% interval
    wer: tuple[float, float, float] | None
    # of the final model; None before the end
    final_objf: float | None

    @property
    def label(self) -> str:
        return self.folder.path.name

    @property
    def is_speech(self) -> bool:
        """A custom task has losses and examples instead of objectives and frames."""
        return not self.settings["task._target_"]

    @property
    def valid_loss(self) -> float:
        """Of the final model, or of the last outer iteration of a run that has not finished."""
        return -(self.points[-1].valid_objf if self.final_objf is None else self.final_objf)

    def seconds_to(self, objf: float) -> float:
        """Seconds of training until the validation objective is reached, interpolated; or NaN."""
        before: Point | None = None
        for point in self.points:
            if point.valid_objf >= objf:
                if before is None:
                    return point.elapsed_s
                share = (objf - before.valid_objf) / (point.valid_objf - before.valid_objf)
                return before.elapsed_s + share * (point.elapsed_s - before.elapsed_s)
            before = point
        return math.nan

    def figures(self, objf: float) -> dict[str, Any]:
        """For JSON and the tables; None where a value is not known."""
        last, seconds = self.points[-1], self.seconds_to(objf)
        return {
            "run": self.label,
            "num_jobs": max(point.num_jobs for point in self.points),
            "optimizer": self.settings["optimizer.kind"],
            "outer": self.settings["outer.kind"],
            "seed": self.settings["seed"],
            "frames_per_s": last.frames_processed / last.elapsed_s if last.elapsed_s else None,
            "wer_percent": self.wer and self.wer[0],
            "wer_interval_95": self.wer and list(self.wer[1:]),
            "valid_objf": -self.valid_loss,
            "is_final_model": self.final_objf is not None,
            "valid_accuracy": last.accuracy,
            "epochs": last.epoch,
            "frames_processed": last.frames_processed,
            "seconds": last.elapsed_s,
            "seconds_to_common_objf": None if math.isnan(seconds) else seconds,
        }


@dataclass(frozen=True)
class Group:
    """Runs of equal settings but for the seed."""

    name: str
    runs: tuple[ComparedRun, ...]

    def values(self, measure: str) -> list[float]:
        """WER in percent, or validation loss; low is good."""
        return [run.wer[0] if measure == WER and run.wer else run.valid_loss for run in self.runs]

    def by_seed(self, measure: str) -> dict[int, float]:
        """Values by seed; of a seed that ran twice, the last."""
        seeds = [run.settings["seed"] for run in self.runs]
        return dict(zip(seeds, self.values(measure), strict=True))

    def mean(self, measure: str) -> float:
        return statistics.fmean(self.values(measure))


@dataclass(frozen=True)
class Difference:
    """How much worse the second of two groups is; the bounds are NaN without an interval."""

    value: float
    low: float
    high: float
    basis: str

    @property
    def is_significant(self) -> bool:
        return self.low > 0.0 or self.high < 0.0


WER, LOSS = "test WER", "validation loss"
_UNITS = {WER: " points", LOSS: ""}


# Reading ------------------------------------------------------------------------------------------


def read(folder: RunFolder) -> ComparedRun:
    """Read a run; only the entries of its log that are compared are checked.

    Raises:
        ConfigError: The run has no outer iteration, or its settings are damaged.
    """
    points, end = dict[int, Point](), dict[str, Any]()
    for line in log_lines(folder.events) if folder.events.is_file() else ():
        try:
            event = parse_json(line)
            if event["event"] == "outer_iteration":
                points[int(event["outer_iter"])] = _point(event)
            elif event["event"] == "finished":
                end = {
                    "objf": _objf(event["valid"]),
                    "wer": event.get("test_errors") and WordErrors.of_json(event["test_errors"]).wer,
                }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            # cut short by a crash, or damaged
            continue
    if not points:
        raise ConfigError(
            f"{folder.path} has no outer iteration yet; remove it from the command, or wait for "
            "its first."
        )
    bounds = interval_of(folder)
    wer = (end["wer"], *bounds) if bounds and end.get("wer") is not None else None
    in_order = tuple(points[number] for number in sorted(points))
    values = flatten(read_config(folder.config)).items()
    # without passwords, and with lists for tuples as in YAML
    settings = {
        path: masked(one) if isinstance(one, str) else list(one) if isinstance(one, tuple) else one
        for path, one in values
    }
    return ComparedRun(folder, in_order, settings, wer, end.get("objf"))


def interval_of(folder: RunFolder) -> tuple[float, float] | None:
    """The 95% interval of the test set's WER; None where nothing was decoded, or for damage."""
    try:
        found = read_json(folder.decode / "wer.json")["test_interval_95"]
        return float(found["low"]), float(found["high"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _point(event: Mapping[str, Any]) -> Point:
    frames = event.get("frames_processed", event.get("examples_processed"))
    accuracy = float(event["valid"].get("accuracy", math.nan))
    epoch, elapsed_s = float(event["epoch"]), float(event["elapsed_s"])
    train, valid = _objf(event["train"]), _objf(event["valid"])
    return Point(epoch, int(frames), elapsed_s, train, valid, accuracy, int(event["num_jobs"]))


def _objf(scores: Mapping[str, Any]) -> float:
    """A custom task has a loss."""
    return float(scores["objf"]) if "objf" in scores else -float(scores["loss"])


# Differences --------------------------------------------------------------------------------------


def differences(runs: Sequence[ComparedRun], *, with_seed: bool = True) -> dict[str, list[Any]]:
    """Setting -> its value in each run, where they are not all equal."""
    paths = dict.fromkeys(path for run in runs for path in run.settings)
    found = {
        path: [run.settings.get(path) for run in runs]
        for path in paths
        if path not in _NO_DIFFERENCE and (with_seed or path != "seed")
    }
    found = {path: values for path, values in found.items() if any(v != values[0] for v in values)}
    if found.get("schedule.num_jobs_final") == found.get("cluster.num_workers", 0):
        # one job per worker: one of the two names is enough
        del found["schedule.num_jobs_final"]
    return found


def names_of(runs: Sequence[ComparedRun]) -> list[str]:
    """A name for each run from the settings that differ; with its folder where these are equal."""
    different = differences(runs)
    seeds = different.pop("seed", None)
    groups = _group_names(runs, different)
    seed_words = [f"seed={seed}" for seed in seeds] if seeds else [""] * len(runs)
    names = [", ".join(filter(None, words)) for words in zip(groups, seed_words, strict=True)]
    return [
        name if name and names.count(name) == 1 else ", ".join(filter(None, (name, run.label)))
        for name, run in zip(names, runs, strict=True)
    ]


def groups_of(runs: Sequence[ComparedRun]) -> list[Group]:
    """Runs of equal settings but for the seed, in the order of their first run."""
    different = differences(runs, with_seed=False)
    members: dict[str, list[ComparedRun]] = {}
    keys: dict[str, str] = {}
    for index, (run, name) in enumerate(zip(runs, _group_names(runs, different), strict=True)):
        key = repr([values[index] for values in different.values()])
        members.setdefault(key, []).append(run)
        keys[key] = name
    return [Group(keys[key] or "all runs", tuple(found)) for key, found in members.items()]


def _group_names(runs: Sequence[ComparedRun], different: Mapping[str, Sequence[Any]]) -> list[str]:
    """Words as on the command line, such as optimizer=sgd."""
    paths = list(different)[:_MAX_IN_NAME]
    # optimizer.kind is chosen with optimizer=sgd, task._target_ with task=module:function
    choices = [path.removesuffix(".kind").removesuffix("._target_") for path in paths]
    shorts = [choice.rpartition(".")[2] for choice in choices]
    names = [
        short if shorts.count(short) == 1 else choice
        for short, choice in zip(shorts, choices, strict=True)
    ]
    values = zip(*(map(str, different[path]) for path in paths), strict=True)
    words = [", ".join(map("{}={}".format, names, of_run)) for of_run in values]
    return words or [""] * len(runs)


# The verdict --------------------------------------------------------------------------------------


def measure_of(runs: Sequence[ComparedRun]) -> str:
    """The WER where all runs have one, else the validation loss."""
    return WER if all(run.wer for run in runs) else LOSS


def verdict(groups: Sequence[Group], measure: str) -> tuple[str, str]:
    """(word, sentence) about the best group and the second."""
    best = groups[0]
    if len(groups) == 1:
        values = best.values(measure)
        if len(values) == 1:
            return "one run", f"{measure} {values[0]:.4g}; name a second run to compare it with."
        num_seeds = len({run.settings["seed"] for run in best.runs})
        seeds = (
            "equal, and so are their seeds: they are no independent runs"
            if num_seeds == 1
            else "equal but for the seed"
            if num_seeds == len(values)
            else f"equal but for the seed, of which there are {num_seeds}"
        )
        return "no difference", (
            f"The settings of these {counted(len(values), 'run')} are {seeds}: {measure} mean "
            f"{statistics.fmean(values):.4g}, {min(values):.4g} to {max(values):.4g}."
        )
    second = groups[1]
    problem = incomparable([*best.runs, *second.runs], measure)
    if problem:
        return "not comparable", problem
    better, worse = _group_names(
        [best.runs[0], second.runs[0]], differences([best.runs[0], second.runs[0]], with_seed=False)
    )
    found = difference(best, second, measure)
    unit = _UNITS[measure]
    means = f"{best.mean(measure):.3g} and {second.mean(measure):.3g}"
    figures = f"{measure} {means}, difference {found.value:.2g}{unit}"
    if math.isnan(found.low):
        return "no interval", (
            f"{better} has a lower {measure} than {worse}: {figures}. One run of each gives no "
            "interval; train both with the same two or more seeds."
        )
    interval = f"95% interval {found.low:.2g} to {found.high:.2g}, {found.basis}"
    if found.is_significant:
        return "better", f"{better} is better than {worse}: {figures} ({interval})."
    return (
        "not significant",
        f"{better} and {worse} do not differ significantly: {figures} ({interval}).",
    )


def incomparable(runs: Sequence[ComparedRun], measure: str) -> str:
    """The reason why these runs cannot be compared by a measure; empty if they can."""
    prefixes = (
        ("objective.kind", "task.", "data.", "features.", "align.") if measure == LOSS else ()
    )
    found = [path for path in differences(runs) if path.startswith(prefixes)] if prefixes else []
    if found:
        return (
            f"{', '.join(found[:3])} differ, so the validation losses are of different things; "
            "compare the WER."
        )
    if (
        measure == WER
        and len(
            {
                tuple((row.utt_id, row.errors.num_words) for row in rows)
                for run in runs
                if (rows := utterances(run))
            }
        )
        > 1
    ):
        return "The runs were decoded on different test sets."
    return ""


def difference(best: Group, other: Group, measure: str) -> Difference:
    """Mean of the other group minus mean of the best, with an interval as good as the runs allow.

    From matched seeds by Student's t, else from groups of two or more runs by Welch's t, else from
    the utterances of one run each by a paired bootstrap.
    """
    # NumPy is loaded for the first interval, not for the help
    from ngsgd.asr.decode.significance import bootstrap_interval, paired_interval, welch_interval

    value = other.mean(measure) - best.mean(measure)
    ours, theirs = best.by_seed(measure), other.by_seed(measure)
    matched = [theirs[seed] - ours[seed] for seed in ours if seed in theirs]
    if len(matched) > 1:
        mean = statistics.fmean(matched)
        return Difference(mean, *paired_interval(matched), f"{counted(len(matched), 'matched seed')}")
    counts = (len(best.runs), len(other.runs))
    if min(counts) > 1:
        bounds = welch_interval(best.values(measure), other.values(measure))
        return Difference(value, *bounds, f"{counts[0]} and {counts[1]} runs of other seeds")
    # with equal seeds if there are such
    pairs = [(first, second) for first in best.runs for second in other.runs]
    first, second = min(pairs, key=lambda pair: pair[0].settings["seed"] != pair[1].settings["seed"])
    both = bootstrap_interval(utterances(first), utterances(second)) if measure == WER else None
    if both:
        low, high = both
        value = Group("", (second,)).mean(measure) - Group("", (first,)).mean(measure)
        basis = "one run each, test utterances resampled; seeds may differ by more"
        return Difference(value, low, high, basis)
    return Difference(value, math.nan, math.nan, "one run each")


@functools.lru_cache(maxsize=64)
def _utterances(path: Path) -> list[UtteranceErrors]:
    try:
        return read_per_utterance(read_log(path))
    except (OSError, ValueError):
        return []


def utterances(run: ComparedRun) -> list[UtteranceErrors]:
    """Errors of each utterance of the test set; empty where nothing was decoded."""
    return _utterances(run.folder.decode / "test.per_utt.txt")


def common_objf(runs: Sequence[ComparedRun]) -> float:
    """The validation objective that every run reached: the lowest of their best."""
    return min(max(point.valid_objf for point in run.points) for run in runs)
