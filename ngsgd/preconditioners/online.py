"""The online natural-gradient preconditioner as an object: it owns the state, `ngsgd.ops.natural_gradient` the arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ngsgd.ops import natural_gradient as ops

_NUM_FIRST_UPDATES = 11  # the first 11 calls always update (Kaldi: t <= 10), then every update_period-th


class OnlineNaturalGradient:
    """Multiplies rows by the inverse of a smoothed, low-rank Fisher matrix that it estimates from the same rows.

    Args:
        rank: rank R of the estimate; lowered to D - 1 for rows of dimension D.
        update_period: calls between updates of the estimate, after the first 11 calls which all update.
        num_samples_history: rows after which the past counts 1/e (eq. 78 of arXiv 1410.7455).
        num_minibatches_history: if > 0, forget by minibatches instead: eta = 1 / num_minibatches_history.
        alpha: smoothing towards the identity, in units of the mean eigenvalue (eq. 19).
        epsilon: absolute floor of the eigenvalues.
        delta: floor of the eigenvalues relative to the largest.

    >>> preconditioner = OnlineNaturalGradient(rank=2)
    >>> X = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [3.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    >>> Xhat, scale = preconditioner.precondition(X)
    >>> torch.allclose((scale * Xhat).norm(), X.norm())   # only the direction changes
    True
    """

    def __init__(self, rank: int = 40, update_period: int = 1, num_samples_history: float = 2000.0,
                 num_minibatches_history: float = 0.0, alpha: float = 4.0, epsilon: float = 1e-10,
                 delta: float = 5e-4) -> None:
        if rank < 1 or update_period < 1:
            raise ValueError(f"Invalid rank or update_period: {rank}, {update_period}; both must be at least 1")
        if not 0.0 < num_samples_history <= 1e6 or not 0.0 <= num_minibatches_history < 1e6:
            raise ValueError(f"Invalid history: {num_samples_history} samples, {num_minibatches_history} minibatches")
        if alpha < 0.0 or epsilon <= 0.0 or delta <= 0.0:
            raise ValueError(f"Invalid smoothing: alpha {alpha}, epsilon {epsilon}, delta {delta}")
        self.rank = rank
        self.update_period = update_period
        self.num_samples_history = num_samples_history
        self.num_minibatches_history = num_minibatches_history
        self.smoothing = ops.Smoothing(alpha, epsilon, delta)
        self.num_calls = 0       # unfrozen ones; Kaldi also counts frozen calls, after which it may never update again
        self.frozen = False
        self._state: ops.FisherState | None = None

    @property
    def is_initialised(self) -> bool:
        return self._state is not None

    def precondition(self, X_ND: Tensor) -> tuple[Tensor, Tensor]:
        """(Xhat, scale): X times the inverse Fisher matrix, before the scale that restores its Frobenius norm.

        X is N x D and is not modified; Xhat is N x D, scale 0-d.  Rows of dimension 1 come back as they are with
        scale 1.  The estimate used is the one from before this minibatch, so the result stays an unbiased direction.
        """
        if X_ND.shape[1] == 1:
            return X_ND, torch.ones((), dtype=X_ND.dtype, device=X_ND.device)
        sum_sq = _sum_sq(X_ND)
        if self._state is None:
            self._state = self._start(X_ND, sum_sq)
        Xhat_ND, H_NR = ops.precondition(X_ND, self._state.W_RD)
        if self._updates_now():
            self._state = self._updated(self._state, X_ND, H_NR, sum_sq)
        self.num_calls += not self.frozen
        sum_sq_hat = _sum_sq(Xhat_ND)
        # a zero minibatch has no direction to rescale
        scale = torch.where((sum_sq > 0.0) & (sum_sq_hat > 0.0), sum_sq / sum_sq_hat, 1.0).sqrt()
        return Xhat_ND, scale

    def freeze(self, frozen: bool = True) -> None:
        """While frozen the estimate is used but not updated, and calls are not counted."""
        self.frozen = frozen

    def state_dict(self) -> dict[str, Any]:
        """"W" (R x D), "d" (R), "rho" (0-d) and "t", the number of unfrozen calls; only "t" before the first call."""
        if self._state is None:
            return {"t": self.num_calls}
        return {"W": self._state.W_RD.clone(), "d": self._state.d_R.clone(), "rho": self._state.rho.clone(),
                "t": self.num_calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`; an object that has loaded a state counts as initialised, also at t = 0."""
        self.num_calls = int(state["t"])
        if "W" not in state:
            self._state = None
            return
        W_RD = torch.as_tensor(state["W"]).clone()
        d_R = torch.as_tensor(state["d"]).to(W_RD.device, torch.float64)
        rho = torch.as_tensor(state["rho"]).to(W_RD.device, torch.float64)
        if W_RD.ndim != 2 or d_R.shape != W_RD.shape[:1] or rho.ndim != 0:
            raise ValueError(f"Invalid state: W {tuple(W_RD.shape)}, d {tuple(d_R.shape)}, rho {tuple(rho.shape)}")
        self._state = ops.FisherState(W_RD, d_R.clone(), rho.clone())

    def _updates_now(self) -> bool:
        if self.frozen:
            return False
        past_first = self.num_calls - (_NUM_FIRST_UPDATES - 1)
        return past_first <= 0 or past_first % self.update_period == 0

    def _start(self, X_ND: Tensor, sum_sq: Tensor) -> ops.FisherState:
        """Kaldi's fixed start, then passes over the first minibatch itself; that minibatch then updates once more."""
        num_rows, dim = X_ND.shape
        rank = min(self.rank, dim - 1)
        state = ops.initial_state(dim, rank, self.smoothing, X_ND)
        for _ in range(3 if num_rows > rank else 1):
            state = self._updated(state, X_ND, X_ND @ state.W_RD.T, sum_sq)
        return state

    def _updated(self, state: ops.FisherState, X_ND: Tensor, H_NR: Tensor, sum_sq: Tensor) -> ops.FisherState:
        eta = ops.forgetting_rate(len(X_ND), self.num_samples_history, self.num_minibatches_history)
        return ops.updated_state(state, X_ND, H_NR, sum_sq, eta, self.smoothing)


def _sum_sq(X_ND: Tensor) -> Tensor:
    flat = X_ND.reshape(-1)
    return torch.dot(flat, flat)
