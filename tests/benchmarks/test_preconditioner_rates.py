"""The measurement of learning rates in docs/preconditioners.md."""

from __future__ import annotations

from benchmarks.preconditioner_rates import best, held_out_loss


def test_the_best_rate_is_one_that_does_not_diverge() -> None:
    small = {"num_steps": 5, "width": 8}
    assert held_out_loss("kfac", 1e6, 0, **small) == float("inf")
    assert best("kfac", rates=(0.001, 1e6), seeds=(0,), **small).startswith("0.001 |")
