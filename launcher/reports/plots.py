"""Learning curves as a picture, and the outer iterations of a run that charts are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ngsgd.counting import counted
from ngsgd.launcher.reports.svg import BLUE, GRAY, GREEN, LINE, ORANGE, RED

Events = Iterable[Mapping[str, Any]]

_DPI = 130


def draw(events: Events, path: Path, *, is_speech: bool = True) -> None:
    """Draw the curves of one run; without an outer iteration nothing is written."""
    curve = Curve(events, is_speech=is_speech)
    if not curve.iterations:
        return
    figure = new_figure(10.0, 7.4)
    top, bottom = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    for axes, score in zip(top, curve.scores, strict=False):
        lines(
            axes,
            curve,
            {"train": (score.train, BLUE), "valid": (score.valid, ORANGE)},
            scale=score.scale,
        )
        label(axes, score.title, score.unit, legend="best")
    lines(bottom[0], curve, {"effective": ("effective_lr", GREEN), "each job": ("lr", GRAY)})
    bottom[0].set_yscale("log")
    label(bottom[0], "Learning rate", f"per {curve.example}", legend="best")
    shares = {
        "layers": ("max_change_share", RED),
        "complete model": ("max_param_change_share", GRAY),
    }
    lines(bottom[1], curve, shares, scale=100.0)
    bottom[1].set_ylim(bottom=0)
    label(bottom[1], "Clipped updates (max_change)", "%", legend="best")
    for axes in bottom:
        axes.set_xlabel(curve.x_label)
    figure.suptitle(_title(curve), fontsize=12)
    save(figure, path)


def draw_schedule(learned: Sequence[float], before: Sequence[float], path: Path) -> None:
    """Draw a learned schedule of learning rates and the one it started from."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for name, rates, color in (("before", before, GRAY), ("learned", learned, BLUE)):
        axes.plot(
            [100.0 * index / (len(rates) - 1) for index in range(len(rates))],
            rates,
            "o-",
            color=color,
            label=name,
        )
    axes.set_yscale("log")
    axes.set_xlabel("share of the run (%)")
    label(axes, "Learning rate of a job", "per frame", legend="best")
    save(figure, path)


@dataclass(frozen=True)
class Score:
    """A score of the training and validation examples, and where the events have it."""

    name: str
    title: str
    unit: str
    train: str
    valid: str
    scale: float = 1.0
    digits: int = 3


class Curve:
    """The outer iterations of one run, in order; a custom task has losses, metrics and examples."""

    def __init__(self, events: Events, *, is_speech: bool = True) -> None:
        self.is_speech = is_speech
        self.example = "frame" if is_speech else "example"
        # the line of an outer iteration that ran twice is superseded by the later one
        latest = {
            event["outer_iter"]: event
            for event in events
            if event.get("event") == "outer_iteration"
        }
        self.iterations = [latest[outer_iter] for outer_iter in sorted(latest)]
        most = max((event["frames_processed"] for event in self.iterations), default=0)
        scale, unit = (
            (1e6, " (millions)")
            if most >= 2e6
            else (1e3, " (thousands)")
            if most >= 2e3
            else (1.0, "")
        )
        self.x_label = f"{self.example}s processed{unit}"
        self.positions = [event["frames_processed"] / scale for event in self.iterations]
        self.scale = scale

    @property
    def scores(self) -> list[Score]:
        """Return the scores that are charted."""
        if self.is_speech:
            return [
                Score("objf", "Objective function", "nats per frame", "train.objf", "valid.objf"),
                Score(
                    "accuracy", "Frame accuracy", "%", "train.accuracy", "valid.accuracy", 100.0, 1
                ),
            ]
        metrics = [
            name.removeprefix("valid/")
            for name in self.iterations[-1].get("diagnostics", {})
            if name.startswith("valid/")
        ]
        return [
            Score("loss", "Loss (mean over examples)", "", "train.objf", "valid.objf", -1.0, 4),
            *(
                Score(
                    name, name, "", f"diagnostics.train/{name}", f"diagnostics.valid/{name}", 1.0, 4
                )
                for name in metrics
            ),
        ]

    def values(self, key: str, scale: float = 1.0) -> list[float]:
        first, _, second = key.partition(".")
        found = (
            event[first].get(second, float("nan")) if second else event.get(first, float("nan"))
            for event in self.iterations
        )
        return [scale * value for value in found]


def lines(axes: Any, curve: Curve, what: Mapping[str, tuple[str, str]], scale: float = 1.0) -> None:
    # markers of a long run would hide its line
    marker = "o" if len(curve.positions) <= 40 else ""
    for name, (key, color) in what.items():
        axes.plot(
            curve.positions,
            curve.values(key, scale),
            color=color,
            label=name,
            linewidth=1.8,
            marker=marker,
            markersize=3.5,
        )


def label(axes: Any, title: str, unit: str, *, legend: str = "") -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(unit)
    axes.grid(visible=True, color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(loc=legend, frameon=False)
    axes.margins(x=0.02)


def _title(curve: Curve) -> str:
    last = curve.iterations[-1]
    num_jobs = max(event["num_jobs"] for event in curve.iterations)
    start = (
        f"{counted(len(curve.iterations), 'outer iteration')}, {last['epoch']:.1f} epochs, "
        f"up to {counted(num_jobs, 'job')}: "
    )
    if not curve.is_speech:
        return f"{start}validation loss {-last['valid']['objf']:.4g}"
    accuracy = f"{100 * last['valid']['accuracy']:.1f}%"
    return f"{start}validation objf {last['valid']['objf']:.3f}, frame accuracy {accuracy}"


def new_figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # no pyplot: it keeps every figure alive
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, path: Path) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    figure.savefig(draft, dpi=_DPI, format="png")
    draft.replace(path)
