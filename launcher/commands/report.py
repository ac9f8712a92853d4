"""`ngsgd report RUN`: one HTML page about a run, which starts with a verdict."""

from __future__ import annotations

import json
from argparse import SUPPRESS
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_OK, ConfigError, NgsgdError
from ngsgd.files import log_lines, parse_json_lines, read_json, read_log, write_text
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.console import version
from ngsgd.runs.run_folder import RunFolder, find_run
from ngsgd.training.storage.event_log import read_events, valid_events

if TYPE_CHECKING:
    from ngsgd.launcher.reports.charts import Chart
    from ngsgd.launcher.reports.checks import Check, Verdict
    from ngsgd.launcher.reports.history import RunHistory

_DPI = 130
# of the end of an event log whose jobs are in the page: in memory they take six times as much
_JOBS_BYTES = 64 << 20


def command(arguments: Sequence[str]) -> int:
    """Write report.html into the run's folder."""
    parser = Parser("report")
    parser.add_argument(
        "run",
        metavar="RUN",
        help="a run folder, or its name under runs/; running, failed or finished",
    )
    parser.add_argument(
        "--output", "-o", metavar="FILE", help="the page (default: report.html in the run's folder)"
    )
    parser.add_argument(
        "--spectra",
        action="store_true",
        help="train one more job to measure the spectra of the Fisher factors",
    )
    # the default since spectra are made on request
    parser.add_argument("--no-spectra", action="store_true", help=SUPPRESS)
    parser.add_argument(
        "--pictures",
        action="store_true",
        help="also write the charts as PNG into a folder next to the page",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write a trace of jobs, averaging and faults, for https://ui.perfetto.dev, instead of the page",
    )
    parser.add_argument(
        "--mlflow",
        action="store_true",
        help="also add the page to the artifacts of the run in MLflow",
    )
    parser.add_argument(
        "--quiet", "-q", action="store_true", help="print only the path of the page"
    )
    options = parser.parse_args(list(arguments))
    folder = RunFolder.open(find_run(options.run, with_models=options.spectra))
    if options.trace:
        _write_trace(folder, Path(options.trace))
        return EXIT_OK
    target = Path(options.output) if options.output else folder.report
    say: Callable[[str], None] = (lambda _: None) if options.quiet else print
    say(write(folder, target, say, with_spectra=options.spectra, with_pictures=options.pictures))
    if options.mlflow:
        _send(folder, target, with_pictures=options.pictures)
    print(target)
    return EXIT_OK


def _write_trace(folder: RunFolder, path: Path) -> None:
    from ngsgd.launcher.timeline.trace import trace_of

    events = read_events(folder.events)
    if not any(event["event"] == "outer_iteration" for event in events):
        raise ConfigError(f"{folder.path} has no complete outer iteration yet, so there is nothing to trace.")
    write_text(path, json.dumps(trace_of(folder.path.name, events)))
    print(path)


def _send(folder: RunFolder, page: Path, *, with_pictures: bool) -> None:
    """To the MLflow run that belongs to the folder."""
    from ngsgd.launcher.mlflow.store import open_client, read_tracking, with_login

    stored = read_tracking(folder.path)
    if not stored:
        raise ConfigError(f"{folder.path} is in no MLflow store; run the command without --mlflow.")
    client = open_client(with_login(str(stored["tracking_uri"])))
    client.log_artifact(stored["run_id"], str(page))
    if with_pictures:
        client.log_artifacts(stored["run_id"], str(pictures_of(page)), "report")


def pictures_of(page: Path) -> Path:
    """The folder of a page's pictures, next to the page, which may lie outside the run."""
    return page.with_suffix("") if page.suffix else page.with_name(f"{page.name}-pictures")


def write(
    folder: RunFolder,
    target: Path,
    say: Callable[[str], None],
    *,
    with_spectra: bool = False,
    with_pictures: bool = False,
) -> str:
    """Write the page, and on request the pictures next to it; return the verdict in one line."""
    from ngsgd.launcher.reports.charts import charts_of
    from ngsgd.launcher.reports.checks import checks_of, verdict_of
    from ngsgd.launcher.reports.svg import themed

    run = history_of(folder)
    checks = checks_of(run)
    verdict = verdict_of(run, checks)
    with themed():
        charts = charts_of(run, _spectra(folder, run, say) if with_spectra else {})
        text = _page(folder, run, charts, verdict, checks)
    if with_pictures:
        pictures = pictures_of(target)
        pictures.mkdir(exist_ok=True)
        for chart in (chart for group in charts.values() for chart in group):
            chart.figure.savefig(
                pictures / f"{chart.name}.png", dpi=_DPI, format="png", facecolor="white"
            )
    write_text(target, text)
    return f"{verdict.word}: {verdict.sentence}"


def history_of(folder: RunFolder) -> RunHistory:
    """Read the files of a run.

    Raises:
        ConfigError: Its process has not written anything yet.
    """
    from ngsgd.launcher.reports.comparison import interval_in
    from ngsgd.launcher.reports.history import RunHistory
    from ngsgd.launcher.run_state import state_of
    from ngsgd.runs.saved_config import read_config

    config, events = read_config(folder.config), _without_old_jobs(folder.events)
    if all(event["event"] == "opened" for event in events):
        raise ConfigError(
            f"{folder.path} has no event yet, so there is nothing to report; wait for its first "
            "outer iteration."
        )
    try:
        interval = interval_in(read_json(folder.decode / "wer.json"))
    # not decoded, or damaged
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        interval = None
    # a long ledger is read line by line
    ledger = [line for text in (log_lines(folder.ledger) if folder.ledger.is_file() else ())
              if text.startswith('{"event": "started"') for line in parse_json_lines(text)]
    return RunHistory(folder.path.name, config, events, state_of(folder.path), ledger, interval)


def _without_old_jobs(path: Path) -> list[dict[str, Any]]:
    """The events of a run; of a long log, the old outer iterations have no records of jobs.

    Scores, rates and times are complete, and the page reports which jobs are not counted.
    """
    found = list[dict[str, Any]]()
    left = path.stat().st_size if path.is_file() else 0
    for text in log_lines(path) if path.is_file() else ():
        for event in valid_events(parse_json_lines(text)):
            is_old = left > _JOBS_BYTES and event["event"] == "outer_iteration"
            found.append({**event, "jobs": [], "relative_change": {}, "without_jobs": True} if is_old else event)
        left -= len(text) + 1
    return found


def _spectra(
    folder: RunFolder, run: RunHistory, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Empty, with a reason, for a run that has none."""
    from ngsgd.runs.fisher_spectra import fisher_spectra

    if run.config.optimizer.kind != "ngsgd":
        say(f"without Fisher spectra: optimizer.kind is {run.config.optimizer.kind}")
        return {}
    try:
        return fisher_spectra(folder, run.config)
    except NgsgdError as error:
        say(f"without Fisher spectra: {str(error).partition(chr(10))[0]}")
        return {}


def _page(
    folder: RunFolder,
    run: RunHistory,
    charts: Mapping[str, Sequence[Chart]],
    verdict: Verdict,
    checks: Sequence[Check],
) -> str:
    from ngsgd.asr.decode.scoring import read_per_utterance
    from ngsgd.launcher.reports import page as html
    from ngsgd.launcher.reports import sections
    from ngsgd.runs.config_file import to_yaml

    utterances = read_per_utterance(_text_of(folder.decode / "test.per_utt.txt"))
    without = [event["outer_iter"] + 1 for event in run.iterations if event.get("without_jobs")]
    body = [
        *([html.note(f"The log of this run has {folder.events.stat().st_size / 1e6:,.0f} MB. Jobs, workers and layers are those "
                     f"after outer iteration {without[-1]}; scores, rates and times are complete.")] if without else []),
        *sections.summary(run, verdict, checks),
        *sections.quality(run, charts.get("learning", []), _word_errors(folder)),
        *_decoding_weights(folder),
        *sections.words(utterances, _text_of(folder.decode / "test.per_spk.txt")),
        *sections.time_spent(run, charts.get("time", [])),
        *sections.interruptions(run),
        *sections.natural_gradient(run, charts.get("layers", [])),
        *sections.settings(run, to_yaml(run.config)),
    ]
    return html.page(
        run.name,
        f"{run.state['state']} - {folder.path}",
        body,
        f"ngsgd {version('ngsgd')}, torch {version('torch')}. Every figure is in {folder.events}.",
    )


def _text_of(path: Path) -> str:
    """Empty where nothing was decoded."""
    try:
        return read_log(path)
    except (OSError, ValueError):
        return ""


def _decoding_weights(folder: RunFolder) -> list[str]:
    """Empty where nothing was decoded, and for a damaged file."""
    from ngsgd.launcher.reports import sections

    try:
        return [*sections.decoding_weights(read_json(folder.decode / "wer.json"))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return []


def _word_errors(folder: RunFolder) -> list[tuple[str, str, str, str]]:
    """(set, WER, interval, counts) of the rungs below the run and of the final model.

    Empty where nothing was decoded.
    """
    from ngsgd.launcher.reports.comparison import interval_in
    from ngsgd.runs.rungs import rungs_of

    try:
        about = read_json(folder.decode / "wer.json")
        low, high = interval_in(about)
        results = {f"{of}, {rung.name}": result for rung in rungs_of(folder.rungs)
                   for of, result in (("validation", rung.valid), ("test", rung.test)) if result}
        results |= {"validation": str(about["valid"]), "test": str(about["test"])}
    # not decoded yet, or damaged
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
    return [
        (
            name,
            result.removeprefix("%WER ").partition(" ")[0],
            f"{low:.2f} to {high:.2f}" if name == "test" else "",
            result.partition("[ ")[2].removesuffix(" ]"),
        )
        for name, result in results.items()
    ]
