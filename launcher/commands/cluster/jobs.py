"""`ngsgd status`, `logs` and `stop`, for runs on this machine and for Ray jobs."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import time
from collections.abc import Iterator, Sequence
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
from ngsgd.launcher.reports.progress import ProgressTracker, final_lines, iteration_line
from ngsgd.launcher.run_state import is_elsewhere, may_be_alive, state_of
from ngsgd.launcher.text import masked, printable
from ngsgd.launcher.why.explain import explain
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
    """`ngsgd status`."""
    parser = Parser("status")
    parser.add_argument("what", nargs="?", metavar="RUN|JOB",
                        help=f"{_WHAT}; or a folder of runs (default: all runs)")
    parser.add_argument("--output-dir", default="runs", metavar="DIR",
                        help="folder of the runs to list (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help=JSON)
    jobs.add_arguments(parser)
    options = parser.parse_args(list(arguments))
    run = _run_of(options)
    is_folder = not run and not options.dashboard_url and bool(options.what) and (
        is_url(options.what) or Path(options.what).is_dir())
    folder = options.what if is_folder else options.output_dir
    is_about_jobs = not run and bool((options.what and not is_folder) or options.dashboard_url)
    if not is_about_jobs:
        _refuse_token(options)
    if run:
        answer = explain(run)
        found: Any = {**state_of(run), "why": answer.as_json()}
        lines = [*describe_run(found), *([f"why        {answer.short}", *answer.lines_of_next] if answer.short else [])]
    elif is_about_jobs:
        found = _jobs(_job_server(options), options.what)
        lines = [f"{job['job']:40} {job['state']:10} {job['entrypoint']}"
                 for job in found] or ["the cluster has no jobs"]
    else:
        # newest first
        runs = sorted(_runs_in(folder), key=lambda run: (run / "config.yaml").stat().st_mtime,
                      reverse=True)
        found = [state_of(run) for run in runs]
        lines = [_run_line(state) for state in found] or [f"{folder} holds no runs"]
    print(masked(json.dumps(found, indent=1) if options.json else printable("\n".join(lines))))
    return EXIT_OK


def logs(arguments: Sequence[str]) -> int:
    """`ngsgd logs`."""
    parser = Parser("logs")
    parser.add_argument("what", metavar="RUN|JOB", help=_WHAT)
    parser.add_argument("--follow", "-f", action="store_true",
                        help="print new lines until the run or job ends; its exit code becomes "
                             "that of logs")
    jobs.add_arguments(parser)
    options = parser.parse_args(list(arguments))
    run = _run_of(options)
    if run:
        _refuse_token(options)
        return _run_logs(RunFolder(run), follow=options.follow)
    server = _job_server(options)
    client = jobs.connect(server)
    with told(server, options.what):
        if not options.follow:
            print(printable(client.get_job_logs(options.what)), end="")
            return EXIT_OK
        return exit_code(jobs.follow(client, options.what))


def stop(arguments: Sequence[str]) -> int:
    """`ngsgd stop`."""
    parser = Parser("stop")
    parser.add_argument("what", metavar="RUN|JOB", help=_WHAT)
    parser.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS",
                        help="maximum time to wait for the end, in seconds (default: %(default)s); "
                             "the run finishes its outer iteration within failure.grace_period_s")
    jobs.add_arguments(parser)
    options = parser.parse_args(list(arguments))
    run = _run_of(options)
    if run:
        _refuse_token(options)
        return _stop_run(run, options.timeout)
    server = _job_server(options)
    client = jobs.connect(server)
    with told(server, options.what):
        if jobs.state_of(client, options.what) not in ENDED:
            client.stop_job(options.what)
        state = jobs.wait_until_ended(client, options.what, options.timeout)
    print(f"{options.what} {state}")
    if state not in ENDED:
        raise ClusterError(f"{options.what} did not end within {options.timeout:g} s; wait longer "
                           "with --timeout.")
    return EXIT_OK


def _runs_in(folder: str) -> list[Path]:
    """Folders of the runs in an output directory or below a URL."""
    if is_url(folder):
        return stored_run.fetched_runs(folder)
    return [config.parent for config in Path(folder).glob("*/config.yaml")]


def exit_code(state: str) -> int:
    """Return the exit code of a command that waited for the end of a job."""
    return EXIT_OK if state == "SUCCEEDED" else EXIT_RUN_FAILED


def _run_of(options: Any) -> Path | None:
    """The run that is named; None for a Ray job, which an explicit --dashboard-url selects."""
    return known_run(options.what, with_models=False) if options.what and not options.dashboard_url else None


def _refuse_token(options: Any) -> None:
    """Raise ConfigError for a token where no Ray cluster is asked."""
    if options.token_file:
        raise ConfigError("--token-file has no effect on the runs of this machine; add --dashboard-url URL for the jobs of a Ray "
                          "cluster, or remove it.")


def _job_server(options: Any) -> JobServer:
    """The server of the jobs; raises ConfigError for an unknown run where no Ray is in use."""
    server = jobs.job_server_of(options)
    if options.what and not jobs.is_server_given(options):
        try:
            require_dashboard(server.address)
        except ClusterError:
            # reports the newest runs
            find_run(options.what)
            raise
    return server


def _jobs(server: JobServer, job: str | None) -> list[dict[str, Any]]:
    client = jobs.connect(server)
    with told(server, job or ""):
        details = [client.get_job_info(job)] if job else client.list_jobs()
    return [{"job": one.submission_id or one.job_id, "state": str(one.status.value),
             "message": one.message,
             "entrypoint": one.entrypoint, "start_time_ms": one.start_time,
             "end_time_ms": one.end_time}
            for one in details if one.submission_id or job]


def _run_line(state: dict[str, Any]) -> str:
    result = state["wer"] or (progress_line(state) if state["num_outer_iters"] else "")
    return f"{Path(state['run']).name:48} {state['state']:10} {result}".rstrip()


def _run_logs(folder: RunFolder, *, follow: bool) -> int:
    """Print the progress lines of a run from its event log."""
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

    kind = event.get("event")
    if kind == "outer_iteration":
        return [iteration_line(OuterIterationRecord.from_json(event), is_speech=is_speech)]
    if kind == "incident":
        return [f"! iter {event['outer_iter'] + 1}: {event['message']}"]
    if kind == "finished":
        return final_lines(FinalReport.from_json(event))
    return []


def _stop_run(run: Path, timeout_s: float) -> int:
    """Send SIGTERM to the coordinator, which finishes its outer iteration and saves."""
    state = state_of(run)
    process = state["process"]
    if is_elsewhere(process) and stored_run.url_of(run):
        return _stop_stored_run(run, timeout_s)
    if not process_identity.is_alive(process):
        _refuse_unproved(run, state)
        print(f"{run} {state['state']}")
        return EXIT_OK
    _ask_to_end(run, process)
    deadline = time.monotonic() + timeout_s
    while process_identity.is_alive(process) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    if process_identity.is_alive(process):
        raise ClusterError(f"process {process['process_id']} of {run} did not end within "
                           f"{timeout_s:g} s; wait longer with --timeout.")
    end = state_of(_current(run))
    print(f"{run} {end['state']}" if end["state"] == "SUCCEEDED"
          else f"{run} {end['state']}; continue with: {end['resume']}")
    return EXIT_OK


def _stop_stored_run(run: Path, timeout_s: float) -> int:
    """Ask the coordinator of a run in object storage to stop; it does after its outer iteration."""
    url = stored_run.url_of(run)
    stored_run.stop(run)
    deadline = time.monotonic() + timeout_s
    while stored_run.holder(run)[0]:
        if time.monotonic() > deadline:
            raise ClusterError(f"{url} was asked to stop after its outer iteration, and did not end within {timeout_s:g} s; wait "
                               "longer with --timeout.")
        time.sleep(1.0)
    end = state_of(_current(run))
    print(f"{url} {end['state']}; continue with: {end['resume']}")
    return EXIT_OK


def _current(run: Path) -> Path:
    """Make the copy of a run in object storage current; the folders of other runs always are."""
    url = stored_run.url_of(run)
    return find_run(url, with_models=False) if url else run


def _ask_to_end(run: Path, process: dict[str, Any]) -> None:
    lock = RunFolder(run).lock
    held = holder_of(lock)
    # the lock of a run in object storage is its lease
    if not stored_run.url_of(run) and (held is None or held.get("holder") != process):
        raise ConfigError(f"process {process['process_id']}, which process.json of {run} names, "
                          "does not hold the lock of the run, and got no signal. If no process "
                          "trains the run, remove process.json.")
    try:
        process_identity.send_signal(process, signal.SIGTERM)
    except PermissionError as error:
        raise ConfigError(f"{run} is trained by process {process['process_id']} of another user; "
                          "ask them to stop it.") from error


def _refuse_unproved(run: Path, state: dict[str, Any]) -> None:
    """Raise ConfigError if a process that must not get a signal may train the run."""
    process = state["process"]
    if state["state"] in ENDED:
        return
    if is_elsewhere(process):
        where = "in another container" if process["host"] == socket.gethostname() else f"on {process['host']}"
        raise ConfigError(f"{run} is trained {where}; stop it there, or stop its Ray job by its "
                          "id.")
    if may_be_alive(process):
        raise ConfigError(f"{run / 'process.json'} names process {process['process_id']} without "
                          "its start time. It may be another program, and got no signal. Inspect "
                          f"it with `ps -fp {process['process_id']}`; if it trains the run: kill "
                          f"-TERM {process['process_id']}")
