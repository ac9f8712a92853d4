"""`ngsgd plan`: computed times, printed lines and refused settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ngsgd.config import ClusterConfig, RunConfig
from ngsgd.errors import ConfigError
from ngsgd.launcher import cli
from ngsgd.launcher.commands.cluster import plan
from ngsgd.launcher.commands.cluster.plan import keep, kept_in, saved, settings_key
from ngsgd.launcher.config import compose
from ngsgd.launcher.reports import plan_text
from ngsgd.planning import scaling
from ngsgd.planning.planner import Link, Machine, Speed, Spread, Workload
from ngsgd.planning.scaling import Assumptions
from ngsgd.runs import trust
from tests.launcher.records import Command

ROOT = Path(__file__).resolve().parents[3]
MACHINE = Machine(
    num_cores=2, num_gpus=0,
    parallel=(Speed(1, 2, 30000.0, 0.05, 0.06), Speed(2, 1, 20000.0, 0.05, 0.06), Speed(4, 1, 18000.0, 0.06, 0.06)),
    serial=(Speed(1, 1, 21000.0, 0.05, 0.06), Speed(1, 2, 30000.0, 0.05, 0.06)),
    spread=Spread(0.02, 0.0), link=Link(4e9, 4e-5, 1.5e9), checkpoint_s=0.007)
WORKLOAD = Workload(samples=16000.0, minibatch_size=128, model_bytes=1_300_000, total_samples=1.2e6)
ASSUMED = Assumptions(2, 1.25e8, 2e-4, 1.2e-4, 20.0, None)
# 10.4 million parameters, much data
LARGE = replace(WORKLOAD, model_bytes=41_600_000, total_samples=1e9)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[RunConfig]:
    """The configurations that would have been measured, for half a minute each."""
    seen: list[RunConfig] = []

    def fake(config: RunConfig, seconds: float, *, to_stderr: bool) -> tuple[Machine, Workload]:
        seen.append(config)
        return MACHINE, WORKLOAD
    monkeypatch.setattr(plan, "measure_machine", fake)
    monkeypatch.chdir(tmp_path)
    return seen


# The command --------------------------------------------------------------------------------------


def test_settings_are_composed_as_for_training(measured: list[RunConfig], command: Command) -> None:
    told = command("plan", "model=pnorm", "--workers", "1,8", "schedule.minibatch_size=256").out
    [config] = measured
    assert (config.model.kind, config.schedule.minibatch_size) == ("pnorm", 256)
    rows = [line for line in told.splitlines() if re.match(r" +\d+  ", line)]
    assert [int(row.split()[0]) for row in rows] == [1, 8]


@pytest.mark.slow
def test_a_task_is_measured_as_it_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                             ) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trust, "allowed_modules", set())
    assert cli.main(["plan", "task=tests.tasks.blobs:make_task", f"task.search_path={ROOT}", "task.args={shard_size: 80}",
                     "schedule.minibatch_size=16", "--seconds", "1", "--workers", "1,4"]) == 0
    said = capsys.readouterr().out
    # 950 training examples in 12 shards
    assert "79 examples" in said and not re.search("frame|iter=|samples_per_iter", said)
    config = compose.compose(["task=tests.tasks.blobs:make_task", "schedule.minibatch_size=16"])
    assert settings_key(config) != settings_key(compose.compose(["schedule.minibatch_size=16"]))


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=" ".join)
def test_the_measurement_is_announced(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("ngsgd.planning.probe.measure", lambda *_, **__: (MACHINE, WORKLOAD))
    monkeypatch.setattr(plan, "spec_of", lambda *_: None)
    waits = command("plan", f"output_dir={tmp_path}", "--seconds", "7", *flags).err.splitlines()
    assert len(waits) == 2 and str(tmp_path) in waits[0] and "7 s" in waits[1]


def test_json_is_all_that_stdout_gets(measured: list[RunConfig], command: Command) -> None:
    found = json.loads(command("plan", "--json", "--workers", "4,2,4").out)
    assert [row["workers"] for row in found["rows"]] == [2, 4]
    assert found["rows"][0]["here"]["outer_iter_s"] > 0.8
    assert Machine.from_json(found["machine"]) == MACHINE
    assert found["advice"]


def test_a_price_gives_the_cost_of_each_row_and_a_choice(measured: list[RunConfig], command: Command) -> None:
    words = ("plan", "cluster.price_per_hour=0.5", "--workers", "1,2,4")
    said = command(*words).out
    assert re.search(r"training +cost$", said, re.MULTILINE)
    assert re.search(r"^choice: cluster.num_workers=\d egs.samples_per_iter=\d+ cluster.compression=\w+: .*, cost [\d.]+$", said,
                     re.MULTILINE)
    found = json.loads(command(*words, "--json").out)
    for row in found["rows"]:
        assert row["cost"] == pytest.approx(row["total_s"] / 3600 * row["workers"] * 0.5)
    assert found["choice"] in found["choices"]


def test_a_deadline_that_cannot_be_kept_is_told_with_the_fastest_settings(
        measured: list[RunConfig], command: Command) -> None:
    told = command("plan", "--workers", "1,2", "--deadline", "1e-4").out
    assert re.search(r"^choice: none; .* 2 workers: ", told, re.MULTILINE)


@pytest.mark.parametrize(("arguments", "told"), [
    (["--deadline", "0"], "--deadline is 0.0"),
    (["--budget", "3"], "cluster.price_per_hour=PRICE"),
    (["--workers", "1,x"], "--workers is '1,x'"),
    (["--workers", "0"], "--workers is '0'"),
    (["--workers", "1000000"], "from 1 to 100000"),
    (["--bandwidth", "0"], "--bandwidth is 0.0"),
    (["--seconds", "nan"], "--seconds"),
    (["--failures-per-worker-hour", "-1"], "--failures-per-worker-hour is -1.0"),
    (["--cores-per-node", "0"], "--cores-per-node is 0"),
    (["--sigma", "much"], "'much'"),
    (["--bandwidth", "10Gb"], "bytes/s"),
    (["--deadline", "8h"], "HOURS"),
    (["--cores-per-node", "2.5"], "integer"),
    (["optimizer.max_chnage=1"], "optimizer.max_change=1"),
    (["--saved"], "--saved"),
])
def test_bad_input_is_reported(arguments: list[str], told: str, measured: list[RunConfig], tmp_path: Path,
                                        command: Command) -> None:
    captured = command("plan", *arguments, code=2)
    assert told in captured.err
    assert (captured.out, measured, list(tmp_path.iterdir())) == ("", [], [])


def test_all_wrong_arguments_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        plan.command(["--workers", "x", "--bandwidth", "-1", "--sigma", "-2"])
    assert len(caught.value.problems) == 3


def test_a_saved_measurement_is_used_for_its_own_settings_only(
        measured: list[RunConfig], command: Command) -> None:
    Path("runs").mkdir()
    keep(RunConfig(), MACHINE, WORKLOAD)
    # where jobs run may differ
    command("plan", "--saved", "output_dir=runs", "cluster=in_process", "name=other")
    assert measured == []
    told = command("plan", "--saved", "output_dir=runs", "model.hidden_dim=512", code=2).err
    assert "measurement" in told


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}',
                                     '{"format": 3, "settings": "KEY", "machine": {}, "workload": {}}'])
def test_a_damaged_measurement_counts_as_none(content: str, tmp_path: Path) -> None:
    config = RunConfig(output_dir=str(tmp_path))
    kept_in(config).write_text(content.replace("KEY", settings_key(config)))
    with pytest.raises(ConfigError):
        saved(config)


# The table ----------------------------------------------------------------------------------------


def _rows(*workers: int, machine: Machine = MACHINE, workload: Workload = WORKLOAD, assumed: Assumptions = ASSUMED,
          cluster: ClusterConfig | None = None) -> list[scaling.Row]:
    config = RunConfig(cluster=cluster or ClusterConfig(kind="ray"))
    return scaling.rows(machine, workload, config, workers, assumed)


def test_workers_share_cores_here_and_have_their_own_there() -> None:
    one, two, four, many = _rows(1, 2, 4, 1000)
    assert one.here == one.there
    assert two.here == two.there  # two cores are one machine: there is no network
    assert (four.num_machines, many.num_machines) == (2, 500)
    assert four.here is not None
    assert four.here.outer_iter_s > 2 * four.there.outer_iter_s * 0.95
    assert four.speed_up_here is not None and four.speed_up_here < two.speed_up
    assert many.here is None
    assert one.speed_up == 1.0


def test_in_one_process_more_workers_are_no_faster_here() -> None:
    (four,) = _rows(4, cluster=ClusterConfig(kind="in_process"))
    assert four.here is not None
    assert four.here.compute_s == pytest.approx(4 * (16000 / 21000 + 0.05), rel=0.01)
    assert four.there.compute_s == pytest.approx(16000 / 20000 + 0.05, rel=0.2)


def test_faster_links_and_a_smaller_spread_make_an_outer_iteration_shorter() -> None:
    (base,), (fast,), (even,) = (_rows(64, workload=LARGE, assumed=assumed) for assumed in (
        ASSUMED, replace(ASSUMED, bandwidth=1.25e9), replace(ASSUMED, sigma=0.0)))
    assert fast.there.outer_iter_s < base.there.outer_iter_s
    assert even.there.outer_iter_s < base.there.outer_iter_s


def test_failures_cost_more_with_more_workers() -> None:
    few, many = _rows(4, 256, assumed=replace(ASSUMED, failures_per_worker_hour=0.5))
    assert 0.0 < few.lost < many.lost < 1.0
    (never,) = _rows(256, assumed=replace(ASSUMED, failures_per_worker_hour=0.0))
    assert never.lost == 0.0


def test_harmless_settings_are_kept() -> None:
    (row,) = _rows(2, workload=replace(WORKLOAD, samples=15000.0, total_samples=1e9), machine=replace(MACHINE, parallel=(
        Speed(1, 2, 3000.0, 0.05, 0.06), Speed(2, 1, 2000.0, 0.05, 0.06))))
    assert row.samples.samples == RunConfig().egs.samples_per_iter == 16000


@pytest.mark.parametrize(("workers", "absent"), [((1, 2), "nothing"), ((1, 1000), "nothing"), ((64, 1000), "samples_per_iter  ")])
def test_a_column_without_values_is_omitted(workers: tuple[int, ...], absent: str) -> None:
    table = _rows(*workers)
    lines = plan_text.text(MACHINE, WORKLOAD, ASSUMED, table)
    (head,) = [line for line in lines if line.startswith("workers")]
    above, *cells = lines[lines.index(head) - 1], *lines[lines.index(head) + 1:][:len(table)]
    assert not any(line.endswith("-") or " - " in line for line in cells)
    assert {len(line) for line in cells} == {len(head)}
    assert (head.count("s/iter"), "here" in above) == ((2, True) if table[0].here else (1, False))
    assert absent not in head
    # a value that is missing in some rows has a reason
    assert any(line.startswith("here for") for line in lines) == (workers == (1, 1000))


def test_every_number_of_workers_gets_samples_and_each_reason_is_printed_once() -> None:
    table = _rows(1, 2, 4, 8, 1000)
    lines = plan_text.text(MACHINE, WORKLOAD, ASSUMED, table)
    reasons = [line for line in lines if line.startswith("samples_per_iter for ")]
    assert len(reasons) == len({row.samples.reason for row in table})
    assert all(len(line) <= 132 for line in lines)
    assert lines[-1].startswith("advice: ")


# Advice: one line about what helps most -----------------------------------------------------------


def test_the_number_of_workers_is_the_last_line_after_advice_on_threads() -> None:
    slow = replace(MACHINE, serial=(Speed(1, 1, 21000.0, 0.05, 0.06), Speed(1, 2, 12000.0, 0.05, 0.06)))
    table = _rows(1, 2, machine=slow)
    *before, last = plan_text.text(slow, WORKLOAD, ASSUMED, table)
    assert plan_text.advice(table) in last
    assert plan_text.thread_advice(slow) in before[-1]
    found = plan_text.as_json(slow, WORKLOAD, ASSUMED, table)
    told = plan_text.thread_advice(slow)
    assert (found["thread_advice"], found["advice"]) == (told, plan_text.advice(table))
    assert " 1.8 " in told and "cluster.threads_per_worker=1" in told
    assert plan_text.thread_advice(MACHINE) == ""


def test_the_time_of_a_run_is_that_of_its_outer_iterations() -> None:
    one, four, many = _rows(1, 4, 1000, assumed=replace(ASSUMED, failures_per_worker_hour=0.0))
    # 1.2 million samples in jobs of 16000; a run has at least one outer iteration
    assert [row.num_outer_iters for row in (one, four, many)] == [75, 18, 1]
    assert four.total_s == pytest.approx(18 * four.there.outer_iter_s)
    [failing] = _rows(4, assumed=replace(ASSUMED, failures_per_worker_hour=0.5))
    assert failing.total_s * (1.0 - failing.lost) == pytest.approx(four.total_s)


def test_advice_on_fixed_costs() -> None:
    machine = replace(MACHINE, checkpoint_s=0.5)
    table = _rows(2, machine=machine, workload=replace(WORKLOAD, total_samples=1e9))
    assert table[0].samples.samples > 16000
    share = f"{100 * table[0].there.efficiency:.0f}%"
    assert plan_text.advice(table) .count(f" {share} ") == 1
    assert f"egs.samples_per_iter={table[0].samples.samples};" in plan_text.advice(table)


@pytest.mark.parametrize("total_samples", [1.2e6, 1e7, 1e8])
@pytest.mark.entry("Nc11", "`ngsgd plan` for little data", "works",
                   "Numbers of workers and lengths of jobs are advised only if a run has at least 20 outer iterations.")
def test_every_advised_number_has_twenty_outer_iterations(total_samples: float) -> None:
    table = _rows(1, 2, 4, 8, 16, 64, 256, workload=replace(WORKLOAD, total_samples=total_samples))
    advised = int(re.findall(r"\d+", plan_text.advice(table))[0])
    row = next(row for row in table if row.workers == advised)
    assert row.num_outer_iters >= 20
    assert total_samples > 2e6 or any(other.num_outer_iters < 20 and other.there.efficiency >= 0.5 for other in table)
    for choice in scaling.choices(MACHINE, replace(WORKLOAD, total_samples=total_samples), RunConfig(), (1, 8, 64), ASSUMED):
        assert total_samples >= 20 * choice.workers * choice.samples_per_iter * 0.95


@pytest.mark.parametrize(("workers", "workload", "told"), [
    ((1, 2, 1000), WORKLOAD, r".*; for 1000 there is too little data\."),
    ((1000, 2000), WORKLOAD, "(?!.*up to).*"),
    ((1, 2), replace(WORKLOAD, samples=1e6, total_samples=1e9),
     r"up to 2 workers run at 9\d% efficiency; the table ends there\.")])
def test_a_number_is_advised_that_pays(workers: tuple[int, ...], workload: Workload, told: str) -> None:
    assert re.fullmatch(told, plan_text.advice(_rows(*workers, workload=workload)))


# For real -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_command_measures_prints_and_keeps(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ngsgd", "plan",
             f"output_dir={tmp_path}", "data.train_minutes=1.5", "data.valid_minutes=0.3",
             "data.test_minutes=0.3", "egs.samples_per_iter=400", "egs.num_diagnostic_frames=300", "model.num_layers=2",
             "model.hidden_dim=64", "schedule.minibatch_size=16", "cluster.wait_for_workers_s=280", "--workers", "1,4",
             "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*words, "--seconds", "1"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)
    assert [row["workers"] for row in first["rows"]] == [1, 4]
    assert 0.0 < first["rows"][0]["there"]["efficiency"] < 1.0
    again = subprocess.run([*words, "--saved"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert json.loads(again.stdout) == first
    # no checkpoint of the probe is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "plan.json"]
