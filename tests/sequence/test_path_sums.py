"""Path sums and their derivatives against an enumeration, a dense recursion, and differences."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ngsgd.sequence.forward_backward import Transitions, expected_accuracy, log_path_sum
from tests.reference.path_sums import enumerated, log_domain
from tests.sequence.graphs import digit_like_graph, random_graph

LENGTHS = [3, 5, 1, 4]
# float64 on both sides, a handful of frames: rounding of single sums
assert_exact = partial(assert_close, rtol=0.0, atol=1e-9)


def problem(seed: int, leak: float) -> tuple[Transitions, Tensor, Tensor]:
    graph = random_graph(seed, leak=leak)
    generator = torch.Generator().manual_seed(seed)
    scores_NP = torch.randn(sum(LENGTHS), 3, generator=generator, dtype=torch.float64).mul_(2.0).requires_grad_()
    accuracy_NP = torch.rand(sum(LENGTHS), 3, generator=generator, dtype=torch.float64)
    return Transitions(graph, dtype=torch.float64), scores_NP, accuracy_NP


@pytest.mark.parametrize("leak", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(5))
def test_sums_and_derivatives_equal_an_enumeration_of_all_paths(seed: int, leak: float) -> None:
    transitions, scores_NP, accuracy_NP = problem(seed, leak)
    graph = random_graph(seed, leak=leak)
    z_B = log_path_sum(scores_NP, LENGTHS, transitions)
    e_B = expected_accuracy(scores_NP, accuracy_NP, LENGTHS, transitions)
    is_possible_B = z_B.isfinite()
    [d_z] = torch.autograd.grad(z_B[is_possible_B].sum(), scores_NP)
    [d_e] = torch.autograd.grad(e_B.sum(), scores_NP)
    begin = 0
    for index, length in enumerate(LENGTHS):
        part = slice(begin, begin + length)
        begin += length
        if not is_possible_B[index]:
            assert float(e_B[index].detach()) == 0.0 and not d_e[part].any()
            continue
        log_z, d_log_z, mean, d_mean = enumerated(graph, scores_NP[part].detach().numpy(), accuracy_NP[part].numpy())
        assert_exact(float(z_B[index].detach()), log_z)
        assert_exact(d_z[part], torch.from_numpy(d_log_z))
        assert_exact(float(e_B[index].detach()), mean)
        assert_exact(d_e[part], torch.from_numpy(d_mean))


def test_most_of_these_graphs_have_paths() -> None:
    """Else the test above would compare nothing."""
    transitions, scores_NP, _ = problem(0, 0.1)
    assert log_path_sum(scores_NP, LENGTHS, transitions).isfinite().all()


def test_derivatives_equal_finite_differences() -> None:
    transitions, scores_NP, accuracy_NP = problem(3, 0.1)
    assert torch.autograd.gradcheck(lambda x: log_path_sum(x, LENGTHS, transitions), scores_NP)
    assert torch.autograd.gradcheck(lambda x: expected_accuracy(x, accuracy_NP, LENGTHS, transitions), scores_NP)


@pytest.mark.parametrize("num_states", [40, 400])  # dense and sparse products
def test_log_sums_equal_a_dense_recursion_in_the_log_domain(num_states: int) -> None:
    graph = digit_like_graph(0, num_states, 30).with_leak(1e-3)
    scores_NP = torch.randn(60, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64).mul_(5.0).requires_grad_()
    z_B = log_path_sum(scores_NP, [60], Transitions(graph, dtype=torch.float64))
    z_B.sum().backward()
    log_z, posterior_TP = log_domain(graph, scores_NP.detach().numpy())
    assert_close(float(z_B.detach()), log_z, rtol=1e-12, atol=0.0)  # 60 frames of float64 rounding
    assert_exact(scores_NP.grad, torch.from_numpy(posterior_TP))


@pytest.mark.slow
def test_float32_stays_finite_and_right_on_a_thousand_frames() -> None:
    """Scores spread by 20 nats: products of probabilities would underflow within a few frames."""
    graph = digit_like_graph(0, 40, 30).with_leak(1e-5)
    random = np.random.default_rng(0)
    scores_NP = torch.from_numpy(random.normal(0.0, 20.0, (1_000, 30))).float().requires_grad_()
    accuracy_NP = torch.from_numpy(random.integers(2, size=(1_000, 30))).float()
    transitions, exact = Transitions(graph), Transitions(graph, dtype=torch.float64)
    z_B = log_path_sum(scores_NP, [1_000], transitions)
    log_z, posterior_TP = log_domain(graph, scores_NP.detach().double().numpy())
    # float32 rounds each of 1,000 frames' sums to 6e-8
    assert_close(float(z_B.detach()), log_z, rtol=1e-6, atol=0.0)
    [d_z] = torch.autograd.grad(z_B.sum(), scores_NP)
    # float32 at |log a| up to 100: 1e-5 a frame
    assert_close(d_z, torch.from_numpy(posterior_TP).float(), rtol=0.0, atol=1e-4)
    e_B = expected_accuracy(scores_NP, accuracy_NP, [1_000], transitions)
    [d_e] = torch.autograd.grad(e_B.sum(), scores_NP)
    exact_NP = scores_NP.detach().double().requires_grad_()
    e64_B = expected_accuracy(exact_NP, accuracy_NP.double(), [1_000], exact)
    [d_e64] = torch.autograd.grad(e64_B.sum(), exact_NP)
    assert d_e.isfinite().all()
    assert_close(float(e_B.detach()), float(e64_B.detach()), rtol=1e-5, atol=0.0)
    assert_close(d_e.double(), d_e64, rtol=0.0, atol=1e-3)


def test_batch_size_and_order_change_nothing() -> None:
    """A column's sums do not depend on the others, to the rounding of the matrix product."""
    transitions = Transitions(digit_like_graph(0, 40, 30).with_leak(1e-3), dtype=torch.float64)
    lengths = [7, 30, 1, 30, 12]
    generator = torch.Generator().manual_seed(0)
    scores = [torch.randn(length, 30, generator=generator, dtype=torch.float64, requires_grad=True) for length in lengths]
    accuracies = [torch.rand(length, 30, generator=generator, dtype=torch.float64) for length in lengths]

    def values(order: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        rows, accuracy = torch.cat([scores[i] for i in order]), torch.cat([accuracies[i] for i in order])
        sizes = [lengths[i] for i in order]
        both = log_path_sum(rows, sizes, transitions) + 2.0 * expected_accuracy(rows, accuracy, sizes, transitions)
        gradients = torch.autograd.grad(both.sum(), [scores[i] for i in order])
        return {i: (both[at].detach(), gradient) for at, (i, gradient) in enumerate(zip(order, gradients, strict=True))}
    together, turned = values([0, 1, 2, 3, 4]), values([3, 0, 4, 2, 1])
    for index in range(len(lengths)):
        for other in (turned[index], values([index])[index]):
            # a product of 5 columns may add up in another order
            assert_close(together[index], other, rtol=1e-12, atol=1e-12)


def test_a_sequence_without_a_path_has_no_derivative() -> None:
    graph = random_graph(0)
    blocked = replace(graph, log_final_S=np.full(graph.num_states, -np.inf))
    scores_NP = torch.randn(5, 3, requires_grad=True)
    transitions = Transitions(blocked)
    assert (log_path_sum(scores_NP, [2, 3], transitions) == -torch.inf).all()
    [gradient] = torch.autograd.grad(expected_accuracy(scores_NP, torch.ones(5, 3), [2, 3], transitions).sum(), scores_NP)
    assert not gradient.any()
