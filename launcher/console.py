"""Guards around the commands: typed errors, messages and exit codes; nothing heavy is imported."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from ngsgd import errors
from ngsgd.errors import EXIT_RUN_FAILED, ConfigError, DataError, NgsgdError
from ngsgd.launcher.screen import SCREEN
from ngsgd.masking import masked, printable

# extra -> import names of its packages, with =PACKAGE where that differs
_EXTRAS = {
    "service": "hydra=hydra-core omegaconf yaml=pyyaml ray mlflow rich matplotlib psutil",
    "asr": "kaldi_native_fbank=kaldi-native-fbank kaldi_decoder=kaldi-decoder kaldifst kaldialign "
           "scipy webrtcvad=webrtcvad-wheels",
    "synth": "espeakng_loader=espeakng-loader", "onnx": "onnx onnxscript onnxruntime", "trackers": "tensorboard wandb"}
_ROOM = "make room on its disk, or choose a folder on another disk (of a run: output_dir=PATH)"
_RIGHTS = "fix its permissions, or work on a copy that can be written"
_DISK = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EROFS: _RIGHTS, errno.EACCES: _RIGHTS,
         errno.EPERM: _RIGHTS, errno.EIO: "the disk fails; restore the file elsewhere",
         errno.ENOENT: "restore it, or correct the path",
         errno.ENAMETOOLONG: "choose a shorter name", errno.ENOTDIR: "correct the path",
         errno.EISDIR: "correct the path", errno.ELOOP: "correct the link"}


class OutOfMemory(NgsgdError):
    """The operating system or the allocator had no memory left."""


def run_guarded(action: Callable[[], int], *, debug: bool = False,
                on_error: Callable[[BaseException], None] = lambda _error: None) -> int:
    """Run an action and return its exit code; errors become messages on stderr.

    `on_error` receives the typed error, or the exception itself if it is of no known kind.
    """
    try:
        return action()
    except SystemExit as end:
        # argparse's --help, or Hydra's own way of ending
        return end.code if isinstance(end.code, int) else 0 if end.code is None else EXIT_RUN_FAILED
    except KeyboardInterrupt:
        _say(["interrupted."])
        return errors.EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and _is_of_output(error):
            return report_lost_output(error)
        if debug:
            print(printable(masked(traceback.format_exc())), file=sys.stderr, end="")
        known = _as_ngsgd_error(error)
        if known is not None and known is not error:
            known.__cause__ = error
        # the record of an error must not hide the error
        with contextlib.suppress(Exception):
            on_error(known or error)
        if known is None:
            hint = "" if debug else " Run again with --debug to see where."
            _say([f"{type(error).__name__}: {_first_line(error).rstrip('.')}.{hint}"])
            return EXIT_RUN_FAILED
        _say(known.problems if isinstance(known, ConfigError) else str(known).splitlines())
        return known.exit_code


def replace_closed_streams() -> None:
    """Use /dev/null for the standard streams that are closed (`>&-`), and for their descriptors.

    The next file that is opened would otherwise get the descriptor of the standard output.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    # the lowest free descriptor each time
    while closed and (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    if closed:
        os.close(null)
    for name in closed:
        # for the rest of the process
        stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115
        setattr(sys, name, stream)


def _is_of_output(error: OSError) -> bool:
    """Whether the standard output cannot be written, so that a newline fails in the same way."""
    if error.filename is not None or error.errno not in _DISK:
        return False
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        return again.errno == error.errno
    except ValueError:
        # closed by the command, or without a descriptor
        return False
    return False


def report_lost_output(error: OSError) -> int:
    """Report that the standard output cannot be written, and drop the rest of it."""
    SCREEN.close()
    drop(sys.stdout)
    _say([f"the standard output cannot be written ({error.strerror or error}); give the output of "
          "the command another place. No run is affected."])
    return EXIT_RUN_FAILED


def _as_ngsgd_error(error: Exception) -> NgsgdError | None:
    """Convert an exception into a typed error; None for a bug."""
    if isinstance(error, NgsgdError):
        return error
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "").partition(".")[0]
        for extra, packages in _EXTRAS.items():
            for name, _, package in (one.partition("=") for one in packages.split()):
                if name == missing:
                    return errors.MissingExtraError(package or name, extra, "This command")
    if isinstance(error, OSError) and error.errno in _DISK:
        path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
        in_run = bool(path) and any((folder / "config.yaml").is_file() for folder in Path(path).absolute().parents)
        kind = errors.CheckpointError if in_run else DataError
        return kind(f"{path or 'a file'} cannot be used ({error.strerror or error}); {_DISK[error.errno]}.")
    if isinstance(error, OSError):
        # of the network, and others
        return None
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return OutOfMemory(f"the memory of this machine was not enough ({_first_line(error)}); use "
                           "fewer cluster.num_workers, a smaller model or smaller egs., or a larger machine.")
    if isinstance(error, RecursionError):
        return DataError(f"a file is nested too deeply to be read ({_first_line(error)}); it is "
                         "damaged or not of ngsgd: restore it. --debug shows which.")
    return None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _say(problems: Sequence[str]) -> None:
    SCREEN.close()
    try:
        for problem in problems:
            print(f"ngsgd: {printable(masked(problem))}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        # nobody reads; flushing at exit must not raise again
        drop(sys.stderr)


def drop(stream: TextIO) -> None:
    """Send the rest of a stream to /dev/null."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def version(package: str) -> str:
    from importlib import metadata
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
