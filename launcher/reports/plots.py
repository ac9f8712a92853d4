"""Learning curves as a picture: objective and accuracy against frames processed, rate and max-change below."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Events = Iterable[Mapping[str, Any]]

BLUE, ORANGE, GREEN, RED = "#1f6fb4", "#e07b1a", "#2f8f4e", "#c0392b"
RUN_COLOURS = (BLUE, ORANGE, GREEN, RED, "#7d4fb0", "#7a7a7a")
_DPI = 130


def draw(events: Events, path: Path, *, is_speech: bool = True) -> None:
    """The curves of one run, from the lines of its events.jsonl; writes nothing when there was no outer iteration."""
    curve = Curve(events, is_speech=is_speech)
    if not curve.millions:
        return
    figure = new_figure(10.0, 7.4)
    top, bottom = figure.subplots(2, 2, sharex=True, height_ratios=(3, 2))
    for axes, score in zip(top, curve.scores, strict=False):
        lines(axes, curve, {"train": (score.train, BLUE), "valid": (score.valid, ORANGE)}, scale=score.scale)
        label(axes, score.title, score.unit, legend="best")
    lines(bottom[0], curve, {"effective": ("effective_lr", GREEN), "each job": ("lr", "#8fc6a0")})
    bottom[0].set_yscale("log")
    label(bottom[0], "Learning rate", f"per {curve.example}", legend="best")
    shares = {"layers": ("max_change_share", RED), "whole model": ("max_param_change_share", "#e3a59e")}
    lines(bottom[1], curve, shares, scale=100.0)
    bottom[1].set_ylim(bottom=0)
    label(bottom[1], "Steps shortened by max-change", "%", legend="best")
    for axes in bottom:
        axes.set_xlabel(curve.x_label)
    figure.suptitle(_title(curve), fontsize=12)
    save(figure, path)


def compare(runs: Sequence[tuple[str, Events]], path: Path) -> None:
    """Several runs overlaid: above the objective, below word errors of final models (frames right where nothing was decoded), each
    against frames and against seconds.
    """
    figure = new_figure(10.0, 7.4)
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    curves = [(name, Curve(events := list(told)), _word_errors(events)) for name, told in runs]
    decoded = any(wer is not None for _, _, wer in curves)
    for (name, curve, wer), colour in zip(curves, RUN_COLOURS * (1 + len(runs) // len(RUN_COLOURS)), strict=False):
        for (top, bottom), across in zip(panels.T, (curve.millions, curve.values("elapsed_s")), strict=True):
            top.plot(across, curve.values("valid.objf"), color=colour, linewidth=2.0, label=name)
            top.plot(across, curve.values("train.objf"), color=colour, linewidth=1.2, linestyle="--", alpha=0.7)
            if wer is not None:
                bottom.plot(across[-1:], [wer], "o", color=colour, markersize=8, label=name)
            elif not decoded:
                bottom.plot(across, curve.values("valid.accuracy", 100.0), color=colour, linewidth=2.0, label=name)
    label(panels[0][0], "Objective function", "nats per frame", legend="lower right")
    label(panels[0][1], "Objective function", "")
    for axes in panels[1]:
        label(axes, "Word errors of final models" if decoded else "Held-out frames right", "% of words" if decoded else "%")
    if decoded:
        # a difference is seen against the whole
        panels[1][0].set_ylim(bottom=0.0)
    panels[1][1].set_ylabel("")
    panels[1][0].set_xlabel("frames processed (millions)")
    panels[1][1].set_xlabel("seconds of training")
    figure.suptitle("Held-out frames (solid) and training frames (dashed)", fontsize=12)
    save(figure, path)


def _word_errors(events: Sequence[Mapping[str, Any]]) -> float | None:
    """Per cent, of a run that has been decoded."""
    return next((event["wer_percent"] for event in reversed(events) if event.get("event") == "finished"
                 and event.get("wer_percent") is not None), None)


def draw_schedule(learned: Sequence[float], before: Sequence[float], path: Path) -> None:
    """A learned schedule of learning rates beside the one it began from; both at even distances over the run."""
    figure = new_figure(7.0, 4.0)
    axes = figure.subplots()
    for name, rates, colour in (("before", before, "#7a7a7a"), ("learned", learned, BLUE)):
        axes.plot([100.0 * index / (len(rates) - 1) for index in range(len(rates))], rates, "o-", color=colour, label=name)
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
    """The outer iterations of one run, in order; a task of the user's own has losses, metrics and examples."""

    def __init__(self, events: Events, *, is_speech: bool = True) -> None:
        self.is_speech = is_speech
        self.example = "frame" if is_speech else "example"
        self.x_label = f"{self.example}s processed (millions)"
        # a resumed run may have told an outer iteration twice; the later word is the one that was
        # committed
        latest = {event["outer_iter"]: event for event in events if event.get("event") == "outer_iteration"}
        self.iterations = [latest[outer_iter] for outer_iter in sorted(latest)]
        self.millions = [event["frames_processed"] / 1e6 for event in self.iterations]

    @property
    def scores(self) -> list[Score]:
        """What is charted of the model's quality."""
        if self.is_speech:
            return [Score("objf", "Objective function", "nats per frame", "train.objf", "valid.objf"),
                    Score("accuracy", "Frames right", "%", "train.accuracy", "valid.accuracy", 100.0, 1)]
        metrics = [name.removeprefix("valid/") for name in self.iterations[-1].get("diagnostics", {}) if name.startswith("valid/")]
        return [Score("loss", "Loss", "mean", "train.objf", "valid.objf", -1.0, 4),
                *(Score(name, name, "", f"diagnostics.train/{name}", f"diagnostics.valid/{name}", 1.0, 4) for name in metrics)]

    def values(self, key: str, scale: float = 1.0) -> list[float]:
        first, _, second = key.partition(".")
        found = (event[first].get(second, float("nan")) if second else event.get(first, float("nan")) for event in self.iterations)
        return [scale * value for value in found]


def lines(axes: Any, curve: Curve, what: Mapping[str, tuple[str, str]], scale: float = 1.0) -> None:
    # a short run is points; dots on a long one are a smear
    marker = "o" if len(curve.millions) <= 40 else ""
    for name, (key, colour) in what.items():
        axes.plot(curve.millions, curve.values(key, scale), color=colour, label=name,
                  linewidth=1.8, marker=marker, markersize=3.5)


def label(axes: Any, title: str, unit: str, *, legend: str = "") -> None:
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_ylabel(unit)
    axes.grid(visible=True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(loc=legend, frameon=False)
    axes.margins(x=0.02)


def _title(curve: Curve) -> str:
    last = curve.iterations[-1]
    num_jobs = max(event["num_jobs"] for event in curve.iterations)
    start = f"{len(curve.iterations)} outer iterations, {last['epoch']:.1f} epochs, up to {num_jobs} jobs: "
    if not curve.is_speech:
        return f"{start}valid loss {-last['valid']['objf']:.4g}"
    return f"{start}valid objf {last['valid']['objf']:.3f}, {100 * last['valid']['accuracy']:.1f}% of frames right"


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
