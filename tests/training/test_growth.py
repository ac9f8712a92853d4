"""Models that grow between outer iterations: no bit depends on what befell the run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ngsgd.cluster.process_pool import ProcessPool
from ngsgd.config import FailureConfig, ModelConfig, OptimizerConfig, OuterConfig, RunConfig, check
from ngsgd.errors import RunInterrupted
from ngsgd.optim.outer import Bmuf, OuterInfo, OuterOptimizer
from ngsgd.training.job import JobResult, Outcome
from ngsgd.training.storage.audit import audit
from tests.toy import Run, StopAfter, config, require_undisturbed, undisturbed
from tests.training.test_coordinator import FaultyPool, Spoil, dies

# 6 outer iterations: one layer in the first, two in the second, three from the third on,
# sub-classes in the last
GROWING = ModelConfig(num_layers=3, hidden_dim=16, add_layers_period=1, num_subclasses=20)


def growing(model: ModelConfig = GROWING, **changes: Any) -> RunConfig:
    return config(model=model, **changes)


def once(places: set[tuple[int, int]], spoil: Spoil) -> Spoil:
    """Spoil the first result of each of these jobs."""
    def chosen(result: JobResult) -> Outcome:
        at = (result.job.outer_iter, result.job.job)
        if at not in places:
            return result
        places.discard(at)
        return spoil(result)
    return chosen


KINDS = {
    "averaged": growing(),
    "with momentum, a moving average and kept Fisher estimates": growing(
        outer=OuterConfig("bmuf", gain=1.5, ema_decay=0.5),
        optimizer=OptimizerConfig(rank_in=4, rank_out=4, momentum=0.5, weight_decay=1e-4,
                                  curvature_state="keep")),
    "tdnn-f with batch norm, an input transform and prior scales": growing(model=replace(
        GROWING, kind="tdnnf", normalize="batchnorm", bottleneck_dim=8, tdnn_offsets="-1,0,1 -1,0 0", input_transform="lda",
        prior_scale_power=-0.25, dropout_schedule="0,0.1,0")),
}
kinds = pytest.mark.parametrize("run_config", KINDS.values(), ids=KINDS)


@pytest.mark.slow
@kinds
@pytest.mark.parametrize("questions", [1, 2, 3, 5])
def test_resuming_between_any_two_stages_is_bitwise_identical(
        tmp_path: Path, run_config: RunConfig, questions: int) -> None:
    assert check(run_config) == []
    whole = undisturbed(run_config)
    run = Run(tmp_path / "stopped", run_config)
    with pytest.raises(RunInterrupted):
        run.train(stop=StopAfter(questions))
    # another process: nothing is in memory
    end = require_undisturbed(Run(tmp_path / "stopped", run_config))
    assert {name: value.tobytes() for name, value in end.buffers.items()} == {
        name: value.tobytes() for name, value in whole.buffers.items()}


@pytest.mark.slow
@kinds
def test_jobs_that_run_again_and_other_processes_give_identical_bits(tmp_path: Path, run_config: RunConfig) -> None:
    run = Run(tmp_path / "faulty", run_config)
    require_undisturbed(run, FaultyPool(run, once({(0, 1), (1, 0), (2, 1), (5, 0)}, dies)))
    run = Run(tmp_path / "processes", run_config)
    require_undisturbed(run, ProcessPool(run.spec, 2, 1, run.store.layout.size,
                                         log_directory=run.folder / "workers"))


def test_only_what_is_in_use_moves(tmp_path: Path) -> None:
    run = Run(tmp_path, growing(optimizer=OptimizerConfig(rank_in=4, rank_out=4, weight_decay=1e-3)))
    run.train()
    moved = [{name.partition(".")[0] for name, change in record.relative_change.items() if change} for record in
             run.recorder.records]
    hidden = ["affine1", "affine2", "affine3"]
    assert moved == [{"affine1", "output"}, {"affine1", "affine2", "output"}, *[{*hidden, "output"}] * 2,
                     {*hidden, "output"}, {*hidden, "subclass_output"}]
    assert run.recorder.records[-1].valid.accuracy > 0.8  # six classes; chance is 0.17


def test_an_outer_iteration_that_is_rolled_back_runs_again_in_its_stage(tmp_path: Path) -> None:
    run = Run(tmp_path / "rolled_back", growing(failure=FailureConfig(on_divergence="halve")))
    places = {(1, 0), (1, 1), (5, 0), (5, 1)}
    pool = FaultyPool(run, once(places, lambda result: replace(result, objf=float("nan"))))
    end = run.train(pool)
    assert [incident.what for incident in run.recorder.incidents].count("rolled_back") == 2
    assert end.progress.outer_iter == 5 and end.progress.lr_scale == 0.25
    assert run.recorder.records[-1].valid.accuracy > 0.7
    assert audit(run.ledger_path) == []


def test_values_written_into_a_model_have_no_momentum() -> None:
    model = np.arange(6, dtype=np.float32)
    outer = OuterOptimizer(Bmuf(2.0), model, ema_decay=0.9)
    for outer_iter in range(2):
        outer.step([model + 1.0, model + 4.0 * outer_iter], [1.0, 1.0], OuterInfo(outer_iter, 20, 2, 0.1))
    assert outer.arrays["block_momentum"].all() and not np.array_equal(outer.eval_model(), outer.final_model())
    before = {name: array.copy() for name, array in outer.arrays.items()}
    outer.put(slice(2, 4), np.array([8.0, 9.0], np.float32))
    assert outer.eval_model()[2:4].tolist() == outer.broadcast()[2:4].tolist() == outer.final_model()[2:4].tolist() == [8.0, 9.0]
    assert outer.arrays["block_momentum"][2:4].tolist() == [0.0, 0.0]
    for name, array in outer.arrays.items():
        assert np.array_equal(np.delete(array, [2, 3]), np.delete(before[name], [2, 3]))


@pytest.mark.parametrize(("changes", "said"), [
    ({"outer": OuterConfig("bmuf", overlap=True)}, r"model.add_layers_period changes the model .* with outer.overlap"),
    ({"outer": OuterConfig("streaming")}, r"with outer.kind streaming jobs continue"),
])
def test_invalid_combinations_are_reported(changes: dict[str, Any], said: str) -> None:
    (problem,) = check(growing(**changes))
    assert re.search(said, problem)
