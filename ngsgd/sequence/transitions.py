"""A graph of states as a matrix on a device.

Letters: S states, B columns.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ngsgd.sequence.graph import StateGraph

# Beyond this, sparse rows are faster on a CPU core, because states have few successors.
_MAX_DENSE_STATES = 64


class Transitions:
    """Products with A, where A_ij is the transition weight from state i to state j.

    With jumps of the leaky HMM the matrix is (I + leak 1 restart^T) A: before every frame a path
    may jump.
    """

    def __init__(self, graph: StateGraph, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        S = graph.num_states
        self.pdf_S = torch.from_numpy(graph.pdf_S).to(device)
        self.log_initial_S, self.log_final_S = (torch.from_numpy(values).to(device, dtype)
                                                for values in (graph.log_initial_S, graph.log_final_S))
        self.leak = graph.leak
        self.restart_S = torch.from_numpy(graph.restart_S).to(device, dtype) if graph.leak else self.log_final_S.new_zeros(S)
        ends = torch.stack([torch.from_numpy(graph.source_A), torch.from_numpy(graph.target_A)])
        values = torch.from_numpy(graph.log_weight_A).exp()
        weights = torch.sparse_coo_tensor(ends, values, (S, S), check_invariants=False).to(dtype).coalesce()
        self._retreat = _matrix(weights).to(device)
        self._advance = _matrix(weights.T.coalesce()).to(device)

    def advance(self, x_SB: Tensor) -> Tensor:
        """Return A^T x."""
        if self.leak:
            x_SB = torch.addmm(x_SB, self.restart_S[:, None], x_SB.sum(dim=0, keepdim=True), alpha=self.leak)
        return self._advance @ x_SB

    def retreat(self, y_SB: Tensor) -> Tensor:
        """Return A y."""
        z_SB: Tensor = self._retreat @ y_SB
        return z_SB + self.leak * (self.restart_S @ z_SB) if self.leak else z_SB


def _matrix(weights: Tensor) -> Tensor:
    if weights.shape[0] <= _MAX_DENSE_STATES:
        return weights.to_dense()
    # torch warns that compressed rows are a beta feature.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        return weights.to_sparse_csr()
