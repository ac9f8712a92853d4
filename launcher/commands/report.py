"""`ngsgd report RUN`: one HTML file about a run, and its pictures as PNG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import EXIT_OK, ConfigError, NgsgdError
from ngsgd.files import read_json, write_text
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.console import version
from ngsgd.launcher.text import duration, masked
from ngsgd.pipeline.runs import config_file
from ngsgd.pipeline.runs.run_folder import RunFolder, find_run
from ngsgd.pipeline.runs.saved_config import read_config
from ngsgd.training.storage.event_log import read_events

if TYPE_CHECKING:
    from ngsgd.config import RunConfig

_DPI = 130


def command(arguments: Sequence[str]) -> int:
    """Writes report.html and report/*.png into the run's folder."""
    parser = Parser("report")
    parser.add_argument("run", metavar="RUN", help="a run folder, or its name under runs/; it may still be going on")
    parser.add_argument("--output", "-o", metavar="FILE", help="the page (default: report.html in the run's folder)")
    parser.add_argument("--no-spectra", action="store_true",
                        help="do not train one more job to measure the Fisher factors (it needs the training examples)")
    parser.add_argument("--mlflow", action="store_true", help="put the page and its pictures into the run in MLflow, too")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but the page's path")
    options = parser.parse_args(list(arguments))
    folder = RunFolder.open(find_run(options.run))
    target = Path(options.output) if options.output else folder.report
    say: Callable[[str], None] = (lambda _: None) if options.quiet else print
    write(folder, target, say, with_spectra=not options.no_spectra)
    if options.mlflow:
        _send(folder, target)
    print(target)
    return EXIT_OK


def _send(folder: RunFolder, page: Path) -> None:
    """To the MLflow run that belongs to the folder."""
    from ngsgd.launcher.mlflow.store import open_client, read_tracking, with_login

    stored = read_tracking(folder.path)
    if not stored:
        raise ConfigError(f"{folder.path} is in no MLflow store; leave out --mlflow.")
    client = open_client(with_login(str(stored["tracking_uri"])))
    client.log_artifact(stored["run_id"], str(page))
    client.log_artifacts(stored["run_id"], str(pictures_of(page)), "report")


def pictures_of(page: Path) -> Path:
    """The folder of a page's pictures beside it, so that a run on a read-only disk can have its page elsewhere."""
    return page.with_suffix("") if page.suffix else page.with_name(f"{page.name}-pictures")


def write(folder: RunFolder, target: Path, say: Callable[[str], None], *, with_spectra: bool = True) -> None:
    """Makes the page at `target`, and the pictures in a folder beside it."""
    from ngsgd.launcher.commands.info import state_of
    from ngsgd.launcher.reports.charts import charts_of

    config = read_config(folder.config)
    events = read_events(folder.events)
    if not any(event.get("event") == "outer_iteration" for event in events):
        raise ConfigError(f"{folder.path} has no outer iteration yet, so there is nothing to draw; wait for the first.")
    spectra: dict[str, list[float]] = {}
    if with_spectra and config.optimizer.kind == "ngsgd" and not config.task._target_:
        from ngsgd.pipeline.runs.fisher_spectra import fisher_spectra

        try:
            spectra = fisher_spectra(folder, config)
        except NgsgdError as error:
            say(f"without Fisher spectra: {str(error).partition(chr(10))[0]}")
    charts = list(charts_of(events, spectra, is_speech=not config.task._target_))
    pictures = pictures_of(target)
    pictures.mkdir(exist_ok=True)
    for chart in charts:
        chart.figure.savefig(pictures / f"{chart.name}.png", dpi=_DPI, format="png")
    write_text(target, _page(folder, config, events, charts, state_of(folder.path), pictures))


# The page -----------------------------------------------------------------------------------------


def _page(folder: RunFolder, config: RunConfig, events: Sequence[Mapping[str, Any]], charts: Sequence[Any],
          state: Mapping[str, Any], pictures: Path) -> str:
    from ngsgd.launcher.reports import page as html

    last = [event for event in events if event.get("event") == "outer_iteration"][-1]
    body = [html.tiles(_tiles(state, last)), html.heading("Curves"), html.pictures(charts)]
    words = _word_errors(folder)
    if words:
        body += [html.heading("Word errors"), html.table(("set", "result", "95% interval"), words)]
    incidents = [event for event in events if event.get("event") == "incident"]
    faults = [masked(f"outer iteration {event['outer_iter'] + 1}: {event['message']}") for event in incidents]
    body += [html.heading(f"Incidents ({len(faults)})"), html.incidents(faults[-100:]),
             html.heading("Settings"), html.table(("setting", "this run", "default"), _changed(config)),
             html.folded("all settings", config_file.to_yaml(config))]
    lead = f"{state['state']} - {folder.path}"
    return html.page(folder.path.name, lead, body, f"ngsgd {version('ngsgd')}, torch {version('torch')}; the pictures are in "
                                                    f"{pictures}, every figure in {folder.events}.")


def _tiles(state: Mapping[str, Any], last: Mapping[str, Any]) -> list[tuple[str, str]]:
    share = last["compute_s"] and sum(job["seconds"] for job in last["jobs"]) / (last["compute_s"] * max(last["num_jobs"], 1))
    found = [("outer iterations", f"{state['outer_iter']} / {state['num_outer_iters']}"), ("epochs", f"{state['epoch']:.2f}"),
             ("frames processed" if state["is_speech"] else "examples processed", f"{state['frames_processed']:,}"),
             ("training", duration(last["elapsed_s"])), *_scores(state, last),
             ("jobs at the end", str(last["num_jobs"])), ("of the last wait: jobs at work", f"{100 * min(share, 1.0):.0f}%")]
    return ([("word errors, test", f"{state['wer_percent']:.2f}%")] if state["wer_percent"] is not None else []) + found


def _scores(state: Mapping[str, Any], last: Mapping[str, Any]) -> list[tuple[str, str]]:
    if state["is_speech"]:
        return [("objf, held-out frames", f"{state['valid_objf']:.3f}"),
                ("held-out frames right", f"{100 * state['valid_accuracy']:.1f}%")]
    return [("valid/loss", f"{-state['valid_objf']:.4g}"),
            *((name, f"{value:.4g}") for name, value in last["diagnostics"].items() if name.startswith("valid/"))]


def _word_errors(folder: RunFolder) -> list[tuple[str, str, str]]:
    try:
        about = read_json(folder.decode / "wer.json")
        interval = about.get("test_interval_95", {})
        shown = f"{interval['low']:.2f} to {interval['high']:.2f}" if interval.keys() >= {"low", "high"} else ""
        return [("valid", str(about["valid"]), ""), ("test", str(about["test"]), shown)]
    # not decoded yet, or damaged
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _changed(config: RunConfig) -> list[tuple[str, str, str]]:
    """The settings that differ from their defaults."""
    from ngsgd.config import RunConfig
    from ngsgd.config.build import flatten

    default = flatten(RunConfig())
    return [(path, masked(str(value)), str(default.get(path, "")))
            for path, value in flatten(config).items() if value != default.get(path)]
