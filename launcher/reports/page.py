"""One self-contained HTML page: no script, nothing from the network, the figure inside it."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence

from ngsgd.launcher.text import printable

# name -> (light, dark); marks keep 3:1 against the card of their mode, text 4.5:1
COLORS = {
    "blue": ("#1f6fb4", "#58a6e8"),
    "orange": ("#b85c0a", "#f0a050"),
    "green": ("#2a7f45", "#4fc878"),
    "red": ("#c0392b", "#ff7b72"),
    "gray": ("#6b7280", "#9aa4b0"),
    "card": ("#ffffff", "#171c23"),
    "back": ("#f4f6f8", "#0e1217"),
    "ink": ("#1d232b", "#e6edf3"),
    "soft": ("#5b6470", "#9aa7b4"),
    "line": ("#dfe3e8", "#303740"),
}
_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 36px 0 10px; } h3 { font-size: 1rem; margin: 20px 0 8px; }
p { margin: 0 0 10px; } p.lead, p.note { color: var(--soft); overflow-wrap: anywhere; }
p.lead { margin-bottom: 16px; }
.verdict, .tile, figure, .card { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.verdict { border-left: 6px solid var(--mark); padding: 12px 16px; margin: 0 0 14px;
  font-size: 1.1rem; }
.verdict b { color: var(--mark); margin-right: 8px; }
.green { --mark: var(--green); } .amber { --mark: var(--orange); } .red { --mark: var(--red); }
.gray { --mark: var(--gray); }
ul.checks { list-style: none; margin: 0; padding: 0; }
ul.checks li { display: grid; grid-template-columns: 1.6em minmax(9em, 13em) 1fr; gap: 2px 8px;
  padding: 6px 12px;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
ul.checks li:last-child { border-bottom: 0; }
ul.checks .icon { color: var(--mark); font-weight: 700; }
ul.checks small { color: var(--soft); display: block; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; }
.tile { padding: 10px 14px; } .tile b { display: block; font-size: 1.3rem; line-height: 1.3; }
.tile span { color: var(--soft); font-size: .85rem; }
.columns { display: grid; grid-template-columns: minmax(0, 1fr); gap: 14px; align-items: start; }
figure { margin: 14px 0; padding: 8px; overflow-x: auto; break-inside: avoid; }
figure img { display: block; width: 100%; min-width: 760px; border-radius: 4px; }
figcaption { color: var(--soft); font-size: .82rem; padding: 2px 6px 4px; }
.card { overflow-x: auto; margin-bottom: 14px; break-inside: avoid-page; }
/* a shadow at each side where a wide table continues; the first two layers scroll and cover it */
.card, figure { background: linear-gradient(90deg, var(--card) 40%, transparent) left / 40px 100% no-repeat local,
  linear-gradient(270deg, var(--card) 40%, transparent) right / 40px 100% no-repeat local,
  linear-gradient(90deg, var(--soft), transparent) left / 14px 100% no-repeat scroll,
  linear-gradient(270deg, var(--soft), transparent) right / 14px 100% no-repeat scroll, var(--card); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: left; padding: 6px 12px; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; } tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; } .long { min-width: 17em; }
.utterance { padding: 8px 12px; border-bottom: 1px solid var(--line); }
.utterance:last-child { border-bottom: 0; }
.words { display: flex; flex-wrap: wrap; gap: 2px 6px;
  font: .85rem/1.4 ui-monospace, Menlo, Consolas, monospace; }
.words span { display: inline-grid; padding: 0 3px; border-radius: 4px; }
.words .sides { color: var(--soft); }
.words .wrong { color: var(--red); outline: 1px solid var(--red); font-weight: 700; }
code, pre { font: .85rem/1.45 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
pre { margin: 0; padding: 12px; overflow-x: auto; }
ul.list { margin: 0; padding: 10px 14px 10px 30px; } ul.list li { overflow-wrap: anywhere; }
details summary { cursor: pointer; padding: 10px 14px; color: var(--blue); }
ul.list summary { padding: 0; color: inherit; }
footer { color: var(--soft); font-size: .85rem; margin-top: 32px; overflow-wrap: anywhere; }
/* two or three parts in a row, and no row that is partly empty: the last ones are wider */
@media (min-width: 770px) { .columns { grid-template-columns: repeat(6, minmax(0, 1fr)); }
.columns > * { grid-column: span 3; } }
@media (min-width: 770px) and (max-width: 1139px) {
.columns > :last-child:nth-child(odd) { grid-column: 1 / -1; } }
@media (min-width: 1140px) { .columns > * { grid-column: span 2; }
.columns > :nth-child(3n+1):is(:nth-last-child(2), :nth-last-child(4)),
.columns > :nth-child(3n+1):is(:nth-last-child(2), :nth-last-child(4)) ~ * { grid-column: span 3; }
.columns > :only-child { grid-column: 1 / -1; } }
@media (max-width: 600px) { th, td { padding: 5px 7px; } ul.checks li { grid-template-columns: 1.6em 1fr; }
ul.checks li > :nth-child(3) { grid-column: 2; } }
@media print { body { background: none; } main { max-width: none; padding: 0; }
figure img { min-width: 0; } }
"""
_ICONS = {
    "green": ("✓", "passed"),
    "amber": ("!", "look at"),
    "red": ("✕", "failed"),
    "gray": ("?", "not judged"),
}
# characters of an item of a list that are shown at once
_LONG = 240
# of a cell whose column must not become narrow
_WIDE = 50


class Html(str):
    """A text that is markup already."""


def page(title: str, lead: str, body: Iterable[str], footer: str) -> str:
    """Return the document."""
    light, dark = (
        "; ".join(f"--{name}: {pair[mode]}" for name, pair in COLORS.items()) for mode in (0, 1)
    )
    # paper is always light
    colors = (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    )
    head = (
        '<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{html.escape(title)}</title>\n'
        f"<style>{colors}{_STYLE}</style>"
    )
    main = "\n".join(
        [
            f"<h1>{html.escape(title)}</h1>",
            f'<p class="lead">{html.escape(lead)}</p>',
            *body,
            f"<footer>{html.escape(footer)}</footer>",
        ]
    )
    # names from logs may contain control characters, which `cat` and `less -R` would execute
    return printable(
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n'
        f"<body>\n<main>\n{main}\n</main>\n</body>\n</html>\n"
    )


def heading(text: str, *, level: int = 2) -> str:
    return f"<h{level}>{html.escape(text)}</h{level}>"


def note(text: str) -> str:
    """A paragraph below a heading."""
    return f'<p class="note">{html.escape(text)}</p>'


def verdict(level: str, word: str, sentence: str) -> str:
    """The first line; the level is a name of `_ICONS`."""
    first = f"<b>{html.escape(word.capitalize())}</b>"
    return f'<p class="verdict {level}">{first}{html.escape(sentence)}</p>'


def checks(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """(level, name, reason, threshold) each; the icon shows the level without the color."""
    inside = "".join(
        f'<li class="{level}"><span class="icon" role="img" aria-label="{_ICONS[level][1]}">'
        f"{_ICONS[level][0]}</span><b>{html.escape(name)}</b>"
        f"<span>{html.escape(reason)}<small>{html.escape(threshold)}</small></span></li>"
        for level, name, reason, threshold in rows
    )
    return f'<div class="card"><ul class="checks">{inside}</ul></div>'


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """(label, value) each, in a row."""
    inside = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(what)}</span></div>'
        for what, value in figures
    )
    return f'<div class="tiles">{inside}</div>'


def picture(png: bytes, about: str) -> str:
    """A figure, with a caption that also describes it for those who cannot see it."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    text = html.escape(about)
    image = f'<img src="{source}" alt="{text}">'
    return f"<figure>{image}<figcaption>{text}</figcaption></figure>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers are aligned right, columns without any value are omitted."""
    lines = [list(row) for row in rows]
    shown = [column for column in range(len(header)) if any(row[column] for row in lines)]
    marks = {column: _mark([row[column] for row in lines]) for column in shown}
    head = "".join(
        f'<th scope="col"{marks[column]}>{html.escape(header[column])}</th>' for column in shown
    )
    body = "".join(
        "<tr>"
        + "".join(f"<td{marks[column]}>{_cell(row[column])}</td>" for column in shown)
        + "</tr>"
        for row in lines
    )
    return card(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def columns(parts: Iterable[str]) -> str:
    """Parts next to each other where there is room."""
    return f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def bullets(texts: Sequence[str]) -> str:
    """A list; the rest of a long text opens at a click."""
    parts = (
        text
        if len(text) <= _LONG
        else Html(
            f"<details><summary>{html.escape(text[:_LONG])} ...</summary>"
            f"{html.escape(text)}</details>"
        )
        for text in texts
    )
    return card(f'<ul class="list">{"".join(f"<li>{_cell(part)}</li>" for part in parts)}</ul>')


def utterance(name: str, counts: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Reference above hypothesis, word by word; differences are marked and bold."""
    words = "".join(
        f"<span{' class=wrong' if ref != hyp else ''}>"
        f"<span>{html.escape(ref)}</span><span>{html.escape(hyp)}</span></span>"
        for ref, hyp in pairs
    )
    return (
        f'<div class="utterance"><b>{html.escape(name)}</b> {html.escape(counts)}'
        '<div class="words">'
        f'<span class="sides"><span>ref</span><span>hyp</span></span>{words}</div></div>'
    )


def card(inside: str) -> str:
    return f'<div class="card">{inside}</div>'


def folded(summary: str, text: str) -> str:
    """Long text that opens at a click."""
    return card(
        f"<details><summary>{html.escape(summary)}</summary>"
        f"<pre>{html.escape(text)}</pre></details>"
    )


def _cell(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)


def _mark(cells: Sequence[str]) -> str:
    """The class of a column."""
    if all(map(_is_number, cells)):
        return ' class="number"'
    return ' class="long"' if max(map(len, cells)) > _WIDE else ""


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or (text[:1] in "-+" and text[1:2].isdigit()) or text in ("", "-")
