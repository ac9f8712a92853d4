"""Numerators with tolerance against an enumeration of all placements."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from ngsgd.sequence.forward_backward import Transitions, log_path_sum
from ngsgd.sequence.numerators import Chains, chain_log_sum, chain_of
from tests.reference import chains as reference
from tests.sequence.graphs import random_graph

P = 3


def labels_of_paths(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Random labels that have a path through the graph of that seed."""
    graph, random = random_graph(seed), np.random.default_rng(seed)
    found = []
    for length in lengths:
        tried = (random.integers(P, size=length).tolist() for _ in range(10_000))
        found.append(next(one for one in tried if graph.log_weight_of(one) > -math.inf))
    return found


@pytest.mark.parametrize("tolerance", [0, 1, 2])
@pytest.mark.parametrize("seed", [1, 3, 4])
def test_the_sum_and_its_gradient_equal_those_over_all_placements(seed: int, tolerance: int) -> None:
    graph, lengths = random_graph(seed), (5, 3)
    labels = labels_of_paths(seed, lengths)
    scores_NP = torch.from_numpy(np.random.default_rng(seed).normal(size=(sum(lengths), P))).requires_grad_()
    found = [chain_of(graph, np.array(one, np.int32), tolerance) for one in labels]
    last_B = torch.tensor([last for _, last in found], dtype=torch.float64)
    sum_B = chain_log_sum(scores_NP, lengths, Chains.of([chain for chain, _ in found])) + last_B
    sum_B.sum().backward()
    parts = [reference.numerator(graph, one, scores_TP, tolerance)
             for one, scores_TP in zip(labels, np.split(scores_NP.detach().numpy(), [5]), strict=True)]
    # float64 on both sides: rounding of a few sums
    assert_close(sum_B.detach(), torch.tensor([total for total, _ in parts], dtype=torch.float64), rtol=0.0, atol=1e-9)
    assert scores_NP.grad is not None
    assert_close(scores_NP.grad, torch.from_numpy(np.concatenate([one for _, one in parts])), rtol=0.0, atol=1e-9)


def test_a_numerator_is_a_part_of_the_denominator() -> None:
    graph = random_graph(3)
    [labels] = labels_of_paths(3, (6,))
    scores_NP = torch.randn(6, P, dtype=torch.float64)
    chain, log_weight = chain_of(graph, np.array(labels, np.int32), 6)
    numerator = chain_log_sum(scores_NP, (6,), Chains.of([chain])) + log_weight
    assert numerator < log_path_sum(scores_NP, (6,), Transitions(graph, dtype=torch.float64))


def test_labels_without_a_path_have_no_chain() -> None:
    chain, log_weight = chain_of(random_graph(1), np.array([7, 7], np.int32), 1)
    assert log_weight == -math.inf
    assert not len(chain.pdf_K)
