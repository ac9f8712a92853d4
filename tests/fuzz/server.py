"""Runs `ngsgd` commands in forks of one process that has imported everything once.

Importing takes seconds and a command on tiny data a fraction of one.  The parent never computes:
a fork of a process with threads could hang.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NoReturn

from tests.fuzz.interposer import Arming

AUDIT = "audit"    # not a command of ngsgd: python -m ngsgd.training.storage.audit
_PR_SET_PDEATHSIG = 1
# bytes above what the server maps; an endless file must not fill the machine
_SPARE_MEMORY = 4 << 30
_MODULES = (
    "ngsgd.launcher.cli", "ngsgd.launcher.commands.hydra_app", "ngsgd.launcher.commands.train",
    "ngsgd.launcher.commands.align", "ngsgd.launcher.commands.decode",
    "ngsgd.launcher.commands.report",
    "ngsgd.launcher.commands.cluster.jobs", "ngsgd.launcher.commands.info", "ngsgd.launcher.commands.kaldi",
    "ngsgd.launcher.help", "ngsgd.launcher.reports.figures", "ngsgd.launcher.config.config_builder",
    "hydra", "hydra.main", "omegaconf", "yaml", "scipy",
    "matplotlib.pyplot", "matplotlib.backends.backend_agg", "kaldi_native_fbank", "kaldifst",
    "kaldi_decoder", "kaldialign", "soxr", "espeakng_loader", "torch._dynamo", "ngsgd.training.storage.audit",
    "ngsgd.models.nnet3.raw_models", "ngsgd.models.nnet3.network", "ngsgd.cluster.process_pool",
    "ngsgd.runs.final_model", "ngsgd.launcher.mlflow.store", "psutil", "rich.console",
    "ngsgd.launcher.commands.transcribe", "ngsgd.pipeline.decoding.transcribe", "soundfile", "webrtcvad",
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int            # exit code; -1 after a signal or a hang
    signal: int          # 0 unless a signal ended it
    hung: bool
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def sentences(self) -> list[str]:
        """The lines of stderr that name an error."""
        return [line for line in self.err.splitlines() if line.startswith("ngsgd: ")]

    @property
    def ending(self) -> str:
        if self.hung:
            return "hung"
        return f"signal {self.signal}" if self.signal else f"exit code {self.code}"


def preload() -> None:
    """Imports what commands need; afterwards this process has one thread and may fork."""
    for name in _MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _draw_nothing()
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise RuntimeError(f"the fork server has {threads} threads; set OMP_NUM_THREADS=1")


def _draw_nothing() -> None:
    """Pictures are written, but blank: drawing takes most of the time of a small run."""
    import matplotlib.figure

    matplotlib.figure.Figure.draw = lambda *_: None  # type: ignore[method-assign]


@dataclass
class Child:
    """A command that runs in a fork."""

    pid: int
    watch: int
    out: IO[bytes]
    err: IO[bytes]
    ended: Outcome | None = field(default=None)

    def wait(self, timeout_s: float) -> Outcome:
        """Its outcome; a command that takes longer is killed and counts as hung."""
        if self.ended is None:
            hung = not select.select([self.watch], [], [], timeout_s)[0]
            # the child leads a process group, so its children end with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
            os.close(self.watch)
            number = 0 if hung or not os.WIFSIGNALED(status) else os.WTERMSIG(status)
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) and not hung else -1
            self.ended = Outcome(code, number, hung, _content(self.out), _content(self.err))
        return self.ended


def start(words: Sequence[str], folder: Path, arming: Arming | None = None) -> Child:
    """Starts `ngsgd WORDS` in `folder`."""
    out, err = (open(os.memfd_create(name), "r+b") for name in ("out", "err"))  # noqa: SIM115
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(list(words), folder, arming, out.fileno(), err.fileno())
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return Child(pid, os.pidfd_open(pid), out, err)


def call(words: Sequence[str], folder: Path, arming: Arming | None = None,
         timeout_s: float = 60.0) -> Outcome:
    """Runs `ngsgd WORDS` in `folder` to its end."""
    return start(words, folder, arming).wait(timeout_s)


def _content(file: IO[bytes]) -> str:
    with file:
        file.seek(0)
        return file.read(1 << 22).decode(errors="replace")


def _become(words: list[str], folder: Path, arming: Arming | None, out: int, err: int) -> NoReturn:
    """The child: the command, then its exit code; no clean-up of the parent's affairs."""
    code = 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (err, 2)):
            os.dup2(source, target)
        os.chdir(folder)
        # nothing may outlive the campaign
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        _limit_memory()
        if arming:
            arming.apply()
        code = _run(words)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 255)


def _limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = mapped + _SPARE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _run(words: list[str]) -> int:
    if words[0] == AUDIT:
        from ngsgd.training.storage import audit

        sys.argv = ["audit", *words[1:]]
        return audit.main()
    from ngsgd.launcher import cli

    sys.argv = ["ngsgd", *words]
    return cli.main(words)
