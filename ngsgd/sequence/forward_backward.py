"""Sums over all paths through a graph of states, and their gradients with respect to frame scores.

All sequences and states advance in one GEMM per frame. Sums are float64 logarithms, relative to the
maximum of each frame; values more than 87 nats below the best state (float32) are zero.

Z = log sum_paths exp(log weight + sum_t score_t); its gradient is the posterior of class p in frame
t. E = sum_paths P(path) sum_t acc_t, with P from those scores. Its gradient is the sum of P over
the paths that pass class p in frame t, each times its accuracy minus E (Povey 2003, section 6.2.3).

Letters: N rows (frames of all sequences, concatenated), P classes, B sequences, T frames of the
longest, S states. Per frame: a forward and b backward log sums, r and s expected accuracies before
and after it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.tensors import to_device
from ngsgd.sequence.graph import StateGraph


def log_path_sum(scores_NP: Tensor, lengths: Sequence[int], transitions: Transitions) -> Tensor:
    """Return Z of each sequence, B (float64); minus infinity, with gradient 0, if no path has its
    length.

    `scores_NP` are the frame scores, with respect to which Z is once differentiable, and `lengths`
    the frames of each sequence, in the order of the rows.
    """
    z_B: Tensor = _LogPathSum.apply(scores_NP, tuple(lengths), transitions)  # type: ignore[no-untyped-call]
    return z_B


def expected_accuracy(scores_NP: Tensor, accuracy_NP: Tensor, lengths: Sequence[int], transitions: Transitions) -> Tensor:
    """Return E of each sequence, B (float64); 0, with gradient 0, if no path has its length.

    `accuracy_NP` is that of class p in each frame, without gradient; see `log_path_sum`.
    """
    e_B: Tensor = _ExpectedAccuracy.apply(scores_NP, accuracy_NP, tuple(lengths), transitions)  # type: ignore[no-untyped-call]
    return e_B


class _LogPathSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NP: Tensor, lengths: tuple[int, ...], transitions: Transitions) -> Tensor:
        batch = _Batch.of(scores_NP, lengths)
        log_z_B, log_a_TSB = _forward(batch, batch.by_state(scores_NP, transitions), transitions)
        if ctx.needs_input_grad[0]:
            posterior_TSB = _posteriors(batch, batch.by_state(scores_NP, transitions), log_a_TSB, transitions)
            ctx.save_for_backward(batch.by_row(posterior_TSB, transitions, scores_NP.shape[1]))
        ctx.batch = batch
        return batch.in_order(log_z_B)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dZ_B: Tensor) -> tuple[Tensor, None, None]:
        (posterior_NP,) = ctx.saved_tensors
        return posterior_NP * ctx.batch.per_row(dZ_B).to(posterior_NP.dtype), None, None


class _ExpectedAccuracy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_NP: Tensor, accuracy_NP: Tensor, lengths: tuple[int, ...], transitions: Transitions) -> Tensor:
        batch = _Batch.of(scores_NP, lengths)
        score_TSB, accuracy_TSB = batch.by_state(scores_NP, transitions), batch.by_state(accuracy_NP, transitions)
        log_a_TSB, r_TSB = _forward_accuracy(batch, score_TSB, accuracy_TSB, transitions)
        posterior_TSB, derivative_TSB = _accuracy_posteriors(batch, score_TSB, accuracy_TSB, log_a_TSB, r_TSB, transitions)
        ctx.save_for_backward(batch.by_row(derivative_TSB, transitions, scores_NP.shape[1]))
        ctx.batch = batch
        return batch.in_order((posterior_TSB * accuracy_TSB).sum(dim=(0, 1), dtype=torch.float64))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dE_B: Tensor) -> tuple[Tensor, None, None, None]:
        (derivative_NP,) = ctx.saved_tensors
        return derivative_NP * ctx.batch.per_row(dE_B).to(derivative_NP.dtype), None, None, None


class _Batch(NamedTuple):
    """Sequences as columns, the longest first; active ones of a frame are the first columns."""

    order_B: Tensor  # sequence of each column
    alive: list[int]  # columns that have a frame t
    row_TB: Tensor  # row of each frame; beyond the end of a sequence any row of it
    frame_N: Tensor  # of each row: its frame, its column and its sequence
    column_N: Tensor
    sequence_N: Tensor

    @classmethod
    def of(cls, scores_NP: Tensor, lengths: Sequence[int]) -> _Batch:
        lengths_B = torch.tensor(lengths)
        order_B = torch.argsort(lengths_B, descending=True, stable=True)
        first_B = torch.cumsum(lengths_B, 0) - lengths_B
        sequence_N = torch.repeat_interleave(torch.arange(len(lengths)), lengths_B)
        frame_N = torch.arange(len(sequence_N)) - first_B[sequence_N]
        column_N = torch.empty_like(order_B).index_copy_(0, order_B, torch.arange(len(lengths)))[sequence_N]
        lengths_B = lengths_B[order_B]
        time_T = torch.arange(int(lengths_B.max()))
        alive = (time_T[:, None] < lengths_B).sum(dim=1).tolist()
        row_TB = first_B[order_B] + torch.minimum(time_T[:, None], lengths_B - 1)
        # Computed on the host and sent once, to avoid GPU synchronization.
        parts = (order_B, row_TB, frame_N, column_N, sequence_N)
        sent = to_device(torch.cat([part.flatten() for part in parts]), scores_NP.device).split([part.numel() for part in parts])
        return cls(sent[0], alive, sent[1].view(row_TB.shape), *sent[2:])

    def by_state(self, values_NP: Tensor, transitions: Transitions) -> Tensor:
        """Return T x S x B."""
        return values_NP.detach().T[transitions.pdf_S][:, self.row_TB].transpose(0, 1).contiguous()

    def by_row(self, values_TSB: Tensor, transitions: Transitions, num_classes: int) -> Tensor:
        """Return sums over the states of each class, N x P."""
        T, _, B = values_TSB.shape
        by_class_TPB = values_TSB.new_zeros(T, num_classes, B).index_add_(1, transitions.pdf_S, values_TSB)
        return by_class_TPB.transpose(1, 2)[self.frame_N, self.column_N]

    def in_order(self, values_B: Tensor) -> Tensor:
        """Return values of the columns in the original order of the sequences."""
        return torch.empty_like(values_B).index_copy_(0, self.order_B, values_B)

    def per_row(self, values_B: Tensor) -> Tensor:
        """Return the value of the sequence of each row, N x 1."""
        return values_B[self.sequence_N, None]


def _forward(batch: _Batch, score_TSB: Tensor, transitions: Transitions) -> tuple[Tensor, Tensor]:
    """Return (Z of the columns, log a up to a constant for each frame and column)."""
    T, S, B = score_TSB.shape
    # In place: scores of a frame are needed once.
    log_a_TSB = score_TSB
    log_a_SB = transitions.log_initial_S[:, None].expand(S, B)
    taken_out_B = score_TSB.new_zeros(B, dtype=torch.float64)
    log_z_B = torch.empty_like(taken_out_B)
    for t in range(T):
        alive = batch.alive[t]
        x_SB, top_B = _exp(log_a_SB[:, :alive])
        taken_out_B[:alive] += top_B
        log_a_SB = log_a_TSB[t, :, :alive].add_(transitions.advance(x_SB).log_())
        ended = slice(batch.alive[t + 1] if t + 1 < T else 0, alive)
        if ended.start < ended.stop:
            last_SB = log_a_SB[:, ended] + transitions.log_final_S[:, None]
            log_z_B[ended] = taken_out_B[ended] + torch.logsumexp(last_SB.double(), dim=0)
    return log_z_B, log_a_TSB


def _posteriors(batch: _Batch, score_TSB: Tensor, log_a_TSB: Tensor, transitions: Transitions) -> Tensor:
    """Return P(state at t), with log sums computed backward; 0 without a path."""
    T, S, B = score_TSB.shape
    log_b_SB = transitions.log_final_S[:, None].expand(S, B)
    posterior_TSB = torch.zeros_like(score_TSB)
    for t in range(T - 1, -1, -1):
        alive = batch.alive[t]
        going_on = batch.alive[t + 1] if t + 1 < T else 0
        if t + 1 < T:
            y_SB, _ = _exp(log_b_SB + score_TSB[t + 1, :, :going_on])
            last_SB = transitions.log_final_S[:, None].expand(S, alive - going_on)
            log_b_SB = torch.cat([transitions.retreat(y_SB).log_(), last_SB], dim=1)
        else:
            log_b_SB = log_b_SB[:, :alive]
        posterior_TSB[t, :, :alive] = _softmax(log_a_TSB[t, :, :alive] + log_b_SB)
    return posterior_TSB


def _forward_accuracy(batch: _Batch, score_TSB: Tensor, accuracy_TSB: Tensor, transitions: Transitions) -> tuple[Tensor, Tensor]:
    """Return (log a up to constants, r: expected accuracy of paths into a state, centered)."""
    T, S, B = score_TSB.shape
    log_a_TSB, r_TSB = score_TSB.clone(), torch.zeros_like(score_TSB)
    log_a_SB = transitions.log_initial_S[:, None].expand(S, B)
    r_SB = score_TSB.new_zeros(S, B)
    for t in range(T):
        alive = batch.alive[t]
        x_SB, _ = _exp(log_a_SB[:, :alive])
        r_SB = _centered(r_SB[:, :alive], x_SB)
        y_SB, yr_SB = transitions.advance(torch.cat([x_SB, x_SB * r_SB], dim=1)).split(alive, dim=1)
        r_SB = torch.where(y_SB > 0.0, yr_SB / y_SB, 0.0) + accuracy_TSB[t, :, :alive]
        log_a_SB = log_a_TSB[t, :, :alive].add_(y_SB.log())
        r_TSB[t, :, :alive] = r_SB
    return log_a_TSB, r_TSB


def _accuracy_posteriors(batch: _Batch, score_TSB: Tensor, accuracy_TSB: Tensor, log_a_TSB: Tensor, r_TSB: Tensor,
                         transitions: Transitions) -> tuple[Tensor, Tensor]:
    """Return (P(state at t), the same times r + s - E)."""
    T, S, B = score_TSB.shape
    log_b_SB = transitions.log_final_S[:, None].expand(S, B)
    s_SB = score_TSB.new_zeros(S, B)
    posterior_TSB, derivative_TSB = torch.zeros_like(score_TSB), torch.zeros_like(score_TSB)
    for t in range(T - 1, -1, -1):
        alive = batch.alive[t]
        going_on = batch.alive[t + 1] if t + 1 < T else 0
        if t + 1 < T:
            y_SB, _ = _exp(log_b_SB + score_TSB[t + 1, :, :going_on])
            later_SB = _centered(s_SB + accuracy_TSB[t + 1, :, :going_on], y_SB)
            z_SB, zs_SB = transitions.retreat(torch.cat([y_SB, y_SB * later_SB], dim=1)).split(going_on, dim=1)
            last_SB = transitions.log_final_S[:, None].expand(S, alive - going_on)
            s_SB = torch.cat([torch.where(z_SB > 0.0, zs_SB / z_SB, 0.0), torch.zeros_like(last_SB)], dim=1)
            log_b_SB = torch.cat([z_SB.log_(), last_SB], dim=1)
        else:
            log_b_SB, s_SB = log_b_SB[:, :alive], s_SB[:, :alive]
        p_SB = _softmax(log_a_TSB[t, :, :alive] + log_b_SB)
        posterior_TSB[t, :, :alive] = p_SB
        derivative_TSB[t, :, :alive] = p_SB * _centered(r_TSB[t, :, :alive] + s_SB, p_SB)
    return posterior_TSB, derivative_TSB


def _exp(log_x_SB: Tensor) -> tuple[Tensor, Tensor]:
    """Return (exponentials relative to the maximum of each column, its logarithm)."""
    top_B = log_x_SB.amax(dim=0)
    top_B = torch.where(top_B.isfinite(), top_B, 0.0)
    return (log_x_SB - top_B).exp_(), top_B


def _softmax(log_x_SB: Tensor) -> Tensor:
    x_SB, _ = _exp(log_x_SB)
    total_B = x_SB.sum(dim=0)
    return x_SB / torch.where(total_B > 0.0, total_B, 1.0)


def _centered(values_SB: Tensor, weight_SB: Tensor) -> Tensor:
    """Subtract the weighted mean of each column: sums would lose differences."""
    total_B = weight_SB.sum(dim=0)
    return values_SB - (weight_SB * values_SB).sum(dim=0) / torch.where(total_B > 0.0, total_B, 1.0)


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
