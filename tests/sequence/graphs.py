"""Small random graphs and scores."""

from __future__ import annotations

import numpy as np

from ngsgd.sequence.graph import StateGraph


def random_graph(seed: int, num_states: int = 4, num_classes: int = 3, leak: float = 0.0) -> StateGraph:
    """About half of all arcs, some states without begin or end; weights do not sum to one."""
    random = np.random.default_rng(seed)
    source, target = np.nonzero(random.random((num_states, num_states)) < 0.5)
    log_initial, log_final = random.normal(size=(2, num_states))
    log_initial[random.random(num_states) < 0.4] = -np.inf
    log_final[random.random(num_states) < 0.4] = -np.inf
    log_initial[0], log_final[-1] = 0.0, -0.5
    pdf_S, weights = random.integers(num_classes, size=num_states), random.normal(size=len(source))
    graph = StateGraph(pdf_S, source, target, weights, log_initial, log_final)
    return graph.with_leak(leak) if leak else graph


def digit_like_graph(seed: int, num_states: int, num_classes: int) -> StateGraph:
    """Every state with a loop and a few ways out, that sum to one."""
    random = np.random.default_rng(seed)
    source = np.repeat(np.arange(num_states), 4)
    target = np.concatenate([[state, *random.integers(num_states, size=3)] for state in range(num_states)])
    initial = np.full(num_states, -np.inf)
    initial[0] = 0.0
    pdf_S = random.integers(num_classes, size=num_states)
    log_weight = np.full(len(source), np.log(0.25))
    return StateGraph(pdf_S, source, target, log_weight, initial, np.zeros(num_states))
