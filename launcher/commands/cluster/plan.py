"""`ngsgd plan`: predict the time of an outer iteration on 1 to 1000 workers."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.config import RunConfig
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.files import read_json, write_text
from ngsgd.launcher.arguments import CONFIG, JSON, Parser, out_of_range
from ngsgd.launcher.reports.plan_text import Wishes, as_json, text
from ngsgd.launcher.screen import loading
from ngsgd.object_storage.urls import local_root
from ngsgd.planning.planner import Machine, Workload
from ngsgd.planning.scaling import Assumptions, choices, rows

if TYPE_CHECKING:
    from ngsgd.training.task import TaskSpec

_MAX_WORKERS = 100_000
# of plan.json
_FORMAT = 3


def command(arguments: Sequence[str]) -> int:
    """Measure, predict and print; keep the measurement in <output_dir>/plan.json."""
    options = _options(arguments)
    from ngsgd.launcher.config import compose
    from ngsgd.launcher.config.sources import Sources
    config = compose.compose(options.overrides, Sources.of(options))
    config.sites.require_none("ngsgd plan")
    if math.isfinite(options.budget) and not config.cluster.price_per_hour:
        raise ConfigError("--budget needs the price of a worker; add cluster.price_per_hour=PRICE.")
    machine, workload = saved(config) if options.saved else measure_machine(config, options.seconds, to_stderr=options.json)
    assumed = Assumptions(options.cores_per_node or machine.slots(1), options.bandwidth,
                          options.latency, options.failures_per_worker_hour, options.replace_s, options.sigma)
    table = rows(machine, workload, config, options.workers, assumed)
    wishes = Wishes(config.cluster.price_per_hour, options.deadline * 3600, options.budget)
    found = choices(machine, workload, config, options.workers, assumed) if wishes.any() else []
    is_speech = not config.task._target_
    about = (machine, workload, assumed, table, found, wishes)
    print(json.dumps(as_json(*about, is_speech=is_speech), indent=1) if options.json
          else "\n".join(text(*about, is_speech=is_speech)))
    return EXIT_OK


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("plan", epilog=(
        "The column 'here' has all workers on this machine. The other columns give each worker a "
        "core, or a GPU, on machines like this one. docs/planner.md explains every column."))
    parser.declare({"--workers N,N,...": ("1,2,4,8,16,32,64,256,1000", "numbers of workers"), "--json": JSON, **CONFIG})
    parser.declare({"--seconds S": (30.0, "duration in seconds"),
                    "--saved": "reuse the last measurement of these settings"}, "measurement")
    parser.declare({
        "--deadline HOURS": (float, "choose the cheapest settings with which training ends in this time"),
        "--budget COST": (float, "choose the fastest settings with at most this cost of training, "
                                 "by cluster.price_per_hour")}, "choice of settings")
    parser.declare({
        "--cores-per-node N": (int, "cores or GPUs of a machine (default: as this machine)"),
        "--bandwidth B/S": (1.25e8, "bandwidth of a machine's link in bytes/s; 1.25e9 is 10 Gb/s (default: 1.25e8)"),
        "--latency S": (2e-4, "latency of a link in seconds"),
        "--failures-per-worker-hour X": (
            1.2e-4, "failures of a worker per hour; spot machines: 0.05 and more (default: "
                    "%(default)s, one in 8 hours on 1000 GPUs)"),
        "--replace-s S": (20.0, "time to replace a lost worker in seconds"),
        "--sigma X": (float, "relative spread of a job's time over the machines (default: as "
                             "measured)")}, "assumptions about the cluster")
    options = parser.parse_with_settings(arguments)
    workers = sorted({int(word) if word.strip().isdecimal() else 0 for word in options.workers.split(",")})
    problems = [] if 0 < workers[0] <= workers[-1] <= _MAX_WORKERS else [
        f"--workers is {options.workers!r}; give integers from 1 to {_MAX_WORKERS} with commas between them, such as 1,2,8."]
    least = dict.fromkeys(("latency", "failures_per_worker_hour", "replace_s", "sigma"), 0)
    limits = [name for name in ("deadline", "budget") if getattr(options, name) != math.inf]
    problems += out_of_range(options, {"cores_per_node": 1, **least}, ["seconds", "bandwidth", *limits])
    if problems:
        raise ConfigError(problems)
    options.workers = workers
    options.deadline, options.budget = (math.inf if one is None else one for one in (options.deadline, options.budget))
    return options


def measure_machine(config: RunConfig, seconds: float, *, to_stderr: bool) -> tuple[Machine, Workload]:
    # before the import of torch; workers of a run set it as well
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if config.cluster.ranks_per_worker > 1:
        raise ConfigError("ngsgd plan measures workers of one process; remove cluster.ranks_per_worker.")
    with loading(f"checking {config.output_dir}"):
        from ngsgd.planning import probe
        from ngsgd.runs.run_folder import check_output_dir
        check_output_dir(config)
    spec = spec_of(config, partial(print, file=sys.stderr if to_stderr else sys.stdout, flush=True))
    # on the disk of the run
    with (loading(f"measuring for about {seconds:g} s"),
          tempfile.TemporaryDirectory(dir=config.output_dir, prefix=".plan-") as scratch):
        machine, workload = probe.measure(spec, config, num_cores=os.cpu_count() or 1, seconds=seconds, scratch=Path(scratch))
    keep(config, machine, workload)
    return machine, workload


def spec_of(config: RunConfig, report: Callable[[str], None]) -> TaskSpec:
    """Return the task of a configuration; the data of a speech recipe are prepared."""
    if config.task._target_:
        from ngsgd.pipeline.task_run import task_spec
        from ngsgd.runs.trust import located
        return task_spec(located(config), None)
    from ngsgd.pipeline.prepare import prepare
    from ngsgd.tasks.speech import SpeechTaskSpec
    return SpeechTaskSpec(config, str(prepare(config, report).egs_directory))


def keep(config: RunConfig, machine: Machine, workload: Workload) -> None:
    kept = {"format": _FORMAT, "settings": settings_key(config), "machine": machine.to_json(), "workload": asdict(workload)}
    write_text(kept_in(config), json.dumps(kept, indent=1))


def saved(config: RunConfig) -> tuple[Machine, Workload]:
    """The last measurement in this output directory, of equal settings, or ConfigError."""
    try:
        kept = read_json(kept_in(config))
        if (kept["format"], kept["settings"]) == (_FORMAT, settings_key(config)):
            return Machine.from_json(kept["machine"]), Workload(**kept["workload"])
    except (OSError, ValueError, KeyError, TypeError):
        # there is none, or it is damaged: measure again
        pass
    raise ConfigError(f"{kept_in(config)} has no measurement of these settings; run without --saved to measure.")


def kept_in(config: RunConfig) -> Path:
    return local_root(config.output_dir) / "plan.json"


def settings_key(config: RunConfig) -> str:
    """Return a digest of everything that the measurement depends on."""
    cluster = config.cluster
    parts = [asdict(part) for part in (config.data, config.features, config.egs, config.model, config.optimizer)]
    rest = [config.schedule.minibatch_size, config.schedule.num_epochs, cluster.threads_per_worker, cluster.device, os.cpu_count(),
            # without task.search_path, which a run makes absolute
            config.task._target_, dict(config.task.args or {})]
    return hashlib.sha256(json.dumps([*parts, *rest]).encode()).hexdigest()[:16]
