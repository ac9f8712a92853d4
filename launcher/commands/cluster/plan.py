"""`ngsgd plan`: how long an outer iteration takes on 1 to 1000 workers, measured here and computed from there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ngsgd.config import RunConfig
from ngsgd.errors import EXIT_OK, ConfigError
from ngsgd.launcher.arguments import Parser
from ngsgd.launcher.reports.plan_text import as_json, nodes_text, text
from ngsgd.launcher.reports.predictions import keep, kept_in, saved
from ngsgd.pipeline.performance_model.multi_gpu import INTERCONNECTS
from ngsgd.pipeline.performance_model.multi_gpu import rows as on_nodes
from ngsgd.pipeline.performance_model.planner import Machine, Workload
from ngsgd.pipeline.performance_model.scaling import Assumptions, momentum_of, rows

if TYPE_CHECKING:
    from ngsgd.training.task import TaskSpec

_WORKERS = "1,2,4,8,16,32,64,256,1000"
_MAX_WORKERS = 100_000
_LINK = "ethernet-100"


def command(arguments: Sequence[str]) -> int:
    """Measures, computes, prints; keeps what was measured in <output_dir>/plan.json."""
    options = _parser().parse_intermixed_args(list(arguments))
    workers = _checked(options)
    from ngsgd.launcher.config import compose

    config = compose.compose(options.overrides, config_dir=Path(options.config_dir) if options.config_dir else None)
    if options.nodes:
        return _on_nodes(config, options)
    machine, workload = _saved(config) if options.saved else measure_machine(config, options.seconds, to_stderr=options.json)
    assumed = _assumptions(options, config, machine)
    table = rows(machine, workload, config, workers, assumed)
    is_speech = not config.task._target_
    if options.json:
        print(json.dumps(as_json(machine, workload, assumed, table, is_speech=is_speech), indent=1))
    else:
        print("\n".join(text(machine, workload, assumed, table, is_speech=is_speech)))
    return EXIT_OK


# Arguments ----------------------------------------------------------------------------------------


def _parser() -> Parser:
    parser = Parser("plan", epilog=(
        "Settings (KEY=VALUE) are those of ngsgd train. 'here' is all workers on this machine; the other columns give each "
        "worker a core, or a GPU, on machines like this one. docs/planner.md explains every column."))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the run, as for ngsgd train")
    parser.add_argument("--workers", default=_WORKERS, help="numbers of workers (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measuring (default: %(default)s)")
    parser.add_argument("--saved", action="store_true", help="use the last measurement of these settings, measure nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--config-dir", "-cd", metavar="DIR", help="a folder of your own YAML files")
    parser.add_argument("--cores-per-node", type=int, metavar="N", help="cores (or GPUs) of a machine (default: as this one)")
    parser.add_argument("--bandwidth", type=float, default=1.25e8, help="of a machine's link, bytes/s (default: 1.25e8, 1 Gb/s)")
    parser.add_argument("--latency", type=float, default=2e-4, help="of a link, in seconds (default: %(default)s)")
    parser.add_argument("--failures-per-worker-hour", type=float, default=1.2e-4,
                        help="default: %(default)s, one in 8 hours on 1000 GPUs; spot machines: 0.05 and more")
    parser.add_argument("--replace-s", type=float, default=20.0, help="to replace a lost worker (default: %(default)s)")
    parser.add_argument("--sigma", type=float, help="spread of a job's time over the machines (default: as measured here)")
    parser.add_argument("--nodes", help="instead of the table above: synchronous training and averaging on so many nodes of "
                                        "8 x H200 GPUs, such as 1,4,16; a model on paper, nothing is measured")
    parser.add_argument("--link", choices=list(INTERCONNECTS),
                        help=f"between the GPUs of --nodes; NVLink inside a node, but for pcie (default: {_LINK})")
    parser.add_argument("--parameters", type=float, metavar="P",
                        help="of the model on --nodes (default: that of the last measurement of these settings)")
    parser.add_argument("--gamma", type=float, help="growth of the data needed per sample of a job (default: not known)")
    parser.add_argument("--outer-momentum", type=float, help="eta of the outer optimiser (default: that of the settings)")
    return parser


def _checked(options: argparse.Namespace) -> list[int]:
    """The numbers of workers; raises one ConfigError that lists everything wrong."""
    problems: list[str] = []
    workers = _counts("workers", options.workers, problems)
    for name in ("seconds", "bandwidth", "gamma", "parameters"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value > 0.0):
            problems.append(f"--{name} is {value}; it must be greater than 0.")
    for name in ("latency", "failures_per_worker_hour", "replace_s", "sigma"):
        value = getattr(options, name)
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            problems.append(f"--{name.replace('_', '-')} is {value}; it must be at least 0.")
    if options.outer_momentum is not None and not 0.0 <= options.outer_momentum < 1.0:
        problems.append(f"--outer-momentum is {options.outer_momentum}; it must be at least 0 and less than 1.")
    if options.cores_per_node is not None and options.cores_per_node < 1:
        problems.append(f"--cores-per-node is {options.cores_per_node}; it must be at least 1.")
    if not options.nodes and (options.link or options.parameters):
        problems.append("--link and --parameters are of the table of --nodes; add --nodes, or leave them out.")
    if problems:
        raise ConfigError(problems)
    return workers


def _counts(name: str, given: str, problems: list[str]) -> list[int]:
    """Whole numbers with commas between them, in rising order; adds to `problems` where they are not."""
    words = given.split(",")
    counts = [int(word) for word in words if word.strip().isdecimal() and 1 <= int(word) <= _MAX_WORKERS]
    if len(counts) != len(words):
        problems.append(f"--{name} is {given!r}; give whole numbers from 1 to {_MAX_WORKERS} with commas between them, such as "
                        "1,2,8.")
    return sorted(set(counts))


def _assumptions(options: argparse.Namespace, config: RunConfig, machine: Machine) -> Assumptions:
    momentum = momentum_of(config) if options.outer_momentum is None else options.outer_momentum
    return Assumptions(options.cores_per_node or machine.slots(1), options.bandwidth, options.latency,
                       options.failures_per_worker_hour, options.replace_s, options.sigma, options.gamma, momentum)


def _on_nodes(config: RunConfig, options: argparse.Namespace) -> int:
    """The table of --nodes."""
    problems: list[str] = []
    counts = _counts("nodes", options.nodes, problems)
    if problems:
        raise ConfigError(problems)
    num_parameters = options.parameters or _saved(config)[1].model_bytes / 4
    size = config.schedule.minibatch_size
    steps_between = max(1.0, config.egs.samples_per_iter / size)
    link = INTERCONNECTS[options.link or _LINK]
    table = on_nodes(num_parameters, size, steps_between, counts, link)
    if options.json:
        told = {"parameters": num_parameters, "minibatch_size": size, "steps_between": steps_between, "link": asdict(link),
                "rows": [{**asdict(row), "data_factor": row.data_factor} for row in table]}
        print(json.dumps(told, indent=1))
    else:
        print("\n".join(nodes_text(num_parameters, size, steps_between, link, table)))
    return EXIT_OK


# Measuring, and keeping what was measured ---------------------------------------------------------


def measure_machine(config: RunConfig, seconds: float, *, to_stderr: bool) -> tuple[Machine, Workload]:
    # before torch comes in; the service's own workers wait so too
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import tempfile

    from ngsgd.pipeline.performance_model import probe
    from ngsgd.pipeline.runs.run_folder import check_output_dir

    def report(line: str) -> None:
        print(line, file=sys.stderr if to_stderr else sys.stdout, flush=True)

    if config.cluster.ranks_per_worker > 1:
        raise ConfigError("ngsgd plan measures workers of one process; leave out cluster.ranks_per_worker.")
    check_output_dir(config)
    spec = spec_of(config, report)
    report(f"measuring for about {seconds:g} s")
    # the run's own disk
    with tempfile.TemporaryDirectory(dir=config.output_dir, prefix=".plan-") as scratch:
        machine, workload = probe.measure(spec, config, num_cores=os.cpu_count() or 1, seconds=seconds, scratch=Path(scratch))
    keep(config, machine, workload)
    return machine, workload


def spec_of(config: RunConfig, report: Callable[[str], None]) -> TaskSpec:
    """What is trained; the data of a speech recipe are prepared."""
    if config.task._target_:
        from ngsgd.pipeline.task_run import task_spec, with_module

        return task_spec(with_module(config), None)
    from ngsgd.pipeline.prepare import prepare
    from ngsgd.tasks.speech import SpeechTaskSpec

    return SpeechTaskSpec(config, str(prepare(config, report).egs_directory))


def _saved(config: RunConfig) -> tuple[Machine, Workload]:
    found = saved(config)
    if found is None:
        raise ConfigError(f"{kept_in(config)} has no measurement of these settings; leave out --saved to measure.")
    return found
