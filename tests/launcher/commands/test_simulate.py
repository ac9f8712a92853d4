"""`ngsgd simulate`: output and files, and that randomness comes from the seed alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ngsgd.config import ClusterConfig, OuterConfig, RunConfig
from ngsgd.counting import duration
from ngsgd.errors import ConfigError
from ngsgd.files import read_json_lines
from ngsgd.launcher import cli
from ngsgd.launcher.commands.cluster import simulate
from ngsgd.launcher.commands.cluster.simulate import Summary, VirtualProgress
from ngsgd.planning.planner import Spread
from ngsgd.training.records import SubsetScore
from tests.integration.service import TINY
from tests.launcher.records import Command, outer_iteration

SUMMARY = Summary(4, 10, 200.0, 180.0, 0.9, {"efficiency": 0.8, "failures": 0.1, "stragglers": 0.05, "averaging": 0.03,
                                            "overhead": 0.02}, 3, 1, 640000, SubsetScore(-0.5, 0.9), SubsetScore(-0.6, 0.85),
                  12.0, "/r/x")


def test_everything_wrong_is_reported_at_once(command: Command) -> None:
    wrong = ["--frames-per-s", "0", "--sigma", "-1", "--hang-fraction", "2", "--latency", "nan"]
    told = command("simulate", *wrong, code=ConfigError.exit_code).err
    assert "--frames-per-s" in told
    assert "--sigma is -1.0" in told
    assert "--hang-fraction" in told
    assert "--latency is nan" in told


def test_the_requested_spread_is_that_of_a_complete_job() -> None:
    options = simulate.argument_parser().parse_args(["--sigma", "0.1", "--host-sigma", "0.3"])
    cluster = simulate.cluster_of(options, RunConfig(), num_minibatches=25.0)
    assert cluster.spread == Spread(0.3, 0.5)
    assert cluster.spread.of_job(25.0) == pytest.approx((0.3 ** 2 + 0.1 ** 2) ** 0.5)


@pytest.mark.parametrize(("outer", "exchange", "num_arrays"), [
    ("average", "auto", 1), ("bmuf", "collective", 2), ("average", "object_store", 0), ("streaming", "auto", 0)])
def test_the_exchange_is_that_of_a_run_on_as_many_machines(outer: Any, exchange: Any, num_arrays: int) -> None:
    config = RunConfig(outer=OuterConfig(outer), cluster=ClusterConfig(exchange=exchange))
    options = simulate.argument_parser().parse_args([])
    assert simulate.cluster_of(options, config, num_minibatches=1.0).num_arrays == num_arrays


def test_lines_of_outer_iterations_tell_the_virtual_time() -> None:
    record = outer_iteration()
    assert VirtualProgress().iteration_line(record).endswith(f"at {duration(record.elapsed_s)}")


def test_the_summary_splits_the_time() -> None:
    assert simulate.text(SUMMARY) == [
        "simulated  10 outer iterations on 4 workers: 3m20s (12.0s on this machine); 3 lost workers, 1 of them hung",
        "predicted  3m00s by the planner's formulas (simulated: +11.1%)",
        "efficiency 80.0% (predicted 90.0%); lost to failures 10.0%, stragglers 5.0%, averaging 3.0%, overhead 2.0%",
        "objf       -0.500 valid -0.600 acc 85.0% after 640,000 frames",
        "run folder /r/x"]


def _simulated(output_dir: Path, command: Command, *arguments: str) -> dict[str, Any]:
    words = ["simulate", *TINY, f"output_dir={output_dir}", "cluster.num_workers=3", "schedule.num_epochs=0.5",
             "failure.max_attempts=100", "--json", *arguments]
    summary: dict[str, Any] = json.loads(command(*words).out)
    return summary


@pytest.mark.slow
def test_the_real_command_is_decided_by_its_seed_and_failures_change_no_number(
        tmp_path: Path, command: Command) -> None:
    broken = ("--frames-per-s", "300", "--failures-per-worker-hour", "2000", "--replace-s", "1", "--hang-fraction", "0.2")
    first, second = _simulated(tmp_path, command, *broken), _simulated(tmp_path, command, *broken)
    calm = _simulated(tmp_path, command, "--frames-per-s", "300", "--sigma", "0")
    # sorted: diagnostics run next to the next outer iteration, and an incident of that may be
    # reported before they are; the time of day of the start differs
    events = [sorted(line for line in (Path(one["folder"]) / "events.jsonl").read_text().splitlines() if '"opened"' not in line)
              for one in (first, second)]
    assert events[0] == events[1]
    assert first["num_deaths"] > 0
    assert first["virtual_s"] > 1.1 * calm["virtual_s"]
    assert first["valid"] == calm["valid"]  # the same model
    assert calm["virtual_s"] == pytest.approx(calm["predicted_s"], rel=0.05)
    assert calm["shares"]["failures"] == 0.0
    assert sum(first["shares"].values()) == pytest.approx(1.0)
    folder = Path(calm["folder"])
    records = [line for line in read_json_lines(folder / "events.jsonl") if line["event"] == "outer_iteration"]
    assert records[-1]["elapsed_s"] == calm["virtual_s"]
    assert json.loads((folder / "simulation.json").read_text())["summary"]["virtual_s"] == calm["virtual_s"]
    assert not (tmp_path / "mlflow.db").exists() and not (folder / "decode").exists()
    # with real workers it would start as many processes as the simulation has workers
    assert cli.main(["resume", calm["folder"]]) == ConfigError.exit_code
