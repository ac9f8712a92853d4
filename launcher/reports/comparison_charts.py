"""The charts of `ngsgd compare`: one color for each of the best settings."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ngsgd.counting import counted
from ngsgd.launcher.reports.charts import NARROW, Chart
from ngsgd.launcher.reports.comparison import WER, ComparedRun, Group, Point, common_objf
from ngsgd.launcher.reports.plots import label, new_figure, save
from ngsgd.launcher.reports.svg import GRAY, INK, RUN_COLORS, Spot, strips

# of a comparison: gray is for the runs that are not named
_GROUP_COLORS = RUN_COLORS[:-1]
_MAX_BARS = 20
# a group, the values of its runs, and the interval of a single run
_Bar = tuple[Group, Sequence[float], tuple[float, float] | None]
# characters of a name in a tip
_LONGEST = 40


def comparison_charts(runs: Sequence[ComparedRun], groups: Sequence[Group]) -> list[Chart]:
    """The objective against epochs and time; WER and the time to a common objective as bars."""
    found = [
        _overlay("epochs", "epochs", groups, lambda point: point.epoch),
        _overlay("time", "minutes of training", groups, lambda point: point.elapsed_s / 60),
    ]
    decoded = [group for group in groups if all(run.wer for run in group.runs)]
    if decoded:
        bars = [
            (
                group,
                group.values(WER),
                group.runs[0].wer[1:] if len(group.runs) == 1 and group.runs[0].wer else None,
            )
            for group in decoded
        ]
        found.append(
            _bars(
                "wer",
                "WER on the test set",
                "%",
                groups,
                bars,
                "Lines: the 95% interval of one run, or the range of several seeds.",
            )
        )
    objf = common_objf(runs)
    found.append(
        _bars(
            "speed",
            f"Time to an objective of {objf:.3f}",
            "seconds of training",
            groups,
            [(group, [run.seconds_to(objf) for run in group.runs], None) for group in groups],
            "The highest objective that all runs reached; lines: the range of several seeds.",
        )
    )
    return found


def _overlay(
    name: str, unit: str, groups: Sequence[Group], across: Callable[[Point], float]
) -> Chart:
    """One color for each of the best groups, gray for the others."""
    from matplotlib.collections import LineCollection

    best, others = groups[: len(_GROUP_COLORS)], groups[len(_GROUP_COLORS) :]
    figure = new_figure(NARROW[0], NARROW[1] + 0.15 * len(best))
    axes = figure.subplots()
    axes.add_collection(
        LineCollection(
            [
                list(zip(*_curve(run, across), strict=True))
                for group in others
                for run in group.runs
            ],
            colors=GRAY,
            linewidths=0.5,
        )
    )
    for group, color in zip(best, _GROUP_COLORS, strict=False):
        for number, run in enumerate(group.runs):
            x, y = _curve(run, across)
            axes.plot(x, y, color=color, linewidth=1.8, label="" if number else group.name)
            axes.plot(
                x,
                [point.train_objf for point in run.points],
                color=color,
                linewidth=0.8,
                linestyle="--",
            )
    title = f"Objective against {unit.partition(' ')[0]}"
    label(axes, title, "nats per frame" if groups[0].runs[0].is_speech else "minus the loss")
    figure.legend(fontsize=7, frameon=False, loc="outside lower left")
    axes.set_xlabel(unit)
    rest = f" The best {counted(len(best), 'setting')}; the other {len(others)} are gray." if others else ""
    return Chart(
        name,
        title,
        f"Solid: validation set; dashed: training set.{rest}",
        figure,
        spots=_read_off(best, unit, across),
    )


def _curve(run: ComparedRun, across: Callable[[Point], float]) -> tuple[list[float], list[float]]:
    return [across(point) for point in run.points], [point.valid_objf for point in run.points]


def _read_off(groups: Sequence[Group], unit: str, across: Callable[[Point], float]) -> list[Spot]:
    """The validation objective of each group's first run at even distances."""
    curves = [(group.name[:_LONGEST], *_curve(group.runs[0], across)) for group in groups]
    end = max(x[-1] for _, x, _ in curves)
    places = [end * step / 40 for step in range(1, 41)]
    tips = []
    for place in places:
        inside = [curve for curve in curves if curve[1][0] <= place <= curve[1][-1]]
        values = (f"{name}: {_interpolated(place, x, y):.4g}" for name, x, y in inside)
        tips.append((f"{place:.3g} {unit}", *values))
    return strips(places, tips)


def _interpolated(place: float, x: Sequence[float], y: Sequence[float]) -> float:
    """The value at a place between the ends of x, on the line between two points."""
    right = max(bisect_left(x, place), 1) if len(x) > 1 else 0
    left = max(right - 1, 0)
    width = x[right] - x[left]
    return y[left] + (y[right] - y[left]) * (place - x[left]) / width if width else y[right]


def _bars(
    name: str, title: str, unit: str, groups: Sequence[Group], bars: Sequence[_Bar], told: str
) -> Chart:
    """A horizontal bar for each group, the best on top."""
    # a run whose objective is NaN never reached the common one
    bars = [bar for bar in bars if not math.isnan(sum(bar[1]))][:_MAX_BARS]
    figure = new_figure(NARROW[0], max(2.0, 1.0 + 0.4 * len(bars)))
    axes = figure.subplots()
    spots = []
    for index, (group, found, bounds) in enumerate(bars):
        mean, (low, high) = statistics.fmean(found), bounds or (min(found), max(found))
        result_bar(axes, index, group.name, mean, (low, high), _color(groups.index(group)))
        tip = (
            f"{mean:.4g} {unit}",
            *([f"{low:.4g} to {high:.4g}"] if high > low else []),
            f"runs: {len(found)}",
        )
        spots.append(Spot(0.0, max(high, mean), tip, index + 0.3, index - 0.3))
    label(axes, title, "")
    axes.set_xlabel(unit)
    return Chart(name, title, told, figure, spots=spots)


def _color(index: int) -> str:
    """Of the index-th best group, the same in all charts."""
    return _GROUP_COLORS[index] if index < len(_GROUP_COLORS) else GRAY


# The picture of --png ----------------------------------------------------------------------------


def draw_comparison(groups: Sequence[Group], path: Path) -> None:
    """Draw several settings: the objective against epochs and time, and the results as bars.

    The bars are the WER of final models, or the time of training where nothing was decoded.
    """
    height = 0.9 + 0.45 * len(groups)
    figure = new_figure(10.0, 4.0 + height)
    panels = figure.subplot_mosaic(
        [["epochs", "minutes"], ["bars", "bars"]], height_ratios=(4.0, height)
    )
    for index, group in enumerate(groups):
        for run in group.runs:
            _objectives(panels["epochs"], [point.epoch for point in run.points], run, index)
            _objectives(
                panels["minutes"], [point.elapsed_s / 60 for point in run.points], run, index
            )
    label(
        panels["epochs"], "Objective: validation set solid, training set dashed", "nats per frame"
    )
    label(panels["minutes"], "", "")
    panels["epochs"].set_xlabel("epochs")
    panels["minutes"].set_xlabel("minutes of training")
    decoded = all(run.wer for group in groups for run in group.runs)
    for index, group in enumerate(groups):
        values = [
            run.wer[0] if decoded and run.wer else run.points[-1].elapsed_s / 60
            for run in group.runs
        ]
        wer = group.runs[0].wer
        bounds = wer[1:] if decoded and wer and len(values) == 1 else (min(values), max(values))
        result_bar(
            panels["bars"],
            index,
            group.name,
            sum(values) / len(values),
            bounds,
            RUN_COLORS[index % len(RUN_COLORS)],
        )
    label(
        panels["bars"],
        "WER on the test set; line: 95% interval of one run, or the range of seeds"
        if decoded
        else "Time of training; line: the range of seeds",
        "",
    )
    panels["bars"].set_xlabel("%" if decoded else "minutes")
    save(figure, path)


def _objectives(axes: Any, x: Sequence[float], run: ComparedRun, index: int) -> None:
    color = RUN_COLORS[index % len(RUN_COLORS)]
    axes.plot(x, [point.valid_objf for point in run.points], color=color, linewidth=1.8)
    axes.plot(
        x, [point.train_objf for point in run.points], color=color, linewidth=0.9, linestyle="--"
    )


def result_bar(
    axes: Any, index: int, name: str, mean: float, bounds: tuple[float, float], color: str
) -> None:
    """Draw the index-th bar from the top, its name, and a line between the bounds."""
    axes.barh(index, mean, height=0.5, color=color)
    if bounds[1] > bounds[0]:
        axes.plot(bounds, [index, index], color=INK, linewidth=1.6, marker="|", markersize=7)
    axes.annotate(name, (0.0, index - 0.27), fontsize=7.5, verticalalignment="bottom")
    axes.set_yticks([])
    axes.set_ylim(index + 0.5, -0.7)
