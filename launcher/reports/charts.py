"""The pictures of `ngsgd report`, one figure each, narrow enough to be read on a phone.

All of them are made from the lines of events.jsonl, but for the Fisher spectra, which somebody has to measure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ngsgd.launcher.reports.plots import BLUE, GREEN, ORANGE, RED, Curve, label, lines, new_figure

# inches; 9 pt text is still 10 px high on a screen of 390 px
_NARROW = (4.4, 3.2)
_GREY = "#8a8f98"
_TIMES = {"compute_s": ("jobs", BLUE), "average_s": ("averaging", ORANGE), "checkpoint_s": ("checkpoint", GREEN),
          "diagnostics_s": ("diagnostics", "#7d4fb0")}
# incidents that are marked on the timeline; the others are results that were judged, not faults
_FAULTS = {"worker_died": RED, "job_failed": RED, "worker_replaced": GREEN}
_SIDES = {"input": "-", "output": "--"}


@dataclass(frozen=True)
class Chart:
    """A figure, and what it shows, for those who do not see it."""

    # of its PNG file
    name: str
    title: str
    alt: str
    figure: Any
    is_wide: bool = False


def charts_of(events: Sequence[Mapping[str, Any]], spectra: Mapping[str, Sequence[float]], *, is_speech: bool = True
              ) -> Iterator[Chart]:
    """All that there is to draw; nothing for a run without an outer iteration."""
    curve = Curve(events, is_speech=is_speech)
    if not curve.iterations:
        return
    yield from _learning(curve)
    yield _time_split(curve)
    if any(job.get("ended_s") for event in curve.iterations for job in event["jobs"]):
        yield _timeline(curve, [event for event in events if event.get("event") == "incident"])
    if any("effective_rank" in name for name in _health(curve.iterations[-1])):
        yield _ranks(curve)
    if spectra:
        yield _spectra(spectra)


def _learning(curve: Curve) -> Iterator[Chart]:
    last = curve.iterations[-1]
    for score in curve.scores:
        figure, axes = narrow_axes()
        lines(axes, curve, {"train": (score.train, BLUE), "valid": (score.valid, ORANGE)}, scale=score.scale)
        label(axes, score.title, score.unit, legend="best")
        axes.set_xlabel(curve.x_label)
        train, valid = (f"{curve.values(key, score.scale)[-1]:.{score.digits}f}" for key in (score.train, score.valid))
        told = f"{train} and {valid}{score.unit if score.unit == '%' else f' {score.unit}'.rstrip()}"
        yield Chart(score.name, score.title, f"{score.title} of training and held-out {curve.example}s; at the end {told}.", figure)
    figure, axes = narrow_axes()
    lines(axes, curve, {"effective": ("effective_lr", GREEN), "each job": ("lr", "#8fc6a0")})
    axes.set_yscale("log")
    label(axes, "Learning rate", f"per {curve.example}", legend="best")
    axes.set_xlabel(curve.x_label)
    told = f"It falls from {curve.iterations[0]['effective_lr']:.2g} to {last['effective_lr']:.2g}."
    yield Chart("lr", "Learning rate", told, figure)
    figure, axes = narrow_axes()
    lines(axes, curve, {"layers": ("max_change_share", RED), "whole model": ("max_param_change_share", "#e3a59e")}, scale=100.0)
    axes.set_ylim(bottom=0)
    label(axes, "Steps shortened by max-change", "%", legend="best")
    axes.set_xlabel(curve.x_label)
    told = f"{100 * last['max_change_share']:.0f}% of layer steps at the end."
    yield Chart("max_change", "Steps shortened by max-change", told, figure)


def _time_split(curve: Curve) -> Chart:
    figure, axes = narrow_axes()
    outer_iters = [event["outer_iter"] + 1 for event in curve.iterations]
    base = [0.0] * len(outer_iters)
    for key, (name, colour) in _TIMES.items():
        seconds = curve.values(key)
        axes.bar(outer_iters, seconds, bottom=base, width=0.9, color=colour, label=f"{name}, {sum(seconds):.1f} s")
        base = [below + more for below, more in zip(base, seconds, strict=True)]
    label(axes, "Where the time went", "seconds")
    axes.legend(ncols=2, fontsize=8, frameon=False, loc="upper left")
    # room for the legend above the bars
    axes.set_ylim(top=1.3 * max(base))
    axes.set_xlabel("outer iteration")
    told = ", ".join(f"{name} {sum(curve.values(key)):.1f} s" for key, (name, _) in _TIMES.items())
    return Chart("time", "Where the time went", f"Seconds of each outer iteration: {told}.", figure)


def _timeline(curve: Curve, incidents: Sequence[Mapping[str, Any]]) -> Chart:
    """A lane for each worker, a bar for each job; the end of an outer iteration is a thin line, a fault a cross."""
    workers = sorted({job["worker"] for event in curve.iterations for job in event["jobs"]})
    lanes = {worker: index for index, worker in enumerate(workers)}
    figure = new_figure(10.0, min(1.5 + 0.34 * len(lanes), 9.0))
    axes = figure.subplots()
    for event in curve.iterations:
        axes.axvline(event["elapsed_s"], color="#d5d8dd", linewidth=0.6, zorder=0)
        for job in event["jobs"]:
            colour = _GREY if not job["accepted"] else ORANGE if job["attempt"] > 1 else BLUE
            # so that one job can be told from the next
            shade = 1.0 if event["outer_iter"] % 2 else 0.72
            axes.broken_barh([(job["ended_s"] - job["seconds"], job["seconds"])], (lanes[job["worker"]] - 0.38, 0.76),
                             facecolors=colour, alpha=shade, linewidth=0)
    faults = [one for one in incidents if one.get("elapsed_s") and one["what"] in _FAULTS and one["worker"] in lanes]
    for one in faults:
        axes.plot(one["elapsed_s"], lanes[one["worker"]], marker="X", markersize=8, color=_FAULTS[one["what"]],
                  markeredgecolor="white", linestyle="none", zorder=3)
    axes.set_yticks(range(len(lanes)), [f"worker {worker}" for worker in workers])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel("seconds of training")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)
    _explain(axes, faults)
    told = f"Jobs of {len(lanes)} workers over {curve.iterations[-1]['elapsed_s']:.0f} s, {len(faults)} faults."
    return Chart("timeline", "Timeline of the workers", told, figure, is_wide=True)


def _explain(axes: Any, faults: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [Patch(color=BLUE, label="job"), Patch(color=ORANGE, label="job, repeated"), Patch(color=_GREY, label="job, left out"),
             Line2D([], [], color="#d5d8dd", label="averaged")]
    if faults:
        shown.append(Line2D([], [], marker="X", color=RED, linestyle="none", label="fault"))
    axes.legend(handles=shown, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(shown), frameon=False, fontsize=8)


def _ranks(curve: Curve) -> Chart:
    """How many directions carry the Fisher, by layer and side, as training goes on."""
    figure, axes = narrow_axes()
    names = sorted(name for name in _health(curve.iterations[-1]) if name.endswith("_effective_rank"))
    layers = sorted({name.rpartition("/")[0] for name in names})
    for name in names:
        layer, _, quantity = name.rpartition("/")
        style = _SIDES.get(quantity.partition("_")[0], ":")
        values = [_health(event).get(name, float("nan")) for event in curve.iterations]
        axes.plot(curve.millions, values, color=_shade(layers.index(layer), len(layers)), linestyle=style, linewidth=1.4,
                  label=layer if style == "-" else None)
    label(axes, "Effective rank of the Fisher factors", "directions")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    axes.set_xlabel(curve.x_label)
    return Chart("fisher_rank", "Effective rank of the Fisher factors",
                 "Solid: input side of each layer; dashed: output derivatives.", figure)


def _spectra(spectra: Mapping[str, Sequence[float]]) -> Chart:
    """Eigenvalues over their mean, in descending order."""
    figure, axes = narrow_axes()
    layers = sorted({name.rpartition("/")[0] for name in spectra})
    for name, values in sorted(spectra.items()):
        layer, _, side = name.rpartition("/")
        style = _SIDES.get(side, ":")
        axes.plot(range(1, len(values) + 1), values, color=_shade(layers.index(layer), len(layers)), linestyle=style, linewidth=1.4,
                  label=layer if style == "-" else None)
    axes.set_yscale("log")
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8)
    label(axes, "Spectra of the Fisher factors", "eigenvalue over the mean")
    axes.legend(fontsize=7, frameon=False, ncols=2)
    axes.set_xlabel("direction")
    return Chart("fisher_spectra", "Spectra of the Fisher factors", "Eigenvalues of each factor over their mean, largest first. "
                 "Solid: input side; dashed: output derivatives.", figure)


def _health(event: Mapping[str, Any]) -> dict[str, float]:
    """Mean over the accepted jobs, as `OuterIterationRecord.health`."""
    values: dict[str, list[float]] = {}
    for job in event["jobs"]:
        if job["accepted"]:
            for name, value in job.get("health", {}).items():
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _shade(index: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.05 + 0.85 * index / max(count - 1, 1))


def narrow_axes() -> tuple[Any, Any]:
    """A figure of the width of a phone, and its axes."""
    figure = new_figure(*_NARROW)
    return figure, figure.subplots()
