"""`ngsgd report RUN`: one HTML page about a run, which starts with a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import log_lines, parse_json_lines, read_json, write_text
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.screen import loading
from ngsgd.runs.run_folder import RunFolder, find_run
from ngsgd.training.storage.event_log import valid_events
from ngsgd.word_errors import WordErrors

if TYPE_CHECKING:
    from ngsgd.launcher.reports.checks import Check, Verdict
    from ngsgd.launcher.reports.history import RunHistory

# of the end of an event log whose jobs are in the page: in memory they take six times as much
_JOBS_BYTES = 64 << 20


def command(arguments: Sequence[str]) -> int:
    """Write report.html into the run's folder."""
    parser = Parser("report")
    parser.declare({
        "RUN": "a run folder, or its name under runs/; running, failed or finished",
        "--output -o FILE": "the page (default: report.html in the run's folder)",
        "--mlflow": "also add the page to the artifacts of the run in MLflow",
        "--quiet -q": "print only the path of the page"})
    options = parser.parse_args(arguments)
    folder = RunFolder.open(find_run(options.run, with_models=False))
    target = Path(options.output) if options.output else folder.report
    with loading():
        verdict = write(folder, target)
    if not options.quiet:
        print(verdict)
    if options.mlflow:
        from ngsgd.launcher.mlflow.store import open_client, read_tracking, with_login
        stored = read_tracking(folder.path)
        if not stored:
            raise ConfigError(f"{folder.path} is in no MLflow store; run the command without --mlflow.")
        client = open_client(with_login(str(stored["tracking_uri"])))
        client.log_artifact(stored["run_id"], str(target))
    print(target)
    return EXIT_OK


def write(folder: RunFolder, target: Path) -> str:
    """Write the page; return the verdict in one line."""
    from ngsgd.launcher.reports.checks import checks_of, verdict_of
    run = history_of(folder)
    checks = checks_of(run)
    verdict = verdict_of(run, checks)
    write_text(target, _page(folder, run, verdict, checks))
    return f"{verdict.word}: {verdict.sentence}"


def history_of(folder: RunFolder) -> RunHistory:
    """Read the files of a run; raise ConfigError before its first event."""
    from ngsgd.launcher.reports.comparison import interval_of
    from ngsgd.launcher.reports.history import RunHistory
    from ngsgd.launcher.run_state import state_of
    from ngsgd.runs.config_file import read_config
    config, events = read_config(folder.config), list[dict[str, Any]]()
    # of a long log, the old outer iterations have no records of jobs, which the page reports
    left = folder.events.stat().st_size if folder.events.is_file() else 0
    for text in log_lines(folder.events) if folder.events.is_file() else ():
        for event in valid_events(parse_json_lines(text)):
            if left > _JOBS_BYTES and event["event"] == "outer_iteration":
                event |= {"jobs": [], "relative_change": {}, "without_jobs": True}
            events.append(event)
        left -= len(text) + 1
    if all(event["event"] == "opened" for event in events):
        raise ConfigError(f"{folder.path} has no event yet, so there is nothing to report; wait "
                          "for its first outer iteration.")
    # a long ledger is read line by line
    ledger = [line for text in (log_lines(folder.ledger) if folder.ledger.is_file() else ())
              if text.startswith('{"event": "started"') for line in parse_json_lines(text)]
    return RunHistory(folder.path.name, config, events, state_of(folder.path), ledger, interval_of(folder))


def _page(folder: RunFolder, run: RunHistory, verdict: Verdict, checks: Sequence[Check]) -> str:
    from ngsgd.launcher.reports import page as html
    from ngsgd.launcher.reports import sections
    from ngsgd.launcher.reports.comparison import utterances_of
    from ngsgd.runs.config_file import to_yaml
    word_errors, weights, speakers = _decoded(folder)
    without = [event["outer_iter"] + 1 for event in run.iterations if event.get("without_jobs")]
    body = []
    if without:
        body.append(html.note(
            f"The log of this run has {folder.events.stat().st_size / 1e6:,.0f} MB. Jobs, workers "
            f"and layers are those after outer iteration {without[-1]}; scores, rates and times are complete."))
    body += [*sections.summary(run, verdict, checks), *sections.quality(run, word_errors), *weights,
             *sections.words(utterances_of(folder), speakers), *sections.time_spent(run),
             *sections.interruptions(run), *sections.natural_gradient(run),
             *sections.settings(run, to_yaml(run.config))]
    return html.page(
        run.name, f"{run.state['state']} - {folder.path}", body,
        f"ngsgd {version('ngsgd')}, torch {version('torch')}. Every figure is in {folder.events}.")


def _decoded(folder: RunFolder) -> tuple[list[tuple[str, str, str, str]], list[str], dict[str, WordErrors]]:
    """(set, WER, interval, counts) of the rungs below the run and of the final model; the section
    about the decoding weights; and the errors of the speakers.

    All empty where nothing was decoded, and for a damaged file.
    """
    from ngsgd.launcher.reports import sections
    from ngsgd.runs.rungs import rungs_of
    try:
        about = read_json(folder.decode / "wer.json")
        low, high = (float(about["test_interval_95"][name]) for name in ("low", "high"))
        results = {f"validation, {rung.name}": rung.valid for rung in rungs_of(folder.rungs) if rung.valid}
        results |= {"validation": WordErrors.of_json(about["valid"]), "test": WordErrors.of_json(about["test"])}
        speakers = {name: WordErrors.of_json(one) for name, one in about["test_by_speaker"].items()}
        weights = [*sections.decoding_weights(about)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return [], [], {}
    rows = [(name, f"{one.wer:.2f}" if one.num_words else "(no words)", f"{low:.2f} to {high:.2f}" if name == "test" else "",
             f"{one.num_errors} / {one.num_words}, {one.insertions} ins, {one.deletions} del, {one.substitutions} sub")
            for name, one in results.items()]
    return rows, weights, speakers
