"""The model of nodes with 8 GPUs: limits that are known, and tables of the docs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from ngsgd.launcher import cli
from ngsgd.pipeline.performance_model.multi_gpu import INTERCONNECTS, GpuNode, all_reduce_s, rows


def test_a_ring_moves_twice_the_bytes_but_those_of_one_member() -> None:
    assert all_reduce_s(4, 8e9, 1e9, 0.0) == pytest.approx(2 * 3 / 4 * 8.0)
    assert all_reduce_s(4, 0.0, 1e9, 1e-3) == pytest.approx(6e-3)


@pytest.mark.parametrize("link", INTERCONNECTS)
def test_shares_fall_with_the_number_of_nodes_and_averaging_at_every_step_is_no_better(
    link: str,
) -> None:
    table = rows(1e9, 4096, 100, [1, 2, 16, 256], INTERCONNECTS[link])
    for few, many in itertools.pairwise(table):
        assert many.synchronous <= few.synchronous <= 1.0
        assert many.averaging <= few.averaging <= 1.0
        assert many.groups <= few.groups <= 1.0
    # nothing of it is hidden behind the backward pass
    assert all(
        row.averaging <= row.synchronous for row in rows(1e9, 4096, 1, [1, 16], INTERCONNECTS[link])
    )


def test_synchronous_training_loses_nothing_from_the_bandwidth_of_the_page_on() -> None:
    node, num_nodes, P = GpuNode(), 16, 4e9
    fast = replace(INTERCONNECTS["infiniband"], inside_latency_s=0.0, between_latency_s=0.0)
    step_s = node.step_s(1e9, 8192)
    inside_s = all_reduce_s(node.num_gpus, P, fast.inside, 0.0)
    enough = 2 * (1 - 1 / num_nodes) * P / (node.hidden * step_s - inside_s)
    for factor, is_free in ((1.01, True), (0.99, False)):
        [row] = rows(1e9, 8192, 500, [num_nodes], replace(fast, between=factor * enough))
        assert (row.synchronous == 1.0) is is_free


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0,2"],
        ["--nodes", "2", "--parameters", "-1"],
        ["--link", "pcie"],
        ["--parameters", "1e9"],
    ],
)
def test_wrong_options_are_refused(words: list[str]) -> None:
    assert cli.main(["plan", *words]) == 2


def test_json_has_the_inputs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--nodes", "4", "--parameters", "1e6", "--json"]) == 0
    assert "data_factor" in capsys.readouterr().out
