"""The best path through a graph of states by loops over frames, states and arcs, in float64."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ngsgd.sequence.graph import StateGraph


def best_path(graph: StateGraph, loglik_TP: npt.NDArray[np.floating]) -> tuple[list[int], float]:
    """Classes of the frames and the log score of the best path; minus infinity without one."""
    arcs = list(zip(graph.source_A.tolist(), graph.target_A.tolist(), graph.log_weight_A.tolist(), strict=True))
    paths: dict[int, tuple[float, list[int]]] = {
        state: (log_weight, []) for state, log_weight in enumerate(graph.log_initial_S.tolist()) if log_weight > -math.inf}
    for loglik_P in loglik_TP:
        reached: dict[int, tuple[float, list[int]]] = {}
        for source, target, log_weight in arcs:
            if source in paths:
                pdf = int(graph.pdf_S[target])
                score = paths[source][0] + log_weight + float(loglik_P[pdf])
                if target not in reached or score > reached[target][0]:
                    reached[target] = score, [*paths[source][1], pdf]
        paths = reached
    ends = [(score + float(graph.log_final_S[state]), pdfs) for state, (score, pdfs) in paths.items()]
    score, pdfs = max(ends, default=(-math.inf, []))
    return pdfs, score
