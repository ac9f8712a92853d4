"""Draw the diagrams of the documentation: `python docs/diagrams.py` writes docs/*.svg.

SVG keeps text searchable and needs no script in the page. A white background keeps the pictures
readable on dark pages.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

BLUE, GREEN, GRAY = "#e3ecfb", "#e4f5e4", "#f1f1f1"


def box(x: int, y: int, width: int, height: int, lines: list[str], fill: str) -> str:
    """Return a rounded box whose first line is bold, with its top left corner at (x, y)."""
    step = 18
    first = y + (height - step * len(lines)) // 2 + 13
    texts = [f'<text x="{x + width // 2}" y="{first + n * step}" text-anchor="middle"'
             f'{" font-weight=" + chr(34) + "bold" + chr(34) if n == 0 else ""}>'
             f'{escape(line)}</text>' for n, line in enumerate(lines)]
    return (f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{fill}" '
            f'stroke="#556"/>\n' + "\n".join(texts))


def arrow(*points: tuple[int, int], label: str = "", at: tuple[int, int] = (0, 0)) -> str:
    """Return a line through `points` with an arrowhead, and its label centered at `at`."""
    path = " ".join(f"{x},{y}" for x, y in points)
    text = f'<text x="{at[0]}" y="{at[1]}" text-anchor="middle" fill="#345">{escape(label)}</text>'
    return (f'<polyline points="{path}" fill="none" stroke="#556" stroke-width="1.5" '
            f'marker-end="url(#head)"/>' + (f"\n{text}" if label else ""))


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a complete SVG document."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#556"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>", ""])


def outer_iteration() -> str:
    """Return the picture of one outer iteration: jobs, average, outer optimizer, checkpoint."""
    parts = [box(20, 105, 130, 60, ["Coordinator", "model, schedule"], BLUE)]
    for n, (name, y) in enumerate((("Job 0", 20), ("Job 1", 105), ("Job N - 1", 190))):
        parts += [box(235, y, 190, 60, [name, "local NG-SGD on one shard"], GREEN),
                  arrow((150, 135), (190, 135), (190, y + 30), (235, y + 30)),
                  arrow((425, y + 30), (470, y + 30), (470, 135), (510, 135))]
        if n == 1:
            parts.append('<text x="330" y="182" text-anchor="middle">...</text>')
    parts += [
        box(510, 105, 130, 60, ["Weighted mean", "bad results rejected"], BLUE),
        arrow((640, 135), (675, 135)),
        box(675, 105, 130, 60, ["Outer optimizer", "momentum"], BLUE),
        arrow((740, 165), (740, 205)),
        box(675, 205, 130, 60, ["Checkpoint", "and ledger, on disk"], GRAY),
        arrow((740, 265), (740, 290), (85, 290), (85, 165),
              label="next outer iteration: new model and learning rate", at=(412, 284)),
        '<text x="184" y="100" text-anchor="end" fill="#345">model</text>',
        '<text x="474" y="100" fill="#345">results</text>']
    return picture(825, 305, "One outer iteration", parts)


def parts_of_the_code() -> str:
    """Return the picture of the packages and of who calls whom."""
    parts = [
        box(20, 20, 190, 60, ["ngsgd.launcher", "CLI, Ray, MLflow, reports"], GRAY),
        arrow((210, 50), (270, 50)),
        box(270, 20, 190, 60, ["ngsgd.pipeline", "build_run: prepare, finish"], BLUE),
        arrow((460, 50), (525, 50)),
        box(525, 20, 250, 60, ["ngsgd.asr, models, sequence, data", "speech: audio to WER"], GREEN),
        arrow((115, 80), (115, 130)),
        box(20, 130, 190, 60, ["ngsgd.planning, exports", "time, other programs"], GRAY),
        arrow((210, 160), (270, 160)),
        arrow((365, 80), (365, 130)),
        box(270, 130, 190, 60, ["ngsgd.runs", "a run on disk"], BLUE),
        arrow((365, 190), (365, 240)),
        box(270, 240, 190, 60, ["ngsgd.training", "Coordinator, Worker"], BLUE),
        arrow((650, 240), (650, 80)),
        box(525, 240, 250, 60, ["ngsgd.tasks", "model, data and loss as a Task"], GREEN),
        arrow((460, 270), (525, 270)),
        arrow((270, 270), (210, 270)),
        box(20, 240, 190, 60, ["ngsgd.cluster", "worker pools, exchange"], BLUE),
        arrow((365, 300), (365, 350)),
        box(270, 350, 190, 60, ["ngsgd.optim", "NGSGD, SGD, outer rules"], GREEN),
        arrow((460, 380), (525, 380)),
        box(525, 350, 250, 60, ["preconditioners, curvature, ops", "arithmetic on tensors"], GREEN)]
    return picture(795, 430, "Packages", parts)


if __name__ == "__main__":
    folder = Path(__file__).parent
    for name, svg in (("outer-iteration", outer_iteration()), ("packages", parts_of_the_code())):
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
