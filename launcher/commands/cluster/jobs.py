"""`ngsgd status`, `logs` and `stop`, for runs on this machine and for Ray jobs."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ngsgd import process_identity
from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, ClusterError, ConfigError
from ngsgd.files import MAX_LINE_BYTES, open_regular, parse_json_lines
from ngsgd.launcher.arguments import JSON, Parser
from ngsgd.launcher.commands.info import describe_run, end_lines, progress_line
from ngsgd.launcher.ray import jobs
from ngsgd.launcher.ray.jobs import ENDED, JobServer, told
from ngsgd.launcher.ray.probe import require_dashboard
from ngsgd.launcher.reports.progress import ProgressTracker, figures_in, final_lines, iteration_line
from ngsgd.launcher.run_state import is_elsewhere, may_be_alive, state_of
from ngsgd.launcher.screen import loading
from ngsgd.launcher.why.explain import explain
from ngsgd.masking import masked, printable
from ngsgd.object_storage.urls import is_url
from ngsgd.runs import stored_run
from ngsgd.runs.run_folder import RunFolder, find_run, known_run
from ngsgd.training.storage.event_log import valid_events
from ngsgd.training.storage.lock import holder_of

_POLL_S = 0.3
# each reads an object of the bucket
_POLL_STORED_S = 5.0
_WHAT = "run folder, its name under runs/, its URL, or id of a Ray job"


def status(arguments: Sequence[str]) -> int:
    parser = Parser("status")
    parser.add_argument("what", nargs="?", metavar="RUN|JOB", help=f"{_WHAT}; or a folder of runs (default: all runs)")
    parser.declare({"--output-dir DIR": ("runs", "folder of the runs to list"), "--json": JSON})
    jobs.add_arguments(parser)
    options = parser.parse_args(arguments)
    run, what = _run_of(options), options.what
    is_folder = bool(not run and not options.dashboard_url and what and (is_url(what) or Path(what).is_dir()))
    if run:
        answer = explain(run)
        found: Any = {**state_of(run), "why": answer.as_json()}
        lines = describe_run(found)
        lines += [f"why        {answer.short}", *answer.lines_of_next] if answer.short else []
    elif options.dashboard_url or (what and not is_folder):
        client, server = _connected(options)
        with told(server, what or ""):
            details = [client.get_job_info(what)] if what else client.list_jobs()
            # the machine of this command need not see the folder of the run
            figures = figures_in(client.get_job_logs(what)) if what else {}
        found = [{"job": one.submission_id or one.job_id, "state": str(one.status.value),
                  "message": one.message, "entrypoint": one.entrypoint,
                  "start_time_ms": one.start_time, "end_time_ms": one.end_time, **figures}
                 for one in details if one.submission_id or what]
        lines = [f"{job['job']:40} {job['state']:10} {job['entrypoint']}" for job in found] or ["the cluster has no jobs"]
        shown = [f"{name} {value}" for name, value in figures.get("progress", {}).items()]
        lines += [f"progress   {', '.join(shown)}"] if shown else []
        lines += [f"result     {figures['wer']}"] if "wer" in figures else []
    else:
        _refuse_token(options)
        folder = what if is_folder else options.output_dir
        runs = (stored_run.fetched_runs(folder) if is_url(folder) else
                [config.parent for config in Path(folder).glob("*/config.yaml")])
        runs = sorted(runs, key=lambda run: (run / "config.yaml").stat().st_mtime, reverse=True)
        found = [state_of(run) for run in runs]
        results = [one["wer"] or (progress_line(one) if one["num_outer_iters"] else "") for one in found]
        lines = [f"{Path(one['run']).name:48} {one['state']:10} {result}".rstrip()
                 for one, result in zip(found, results, strict=True)] or [f"{folder} holds no runs"]
    print(masked(json.dumps(found, indent=1) if options.json else printable("\n".join(lines))))
    return EXIT_OK


def logs(arguments: Sequence[str]) -> int:
    parser = Parser("logs")
    parser.add_argument("what", metavar="RUN|JOB", help=_WHAT)
    parser.declare({"--follow -f": "print new lines until the run or job ends; its exit code becomes that of logs"})
    jobs.add_arguments(parser)
    options = parser.parse_args(arguments)
    if run := _run_of(options):
        return _run_logs(RunFolder(run), follow=options.follow)
    client, server = _connected(options)
    with told(server, options.what):
        if not options.follow:
            print(printable(client.get_job_logs(options.what)), end="")
            return EXIT_OK
        return exit_code(jobs.follow(client, options.what))


def stop(arguments: Sequence[str]) -> int:
    parser = Parser("stop")
    parser.add_argument("what", metavar="RUN|JOB", help=_WHAT)
    parser.declare({"--timeout SECONDS": (
        60.0, "maximum time to wait for the end, in seconds (default: %(default)s); the run "
              "finishes its outer iteration within failure.grace_period_s")})
    jobs.add_arguments(parser)
    options = parser.parse_args(arguments)
    if run := _run_of(options):
        return _stop_run(run, options.timeout)
    client, server = _connected(options)
    with told(server, options.what):
        if jobs.state_of(client, options.what) not in ENDED:
            client.stop_job(options.what)
        _wait_until(lambda: jobs.state_of(client, options.what) in ENDED, options.timeout, options.what)
        print(f"{options.what} {jobs.state_of(client, options.what)}")
    return EXIT_OK


def exit_code(state: str) -> int:
    """Return the exit code of a command that waited for the end of a job."""
    return EXIT_OK if state == "SUCCEEDED" else EXIT_RUN_FAILED


def _run_of(options: Any) -> Path | None:
    """The run that is named; None for a Ray job, which an explicit --dashboard-url selects."""
    if not options.what or options.dashboard_url:
        return None
    if run := known_run(options.what, with_models=False):
        _refuse_token(options)
    return run


def _refuse_token(options: Any) -> None:
    if options.token_file:
        raise ConfigError("--token-file has no effect on the runs of this machine; add "
                          "--dashboard-url URL for the jobs of a Ray cluster, or remove it.")


def _connected(options: Any) -> tuple[Any, JobServer]:
    """Client and server of the jobs; raises ConfigError for an unknown run without Ray."""
    server = jobs.job_server_of(options)
    with loading(f"asking {server.address}"):
        if options.what and not jobs.is_server_given(options):
            try:
                require_dashboard(server.address)
            except ClusterError:
                # reports the newest runs
                find_run(options.what)
                raise
        return jobs.connect(server), server


def _run_logs(folder: RunFolder, *, follow: bool) -> int:
    progress, read = ProgressTracker(), 0
    is_speech = bool(state_of(folder.path)["is_speech"])
    while True:
        # before reading, so that no event between reading and this check is lost
        _current(folder.path)
        is_over = state_of(folder.path)["state"] in (*ENDED, "LOST")
        for event, end_of_line in events_after(folder.events, read):
            read = end_of_line
            for line in _lines_of(event, is_speech=is_speech):
                progress.report(line)
        if is_over or not follow:
            break
        time.sleep(_POLL_STORED_S if stored_run.url_of(folder.path) else _POLL_S)
    end = state_of(folder.path)
    if end["state"] in ("FAILED", "STOPPED", "LOST"):
        for line in end_lines(end):
            progress.report(line)
    if not follow:
        return EXIT_OK
    return EXIT_INTERRUPTED if end["state"] == "STOPPED" else exit_code(end["state"])


def events_after(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield (event, byte after its line) of the complete lines after the first bytes of a log."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(start)
        while (line := file.readline(MAX_LINE_BYTES)).endswith(b"\n"):
            start += len(line)
            yield from ((event, start) for event in valid_events(parse_json_lines(line.decode("utf-8", errors="replace"))))


def _lines_of(event: dict[str, Any], *, is_speech: bool) -> list[str]:
    from ngsgd.training.records import FinalReport, OuterIterationRecord
    match event.get("event"):
        case "outer_iteration":
            return [iteration_line(OuterIterationRecord.from_json(event), is_speech=is_speech)]
        case "incident":
            return [f"! iter {event['outer_iter'] + 1}: {event['message']}"]
        case "finished":
            return final_lines(FinalReport.from_json(event))
    return []


def _stop_run(run: Path, timeout_s: float) -> int:
    """Ask the coordinator to finish its outer iteration, save and end: by SIGTERM or its bucket."""
    state, url = state_of(run), stored_run.url_of(run)
    process, where = state["process"], url or run
    if is_elsewhere(process) and url:
        stored_run.stop(run)
        _wait_until(lambda: not stored_run.holder(run)[0], timeout_s,
                    f"{url} was asked to stop after its outer iteration, and", 1.0)
    elif not process_identity.is_alive(process):
        _refuse_unproved(run, state)
        print(f"{where} {state['state']}")
        return EXIT_OK
    else:
        held = holder_of(RunFolder(run).lock)
        # the lock of a run in object storage is its lease
        if not url and (held is None or held.get("holder") != process):
            raise ConfigError(f"process {process['process_id']}, which process.json of {run} names, "
                              "does not hold the lock of the run, and got no signal. If no process "
                              "trains the run, remove process.json.")
        try:
            process_identity.send_signal(process, signal.SIGTERM)
        except PermissionError as error:
            raise ConfigError(f"{run} is trained by process {process['process_id']} of another user; "
                              "ask them to stop it.") from error
        _wait_until(lambda: not process_identity.is_alive(process), timeout_s, f"process {process['process_id']} of {run}")
    end = state_of(_current(run))
    print(f"{where} {end['state']}" if end["state"] == "SUCCEEDED" else f"{where} {end['state']}; continue with: {end['resume']}")
    return EXIT_OK


def _wait_until(is_over: Callable[[], bool], timeout_s: float, what: str, poll_s: float = _POLL_S) -> None:
    deadline = time.monotonic() + timeout_s
    with loading(f"waiting for the end, at most {timeout_s:g} s"):
        while not is_over():
            if time.monotonic() > deadline:
                raise ClusterError(f"{what} did not end within {timeout_s:g} s; wait longer with --timeout.")
            time.sleep(poll_s)


def _current(run: Path) -> Path:
    """Make the copy of a run in object storage current; the folders of other runs always are."""
    url = stored_run.url_of(run)
    return find_run(url, with_models=False) if url else run


def _refuse_unproved(run: Path, state: dict[str, Any]) -> None:
    """Raise ConfigError if a process that must not get a signal may train the run."""
    process = state["process"]
    if state["state"] in ENDED:
        return
    if is_elsewhere(process):
        where = "in another container" if process["host"] == socket.gethostname() else f"on {process['host']}"
        raise ConfigError(f"{run} is trained {where}; stop it there, or stop its Ray job by its id.")
    if may_be_alive(process):
        raise ConfigError(f"{run / 'process.json'} names process {process['process_id']} without "
                          "its start time. It may be another program, and got no signal. Inspect "
                          f"it with `ps -fp {process['process_id']}`; if it trains the run: kill "
                          f"-TERM {process['process_id']}")
