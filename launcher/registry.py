"""The commands of `ngsgd`; dispatch, help, completion and the reference read this list."""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass

from ngsgd.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """A command, and the "module:function" in ngsgd.launcher that runs it."""

    name: str
    group: str
    about: str
    # empty: commands.NAME:command
    target: str = ""
    # what completion offers behind it: runs, settings, both or nothing
    takes: tuple[str, ...] = ()

    def run(self, arguments: Sequence[str]) -> int:
        target = self.target or f"commands.{self.name}:command"
        return int(pkgutil.resolve_name(f"ngsgd.launcher.{target}")(arguments))


_TRAIN, _USE, _INSPECT = "Train", "Use a model", "Inspect"
_CLUSTER, _EXCHANGE, _SHELL = "Cluster", "Exchange", "Shell"
_RUNS, _SETTINGS, _BOTH = ("runs",), ("settings",), ("runs", "settings")
# in the order of the help
COMMANDS = (
    Command("train", _TRAIN, "train an acoustic model, decode the test set and print the WER",
            "commands.hydra_app:train", _SETTINGS),
    Command("resume", _TRAIN, "continue an interrupted run from its last checkpoint", "commands.hydra_app:resume", _RUNS),
    Command("stop", _TRAIN, "stop a run or a Ray job after its current outer iteration",
            "commands.cluster.jobs:stop", _RUNS),
    Command("tune", _TRAIN, "learn learning rates, l2 and momentum by gradient on a short proxy run", takes=_SETTINGS),
    Command("align", _TRAIN, "align recordings with text: words and phones with times; or states of a data set", takes=_BOTH),
    Command("transcribe", _USE, "recognize recordings or live audio: text, JSON, CTM or captions", takes=_RUNS),
    Command("decode", _USE, "compute the WER on the test set or on other data", "commands.decode:decode", _RUNS),
    Command("evaluate", _USE, "compute objective and frame accuracy, without decoding", "commands.decode:evaluate", _RUNS),
    Command("status", _INSPECT, "list runs, or Ray jobs, with state and WER", "commands.cluster.jobs:status", _RUNS),
    Command("why", _INSPECT, "name the cause of a failure, whether a retry can help, and the next command", takes=_RUNS),
    Command("verify", _INSPECT, "repeat jobs of a run and compare them with the results that it counted", takes=_RUNS),
    Command("logs", _INSPECT, "print or follow the log of a run or a Ray job", "commands.cluster.jobs:logs", _RUNS),
    Command("report", _INSPECT, "write an HTML report about a run", takes=_RUNS),
    Command("compare", _INSPECT, "write an HTML comparison of several runs", takes=_RUNS),
    Command("ui", _INSPECT, "open the MLflow dashboard"),
    Command("info", _INSPECT, "show the state of a run, an archive of examples, or installed versions", takes=_RUNS),
    Command("settings", _INSPECT, "search the settings of ngsgd train", "commands.info:settings"),
    Command("submit", _CLUSTER, "train on a Ray, Slurm or Kubernetes cluster", "commands.cluster.submit:command", _SETTINGS),
    Command("doctor", _CLUSTER, "check this machine or a cluster and suggest fixes",
            "commands.cluster.doctor:command", _SETTINGS),
    Command("plan", _CLUSTER, "measure this machine and predict training time on 1 to 1000 workers",
            "commands.cluster.plan:command", _SETTINGS),
    Command("simulate", _CLUSTER, "train on simulated workers with a virtual clock and failures",
            "commands.cluster.simulate:command", _SETTINGS),
    Command("export", _EXCHANGE, "write a model for Kaldi, ONNX, torch.export, sherpa-onnx or "
            "Hugging Face", "commands.kaldi:export", _RUNS),
    Command("import", _EXCHANGE, "convert a Kaldi nnet3 model, as a start for training "
            "(init_model=)", "commands.kaldi:import_"),
    Command("completion", _SHELL, "print the completion script of bash, zsh or fish", "completion:command"))
GROUPS = tuple(dict.fromkeys(command.group for command in COMMANDS))


def find(name: str) -> Command:
    """Return the command of a name.

    Raises:
        ConfigError: there is none; the message suggests another one.
    """
    known = {command.name: command for command in COMMANDS}
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean ngsgd {near[0]}?" if near else f"Choose one of {', '.join(known)}; see ngsgd --help."
    raise ConfigError(f"{name!r} is not a command. {hint}")
