"""`ngsgd compare RUN RUN ...`: which of several runs is better, on one page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ngsgd.counting import counted, duration
from ngsgd.errors import EXIT_OK
from ngsgd.files import write_text
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.reports import comparison, figures
from ngsgd.launcher.reports import page as html
from ngsgd.launcher.reports.comparison import ComparedRun, Group, Identity, identity
from ngsgd.masking import printable
from ngsgd.runs.run_folder import RunFolder, find_run

# rows of the table on the terminal; the page has all
_MOST_PRINTED = 30
# a table of settings with more columns cannot be read
_MOST_COLUMNS = 12


def command(arguments: Sequence[str]) -> int:
    """Print the verdict and a table, and write the page."""
    parser = Parser("compare")
    parser.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or their names under runs/")
    parser.declare({"--output -o FILE": ("compare.html", "the page"),
                    "--png FILE": "also write the figure of the page as a picture",
                    "--json": "print JSON instead of the table"})
    options = parser.parse_args(arguments)
    runs = [comparison.read(RunFolder.open(find_run(run))) for run in options.runs]
    measure = comparison.WER if all(run.wer for run in runs) else comparison.LOSS
    groups = sorted(comparison.groups_of(runs), key=lambda group: group.mean(measure))
    word, sentence = comparison.verdict(groups, measure)
    same = identity(runs)
    target = Path(options.output)
    figure = figures.comparison_figure(groups)
    write_text(target, _page(runs, groups, measure, (word, sentence), same, figures.png(figure)))
    if options.png:
        figures.save(figure, Path(options.png))
    if options.json:
        objf = comparison.common_objf(runs)
        found = {"page": str(target), "verdict": word, "sentence": sentence, "common_objf": objf,
                 "final_models": same and asdict(same)}
        print(json.dumps({**found, "runs": [run.figures(objf) for run in runs]}, indent=1))
    else:
        verdict = [sentence, *([same.sentence] if same else [])]
        print(printable("\n".join([*verdict, "", *_text_table(runs, measure), f"page {target}"])))
    return EXIT_OK


# column -> text of a run's figures; empty where a value is not known
_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "WER (%)": lambda one: "" if one["wer_percent"] is None else f"{one['wer_percent']:.2f}",
    "95% interval": lambda one: " to ".join(f"{bound:.2f}" for bound in one["wer_interval_95"] or ()),
    "validation objf": lambda one: f"{one['valid_objf']:.4f}{'' if one['is_final_model'] else ' *'}",
    "accuracy (%)": lambda one: f"{100 * one['valid_accuracy']:.1f}".replace("nan", ""),
    "jobs": lambda one: str(one["num_jobs"]),
    "epochs": lambda one: f"{one['epochs']:.2f}",
    "training": lambda one: duration(one["seconds"]),
    "frames/s": lambda one: "" if one["frames_per_s"] is None else f"{one['frames_per_s']:,.0f}",
    "to common objf (s)": lambda one: (
        f"{one['seconds_to_common_objf']:.1f}" if one["seconds_to_common_objf"] is not None else "")}
# the table on a terminal of 80 columns
_PRINTED = ("WER (%)", "95% interval", "validation objf", "training")


def _rows(runs: Sequence[ComparedRun], columns: Sequence[str], measure: str) -> list[tuple[str, ...]]:
    """(run, ...) with the best run first."""
    objf = comparison.common_objf(runs)
    ordered = sorted(zip(runs, comparison.names_of(runs), strict=True), key=lambda one: one[0].result(measure))
    return [(name, *(_COLUMNS[column](run.figures(objf)) for column in columns)) for run, name in ordered]


def _text_table(runs: Sequence[ComparedRun], measure: str) -> list[str]:
    rows = _rows(runs, _PRINTED, measure)
    lines = [("run", *_PRINTED), *rows[:_MOST_PRINTED]]
    shown = [column for column in range(len(lines[0])) if any(row[column] for row in rows)]
    widths = {column: max(len(row[column]) for row in lines) for column in shown}
    text = ["  ".join(row[at].ljust(widths[at]) for at in shown).rstrip() for row in lines]
    if len(rows) > _MOST_PRINTED:
        more = counted(len(rows) - _MOST_PRINTED, "more run is", "more runs are")
        text.append(f"{more} on the page")
    if any(run.final_objf is None for run in runs):
        text.append("* last outer iteration: not finished")
    return text


def _page(runs: Sequence[ComparedRun], groups: Sequence[Group], measure: str, told: tuple[str, str],
          same: Identity | None, figure: bytes) -> str:
    word, sentence = told
    body = [html.verdict({"better": "green"}.get(word, "gray"), word, sentence),
            *([html.note(same.sentence)] if same else []), *_differences(groups, measure),
            html.picture(figure, "Objective against epochs and time of training, and results."),
            html.heading("Runs"),
            html.table(("run", *_COLUMNS), _rows(runs, list(_COLUMNS), measure))]
    if any(run.final_objf is None for run in runs):
        body.append(html.note("* Last outer iteration, since the run has not finished. Other "
                              "scores are those of final models."))
    body += [html.heading("Settings that differ"), _settings(runs)]
    return html.page(
        "Comparison of runs", f"{counted(len(runs), 'run')}, {counted(len(groups), 'setting')}", body,
        f"ngsgd {version('ngsgd')}. WER and validation objective (nats per frame) are those of "
        "final models, accuracy and curves those of outer iterations. Times depend on the load of the machine.")


def _differences(groups: Sequence[Group], measure: str) -> list[str]:
    """Each group against the best; the closest come first."""
    if len(groups) < 2:
        return []
    best, rows = groups[0], list[tuple[str, ...]]()
    for group in groups[1:comparison.MAX_TESTED]:
        found, interval = comparison.difference(best, group, measure), ("", "")
        if not math.isnan(found.low):
            interval = (f"{found.low:.3g} to {found.high:.3g}", "yes" if found.is_significant else "no")
        rows.append((group.name, f"{group.mean(measure):.4g}", str(len(group.runs)),
                     f"{found.value:.3g}", *interval, found.basis))
    header = ("settings", f"{measure}{' (%)' if measure == comparison.WER else ''}", "runs",
              "worse by", "95% interval", "significant", "interval from")
    return [html.heading(f"Difference to the best: {best.name}"), html.table(header, rows)]


def _settings(runs: Sequence[ComparedRun]) -> str:
    """Settings as rows, or as columns where there are more runs than that."""
    different = comparison.differences(runs)
    if not different:
        return html.note("None.")
    columns = [("setting", *(run.label for run in runs))]
    columns += [(path, *map(str, values)) for path, values in different.items()]
    if len(runs) <= _MOST_COLUMNS:
        return html.table(columns[0], columns[1:])
    columns = [("run", *columns[0][1:]), *columns[1:_MOST_COLUMNS + 1]]
    header, *rows = zip(*columns, strict=True)
    return html.table(header, rows)
