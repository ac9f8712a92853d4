"""The texts of `--help`, made from conf/ and the metadata of the options without importing Hydra."""

from __future__ import annotations

import re
import shutil
import textwrap

from ngsgd.config import RunConfig
from ngsgd.launcher.config import compose, describe

COMMANDS = {
    "train": "train an acoustic model, decode the test set, print the word error rate",
    "transcribe": "recognize recordings or live audio with a trained model: text, JSON, CTM or captions",
    "resume": "continue an interrupted run from its last checkpoint",
    "evaluate": "objective and frame accuracy of a run's model, as ngsgd decode --frames",
    "decode": "WER of a model on its test set or on other data, with other words, language models and settings",
    "align": "find the HMM state of every frame from transcripts alone: flat start, then realignment",
    "report": "a page about a run: curves, word errors, where the time went, timeline of the workers, Fisher spectra",
    "compare": "a page about several runs, as the paper's Figure 1: objf against epochs and time; trains those given as settings",
    "plan": "measure this machine for half a minute, tell the time of an outer iteration on 1 to 1000 workers",
    "simulate": "run on many logical workers of this machine, with a virtual clock, stragglers and failures",
    "tune": "learn schedule, layer rates, l2, momentum by gradient on a short proxy: probe, check, run, transfer",
    "submit": "train on a cluster: as a Ray job, a Slurm batch job or a KubeRay RayJob",
    "status": "list of runs with state and WER, or of the jobs of a Ray cluster",
    "logs": "what a run or a Ray job said, once or as it goes on",
    "stop": "end a run or a Ray job after its outer iteration; it can be resumed",
    "settings": "list the options of ngsgd train: default, values, unit and meaning",
    "ui": "open the dashboard (MLflow) on the runs of an output folder",
    "doctor": "look at this machine and tell what would go wrong, with the fix of each",
    "export": "write a run's final model: a bundle, ONNX, torch.export, sherpa-onnx, Hugging Face, or Kaldi's formats",
    "import": "convert Kaldi's raw nnet3 model, binary or text, to continue from with init_model=",
    "info": "state of a run; without a run: versions of what is installed",
}

TOP = """\
usage: ngsgd COMMAND [...]

Distributed natural-gradient SGD with parameter averaging, for acoustic models.

commands:
{commands}

  ngsgd COMMAND --help    what a command takes
  ngsgd --version
  eval "$(ngsgd -sc install=bash)"      completion of commands, runs and settings (bash; zsh, fish likewise)

exit codes: 0 ok, 1 run failed, 2 usage or configuration, 3 data, 4 diverged, 5 cluster, 6 checkpoint, 130 interrupted

examples:
  ngsgd train                                   synthetic digits, two workers on this machine
  ngsgd train recipe=fsdd cluster.num_workers=4
  ngsgd ui                                      then look at the curves in a browser
"""

TRAIN = """\
usage: ngsgd train [KEY=VALUE ...] [flags]

Train an acoustic model and decode the test set. Unset options keep their defaults.

what to use (GROUP=CHOICE):
{groups}

most used settings (KEY=VALUE):
{settings}

flags:
  --cfg job               print the composed settings, all of them, and stop (--resolve: with references filled in)
  --multirun, -m          run every combination of the values given as KEY=A,B one after another
  --config-dir DIR        a folder of your own YAML files: DIR/recipe/mine.yaml is then recipe=mine
  --continue              go on with the newest run of this name= in output_dir, if there is one: for jobs that are queued again
  --trust                 import the module that init_model= or the run to continue names (docs/own-model.md)
  --allow-other-bits      accept workers, or a continued run, on other processors, versions or kernels: results agree to rounding
  --quiet, -q             only incidents and the result
  --verbose, -v           also predicted and measured times at the end
  --debug                 show the traceback of an error
  --info [WHAT], --package, --resolve, --hydra-help, --shell-completion: Hydra's own

examples:
  ngsgd train optimizer=sgd name=baseline
  ngsgd train recipe=fsdd data.source=fsdd.tar.gz model=pnorm
  ngsgd train -m seed=0,1,2                     three runs, one after another
  ngsgd train cluster=in_process                everything in one process: breakpoints work

all options: ngsgd settings [PATTERN], such as ngsgd settings optimizer, or ngsgd train --help optimizer
composed values: ngsgd train --cfg job
"""

_MOST_USED = (
    "output_dir", "name", "seed", "data.source", "data.train_minutes", "model.num_layers", "model.hidden_dim",
    "optimizer.max_param_change", "schedule.num_epochs", "schedule.minibatch_size", "schedule.lr_initial",
    "schedule.lr_final", "egs.samples_per_iter", "cluster.num_workers", "cluster.threads_per_worker", "cluster.address",
)
_WIDEST = 110   # columns

def top() -> str:
    return TOP.format(commands="\n".join(f"  {name:12}{what}" for name, what in COMMANDS.items()))


def train(group: str = "") -> str:
    """Return the help of `ngsgd train`, or the options of one section."""
    if group:
        return describe.text(describe.matching(group)) + "\n"
    about = {one.path: one for one in describe.options()}
    default_choices = _default_choices()
    groups = [_row(f"  {group + '=':16}", f"{' | '.join(choices)}  (default {default_choices.get(group, '-')})")
              for group, choices in compose.groups().items()]
    rows = [_row(f"  {path:28}{about[path].default:9} ", about[path].about) for path in _MOST_USED]
    return TRAIN.format(groups="\n".join(groups), settings="\n".join(rows))


def _row(start: str, about: str) -> str:
    """One entry of a list: what is too long for the terminal goes on below, behind the columns of `start`."""
    width = min(_WIDEST, shutil.get_terminal_size((80, 24)).columns)
    lines = textwrap.wrap(about, max(width - len(start), 24), break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join([f"{start}{lines[0]}".rstrip(), *(" " * len(start) + line for line in lines[1:])])


def _default_choices() -> dict[str, str]:
    """The defaults list of conf/config.yaml, read by lines: a YAML parser would double the time of --help."""
    text = (compose.conf_dir() / "config.yaml").read_text()
    found = dict(re.findall(r"^  - (\w+): (\w+)", text, re.MULTILINE))
    kinds = {group: getattr(getattr(RunConfig(), group, None), "kind", "none") for group in found}
    return {group: kinds[group] if choice == "null" else choice for group, choice in found.items()}
