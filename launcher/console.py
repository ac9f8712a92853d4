"""What every command shares: arguments that fail in a sentence, errors that become sentences and exit codes.

Nothing heavy is imported at the top, so that `ngsgd --help` answers at once.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ngsgd.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_RUN_FAILED,
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    NgsgdError,
)

# import name -> (package, extra); only what an optional extra brings
_EXTRAS = {
    "hydra": ("hydra-core", "service"), "omegaconf": ("omegaconf", "service"), "yaml": ("pyyaml", "service"),
    "ray": ("ray", "service"), "mlflow": ("mlflow", "service"), "rich": ("rich", "service"),
    "matplotlib": ("matplotlib", "service"), "psutil": ("psutil", "service"), "kaldi_native_fbank": ("kaldi-native-fbank", "asr"),
    "kaldi_decoder": ("kaldi-decoder", "asr"), "kaldifst": ("kaldifst", "asr"), "kaldialign": ("kaldialign", "asr"),
    "espeakng_loader": ("espeakng-loader", "synth"), "scipy": ("scipy", "asr"),
}

TRUST = "import the module that the run names (model._target_) although another user or machine began it; it runs as you"

# Text from files and servers ------------------------------------------------------------------------------------------

_COLORS = re.compile(r"\x1b\[[0-9;]*m")
# what a terminal obeys: C0 but for newline and tab, DEL, C1, marks that reorder text, line separators, half characters
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
MASK = "***"
_SECRETS = (
    # http://user:password@host; the second form is for a password with a slash, which the first takes for a path
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://)[^/?#\s\"'<>]*@"), rf"\g<1>{MASK}@"),
    (re.compile(r"([a-zA-Z][a-zA-Z0-9+.\-]*://)[^/?#\s:@\"'<>]*:(?!\d+(?:[/?#\s]|$))[^\s\"'<>]*@"), rf"\g<1>{MASK}@"),
    (re.compile(r"([?&;][^=&;\s\"'<>]*(?:passw|pwd|secret|token|key|sig|auth|credential)[^=&;\s\"'<>]*=)[^&;\s\"'<>#]+",
                re.IGNORECASE), rf"\g<1>{MASK}"),
    (re.compile(r"\b((?:password|passwd|pwd|secret|token|api_?key)=)[^&;,\s\"'<>*]+", re.IGNORECASE), rf"\g<1>{MASK}"),
    (re.compile(r"\b(Bearer|Basic)\s+[A-Za-z0-9._~+/=\-]{8,}"), rf"\g<1> {MASK}"),
)


_VARIABLES = ("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "RAY_AUTH_TOKEN")
_SHORTEST = 6   # a shorter password is a part of too many words
_known: set[str] = set()


def printable(text: str) -> str:
    """The text with everything that a terminal would obey as an escape such as \\x1b; newlines and tabs stay."""
    return _OBEYED.sub(lambda found: ascii(found[0])[1:-1], _COLORS.sub("", text))


def masked(text: str) -> str:
    """The text without user names and passwords in URLs, and without tokens, passwords and keys in query strings."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    for secret in sorted({*_known, *(os.environ.get(name, "") for name in _VARIABLES)}, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, MASK)
    return text


def conceal(url: str) -> None:
    """From now on the password of this URL is masked wherever it stands: libraries quote parts of a URL in their errors."""
    from urllib.parse import unquote

    login = url.partition("://")[2].rpartition("@")[0]
    password = login.partition(":")[2] or login
    if MASK not in password:
        _known.update({password, unquote(password)})


def is_masked(text: str) -> bool:
    """Whether it is a URL that was masked, so that its user and password must come from elsewhere."""
    return f"://{MASK}@" in text or f"={MASK}" in text


# Errors ---------------------------------------------------------------------------------------------------------------


def run_guarded(action: Callable[[], int], *, debug: bool = False) -> int:
    """The action's exit code; every error becomes sentences on stderr and the exit code of its kind."""
    try:
        return action()
    except SystemExit as end:  # argparse's --help, or Hydra's own way of ending
        return end.code if isinstance(end.code, int) else EXIT_OK if end.code is None else EXIT_RUN_FAILED
    except KeyboardInterrupt:
        _say(["interrupted."])
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except Exception as error:
        if debug:
            print(printable(masked(traceback.format_exc())), file=sys.stderr, end="")
        known = _as_ngsgd_error(error)
        if known is None:
            hint = "" if debug else " Run again with --debug to see where."
            _say([f"{type(error).__name__}: {_first_line(error).rstrip('.')}.{hint}"])
            return EXIT_RUN_FAILED
        _say(known.problems if isinstance(known, ConfigError) else [str(known)])
        return known.exit_code


def _as_ngsgd_error(error: Exception) -> NgsgdError | None:
    """The typed error that stands for it; None for what only a bug of ours can raise."""
    if isinstance(error, NgsgdError):
        return error
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing in _EXTRAS:
        return MissingExtraError(*_EXTRAS[missing], "This command")
    if isinstance(error, OSError):
        return _of_disk(error)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return OutOfMemory(f"the memory of this machine was not enough ({_first_line(error) or 'MemoryError'}); use fewer "
                           "cluster.num_workers, a smaller model or smaller egs., or a larger machine.")
    if isinstance(error, RecursionError):
        return DataError(f"a file is nested too deeply to be read ({_first_line(error)}); it is damaged or not of ngsgd: restore "
                         "it. --debug shows which.")
    return None


class OutOfMemory(NgsgdError):
    """The operating system or the allocator had no memory left."""


def _of_disk(error: OSError) -> NgsgdError | None:
    """What a full, read-only or failing disk means to the user; None for network errors and the like."""
    said = _DISK.get(error.errno or 0)
    if said is None:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    in_run = any((folder / "config.yaml").is_file() for folder in Path(path).absolute().parents) if path else False
    kind = CheckpointError if in_run else DataError
    return kind(f"{path or 'a file'} cannot be used ({error.strerror or error}); {said}.")


_ROOM, _RIGHTS = "make room", "fix its permissions, or work on a copy that can be written"
_DISK = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EROFS: _RIGHTS, errno.EACCES: _RIGHTS, errno.EPERM: _RIGHTS,
         errno.EIO: "the disk fails; restore the file elsewhere", errno.ENOENT: "restore it, or correct the path",
         errno.ENAMETOOLONG: "choose a shorter name", errno.ENOTDIR: "correct the path", errno.EISDIR: "correct the path",
         errno.ELOOP: "correct the link"}


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _say(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"ngsgd: {printable(masked(problem))}", file=sys.stderr)


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are ConfigErrors."""

    def __init__(self, command: str, **options: Any) -> None:
        from launcher import help as texts

        super().__init__(prog=f"ngsgd {command}", description=texts.COMMANDS[command], allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help.")


def version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
