"""Client of the job server of a Ray cluster, for `ngsgd submit`, `status`, `logs` and `stop`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngsgd.errors import ClusterError, ConfigError, NgsgdError
from ngsgd.launcher.ray.probe import require_dashboard, require_version
from ngsgd.launcher.screen import say
from ngsgd.masking import printable

if TYPE_CHECKING:
    from ngsgd.launcher.arguments import Parser

ENDED = ("STOPPED", "SUCCEEDED", "FAILED")  # Ray's words for a job that is over
_DEFAULT = "http://127.0.0.1:8265"
_ADDRESS = "RAY_API_SERVER_ADDRESS"  # what `ray job` reads, too
_TOKEN_ERRORS = ("401", "unauthorized", "authentication", "token")
# settings of a run that joins the cluster of its Ray job, above those of a recipe
IN_JOB = ("cluster=ray", "cluster.address=auto")
POLL_INTERVAL_S = 0.5
_AGENT_S = 90.0
# from the end of the output of a job to its last state
_END_S = 30.0


@dataclass(frozen=True)
class JobServer:
    """Where the job server is, and the token that opens it."""

    address: str
    token_file: str = ""


def add_arguments(parser: Parser) -> None:
    """Add --dashboard-url and --token-file, which take precedence over the environment."""
    parser.add_argument("--dashboard-url", metavar="URL",
                        help=f"dashboard of the Ray cluster (default: ${_ADDRESS}, else {_DEFAULT})")
    parser.add_argument("--token-file", metavar="FILE",
                        help="token of the Ray cluster (default: $RAY_AUTH_TOKEN, $RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)")


def is_server_given(options: Any) -> bool:
    """Whether the command line or the environment names a cluster or its token."""
    return bool(options.dashboard_url or options.token_file or os.environ.get(_ADDRESS))


def job_server_of(options: Any) -> JobServer:
    address = options.dashboard_url or os.environ.get(_ADDRESS) or _DEFAULT
    return JobServer(address if "://" in address else f"http://{address}", options.token_file or "")


def connect(server: JobServer) -> Any:
    """A JobSubmissionClient; raises ClusterError if the server is missing or rejects the token."""
    require_version()
    require_dashboard(server.address)
    use_token(server)
    with told(server):
        from ray.job_submission import JobSubmissionClient
        return JobSubmissionClient(server.address)


@contextmanager
def told(server: JobServer, job: str = "") -> Iterator[None]:
    """Convert Ray's exceptions to one ClusterError."""
    try:
        yield
    except (ModuleNotFoundError, NgsgdError):
        raise
    except Exception as error:
        # Ray raises RuntimeError, ConnectionError, its own errors and requests' errors here
        said = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
        # `tail_job_logs` raises what the server answers
        if job and ("does not exist" in str(error) or ("404" in str(error) and f"/jobs/{job}/" in str(error))):
            raise ConfigError(f"{job} is neither a run nor a job of the cluster at {server.address}; see them with: ngsgd status "
                              f"--dashboard-url {server.address}") from error
        if job and "already exists" in str(error):
            raise ConfigError(f"job {job} exists on the cluster at {server.address}; choose another --job-name.") from error
        if any(word in str(error).lower() for word in _TOKEN_ERRORS):
            raise ClusterError(f"the cluster at {server.address} refuses this token, or none was given ({said}); give the one of "
                               "its head with --token-file FILE or RAY_AUTH_TOKEN.") from error
        if "No available agent" in str(error):
            raise ClusterError(f"the head at {server.address} has no agent to run jobs; another Ray there may have its port: "
                               "start the head with --dashboard-agent-listen-port=PORT.") from error
        raise ClusterError(f"no Ray job server answers at {server.address} ({said}); give the address of its dashboard with "
                           "--dashboard-url http://HEAD:8265.") from error


def submit(client: Any, **what: Any) -> str:
    """Submit a job and return its id; wait for the agent of a head that was just started."""
    deadline, waits = time.monotonic() + _AGENT_S, False
    while True:
        try:
            return str(client.submit_job(**what))
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            if not waits:
                say(f"waiting for the agent of the head, for at most {_AGENT_S:.0f} s")
            waits = True
            time.sleep(2 * POLL_INTERVAL_S)


def follow(client: Any, job: str) -> str:
    """Print the job's output until it ends; return its state then, or soon after."""
    import asyncio

    async def run() -> None:
        async for text in client.tail_job_logs(job):
            print(printable(text), end="", flush=True)

    asyncio.run(run())
    deadline = time.monotonic() + _END_S
    while (state := state_of(client, job)) not in ENDED and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return state


def state_of(client: Any, job: str) -> str:
    """In Ray's words."""
    return str(client.get_job_status(job).value)


def use_token(server: JobServer) -> None:
    """The file named on the command line has priority over the environment."""
    if server.token_file:
        if not Path(server.token_file).is_file():
            raise ConfigError(f"--token-file {server.token_file} is not there; copy it from the head's ~/.ray/auth_token.")
        os.environ["RAY_AUTH_TOKEN_PATH"] = server.token_file
        os.environ.pop("RAY_AUTH_TOKEN", None)
    has_token = any(name in os.environ for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if has_token or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
