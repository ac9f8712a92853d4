"""Colors for light and dark screens, and figures as SVG with values under the pointer.

Every spot of a chart is a transparent rectangle followed by its tip. CSS shows the tip of the spot
under the pointer or the finger, so a page works where scripts are blocked, as in mail programs.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# name -> (light, dark); lines and marks keep 3:1 against the card of their mode, text 4.5:1
PALETTE = {
    "blue": ("#1f6fb4", "#58a6e8"),
    "orange": ("#b85c0a", "#f0a050"),
    "green": ("#2a7f45", "#4fc878"),
    "red": ("#c0392b", "#ff7b72"),
    "purple": ("#7d4fb0", "#b992f0"),
    "teal": ("#0f7c88", "#3fc1cf"),
    "pink": ("#b83280", "#f08cc0"),
    "gray": ("#6b7280", "#9aa4b0"),
}
SURFACES = {
    "card": ("#ffffff", "#171c23"),
    "back": ("#f4f6f8", "#0e1217"),
    "ink": ("#1d232b", "#e6edf3"),
    "soft": ("#5b6470", "#9aa7b4"),
    "line": ("#dfe3e8", "#303740"),
}
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, PINK, GRAY = (light for light, _ in PALETTE.values())
CARD, _, INK, SOFT, LINE = (light for light, _ in SURFACES.values())
RUN_COLORS = (BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, PINK, GRAY)
# light color of a chart -> the property of the page that replaces it
VARIABLES = {light: f"var(--{name})" for name, (light, _) in {**PALETTE, **SURFACES}.items()}
# of the text of a tip, in points of the figure
_FONT_SIZE, _LINE_HEIGHT, _CHARACTER = 8.0, 10.5, 4.7
_POINTS_PER_INCH = 72


def css() -> str:
    """The colors as properties of the page; paper is always light."""
    light, dark = (
        "; ".join(f"--{name}: {pair[mode]}" for name, pair in {**PALETTE, **SURFACES}.items())
        for mode in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )


def contrast(first: str, second: str) -> float:
    """Return the contrast ratio of two colors, 1 to 21, as defined by WCAG 2."""
    bright, dim = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (bright + 0.05) / (dim + 0.05)


def _luminance(color: str) -> float:
    channels = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@dataclass(frozen=True)
class Spot:
    """A rectangle of a chart, in the coordinates of its axes, and the lines shown over it.

    The rectangle of a curve has the height of the axes (`bottom` and `top` are None), and a
    vertical guide at `guide`.
    """

    left: float
    right: float
    lines: tuple[str, ...]
    bottom: float | None = None
    top: float | None = None
    guide: float | None = None


def strips(
    positions: Sequence[float], lines: Sequence[tuple[str, ...]], *, most: int = 80
) -> list[Spot]:
    """Spots around the points of a curve; of more than `most` points every n-th has one."""
    step = -(-len(positions) // most)
    chosen = list(range(len(positions) - 1, -1, -step))[::-1]
    spots = []
    for place, index in enumerate(chosen):
        x = positions[index]
        left = positions[chosen[place - 1]] if place else x
        right = positions[chosen[place + 1]] if place + 1 < len(chosen) else x
        # the first and the last reach as far out as in, so that a single point has a width
        reach = max(x - left, right - x, abs(x) * 0.02, 1e-9) / 2
        spots.append(
            Spot(
                (x + left) / 2 if place else x - reach,
                (x + right) / 2 if right > x else x + reach,
                lines[index],
                guide=x,
            )
        )
    return spots


def inline_svg(figure: Any, spots: Sequence[Spot], *, name: str, alt: str) -> str:
    """The figure as an element of a page; its ids start with `name`."""
    from matplotlib import rc_context

    target = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(target, format="svg", metadata={"Date": None}, transparent=True)
    text = re.sub(
        r"\s*<metadata>.*?</metadata>",
        "",
        target.getvalue()[target.getvalue().index("<svg") :],
        flags=re.DOTALL,
    )
    text = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", text)
    text = re.sub(r'(id="|#)([mp][0-9a-f]{10})', rf"\1{name}-\2", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda found: VARIABLES.get(found[0], found[0]), text)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = re.sub(
        r' width="[\d.]+pt" height="[\d.]+pt"| height="[\d.]+pt"| width="[\d.]+pt"', "", text
    )
    start = f'<svg class="chart" role="img" aria-label="{html.escape(alt)}"'
    inside = text.removeprefix("<svg").rstrip().removesuffix("</svg>")
    return f"{start}{inside}{_overlay(figure, spots)}</svg>"


def themed() -> Any:
    """A context in which figures are made with the ink of the page."""
    from matplotlib import rc_context

    return rc_context(
        {
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": SOFT,
            "xtick.color": SOFT,
            "ytick.color": SOFT,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "grid.color": LINE,
            "axes.titlecolor": INK,
        }
    )


def _overlay(figure: Any, spots: Sequence[Spot]) -> str:
    if not spots:
        return ""
    axes = figure.axes[0]
    scale = _POINTS_PER_INCH / figure.dpi
    width, height = (_POINTS_PER_INCH * inches for inches in figure.get_size_inches())
    frame = axes.get_window_extent()
    upper, lower = height - scale * frame.y1, height - scale * frame.y0

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y))
        return scale * across, height - scale * up

    parts = []
    for spot in spots:
        base = axes.get_ylim()[0]
        x0, x1 = (place(x, base)[0] for x in (spot.left, spot.right))
        y0, y1 = (
            (upper, lower)
            if spot.top is None or spot.bottom is None
            else sorted(place(spot.left, y)[1] for y in (spot.bottom, spot.top))
        )
        guide = place(spot.guide, base)[0] if spot.guide is not None else None
        parts.append(
            f'<g class="spot"><rect class="hit" x="{x0:.1f}" y="{y0:.1f}" '
            f'width="{max(x1 - x0, 1.0):.1f}" height="{y1 - y0:.1f}"/>'
            f"{_tip(spot.lines, (x0 + x1) / 2, y0, guide, (upper, lower), width)}</g>"
        )
    return "".join(parts)


def _tip(
    lines: Sequence[str],
    x: float,
    y: float,
    guide: float | None,
    span: tuple[float, float],
    width: float,
) -> str:
    """A box with the lines, at the side of x that has more room."""
    upper, lower = span
    box_width = _CHARACTER * max(map(len, lines)) + 10
    box_height = _LINE_HEIGHT * len(lines) + 7
    at = x if guide is None else guide
    left = min(
        max(at - box_width - 5 if at > width / 2 else at + 5, 1.0), max(width - box_width - 1, 1.0)
    )
    top = upper + 3 if guide is not None else max(1.0, min(y, lower - box_height))
    rows = "".join(
        f'<tspan x="{left + 5:.1f}" dy="{_LINE_HEIGHT}">{html.escape(line)}</tspan>'
        for line in lines
    )
    mark = (
        f'<line class="guide" x1="{at:.1f}" x2="{at:.1f}" y1="{upper:.1f}" y2="{lower:.1f}"/>'
        if guide is not None
        else ""
    )
    return (
        f'<g class="tip">{mark}<rect class="box" rx="3" x="{left:.1f}" y="{top:.1f}" '
        f'width="{box_width:.1f}" height="{box_height:.1f}"/>'
        f'<text font-size="{_FONT_SIZE}" y="{top + 1.5:.1f}">{rows}</text></g>'
    )
