"""The charts of `ngsgd report`, made from events.jsonl; spectra are measured on request.

A narrow chart can be read on a phone of 390 px.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ngsgd.counting import counted
from ngsgd.launcher.reports.history import FAULTS, Event, RunHistory, Stop, mean_health
from ngsgd.launcher.reports.plots import Curve, Score, label, lines, new_figure
from ngsgd.launcher.reports.svg import (
    BLUE,
    CARD,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    RUN_COLORS,
    SOFT,
    Spot,
    strips,
)
from ngsgd.launcher.text import duration
from ngsgd.schedules import JOB_RATE

# inches; 9 pt text is still 10 px high on a screen of 390 px
NARROW = (4.4, 3.2)
_TIMES = {
    "compute_s": ("jobs", BLUE),
    "average_s": ("averaging", ORANGE),
    "checkpoint_s": ("checkpoint", GREEN),
    "diagnostics_s": ("diagnostics", PURPLE),
}
_MARKS = {**dict.fromkeys(FAULTS, RED), "worker_replaced": GREEN}
_SIDES = {"input": "-", "output": "--"}
# of the timeline: more would neither be drawn in time nor be legible
_MAX_JOBS, _MAX_LANES = 1500, 40


@dataclass(frozen=True)
class Chart:
    """A figure, its description for those who cannot see it, and the values under the pointer."""

    name: str
    title: str
    alt: str
    figure: Any
    is_wide: bool = False
    spots: Sequence[Spot] = field(default=())


def charts_of(run: RunHistory, spectra: Mapping[str, Sequence[float]]) -> dict[str, list[Chart]]:
    """Charts by section: learning, time, layers; empty before the first outer iteration."""
    if not run.iterations:
        return {}
    has_times = any(job.get("ended_s") for event in run.iterations for job in event["jobs"])
    has_ranks = any("effective_rank" in name for name in mean_health(run.iterations[-1]))
    return {
        "learning": list(_learning(run)),
        "time": [_time_split(run), *([_timeline(run)] if has_times else [])],
        "layers": [
            *([_ranks(run)] if has_ranks else []),
            *([_spectra(spectra)] if spectra else []),
        ],
    }


def narrow_axes() -> tuple[Any, Any]:
    """A figure of the width of a phone, and its axes."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(*NARROW)
    axes = figure.subplots()
    axes.xaxis.set_major_locator(MaxNLocator(5))
    return figure, axes


# Charts -------------------------------------------------------------------------------------------


def _learning(run: RunHistory) -> Iterator[Chart]:
    for score in run.curve.scores:
        yield _score(run, score)
    yield _curves(
        run,
        "lr",
        "Learning rate",
        f"per {run.curve.example}",
        {"effective": ("effective_lr", GREEN), "each job": ("lr", GRAY)},
        f"{JOB_RATE.capitalize()}; gain is that of the outer optimizer.",
        is_log=True,
    )
    shares = {
        "layers": ("max_change_share", RED),
        "complete model": ("max_param_change_share", GRAY),
    }
    yield _curves(
        run,
        "max_change",
        "Clipped updates (max_change)",
        "%",
        shares,
        "A share near 100% for long means that the learning rate is too high.",
        scale=100.0,
    )


def _score(run: RunHistory, score: Score) -> Chart:
    last, per_cent = run.iterations[-1], "%" if score.unit == "%" else f" {score.unit}".rstrip()
    values = {"training": (score.train, BLUE), "validation": (score.valid, ORANGE)}
    first, _, second = score.valid.partition(".")
    value = score.scale * last[first].get(second, float("nan"))
    subtitle_text = f"Last outer iteration, validation: {value:.{score.digits}f}{per_cent}."
    return _curves(run, score.name, score.title, score.unit, values, subtitle_text, scale=score.scale)


def _curves(
    run: RunHistory,
    name: str,
    title: str,
    unit: str,
    what: Mapping[str, tuple[str, str]],
    subtitle_text: str,
    *,
    scale: float = 1.0,
    is_log: bool = False,
) -> Chart:
    """Some values of all outer iterations against the data processed."""
    curve = run.curve
    figure, axes = narrow_axes()
    lines(axes, curve, what, scale=scale)
    if is_log:
        axes.set_yscale("log")
    elif unit == "%" and scale == 100.0 and name == "max_change":
        axes.set_ylim(bottom=0)
    label(axes, title, unit, legend="best")
    axes.set_xlabel(curve.x_label)
    _mark_stops(axes, curve, run.stops())
    columns = {series: curve.values(key, scale) for series, (key, _) in what.items()}
    return Chart(name, title, subtitle_text, figure, spots=_spots(curve, columns))


def _spots(
    curve: Curve,
    columns: Mapping[str, Sequence[float]],
    positions: Sequence[float] = (),
    form: str = ".4g",
) -> list[Spot]:
    """Over each outer iteration the values of all curves."""
    tips = [
        (
            f"outer iteration {event['outer_iter'] + 1}, epoch {event['epoch']:.2f}",
            *(f"{series}: {values[index]:{form}}" for series, values in columns.items()),
        )
        for index, event in enumerate(curve.iterations)
    ]
    return strips(positions or curve.positions, tips)


def _mark_stops(axes: Any, curve: Curve, stops: Sequence[Stop]) -> None:
    for number, stop in enumerate(stops):
        axes.axvline(
            stop.frames_processed / curve.scale,
            color=PURPLE,
            linewidth=1.0,
            linestyle=":",
            label="" if number else "resumed",
        )
    if stops:
        axes.legend(loc="best", frameon=False)


def _time_split(run: RunHistory) -> Chart:
    curve = run.curve
    figure = new_figure(10.0, 2.6)
    axes = figure.subplots()
    outer_iters = [event["outer_iter"] + 1 for event in curve.iterations]
    base = [0.0] * len(outer_iters)
    columns = {}
    for key, (name, color) in _TIMES.items():
        columns[f"{name} (s)"] = seconds = curve.values(key)
        axes.bar(
            outer_iters,
            seconds,
            bottom=base,
            width=0.9,
            color=color,
            label=f"{name}, {sum(seconds):.1f} s",
        )
        base = [below + more for below, more in zip(base, seconds, strict=True)]
    label(axes, "Seconds of each outer iteration", "seconds")
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    # room for the legend above the bars
    axes.set_ylim(top=1.2 * max(*base, 1e-9))
    axes.set_xlabel("outer iteration")
    subtitle_text = ", ".join(f"{name} {sum(curve.values(key)):.1f} s" for key, (name, _) in _TIMES.items())
    return Chart(
        "time",
        "Seconds of each outer iteration",
        f"In total: {subtitle_text}. Workers train only during jobs.",
        figure,
        is_wide=True,
        spots=_spots(curve, columns, outer_iters, ".2f"),
    )


def _timeline(run: RunHistory) -> Chart:
    """A lane for each worker, a bar for each job; averaging is a thin line, a fault a cross."""
    iterations = _newest(run.iterations)
    first, end_s = iterations[0], iterations[-1]["elapsed_s"]
    start_s = first["elapsed_s"] - first["compute_s"] if first["outer_iter"] else 0.0
    workers = _lanes(run, iterations)
    lanes = {worker: lane for lane, worker in enumerate(workers)}
    figure = new_figure(10.0, min(1.5 + 0.34 * len(lanes), 9.0))
    axes = figure.subplots()
    spots = _job_bars(axes, iterations, lanes)
    for event in iterations:
        axes.axvline(event["elapsed_s"], color=SOFT, linewidth=0.4, zorder=0)
    faults = _crosses(axes, run, lanes, (start_s, end_s))
    stops = [stop for stop in run.stops() if stop.elapsed_s >= start_s]
    for stop in stops:
        axes.axvline(stop.elapsed_s, color=PURPLE, linewidth=1.6, linestyle=":", zorder=2)
    axes.set_yticks(range(len(lanes)), [f"worker {worker}" for worker in workers])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    pauses = " (the clock stands still while no process trains)" if stops else ""
    axes.set_xlabel(f"seconds of training{pauses}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    _explain(axes, has_faults=bool(faults), has_stops=bool(stops))
    subtitle_text = f"{counted(len(lanes), 'worker')}, {duration(end_s)}; faults {len(faults)}, resumes {len(stops)}."
    if len(iterations) < len(run.iterations):
        subtitle_text += f" The last {len(iterations)} of {counted(len(run.iterations), 'outer iteration')}."
    return Chart(
        "timeline",
        "Timeline of the workers",
        f"{subtitle_text} Gaps are waiting.",
        figure,
        is_wide=True,
        spots=[*spots, *faults],
    )


def _crosses(
    axes: Any, run: RunHistory, lanes: Mapping[int, int], span: tuple[float, float]
) -> list[Spot]:
    """Draw the faults; a spot for each."""
    start_s, end_s = span
    spots = []
    for one in run.incidents:
        seconds, lane = one["elapsed_s"], lanes.get(one["worker"])
        if one["what"] in _MARKS and lane is not None and seconds > start_s:
            axes.plot(
                seconds,
                lane,
                marker="X",
                markersize=9,
                color=_MARKS[one["what"]],
                markeredgecolor=CARD,
                linestyle="none",
                zorder=3,
            )
            reach = 0.006 * (end_s - start_s)
            tip = (f"{one['what'].replace('_', ' ')}, {seconds:.1f} s",)
            spots.append(Spot(seconds - reach, seconds + reach, tip, lane + 0.4, lane - 0.4))
    return spots


def _newest(iterations: Sequence[Event]) -> Sequence[Event]:
    """The last outer iterations with at most _MAX_JOBS jobs, but at least one."""
    count, first = 0, len(iterations)
    while first and (not count or count + len(iterations[first - 1]["jobs"]) <= _MAX_JOBS):
        first -= 1
        count += len(iterations[first]["jobs"])
    return iterations[first:]


def _lanes(run: RunHistory, iterations: Sequence[Event]) -> list[int]:
    """The workers shown: all, or those with faults and the slowest."""
    workers = {job["worker"] for event in iterations for job in event["jobs"]}
    rows = sorted(run.workers(), key=lambda row: -row.num_failed)
    return sorted([row.worker for row in rows if row.worker in workers][:_MAX_LANES])


def _job_bars(axes: Any, iterations: Sequence[Event], lanes: Mapping[int, int]) -> list[Spot]:
    """Draw the jobs; a spot for each."""
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    spots = []
    for event in iterations:
        for job in (job for job in event["jobs"] if job["worker"] in lanes):
            lane, start = lanes[job["worker"]], job["ended_s"] - job["seconds"]
            color, kind = BLUE, ""
            if job["attempt"] > 1:
                color, kind = ORANGE, f"attempt {job['attempt']}"
            if not job["accepted"]:
                color, kind = GRAY, f"rejected: {job['reason']}"[:60]
            spans.setdefault((lane, color), []).append((start, job["seconds"]))
            speed = job["num_frames"] / max(job["seconds"], 1e-9)
            tip = (
                f"job {job['job']} of outer iteration {event['outer_iter'] + 1}",
                f"{job['seconds']:.2f} s, {speed:,.0f} per s",
                *filter(None, [kind]),
            )
            spots.append(Spot(start, job["ended_s"], tip, lane + 0.38, lane - 0.38))
    for (lane, color), bars in spans.items():
        # an edge of the card's color separates jobs that touch
        axes.broken_barh(bars, (lane - 0.38, 0.76), facecolors=color, edgecolor=CARD, linewidth=0.8)
    return spots


def _explain(axes: Any, *, has_faults: bool, has_stops: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [
        Patch(color=BLUE, label="job"),
        Patch(color=ORANGE, label="retried job"),
        Patch(color=GRAY, label="rejected job"),
        Line2D([], [], color=SOFT, linewidth=0.6, label="averaging"),
    ]
    if has_faults:
        shown.append(Line2D([], [], marker="X", color=RED, linestyle="none", label="fault"))
    if has_stops:
        shown.append(Line2D([], [], color=PURPLE, linestyle=":", label="resumed"))
    axes.legend(
        handles=shown,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(shown),
        frameon=False,
        fontsize=8,
    )


def _ranks(run: RunHistory) -> Chart:
    """The number of directions that carry the Fisher, by layer and side."""
    figure, axes = narrow_axes()
    health = [mean_health(event) for event in run.iterations]
    names = sorted(name for name in health[-1] if name.endswith("_effective_rank"))
    columns = {
        name.removesuffix("_effective_rank").replace("/", " "): [
            one.get(name, float("nan")) for one in health
        ]
        for name in names
    }
    layers = list(dict.fromkeys(name.rpartition("/")[0] for name in names))
    for name, (series, values) in zip(names, columns.items(), strict=True):
        layer, side = name.rpartition("/")[0], series.rpartition(" ")[2]
        axes.plot(
            run.curve.positions,
            values,
            color=RUN_COLORS[layers.index(layer) % len(RUN_COLORS)],
            linestyle=_SIDES.get(side, ":"),
            linewidth=1.5,
            label=layer if side == "input" else None,
        )
    label(axes, "Effective rank of the Fisher factors", "directions")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    axes.set_xlabel(run.curve.x_label)
    return Chart(
        "fisher_rank",
        "Effective rank of the Fisher factors",
        "Solid: input side of each layer; dashed: side of the output gradients.",
        figure,
        spots=_spots(run.curve, dict(list(columns.items())[:16])),
    )


def _spectra(spectra: Mapping[str, Sequence[float]]) -> Chart:
    """Eigenvalues over their mean, in descending order."""
    figure, axes = narrow_axes()
    layers = list(dict.fromkeys(name.rpartition("/")[0] for name in sorted(spectra)))
    for name, values in sorted(spectra.items()):
        layer, _, side = name.rpartition("/")
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=RUN_COLORS[layers.index(layer) % len(RUN_COLORS)],
            linestyle=_SIDES.get(side, ":"),
            linewidth=1.5,
            label=layer if side == "input" else None,
        )
    axes.set_yscale("log")
    axes.axhline(1.0, color=SOFT, linewidth=0.8)
    label(axes, "Spectra of the Fisher factors", "eigenvalue over the mean")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    axes.set_xlabel("direction")
    longest = max(map(len, spectra.values()))
    tips = [
        (
            f"direction {index + 1}",
            *(
                f"{name.replace('/', ' ')}: {values[index]:.3g}"
                for name, values in sorted(spectra.items())[:16]
                if index < len(values)
            ),
        )
        for index in range(longest)
    ]
    return Chart(
        "fisher_spectra",
        "Spectra of the Fisher factors",
        "Eigenvalues of each factor over their mean, largest first. "
        "Solid: input side; dashed: side of the output gradients.",
        figure,
        spots=strips([float(index + 1) for index in range(longest)], tips),
    )
