"""What every command shares: arguments that fail in a sentence, errors that become sentences and exit codes.

Nothing heavy is imported at the top, so that `ngsgd --help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ngsgd.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_RUN_FAILED, ConfigError, MissingExtraError, NgsgdError

# import name -> (package, extra); only what an optional extra brings
_EXTRAS = {
    "hydra": ("hydra-core", "service"), "omegaconf": ("omegaconf", "service"), "yaml": ("pyyaml", "service"),
    "ray": ("ray", "service"), "mlflow": ("mlflow", "service"), "rich": ("rich", "service"),
    "matplotlib": ("matplotlib", "service"), "psutil": ("psutil", "service"), "kaldi_native_fbank": ("kaldi-native-fbank", "asr"),
    "kaldi_decoder": ("kaldi-decoder", "asr"), "kaldifst": ("kaldifst", "asr"), "kaldialign": ("kaldialign", "asr"),
    "espeakng_loader": ("espeakng-loader", "synth"), "scipy": ("scipy", "asr"),
}


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
            traceback.print_exc()
        known = _as_ngsgd_error(error)
        if known is None:
            hint = "" if debug else " Run again with --debug to see where."
            _say([f"{type(error).__name__}: {_first_line(error).rstrip('.')}.{hint}"])
            return EXIT_RUN_FAILED
        _say(known.problems if isinstance(known, ConfigError) else [str(known)])
        return known.exit_code


def _as_ngsgd_error(error: Exception) -> NgsgdError | None:
    if isinstance(error, NgsgdError):
        return error
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return MissingExtraError(*_EXTRAS[missing], "This command") if missing in _EXTRAS else None


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")


def _say(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"ngsgd: {problem}", file=sys.stderr)


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
