"""Figures and tables from benchmarks/paper/results."""

from __future__ import annotations

import functools
import itertools
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import cast

from benchmarks.paper import clock, frontier, many_jobs
from benchmarks.paper.cells import (
    COMPRESSED,
    CONTROLS,
    JOBS,
    LIMITED,
    MATRIX_METHODS,
    MATRIX_OUTERS,
    METHODS,
    PERIODS,
    REMEDIES,
    SYNCHRONOUS,
    SYNCHRONOUS_RATES,
    TASKS,
    grid,
)
from benchmarks.paper.runs import Line, best_rates, best_synchronous_rate, known
from ngsgd.launcher.reports import figures
from ngsgd.ops.compression import Codec, num_bytes

Group = dict[tuple[str, str, int], list[Line]]   # by method, outer optimizer, number of jobs
_RAMP = "ramp from a quarter"
_STYLES = {"online-ng": "-", "sgd": "--"}


def write(page: Path, folder: Path) -> None:
    """Write the tables between their markers in the page, and the figures into the folder."""
    text = page.read_text(encoding="utf-8")
    for task in TASKS:
        text = between(text, f"{task} runs", many_jobs.all_runs(task, _spread))
        group = _by_setting(task)
        if f"<!-- {task} objf -->" not in text:
            continue
        _draw(task, group, folder / f"results-{task}.png")
        text = between(text, f"{task} rates", _rates(task))
        for name, key, digits in (("objf", "valid_objf", 3), ("wer", "wer_percent", 2), ("clipped", "clipped", 2)):
            text = between(text, f"{task} {name}", _matrix(group, key, digits))
        text = between(text, f"{task} remedies", _variants(group, ("sqrt-gain", *REMEDIES)))
        text = between(text, f"{task} periods", _variants(group, ("sqrt-gain", *PERIODS)))
        text = between(text, f"{task} many jobs", many_jobs.table(task, _spread))
        text = between(text, f"{task} compressed", _compressed(task))
        text = between(text, f"{task} controls", _variants(group, ("sqrt-gain", *CONTROLS)))
    text = between(text, "digits epochs", many_jobs.by_epochs(_spread))
    text = between(text, "frontier", frontier.table(_spread))
    page.write_text(text, encoding="utf-8")


def _by_setting(task: str) -> Group:
    """The runs at each method's best rate."""
    group: Group = defaultdict(list)
    for line in known(task).values():
        setting = line["method"], line["outer"], line["num_jobs"]
        if "diverged" not in line and line["rate"] == _rate(task, *setting):
            group[setting].append(line)
    return group


@functools.cache
def _rate(task: str, method: str, outer: str, num_jobs: int) -> float | None:
    if outer in SYNCHRONOUS and method in (*SYNCHRONOUS_RATES, *LIMITED):
        return best_synchronous_rate(task, outer, num_jobs, method)
    return best_rates(task, (method,)).get(method)


def between(text: str, name: str, table: str) -> str:
    """Return the text with this table between the markers of that name."""
    begin, end = f"<!-- {name} -->", "<!-- end -->"
    return re.sub(f"{re.escape(begin)}.*?{end}", lambda _: f"{begin}\n\n{table}\n\n{end}", text, flags=re.DOTALL)


def _matrix(group: Group, key: str, digits: int) -> str:
    """Rows by method and outer optimizer, columns by number of jobs: mean (lowest to highest)."""
    jobs = [num_jobs for num_jobs in JOBS if any(setting[2] == num_jobs for setting in group)]
    rows = [f"| method | outer | {' | '.join(map(str, jobs))} |", "|---" * (2 + len(jobs)) + "|"]
    for method, outer in itertools.product(MATRIX_METHODS, MATRIX_OUTERS):
        cells = [group.get((method, "average" if num_jobs == 1 else outer, num_jobs), []) for num_jobs in jobs]
        if any(cell for cell, num_jobs in zip(cells, jobs, strict=True) if num_jobs > 1) or (outer == "average" and any(cells)):
            rows.append(f"| {method} | {outer} | {' | '.join(_spread(cell, key, digits) for cell in cells)} |")
    return "\n".join(rows)


def _variants(group: Group, outers: tuple[str, ...]) -> str:
    """One line each, for the numbers of jobs with a run of any setting but the first."""
    jobs = {setting[2] for setting in group if setting[1] in outers[1:]}
    if not jobs:
        return "Not run yet."
    rows = ["| jobs | setting | method | seeds | synchronizations | validation objf | validation %WER | test %WER |",
            "|---|---|---|---|---|---|---|---|"]
    for num_jobs, outer, method in itertools.product(sorted(jobs), outers, METHODS):
        lines = group.get((method, outer, num_jobs))
        if lines:
            exchanges = lines[0]["frames"] / (TASKS[lines[0]["task"]].minibatch * num_jobs) \
                if outer == "synchronous, equal frames" else lines[0]["outer_iters"]
            rows.append(f"| {num_jobs} | {outer} | {method} | {len(lines)} | {exchanges:.0f} | {_spread(lines, 'valid_objf', 3)} | "
                        f"{_spread(lines, 'valid_wer_percent', 2)} | {_spread(lines, 'wer_percent', 2)} |")
    return "\n".join(rows)


def _compressed(task: str) -> str:
    """Rows of each outer optimizer that ran with compressed deltas, at the rates of these runs."""
    lines = [line for line in known(task).values() if "diverged" not in line]
    rows = ["| jobs | outer optimizer | compression | bytes | seeds | validation objf | validation %WER | test %WER |",
            "|---" * 8 + "|"]
    settings = {(line["num_jobs"], line["outer"].split(", ")[0], line["rate"], line["method"])
                for line in lines if line["outer"] in COMPRESSED}
    for (num_jobs, base, rate, method), codec in itertools.product(sorted(settings), ("", "int8", "sparse")):
        outer = f"{base}, {codec}" if codec else base
        own = [line for line in lines if (line["num_jobs"], line["outer"], line["rate"], line["method"])
               == (num_jobs, outer, rate, method)]
        if own:
            size = f"1/{4e6 / sum(num_bytes(10 ** 6, cast(Codec, codec))):.0f}" if codec else "1"
            rows.append(f"| {num_jobs} | {base} | {codec or 'none'} | {size} | {len(own)} | {_spread(own, 'valid_objf', 3)} | "
                        f"{_spread(own, 'valid_wer_percent', 2)} | {_spread(own, 'wer_percent', 2)} |")
    return "\n".join(rows) if len(rows) > 2 else "Not run yet."


def _spread(lines: list[Line], key: str, digits: int) -> str:
    values = [line[key] for line in lines]
    if not values:
        return ""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _rates(task: str) -> str:
    """The search for the learning rates: validation objf of seed 0 with one job."""
    lines = known(task)
    found = {(cell.method, cell.rate): lines[cell.key()] for cell in grid(task, MATRIX_METHODS) if cell.key() in lines}
    rates = sorted({rate for _, rate in found})
    rows = [f"| method | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (1 + len(rates)) + "|"]
    for method in MATRIX_METHODS:
        values = [found.get((method, rate)) for rate in rates]
        if any(values):
            rows.append(f"| {method} | " + " | ".join("" if line is None else "diverged" if "diverged" in line
                                                      else f"{line['valid_objf']:.3f}" for line in values) + " |")
    return "\n".join(rows)


def _draw(task: str, group: Group, path: Path) -> None:
    """Figure 1: validation objf by frames, and by time with as many cores as jobs."""
    figure = figures.new_figure(11.0, 4.8)
    left, right = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(JOBS, figures.RUN_COLORS, strict=False))
    ends = []
    for (method, outer, num_jobs), lines in sorted(group.items()):
        is_ramp = outer == _RAMP and method == "online-ng"
        if not is_ramp and (outer != ("average" if num_jobs == 1 else "sqrt-gain") or method not in ("online-ng", "sgd")):
            continue
        line = min(lines, key=lambda one: one["seed"])
        frames, objf = [point[0] / 1e6 for point in line["curve"]], [point[2] for point in line["curve"]]
        ends.append(objf[-1])
        how = {"color": "black" if is_ramp else colors[num_jobs], "linestyle": _STYLES[method], "linewidth": 1.6}
        jobs = f"{max(1, num_jobs // 4)} to {num_jobs}" if is_ramp else f"{num_jobs}"
        left.plot(frames, objf, label=f"{jobs} {'NG' if method == 'online-ng' else 'SGD'}", **how)
        job_s = clock.seconds_per_job(task, method)
        if job_s is not None:
            minutes = line["outer_iters"] * (job_s + line["average_s"]) / 60
            share = [index / (len(objf) - 1) for index in range(len(objf))] if is_ramp else [frame / frames[-1] for frame in frames]
            right.plot([minutes * part for part in share], objf, **how)
    figures.label(left, "By data", "valid objf, nats per frame")
    left.set_xlabel("frames processed (millions)")
    figures.label(right, "By time, a core for each job", "")
    right.set_xscale("log")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right center", frameon=False)
    right.set_xlabel("minutes (simulated: see the text)")
    left.set_ylim(min(ends) - 0.25, max(ends) + 0.05)
    figure.suptitle(f"{task}: natural gradient (solid) and plain SGD (dashed), gain sqrt(N)", fontsize=12)
    figures.save(figure, path)
