"""Names of other trainers for the options of this one, for suggestions and for `ngsgd.train`.

They are the 20 most typed names of PyTorch, Lightning, Kaldi's scripts and icefall. A name is
written here with underscores, in lower case and without its section.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from ngsgd.interface import is_command_line

_RESUME = "ngsgd resume RUN"
# name -> option with the same meaning; ngsgd.train accepts these names
OTHER_NAMES = {**dict.fromkeys(("lr", "learning_rate"), "schedule.lr_initial"),
               **dict.fromkeys(("epochs", "max_epochs"), "schedule.num_epochs"),
               "batch_size": "schedule.minibatch_size",
               **dict.fromkeys(("workers", "nj"), "cluster.num_workers"),
               "hidden_size": "model.hidden_dim", "exp_dir": "output_dir",
               "data_dir": "data.source"}
# name -> settings with a similar meaning; {} is the value
SETTINGS_INSTEAD = {"arch": "model={}", "loss": "objective={}",
                    "dropout": "model.dropout_schedule=\"{0},{0}\"", "gpus": "cluster.device=cuda "
                    "cluster.num_workers={}", "amp": "cluster.precision=bf16",
                    "grad_clip": "optimizer.max_param_change=NORM",
                    "max_steps": "schedule.num_epochs=EPOCHS",
                    "lr_scheduler": "schedule.lr_schedule={}",
                    "warmup": "schedule.warm_up=FRACTION", "resume": _RESUME}


def _unquoted(key: str, value: str) -> str:
    return f"{key}={value}"


def instead_of(word: str, value: str = "", write: Callable[[str, str], str] = _unquoted) -> str:
    """Return the settings that another trainer's name stands for; empty where the name is unknown.

    `write` returns KEY=VALUE with the quotes that a command line needs, or KEY alone.

    >>> instead_of("trainer.batch-size", "512")
    'schedule.minibatch_size=512'
    """
    name = word.lower().lstrip("-+").replace("-", "_").rpartition(".")[2]
    if text := SETTINGS_INSTEAD.get(name):
        if text == _RESUME and not is_command_line():
            return "resume=RUN"
        words = [word.partition("=") for word in text.split()]
        return " ".join(write(key, part.format(value)) if value and "{" in part else f"{key}{sign}{part.format('VALUE')}"
                        for key, sign, part in words)
    path = OTHER_NAMES.get(name, "")
    return write(path, value) if path and value else path


def did_you_mean(word: str, known: Sequence[str], last: str, value: str = "",
                 write: Callable[[str, str], str] = _unquoted) -> str:
    """Return a question with the nearest known word; the last part of a path is enough.

    Args:
        word: the unknown word.
        known: the words to choose from.
        last: the last part of the word, such as lr of optimizer.lr.
        value: the value that was given, to be repeated in the question.
        write: see `instead_of`.
    """
    if instead := instead_of(last, value, write):
        return f" Did you mean {instead}?"
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    by_last = {path.rpartition(".")[2]: path for path in reversed(known)}
    near = near or [by_last[name] for name in difflib.get_close_matches(last, by_last, 1, 0.75)]
    return f" Did you mean {write(near[0], value) if value else near[0]}?" if near else ""
