"""Sums over paths, written from their definitions: every path one by one, and dense recursions in
the log domain; float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from ngsgd.sequence.graph import StateGraph

Array = npt.NDArray[np.float64]


def matrix(graph: StateGraph) -> Array:
    """S x S: weight from i to j, after a jump, with weight leak, to a state drawn from restart."""
    A = np.zeros((graph.num_states, graph.num_states))
    for source, target, log_weight in zip(graph.source_A, graph.target_A, graph.log_weight_A, strict=True):
        A[source, target] += np.exp(log_weight)
    jump = np.eye(graph.num_states)
    if graph.leak:
        jump = jump + graph.leak * np.outer(np.ones(graph.num_states), graph.restart_S)
    return jump @ A


def paths(graph: StateGraph, num_frames: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every (states of the frames, log weight) that is possible."""
    A, initial, final = matrix(graph), np.exp(graph.log_initial_S), np.exp(graph.log_final_S)
    for states in itertools.product(range(graph.num_states), repeat=num_frames):
        weight = float(initial @ A[:, states[0]]) * float(final[states[-1]])
        for before, after in itertools.pairwise(states):
            weight *= A[before, after]
        if weight > 0.0:
            yield states, float(np.log(weight))


def enumerated(graph: StateGraph, scores_TP: Array, accuracy_TP: Array) -> tuple[float, Array, float, Array]:
    """(log sum, its gradient w.r.t. the scores, expected accuracy, its gradient), over all paths.
    """
    found = list(paths(graph, len(scores_TP)))
    classes = [graph.pdf_S[list(states)] for states, _ in found]
    frames = np.arange(len(scores_TP))
    total_K = np.array([log_weight + scores_TP[frames, pdf_T].sum() for (_, log_weight), pdf_T in zip(found, classes, strict=True)])
    log_z = np.log(np.exp(total_K - total_K.max()).sum()) + total_K.max()
    p_K = np.exp(total_K - log_z)
    accuracy_K = np.array([accuracy_TP[frames, pdf_T].sum() for pdf_T in classes])
    mean = float(p_K @ accuracy_K)
    d_log_z, d_mean = np.zeros_like(scores_TP), np.zeros_like(scores_TP)
    for p, accuracy, pdf_T in zip(p_K, accuracy_K, classes, strict=True):
        d_log_z[frames, pdf_T] += p
        d_mean[frames, pdf_T] += p * (accuracy - mean)
    return float(log_z), d_log_z, mean, d_mean


def log_domain(graph: StateGraph, scores_TP: Array) -> tuple[float, Array]:
    """(log sum, posteriors of the classes): dense recursions, nothing scaled."""
    with np.errstate(divide="ignore"):
        log_A = np.log(matrix(graph))
    score_TS = scores_TP[:, graph.pdf_S]
    a = [_log_sum(graph.log_initial_S[:, None] + log_A, 0) + score_TS[0]]
    for score_S in score_TS[1:]:
        a.append(_log_sum(a[-1][:, None] + log_A, 0) + score_S)
    b = [graph.log_final_S]
    for score_S in score_TS[:0:-1]:
        b.append(_log_sum(log_A + (score_S + b[-1])[None], 1))
    log_z = float(_log_sum(a[-1] + graph.log_final_S, 0))
    posterior_TP = np.zeros_like(scores_TP)
    for t, (a_S, b_S) in enumerate(zip(a, b[::-1], strict=True)):
        np.add.at(posterior_TP[t], graph.pdf_S, np.exp(a_S + b_S - log_z))
    return log_z, posterior_TP


def _log_sum(values: Array, axis: int) -> Array:
    top = values.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(np.exp(values - top).sum(axis=axis)) + top.squeeze(axis))
