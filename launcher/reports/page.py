"""One self-contained HTML page: no script, nothing from the network, the figure inside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape

from ngsgd.masking import printable

# name -> (light, dark); marks keep 3:1 against the card of their mode, text 4.5:1
COLORS = {"blue": ("#1f6fb4", "#58a6e8"), "orange": ("#b85c0a", "#f0a050"),
          "green": ("#2a7f45", "#4fc878"), "red": ("#c0392b", "#ff7b72"),
          "gray": ("#6b7280", "#9aa4b0"), "card": ("#ffffff", "#171c23"),
          "back": ("#f4f6f8", "#0e1217"), "ink": ("#1d232b", "#e6edf3"),
          "soft": ("#5b6470", "#9aa7b4"), "line": ("#dfe3e8", "#303740")}
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
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr));
  gap: 14px; align-items: start; }
figure { margin: 14px 0; padding: 8px; overflow-x: auto; break-inside: avoid; }
figure img { display: block; width: 100%; min-width: 760px; border-radius: 4px; }
figcaption { color: var(--soft); font-size: .82rem; padding: 2px 6px 4px; }
.card { overflow-x: auto; margin-bottom: 14px; break-inside: avoid-page;
  /* a shadow at the side where more can be scrolled to */
  background: linear-gradient(to right, var(--card) 40%, transparent) left / 48px 100% local,
    linear-gradient(to left, var(--card) 40%, transparent) right / 48px 100% local,
    linear-gradient(to right, #8886, transparent) left / 10px 100%,
    linear-gradient(to left, #8886, transparent) right / 10px 100%, var(--card);
  background-repeat: no-repeat; }
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
@media (max-width: 600px) { th, td { padding: 5px 7px; } ul.checks li { grid-template-columns: 1.6em 1fr; }
ul.checks li > :nth-child(3) { grid-column: 2; } }
@media screen and (max-width: 800px) { figcaption::before { content: "Scroll sideways to see all. "; } }
@media screen and (prefers-color-scheme: dark) {
figure img { filter: invert(.9) hue-rotate(180deg); } }
@media print { body { background: none; } main { max-width: none; padding: 0; }
figure img { min-width: 0; } }
"""
_ICONS = {"green": ("✓", "passed"), "amber": ("!", "look at"), "red": ("✕", "failed"), "gray": ("?", "not judged")}
# characters of an item of a list that are shown at once
_LONG = 240
# of a cell whose column must not become narrow
_WIDE = 50


def page(title: str, lead: str, body: Iterable[str], footer: str) -> str:
    light, dark = ("; ".join(f"--{name}: {pair[mode]}" for name, pair in COLORS.items()) for mode in (0, 1))
    # paper is always light
    colors = (f":root {{ color-scheme: light dark; {light} }}\n"
              f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n")
    main = "\n".join([f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>', *body,
                      f"<footer>{escape(footer)}</footer>"])
    # names from logs may contain control characters, which `cat` and `less -R` would execute
    return printable(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n'
        f"<style>{colors}{_STYLE}</style>\n</head>\n<body>\n<main>\n{main}\n</main>\n</body>\n</html>\n")


def heading(text: str, *, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>'


def verdict(level: str, word: str, sentence: str) -> str:
    """The first line; the level is a name of `_ICONS`."""
    return f'<p class="verdict {level}"><b>{escape(word.capitalize())}</b>{escape(sentence)}</p>'


def checks(rows: Iterable[tuple[str, str, str, str]]) -> str:
    """(level, name, reason, threshold) each; the icon shows the level without the color."""
    inside = "".join(
        f'<li class="{level}"><span class="icon" role="img" aria-label="{_ICONS[level][1]}">'
        f"{_ICONS[level][0]}</span><b>{escape(name)}</b><span>{escape(reason)}<small>{escape(threshold)}</small></span></li>"
        for level, name, reason, threshold in rows)
    return card(f'<ul class="checks">{inside}</ul>')


def tiles(figures: Iterable[tuple[str, str]]) -> str:
    """(label, value) each, in a row."""
    inside = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>' for what, value in figures)
    return f'<div class="tiles">{inside}</div>'


def picture(png: bytes, about: str) -> str:
    """A figure, with a caption that also describes it for those who cannot see it."""
    source, text = f"data:image/png;base64,{base64.b64encode(png).decode()}", escape(about)
    return f'<figure><img src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns of numbers are aligned right, columns without any value are omitted."""
    shown = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    marks = [_mark(cells) for _, *cells in shown]
    head = "".join(f'<th scope="col"{mark}>{escape(column[0])}</th>' for mark, column in zip(marks, shown, strict=True))
    lines = ("".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(marks, row, strict=True))
             for row in [*zip(*shown, strict=True)][1:])
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return card(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _mark(cells: Sequence[str]) -> str:
    if all(text[:1].isdigit() or (text[:1] in "-+" and text[1:2].isdigit()) or text in ("", "-") for text in cells):
        return ' class="number"'
    return ' class="long"' if max(map(len, cells)) > _WIDE else ""


def columns(parts: Iterable[str]) -> str:
    """Parts next to each other where there is room."""
    return f'<div class="columns">{"".join(f"<div>{part}</div>" for part in parts)}</div>'


def bullets(texts: Sequence[str]) -> str:
    """A list; the rest of a long text opens at a click."""
    items = (f"<li>{escape(text)}</li>" if len(text) <= _LONG else
             f"<li><details><summary>{escape(text[:_LONG])} ...</summary>{escape(text)}</details></li>" for text in texts)
    return card(f'<ul class="list">{"".join(items)}</ul>')


def utterance(name: str, counts: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Reference above hypothesis, word by word; differences are marked and bold."""
    words = "".join(f"<span{' class=wrong' if ref != hyp else ''}><span>{escape(ref)}</span><span>{escape(hyp)}</span></span>"
                    for ref, hyp in pairs)
    return (f'<div class="utterance"><b>{escape(name)}</b> {escape(counts)}<div class="words">'
            f'<span class="sides"><span>ref</span><span>hyp</span></span>{words}</div></div>')


def card(inside: str) -> str:
    return f'<div class="card">{inside}</div>'


def folded(summary: str, text: str) -> str:
    return card(f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>")
