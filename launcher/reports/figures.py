"""Figures: one for a run, one for a comparison, and one for a learned schedule."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.files import new_file
from ngsgd.launcher.reports.history import Curve, Stop

if TYPE_CHECKING:
    from ngsgd.launcher.reports.comparison import Group

BLUE, ORANGE, GREEN, RED, PURPLE = "#1f6fb4", "#b85c0a", "#2a7f45", "#c0392b", "#7d4fb0"
GRAY, LINE, INK = "#6b7280", "#dfe3e8", "#1d232b"
RUN_COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, "#0f7c88", "#b83280", GRAY)
_TIMES = {"compute_s": ("jobs", BLUE), "average_s": ("averaging", ORANGE),
          "checkpoint_s": ("checkpoint", GREEN), "diagnostics_s": ("diagnostics", PURPLE)}
_DPI = 130
_MAX_BARS = 20


def draw(events: Iterable[Mapping[str, Any]], path: Path, *, is_speech: bool = True) -> None:
    """Draw the curves of one run; without an outer iteration nothing is written."""
    curve = Curve(events, is_speech=is_speech)
    if curve.iterations:
        save(run_figure(curve), path)


def run_figure(curve: Curve, stops: Sequence[Stop] = ()) -> Any:
    """Scores, learning rates and clipped updates by data, and the seconds of outer iterations."""
    # not the names, which a task may choose
    names = [f"score {number}" for number in range(len(curve.scores))]
    rows = [[*names[at : at + 2], "."][:2] for at in range(0, len(names), 2)]
    rows += [["lr", "max_change"], ["time", "time"]]
    figure = new_figure(10.0, 2.9 * len(rows))
    panels = figure.subplot_mosaic(rows)
    for name, score in zip(names, curve.scores, strict=True):
        what = {"training": (score.train, BLUE), "validation": (score.valid, ORANGE)}
        _lines(panels[name], curve, what, scale=score.scale)
        label(panels[name], score.title, score.unit)
    _lines(panels["lr"], curve, {"effective": ("effective_lr", GREEN), "each job": ("lr", GRAY)})
    panels["lr"].set_yscale("log")
    label(panels["lr"], "Learning rate", f"per {curve.example}")
    shares = {"layers": ("max_change_share", RED), "complete model": ("max_param_change_share", GRAY)}
    _lines(panels["max_change"], curve, shares, scale=100.0)
    panels["max_change"].set_ylim(bottom=0)
    label(panels["max_change"], "Clipped updates (max_change)", "%")
    for name in (*names, "lr", "max_change"):
        panels[name].set_xlabel(curve.x_label)
        for number, stop in enumerate(stops):
            at = stop.frames_processed / curve.scale
            text = "" if number else "resumed"
            panels[name].axvline(at, color=PURPLE, linewidth=1.0, linestyle=":", label=text)
        panels[name].legend(loc="best", frameon=False)
    _bars_of_time(panels["time"], curve)
    return figure


def _lines(axes: Any, curve: Curve, what: Mapping[str, tuple[str, str]], scale: float = 1.0) -> None:
    # markers of a long run would hide its line
    style = {"linewidth": 1.8, "marker": "o" if len(curve.positions) <= 40 else "", "markersize": 3.5}
    for name, (key, color) in what.items():
        axes.plot(curve.positions, curve.values(key, scale), color=color, label=name, **style)


def _bars_of_time(axes: Any, curve: Curve) -> None:
    outer_iters = [event["outer_iter"] + 1 for event in curve.iterations]
    base = [0.0] * len(outer_iters)
    for key, (name, color) in _TIMES.items():
        seconds = curve.values(key)
        axes.bar(outer_iters, seconds, bottom=base, width=0.9, color=color, label=f"{name}, {sum(seconds):.1f} s")
        base = [below + more for below, more in zip(base, seconds, strict=True)]
    label(axes, "Seconds of each outer iteration", "seconds")
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    # room for the legend above the bars
    axes.set_ylim(top=1.2 * max(*base, 1e-9))
    axes.set_xlabel("outer iteration")


def comparison_figure(groups: Sequence[Group]) -> Any:
    """Objectives against epochs and time, and the results as bars; the best group is the first.

    The bars are the WER of final models, or the time of training where not all were decoded.
    """
    bars = groups[:_MAX_BARS]
    height = 0.9 + 0.45 * len(bars)
    figure = new_figure(10.0, 4.0 + height)
    panels = figure.subplot_mosaic([["epochs", "minutes"], ["bars", "bars"]], height_ratios=(4.0, height))
    # the best are drawn last, above the others
    for index, group in reversed([*enumerate(groups)]):
        color = RUN_COLORS[min(index, len(RUN_COLORS) - 1)]
        for run in group.runs:
            for axes, x in ((panels["epochs"], [one.epoch for one in run.points]),
                            (panels["minutes"], [one.elapsed_s / 60 for one in run.points])):
                axes.plot(x, [one.valid.objf for one in run.points], color=color, linewidth=1.8)
                axes.plot(x, [one.train.objf for one in run.points], color=color, linewidth=0.8, linestyle="--")
    unit = "nats per frame" if groups[0].runs[0].is_speech else "minus the loss"
    label(panels["epochs"], "Objective: validation set solid, training set dashed", unit)
    label(panels["minutes"], "", "")
    panels["epochs"].set_xlabel("epochs")
    panels["minutes"].set_xlabel("minutes of training")
    decoded = all(run.wer for group in groups for run in group.runs)
    for index, group in enumerate(bars):
        _result_bar(panels["bars"], index, group, decoded=decoded)
    title = "WER on the test set; line: 95% interval of one run, or the range of seeds"
    label(panels["bars"], title if decoded else "Time of training; line: the range of seeds", "")
    panels["bars"].set_xlabel("%" if decoded else "minutes")
    panels["bars"].set_yticks([])
    panels["bars"].set_ylim(len(bars) - 0.5, -0.7)
    return figure


def _result_bar(axes: Any, index: int, group: Group, *, decoded: bool) -> None:
    values = [run.wer[0] if decoded and run.wer else run.points[-1].elapsed_s / 60 for run in group.runs]
    wer = group.runs[0].wer
    bounds = wer[1:] if decoded and wer and len(values) == 1 else (min(values), max(values))
    color = RUN_COLORS[min(index, len(RUN_COLORS) - 1)]
    axes.barh(index, sum(values) / len(values), height=0.5, color=color)
    if bounds[1] > bounds[0]:
        axes.plot(bounds, [index, index], color=INK, linewidth=1.6, marker="|", markersize=7)
    axes.annotate(group.name, (0.0, index - 0.27), fontsize=7.5, verticalalignment="bottom")


def draw_schedule(learned: Sequence[float], before: Sequence[float], path: Path) -> None:
    """Draw a learned schedule of learning rates and the one it started from."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for name, rates, color in (("before", before, GRAY), ("learned", learned, BLUE)):
        share = [100.0 * index / (len(rates) - 1) for index in range(len(rates))]
        axes.plot(share, rates, "o-", color=color, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("share of the run (%)")
    label(axes, "Learning rate of a job", "per frame")
    axes.legend(loc="best", frameon=False)
    save(figure, path)


def label(axes: Any, title: str, unit: str) -> None:
    """Set title and unit, in the style of all figures."""
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(unit)
    axes.grid(visible=True, color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure
    # no pyplot: it keeps every figure alive
    return Figure(figsize=(width, height), layout="constrained")


def png(figure: Any) -> bytes:
    target = io.BytesIO()
    figure.savefig(target, dpi=_DPI, format="png")
    return target.getvalue()


def save(figure: Any, path: Path) -> None:
    with new_file(path) as temporary:
        temporary.write_bytes(png(figure))
