"""The charts of `ngsgd compare`: one color for each of the best settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from ngsgd.launcher.reports.charts import NARROW, Chart
from ngsgd.launcher.reports.comparison import WER, ComparedRun, Group, Point, common_objf
from ngsgd.launcher.reports.plots import label, new_figure, result_bar
from ngsgd.launcher.reports.svg import GRAY, RUN_COLORS, Spot, strips

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
    rest = f" The best {len(best)} settings; the other {len(others)} are gray." if others else ""
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
    import numpy as np

    curves = [(group.name[:_LONGEST], *_curve(group.runs[0], across)) for group in groups]
    places = np.linspace(0.0, max(x[-1] for _, x, _ in curves), 41)[1:].tolist()
    tips = [
        (
            f"{place:.3g} {unit}",
            *(
                f"{name}: {np.interp(place, x, y):.4g}"
                for name, x, y in curves
                if x[0] <= place <= x[-1]
            ),
        )
        for place in places
    ]
    return strips(places, tips)


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
