"""Objectives and numerators against enumerations, finite differences, and their definitions."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from ngsgd.config import ObjectiveConfig
from ngsgd.sequence import objectives
from ngsgd.sequence.forward_backward import Transitions, log_path_sum
from ngsgd.sequence.graph import StateGraph
from ngsgd.sequence.objectives import OUTPUT_L2, Chains, Denominator, SequenceObjective, chain_of
from tests.reference.chains import numerator
from tests.reference.path_sums import enumerated
from tests.sequence.graphs import random_graph

LENGTHS = (4, 3)
P = 3
KINDS = ("mmi", "bmmi", "mpe", "smbr", "lfmmi")
PHONES = np.array([0, 0, 1])
SILENCE = np.array([True, False, False])
# float64 on both sides: rounding of a few sums
assert_exact = partial(assert_close, rtol=0.0, atol=1e-9)


def denominator() -> Denominator:
    return Denominator(random_graph(4, leak=0.1), np.log([0.5, 0.3, 0.2]), PHONES, SILENCE)


def problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y_NP = torch.randn(sum(LENGTHS), P, generator=generator, dtype=torch.float64).mul_(2.0).requires_grad_()
    return y_NP, torch.tensor([0, 1, 2, 2, 1, 0, 2]), torch.tensor([-1.0, -2.0], dtype=torch.float64)


@pytest.fixture
def large_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Terms of regularization and boosting that the tolerance would not hide."""
    monkeypatch.setattr(objectives, "OUTPUT_L2", 0.01)
    monkeypatch.setattr(objectives, "BOOST", 0.5)


def is_right(config: ObjectiveConfig, pdf: int, label: int) -> bool:
    if SILENCE[pdf] and SILENCE[label]:
        return True
    same = PHONES[pdf] == PHONES[label] if config.kind in ("mpe", "bmmi") else pdf == label
    return bool(same)


def by_enumeration(config: ObjectiveConfig, y_NP: np.ndarray, pdf_N: list[int], log_weight_B: list[float]) -> float:
    """The objective, sequence by sequence, from its formula."""
    graph = denominator().graph
    log_softmax = y_NP - np.log(np.exp(y_NP).sum(axis=1, keepdims=True))
    scores = y_NP if config.kind == "lfmmi" else config.acoustic_scale * (log_softmax - denominator().log_prior_P)
    total, begin = 0.0, 0
    for length, log_weight in zip(LENGTHS, log_weight_B, strict=True):
        s_TP, labels = scores[begin:begin + length], pdf_N[begin:begin + length]
        right_TP = np.array([[is_right(config, pdf, label) for pdf in range(P)] for label in labels], dtype=float)
        if config.kind in ("mpe", "smbr"):
            total += enumerated(graph, s_TP, right_TP)[2]
        else:
            cost_P = np.where(SILENCE, 0.1, 1.0)
            against_TP = s_TP + (objectives.BOOST * (1.0 - right_TP) * cost_P if config.kind == "bmmi" else 0.0)
            total += s_TP[np.arange(length), labels].sum() + log_weight - enumerated(graph, against_TP, right_TP)[0]
        begin += length
    smooth = log_softmax[np.arange(len(pdf_N)), pdf_N].sum()
    if config.kind == "lfmmi":
        return float(total + config.ce_weight * smooth - 0.5 * objectives.OUTPUT_L2 * np.square(y_NP).sum())
    return float((1.0 - config.ce_weight) * total + config.ce_weight * smooth)


@pytest.mark.usefixtures("large_terms")
@pytest.mark.parametrize("kind", KINDS)
def test_objective_equals_an_enumeration_and_its_gradient_finite_differences(kind: Any) -> None:
    config = ObjectiveConfig(kind=kind, acoustic_scale=0.7, ce_weight=0.2)
    objective = SequenceObjective(config, denominator(), dtype=torch.float64)
    y_NP, pdf_N, log_weight_B = problem()
    loss = objective(y_NP, pdf_N, LENGTHS, log_weight_B)
    expected = by_enumeration(config, y_NP.detach().numpy(), pdf_N.tolist(), log_weight_B.tolist())
    assert_exact(float(loss.detach()), -expected)
    assert torch.autograd.gradcheck(lambda y: objective(y, pdf_N, LENGTHS, log_weight_B), y_NP)


@pytest.mark.usefixtures("large_terms")
def test_lfmmi_with_priors_and_tolerance_equals_an_enumeration() -> None:
    """Scores without priors, and the labels at every place within the tolerance."""
    config = ObjectiveConfig(kind="lfmmi", use_priors=True, tolerance_frames=1, ce_weight=0.2)
    one, (y_NP, _, _) = denominator(), problem()
    graph = one.graph
    said = [next(list(labels) for labels in itertools.product(range(P), repeat=length)
                 if len(set(labels)) > 1 and graph.log_weight_of(labels) > -math.inf) for length in LENGTHS]
    found = [chain_of(graph, np.array(labels, np.int32), 1) for labels in said]
    assert all(math.isfinite(last) for _, last in found)
    pdf_N = torch.tensor([*said[0], *said[1]])
    log_weight_B = torch.tensor([last for _, last in found], dtype=torch.float64)
    objective, chains = SequenceObjective(config, one, dtype=torch.float64), Chains.of([chain for chain, _ in found])
    loss = objective(y_NP, pdf_N, LENGTHS, log_weight_B, chains)
    y = y_NP.detach().numpy()
    total = 0.2 * float(y_NP.detach().log_softmax(dim=1)[range(7), pdf_N].sum()) - 0.005 * np.square(y).sum()
    for labels, s_TP in zip(said, np.split(y - one.log_prior_P, [4]), strict=True):
        total += numerator(graph, labels, s_TP, 1)[0] - enumerated(graph, s_TP, s_TP)[0]
    assert_exact(float(loss.detach()), -total)
    assert torch.autograd.gradcheck(lambda y: objective(y, pdf_N, LENGTHS, log_weight_B, chains), y_NP)


def test_gradients_are_differences_of_posteriors() -> None:
    """mmi: k (label - posterior), the posterior by enumeration."""
    config = ObjectiveConfig(kind="mmi", acoustic_scale=0.7, ce_weight=0.0)
    y_NP, pdf_N, log_weight_B = problem()
    SequenceObjective(config, denominator(), dtype=torch.float64)(y_NP, pdf_N, LENGTHS, log_weight_B).backward()
    log_softmax = y_NP.detach().log_softmax(dim=1).numpy()
    scores = 0.7 * (log_softmax - denominator().log_prior_P)
    posterior = np.concatenate([enumerated(denominator().graph, part, part)[1] for part in np.split(scores, [4])])
    by_score = 0.7 * (np.eye(P)[pdf_N.numpy()] - posterior)
    by_output = by_score - np.exp(log_softmax) * by_score.sum(axis=1, keepdims=True)
    assert y_NP.grad is not None
    assert_exact(-y_NP.grad, torch.from_numpy(by_output))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_without_a_path_counts_and_moves_nothing(kind: Any) -> None:
    """The other sequence has the derivative that it has alone."""
    one = denominator()
    initial = np.array([0.0, -np.inf, -np.inf, -np.inf])
    # paths of one frame alone
    graph = StateGraph(one.graph.pdf_S, np.array([0]), np.array([1]), np.zeros(1), initial, np.zeros(4))
    blocked = Denominator(graph, one.log_prior_P, PHONES, SILENCE)
    objective = SequenceObjective(ObjectiveConfig(kind=kind, ce_weight=0.0), blocked)
    y_NP = torch.randn(4, P, requires_grad=True)
    pdf_N = torch.full((4,), int(one.graph.pdf_S[1]))
    loss = objective(y_NP, pdf_N, (1, 3), torch.tensor([0.0, -math.inf], dtype=torch.float64))
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert y_NP.grad is not None
    assert y_NP.grad.isfinite().all()
    # lfmmi alone has a regularization of the outputs
    assert_close(y_NP.grad[1:], (OUTPUT_L2 if kind == "lfmmi" else 0.0) * y_NP.detach()[1:])


def test_float32_is_close_to_float64() -> None:
    config = ObjectiveConfig(kind="smbr", ce_weight=0.1)
    y_NP, pdf_N, log_weight_B = problem()
    values = [SequenceObjective(config, denominator(), dtype=dtype)(y_NP.to(dtype), pdf_N, LENGTHS, log_weight_B).double()
              for dtype in (torch.float32, torch.float64)]
    # float32's 6e-8 over a few dozen operations
    assert_close(values[0], values[1], rtol=1e-5, atol=1e-6)


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
def test_the_sum_and_its_gradient_are_those_over_all_placements(seed: int, tolerance: int) -> None:
    graph, lengths = random_graph(seed), (5, 3)
    labels = labels_of_paths(seed, lengths)
    drawn_NP = np.random.default_rng(seed).normal(size=(sum(lengths), P))
    scores_NP = torch.from_numpy(drawn_NP).requires_grad_()
    found = [chain_of(graph, np.array(one, np.int32), tolerance) for one in labels]
    last_B = torch.tensor([last for _, last in found], dtype=torch.float64)
    chains = Chains.of([chain for chain, _ in found])
    sum_B = objectives.chain_log_sum(scores_NP, lengths, chains) + last_B
    sum_B.sum().backward()
    parts = [numerator(graph, one, scores_TP, tolerance)
             for one, scores_TP in zip(labels, np.split(drawn_NP, [5]), strict=True)]
    assert_exact(sum_B.detach(), torch.tensor([total for total, _ in parts], dtype=torch.float64))
    assert scores_NP.grad is not None
    assert_exact(scores_NP.grad, torch.from_numpy(np.concatenate([one for _, one in parts])))


def test_a_numerator_is_a_part_of_the_denominator() -> None:
    graph = random_graph(3)
    [labels] = labels_of_paths(3, (6,))
    scores_NP = torch.randn(6, P, dtype=torch.float64)
    chain, log_weight = chain_of(graph, np.array(labels, np.int32), 6)
    found = objectives.chain_log_sum(scores_NP, (6,), Chains.of([chain])) + log_weight
    assert found < log_path_sum(scores_NP, (6,), Transitions(graph, dtype=torch.float64))


def test_labels_without_a_path_have_no_chain() -> None:
    chain, log_weight = chain_of(random_graph(1), np.array([7, 7], np.int32), 1)
    assert log_weight == -math.inf
    assert not len(chain.pdf_K)
