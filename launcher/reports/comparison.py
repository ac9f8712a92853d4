"""Several runs: what differs between them, and which one is better, with a 95% interval."""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ngsgd.asr.decode.scoring import UtteranceErrors, read_per_utterance
from ngsgd.config.build import flatten
from ngsgd.counting import counted
from ngsgd.errors import ConfigError
from ngsgd.files import read_json, read_log, sha256
from ngsgd.launcher.reports.checks import PLACES
from ngsgd.masking import masked
from ngsgd.runs.config_file import read_config
from ngsgd.runs.run_folder import RunFolder
from ngsgd.training.records import FinalReport, OuterIterationRecord
from ngsgd.training.storage.event_log import events_of

# settings of places and names, or that follow from others
_NO_DIFFERENCE = (*PLACES, "tracking.uri", "tracking.experiment_name", "tracking.run_id", "tracking.parent_run_id",
                  "schedule.num_jobs_initial")
# groups whose difference to the best one is tested
MAX_TESTED = 10
_MAX_IN_NAME = 4


@dataclass(frozen=True)
class ComparedRun:
    folder: RunFolder
    points: tuple[OuterIterationRecord, ...]  # without their jobs
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
        return -(self.points[-1].valid.objf if self.final_objf is None else self.final_objf)

    def seconds_to(self, objf: float) -> float:
        """Seconds of training until the validation objective is reached, interpolated; or NaN."""
        before: OuterIterationRecord | None = None
        for point in self.points:
            if point.valid.objf >= objf:
                if before is None:
                    return point.elapsed_s
                share = (objf - before.valid.objf) / (point.valid.objf - before.valid.objf)
                return before.elapsed_s + share * (point.elapsed_s - before.elapsed_s)
            before = point
        return math.nan

    def result(self, measure: str) -> float:
        """WER in percent, or validation loss; low is good."""
        return self.wer[0] if measure == WER and self.wer else self.valid_loss

    def figures(self, objf: float) -> dict[str, Any]:
        """For JSON and the tables; None where a value is not known."""
        last, seconds = self.points[-1], self.seconds_to(objf)
        return {"run": self.label, "name": self.settings["name"], "num_jobs": max(point.num_jobs for point in self.points),
                "optimizer": self.settings["optimizer._target_"] or self.settings["optimizer.kind"],
                "outer": self.settings["outer.kind"], "seed": self.settings["seed"],
                "frames_per_s": last.frames_processed / last.elapsed_s if last.elapsed_s else None,
                "wer_percent": self.wer and self.wer[0],
                "wer_interval_95": self.wer and list(self.wer[1:]), "valid_objf": -self.valid_loss,
                "is_final_model": self.final_objf is not None,
                "valid_accuracy": last.valid.accuracy if self.is_speech else math.nan,
                "epochs": last.epoch, "frames_processed": last.frames_processed, "seconds": last.elapsed_s,
                "seconds_to_common_objf": None if math.isnan(seconds) else seconds}


@dataclass(frozen=True)
class Group:
    """Runs of equal settings but for the seed."""

    name: str
    runs: tuple[ComparedRun, ...]

    def values(self, measure: str) -> list[float]:
        return [run.result(measure) for run in self.runs]

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


def read(folder: RunFolder) -> ComparedRun:
    """Read a run; raise ConfigError if it has no outer iteration or damaged settings."""
    # without passwords, and with lists for tuples as in YAML
    settings = {path: masked(one) if isinstance(one, str) else list(one) if isinstance(one, tuple)
                else one for path, one in flatten(read_config(folder.config)).items()}
    points, end = dict[int, OuterIterationRecord](), None
    for event in events_of(folder.events):
        if event["event"] == "outer_iteration":
            one = OuterIterationRecord.from_json(event)
            points[one.outer_iter] = replace(one, jobs=())
        elif event["event"] == "finished":
            end = FinalReport.from_json(event)
    if not points:
        raise ConfigError(f"{folder.path} has no outer iteration yet; remove it from the command, or wait for its first.")
    bounds = interval_of(folder)
    wer = (end.test_errors.wer, *bounds) if bounds and end and end.test_errors else None
    in_order = tuple(points[number] for number in sorted(points))
    return ComparedRun(folder, in_order, settings, wer, end.valid.objf if end else None)


def interval_of(folder: RunFolder) -> tuple[float, float] | None:
    """The 95% interval of the test set's WER; None where nothing was decoded, or for damage."""
    try:
        found = read_json(folder.decode / "wer.json")["test_interval_95"]
        return float(found["low"]), float(found["high"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def differences(runs: Sequence[ComparedRun], *, with_seed: bool = True) -> dict[str, list[Any]]:
    """Setting -> its value in each run, where they are not all equal."""
    found = dict[str, list[Any]]()
    for path in dict.fromkeys(path for run in runs for path in run.settings):
        values = [run.settings.get(path) for run in runs]
        if (path not in _NO_DIFFERENCE and (with_seed or path != "seed") and any(one != values[0] for one in values)):
            found[path] = values
    if found.get("schedule.num_jobs_final") == found.get("cluster.num_workers", 0):
        # one job per worker: one of the two names is enough
        del found["schedule.num_jobs_final"]
    return found


def names_of(runs: Sequence[ComparedRun]) -> list[str]:
    """`name=` of each run and the settings that differ; its folder too where these are equal."""
    different = differences(runs)
    seeds = different.pop("seed", None)
    seed_words = [f"seed={seed}" for seed in seeds] if seeds else [""] * len(runs)
    names = [", ".join(filter(None, (run.settings["name"], *words)))
             for run, *words in zip(runs, _group_names(runs, different), seed_words, strict=True)]
    return [name if name and names.count(name) == 1 else ", ".join(filter(None, (name, run.label)))
            for name, run in zip(names, runs, strict=True)]


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
    paths = list(different)[:_MAX_IN_NAME]
    # optimizer.kind is chosen with optimizer=sgd, task._target_ with task=module:function
    choices = [path.removesuffix(".kind").removesuffix("._target_") for path in paths]
    shorts = [choice.rpartition(".")[2] for choice in choices]
    names = [short if shorts.count(short) == 1 else choice for short, choice in zip(shorts, choices, strict=True)]
    values = zip(*(map(str, different[path]) for path in paths), strict=True)
    words = [", ".join(map("{}={}".format, names, of_run)) for of_run in values]
    return words or [""] * len(runs)


def verdict(groups: Sequence[Group], measure: str) -> tuple[str, str]:
    """(word, sentence) about the best group and the second."""
    best = groups[0]
    if len(groups) == 1:
        values = best.values(measure)
        if len(values) == 1:
            return "one run", f"{measure} {values[0]:.4g}; name a second run to compare it with."
        num_seeds, seeds = len({run.settings["seed"] for run in best.runs}), "equal but for the seed"
        if num_seeds == 1:
            seeds = "equal, and so are their seeds: they are no independent runs"
        elif num_seeds < len(values):
            seeds += f", of which there are {num_seeds}"
        return "no difference", (f"The settings of these {counted(len(values), 'run')} are {seeds}: {measure} mean "
            f"{statistics.fmean(values):.4g}, {min(values):.4g} to {max(values):.4g}.")
    second = groups[1]
    if problem := _incomparable([*best.runs, *second.runs], measure):
        return "not comparable", problem
    first_runs = [best.runs[0], second.runs[0]]
    better, worse = _group_names(first_runs, differences(first_runs, with_seed=False))
    found = difference(best, second, measure)
    figures = (f"{measure} {best.mean(measure):.3g} and {second.mean(measure):.3g}, "
               f"difference {found.value:.2g}{' points' if measure == WER else ''}")
    if math.isnan(found.low):
        return "no interval", (f"{better} has a lower {measure} than {worse}: {figures}. One run of each gives no "
            "interval; train both with the same two or more seeds.")
    interval = f"95% interval {found.low:.2g} to {found.high:.2g}, {found.basis}"
    if found.is_significant:
        return "better", f"{better} is better than {worse}: {figures} ({interval})."
    return "not significant", (f"{better} and {worse} do not differ significantly: {figures} ({interval}).")


def _incomparable(runs: Sequence[ComparedRun], measure: str) -> str:
    """The reason why these runs cannot be compared by a measure; empty if they can."""
    if measure == LOSS:
        prefixes = ("objective.kind", "task.", "data.", "features.", "align.")
        found = [path for path in differences(runs) if path.startswith(prefixes)]
        return (f"{', '.join(found[:3])} differ, so the validation losses are of different things; "
                "compare the WER.") if found else ""
    tests = {tuple((row.utt_id, row.errors.num_words) for row in rows) for run in runs if (rows := utterances_of(run.folder))}
    return "The runs were decoded on different test sets." if len(tests) > 1 else ""


def difference(best: Group, other: Group, measure: str) -> Difference:
    """Mean of the other group minus mean of the best, with an interval as good as the runs allow.

    From matched seeds by Student's t, else from groups of two or more runs by Welch's t, else from
    the utterances of one run each by a paired bootstrap.
    """
    # NumPy is loaded for the first interval, not for the help
    from ngsgd.asr.decode.scoring import bootstrap_interval, paired_interval, welch_interval
    value = other.mean(measure) - best.mean(measure)
    # of a seed that ran twice, the last
    ours, theirs = ({run.settings["seed"]: run.result(measure) for run in group.runs} for group in (best, other))
    matched = [theirs[seed] - ours[seed] for seed in ours if seed in theirs]
    if len(matched) > 1:
        mean = statistics.fmean(matched)
        return Difference(mean, *paired_interval(matched), f"{counted(len(matched), 'matched seed')}")
    if min(len(best.runs), len(other.runs)) > 1:
        bounds = welch_interval(best.values(measure), other.values(measure))
        return Difference(value, *bounds, f"{len(best.runs)} and {counted(len(other.runs), 'run')} of other seeds")
    # with equal seeds if there are such
    pairs = [(first, second) for first in best.runs for second in other.runs]
    first, second = min(pairs, key=lambda pair: pair[0].settings["seed"] != pair[1].settings["seed"])
    rows = (utterances_of(first.folder), utterances_of(second.folder)) if measure == WER else ()
    if rows and (both := bootstrap_interval(*rows)):
        return Difference(second.result(measure) - first.result(measure), *both,
                          "one run each, test utterances resampled; seeds may differ by more")
    return Difference(value, math.nan, math.nan, "one run each")


@functools.lru_cache(maxsize=64)
def utterances_of(folder: RunFolder) -> list[UtteranceErrors]:
    """Errors of each utterance of the test set of a run; empty where nothing was decoded."""
    try:
        return read_per_utterance(read_log(folder.decode / "test.per_utt.txt"))
    except (OSError, ValueError):
        return []


def common_objf(runs: Sequence[ComparedRun]) -> float:
    """The validation objective that every run reached: the lowest of their best."""
    return min(max(point.valid.objf for point in run.points) for run in runs)


@dataclass(frozen=True)
class Identity:
    """Final models that should be identical, and the number of those that are not."""

    num_compared: int
    # from the first one of their settings and seed
    num_different: int
    # whether they have equal settings and seeds, or only happen to be identical
    are_equal_runs: bool

    @property
    def sentence(self) -> str:
        if not self.num_different:
            which = " of equal settings and seed" if self.are_equal_runs else ""
            return f"The final models{which} are bitwise identical."
        many = counted(self.num_compared, "final model differs", "final models differ")
        return (f"{self.num_different} of {many} from another one of equal settings and seed; "
                "ngsgd info RUN prints the numeric fingerprint of a run.")


def identity(runs: Sequence[ComparedRun]) -> Identity | None:
    """Compare the final models; None where there are no two to compare."""
    finished, digests = list[ComparedRun](), list[str]()
    for run in runs:
        # before the end of a run there is none
        with contextlib.suppress(OSError):
            digests.append(sha256(run.folder.final / "model.safetensors"))
            finished.append(run)
    if len(finished) > 1 and len(set(digests)) == 1:
        return Identity(len(finished), 0, are_equal_runs=False)
    different = differences(finished).values()
    groups: dict[str, list[str]] = {}
    for index, digest in enumerate(digests):
        groups.setdefault(repr([values[index] for values in different]), []).append(digest)
    repeated = [found for found in groups.values() if len(found) > 1]
    num_different = sum(digest != found[0] for found in repeated for digest in found)
    return Identity(sum(map(len, repeated)), num_different, are_equal_runs=True) if repeated else None
