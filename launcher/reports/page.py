"""One self-contained HTML page: no script, nothing from the network, pictures as SVG inside it."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Sequence
from typing import Any

from ngsgd.launcher.reports.charts import Chart

_STYLE = """
:root { color-scheme: light; --ink: #1d232b; --soft: #5b6470; --line: #dfe3e8;
  --card: #ffffff; --back: #f4f6f8; --accent: #1f6fb4; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 32px 0 10px; }
p.lead { color: var(--soft); margin: 0 0 16px; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; } .tile b { display: block; font-size: 1.3rem; line-height: 1.3; }
.tile span { color: var(--soft); font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(360px, 100%), 1fr)); gap: 14px;
  grid-auto-flow: dense; }
figure { margin: 0; padding: 8px; min-width: 0; } figure.wide { grid-column: 1 / -1; overflow-x: auto; }
figure img { display: block; width: 100%; height: auto; } figure.wide img { min-width: 760px; }
figcaption { color: var(--soft); font-size: .82rem; padding: 2px 6px 4px; }
.card { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
code, pre { font: .85rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { margin: 0; padding: 12px; overflow-x: auto; } ul.incidents { margin: 0; padding: 10px 14px 10px 30px; }
ul.incidents li { overflow-wrap: anywhere; }
details summary { cursor: pointer; padding: 10px 14px; color: var(--accent); }
footer { color: var(--soft); font-size: .85rem; margin-top: 32px; overflow-wrap: anywhere; }
"""


def page(title: str, lead: str, body: Iterable[str], footer: str) -> str:
    """The whole document."""
    head = ('<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<link rel="icon" href="data:,">\n<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>')
    main = "\n".join([f"<h1>{html.escape(title)}</h1>", f'<p class="lead">{html.escape(lead)}</p>', *body,
                      f"<footer>{html.escape(footer)}</footer>"])
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n<main>\n{main}\n</main>\n</body>\n</html>\n'


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """Large figures with what they are, in a row."""
    inside = "".join(f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>'
                     for what, value in figures)
    return f'<div class="tiles">{inside}</div>'


def pictures(charts: Iterable[Chart]) -> str:
    inside = "".join(
        f'<figure{" class=wide" if chart.is_wide else ""}><img alt="{html.escape(chart.title)}: {html.escape(chart.alt)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg(chart.figure)).decode()}">'
        f"<figcaption>{html.escape(chart.alt)}</figcaption></figure>" for chart in charts)
    return f'<div class="charts">{inside}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of numbers stand right."""
    lines = [list(row) for row in rows]
    marks = [' class="number"' if all(_is_number(row[column]) for row in lines) else "" for column in range(len(header))]
    head = "".join(f"<th{mark}>{html.escape(cell)}</th>" for cell, mark in zip(header, marks, strict=True))
    body = "".join("<tr>" + "".join(f"<td{mark}>{html.escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True)) + "</tr>"
                   for row in lines)
    return f'<div class="card"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def incidents(messages: Sequence[str]) -> str:
    inside = "".join(f"<li>{html.escape(message)}</li>" for message in messages)
    return f'<div class="card"><ul class="incidents">{inside}</ul></div>' if messages else "<p>None.</p>"


def folded(summary: str, text: str) -> str:
    """Long text that opens at a click."""
    return f'<div class="card"><details><summary>{html.escape(summary)}</summary><pre>{html.escape(text)}</pre></details></div>'


def svg(figure: Any) -> bytes:
    """The figure as SVG whose letters are text, the same bytes each time."""
    from matplotlib import rc_context

    target = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "ngsgd", "font.family": "sans-serif"}):
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(",", "").replace(".", "").replace("-", "").replace("%", "").isdigit()
