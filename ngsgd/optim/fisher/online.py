"""Online natural-gradient preconditioner with its state.

`ngsgd.ops.natural_gradient` has the arithmetic.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ngsgd.arguments import checks_arguments
from ngsgd.errors import ArgumentError, DivergenceError
from ngsgd.ops import fisher_projection, tensors
from ngsgd.ops import natural_gradient as ops
from ngsgd.ops.fisher_projection import PreconditionContext
from ngsgd.ops.polar_update import PolarState, eta_of, kaldi, polar
from ngsgd.optim.fisher.estimate import Derived, RowMoments, checked_state
from ngsgd.optim.fisher.stack import Shares
from ngsgd.optim.fisher.update_queue import UpdateQueue

# Kaldi's nnet3: calls 0 to 10 update, then 14, 18, .. for period 4.
_NNET3_FIRST_UPDATES = 11
# Kaldi's nnet2, the code of the paper: calls 0 to 9, then 13, 17, ..
_NNET2_FIRST_UPDATES = 10
# Below, fourth powers of the rows approach the end of the float32 range.
_SMALL_SUM_SQ = 1e-13
# Fraction of tr X X^T that leaves three digits of a float32 difference; with alpha 4 and 32
# dimensions at least 1e-2 remains.
_MIN_NORM_LEFT = 1e-3


class OnlineNaturalGradient:
    """Multiply rows by the inverse of a low-rank Fisher estimate of earlier rows.

    Args:
        rank: rank R of the estimate, at most D - 1 for rows of dimension D.
        update_period: calls between updates, after the first 11 calls, which all update.
        num_samples_history: time constant in rows; older rows have weight 1/e (eq. 78).
        num_minibatches_history: if > 0, a time constant in minibatches instead: eta = 1 / that.
        alpha: smoothing towards the identity, in units of the mean eigenvalue (eq. 19).
        epsilon: absolute floor of the eigenvalues, and their initial value.
        delta: floor of the eigenvalues relative to the largest.
        schedule: "nnet3", or "nnet2" for the code of the paper: three passes over the first
            minibatch whatever its size, 10 first updates instead of 11, then every update_period-th
            call after the last update.
        relative_floor: use no absolute floor after the first nonzero rows, and start with
            eigenvalues of at most delta times their mean. Rows of every scale are then
            preconditioned alike. Kaldi's estimates have the absolute floor, which does not change
            rows with squares below 1e-10.
        update: form of the estimate and of its update. "exact" is Kaldi's, with eigenvalues from
            the host: on a device every update waits for it. "polar" uses matrix products alone
            (`ngsgd.ops.polar_update`); it has no floor of single eigenvalues. "auto" is exact on a
            CPU and polar on other devices.
        on_nonfinite: reaction to NaN or Inf. "raise" raises DivergenceError; on a GPU every call
            then waits for the device. "skip" does not update the estimate and returns non-finite
            rows.

    Source: arXiv 1410.7455, section 3; Kaldi's OnlineNaturalGradient.
    """

    @checks_arguments()
    def __init__(self, rank: int = 40, update_period: int = 1, num_samples_history: float = 2000.0,
                 num_minibatches_history: float = 0.0, alpha: float = 4.0, epsilon: float = 1e-10,
                 delta: float = 5e-4, *, schedule: str = "nnet3", relative_floor: bool = False,
                 update: str = "auto", on_nonfinite: str = "raise", queue: UpdateQueue | None = None) -> None:
        if rank < 1 or update_period < 1:
            raise ArgumentError(f"Invalid rank or update_period: {rank}, {update_period}; both must be at least 1")
        if not 0.0 < num_samples_history <= 1e6 or not 0.0 <= num_minibatches_history < 1e6:
            raise ArgumentError(f"Invalid history: {num_samples_history} samples, {num_minibatches_history} minibatches; "
                                "num_samples_history must be above 0 and at most 1e6, num_minibatches_history at least 0 "
                                "and below 1e6.")
        if not (alpha >= 0.0 and epsilon > 0.0 and delta > 0.0):
            raise ArgumentError(f"Invalid smoothing: alpha {alpha}, epsilon {epsilon}, delta {delta}; alpha must be at "
                                "least 0, epsilon and delta above 0.")
        if schedule not in ("nnet3", "nnet2") or on_nonfinite not in ("raise", "skip"):
            raise ArgumentError(f"Invalid schedule or on_nonfinite: {schedule!r} (nnet3 or nnet2), "
                                f"{on_nonfinite!r} (raise or skip)")
        if update not in ("auto", "exact", "polar"):
            raise ArgumentError(f"Invalid update: {update!r}; choose auto, exact or polar.")
        self.rank = rank
        self.update_period = update_period
        self.num_samples_history = num_samples_history
        self.num_minibatches_history = num_minibatches_history
        self.smoothing = ops.Smoothing(alpha, epsilon, delta, relative_floor)
        self.schedule = schedule
        self.update = update
        self.on_nonfinite = on_nonfinite
        self.name = "OnlineNaturalGradient"  # for messages
        # Unfrozen calls; Kaldi also counts frozen ones, after which it may never update again.
        self.num_calls = 0
        self.frozen = False
        # Dimension of the rows, if known before the first call.
        self.dim: int | None = None
        # step of the queue, and calls since
        self._commit, self._calls_since = 0, 0
        self.queue = UpdateQueue() if queue is None else queue
        self._state: ops.FisherState | PolarState | None = None
        self._derived: Derived | None = None

    @property
    def state(self) -> ops.FisherState | None:
        """Current estimate in Kaldi's form; None before the first call."""
        self.queue.wait(self)
        return kaldi(self._state, self.smoothing) if isinstance(self._state, PolarState) else self._state

    @property
    def factors(self) -> tuple[Tensor, Tensor] | None:
        """Factors of rows X - (X left^T) right, R x D; None before the first call."""
        self.queue.wait(self)
        return None if self._state is None else (self._state.left_RD, self._state.right_RD)

    def precondition(self, X_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return X times the inverse Fisher matrix, and the scale that restores its Frobenius norm.

        The estimate before this minibatch is used, so the direction stays unbiased.

        Args:
            X_ND: rows, not modified: float32, float64, or bfloat16 and float16, whose estimate is
                float32. The result is no function of rows that require a gradient.

        Returns:
            (Xhat N x D, scale 0-d) in the dtype of the rows. Rows of dimension 1 are returned
            unchanged with scale 1, and so are no rows.

        Raises:
            ArgumentError: the rows are no matrix of real numbers, or have another dimension than
                those before.
            DivergenceError: the rows are not finite, with on_nonfinite="raise".
        """
        rows_ND = X_ND if type(X_ND) is Tensor and X_ND.dtype in tensors.FULL else self._rows(X_ND)
        call = self.begin(rows_ND)
        if call is None:
            return X_ND.detach(), X_ND.new_ones(())
        Xhat_ND, _, scale = call.preconditioned()
        self.finish(call)
        return Xhat_ND if rows_ND is X_ND else Xhat_ND.to(X_ND.dtype), torch.as_tensor(scale, dtype=X_ND.dtype, device=X_ND.device)

    def _rows(self, X_ND: Tensor) -> Tensor:
        """Return rows from a user as `begin` needs them; ArgumentError if they are none."""
        tensors.require_real(X_ND, "X_ND", self.name, ndim=2)
        return X_ND if X_ND.dtype in tensors.FULL else X_ND.float()

    def begin(self, X_ND: Tensor, one_N: Tensor | None = None, *, num_rows: Tensor | float | None = None,
              loss_scale: Tensor | float = 1.0, scratch: Tensor | None = None, corrects: bool = True) -> PreconditionContext | None:
        """Run the first half of a call on rows [X | one]; `finish` must follow its last use.

        Args:
            num_rows: number of rows that count; default all. The others must be zero.
            loss_scale: factor of the rows that must not enter the estimate, because it changes
                between minibatches.
            scratch: memory for Xhat.
            corrects: whether Xhat is certainly needed; it is then formed immediately.

        Returns:
            None if the rows stay unchanged: of dimension 1, or the first ones, which are not finite
                or all masked.
        """
        # Faster than the complete check, in a call that may take 50 microseconds.
        if type(X_ND) is not Tensor or X_ND.dtype not in tensors.FULL or X_ND.layout is not torch.strided \
                or X_ND.requires_grad or X_ND.is_nested or X_ND.is_meta or X_ND.ndim != 2:
            tensors.require_real(X_ND, "X_ND", self.name, 2, tensors.FULL)
            X_ND = X_ND.detach()
        is_new = self._state is None
        if one_N is not None and len(one_N) != len(X_ND):
            raise ArgumentError(f"{self.name}: one_N has {len(one_N)} elements for {len(X_ND)} rows.")
        dim = X_ND.shape[1] + (one_N is not None)
        X_ND = X_ND.contiguous()
        if (dim <= 1 or is_new) and not self._may_use(X_ND, one_N, dim):
            return None
        num_rows = float(X_ND.shape[0]) if num_rows is None else num_rows
        # An estimate is initialized from rows that count.
        if is_new and float(num_rows) == 0.0:
            return None
        self.queue.wait(self)
        if is_new:
            self.start(X_ND, one_N, num_rows, loss_scale)
        state = self._matched(X_ND, dim)
        projected = fisher_projection.project(X_ND, state.left_RD, one_N, scratch, right_RD=state.right_RD, corrects=corrects)
        if self.on_nonfinite == "raise":
            self._raise_unless_finite(projected.sum_sq, X_ND, dim)
        return PreconditionContext(X_ND, one_N, num_rows, loss_scale, state, projected)

    def moments_of(self, X_ND: Tensor, one_N: Tensor | None = None, *, loss_scale: Tensor | float = 1.0) -> RowMoments | None:
        """Begin a call without preconditioned rows; None if the rows update no estimate.

        With many more rows than columns L = J W^T costs less than H^T H; Kaldi computes it so, too.
        """
        call = self.begin(X_ND, one_N, loss_scale=loss_scale, corrects=False) if self.updates_now() else None
        if call is None:
            return None
        J_RD = ops.project_back(call.X_ND, call.projection.H_NR, call.one_N)
        KL_2RR = torch.stack([J_RD @ J_RD.T, J_RD @ call.estimate.left_RD.T])
        return RowMoments(J_RD, KL_2RR, float(call.projection.sum_sq), call.num_rows, loss_scale)

    def scale_of(self, moments: RowMoments | None) -> float:
        """Return gamma of (38); None: of rows whose scatter is a multiple of the estimate."""
        if moments is not None:
            # |X - H W|^2 from |X|^2 and L
            taken = 2.0 * moments.KL_2RR[1].trace() - torch.dot(moments.KL_2RR[1].reshape(-1), self.gram().view(-1))
            sum_sq_hat = moments.sum_sq - taken.item()
            if sum_sq_hat > _MIN_NORM_LEFT * moments.sum_sq:
                return float(ops.rescaling(moments.sum_sq, sum_sq_hat))
        self.queue.wait(self)
        return self._of_state().scale

    def finish_moments(self, moments: RowMoments | None) -> None:
        """End a call without preconditioned rows."""
        if moments is None:
            self.count_call()
        else:
            self.end_call(moments.J_RD, moments.sum_sq, moments.num_rows, moments.loss_scale, moments.KL_2RR)

    def finish(self, call: PreconditionContext) -> None:
        """Update the estimate if an update is due in this call."""
        J_RD = KL_2RR = None
        if self.updates_now():
            J_RD = ops.project_back(call.X_ND, call.projection.H_NR, call.one_N)
            if isinstance(call.estimate, ops.FisherState):
                KL_2RR = ops.moment_products(J_RD, call.projection.H_NR)
        self.end_call(J_RD, call.projection.sum_sq, call.num_rows, call.loss_scale, KL_2RR)

    def end_call(self, J_RD: Tensor | None, sum_sq: Tensor | float, num_rows: Tensor | float, loss_scale: Tensor | float,
                 KL_2RR: Tensor | None = None) -> None:
        """Count a call, and update the estimate by J = H^T X, if given; K, L: by default of J."""
        if J_RD is not None and isinstance(self._state, PolarState):
            shares = self.shares(num_rows, loss_scale)
            if shares is not None:
                self.queue.record(self, J_RD, sum_sq, shares)
        elif J_RD is not None:
            if KL_2RR is None:
                KL_2RR = torch.stack([J_RD @ J_RD.T, J_RD @ self.current(J_RD).left_RD.T])
            self.queue.add(self, J_RD, KL_2RR, (sum_sq, num_rows, loss_scale))
        self.count_call()

    @property
    def has_begun(self) -> bool:
        """Return whether there is an estimate; the first rows initialize it."""
        return self._state is not None

    def current(self, X: Tensor) -> ops.FisherState | PolarState:
        """Return the estimate for rows like X, after all updates of earlier minibatches."""
        self.queue.wait(self)
        assert self._state is not None
        return self._matched(X, self._state.left_RD.shape[1])

    def has_state(self, state: PolarState) -> bool:
        """Return whether the estimate is this object."""
        return self._state is state

    @property
    def is_polar(self) -> bool:
        """Return whether there is an estimate in polar form."""
        return isinstance(self._state, PolarState)

    @property
    def polar_state(self) -> PolarState:
        """The estimate in polar form, without the updates that wait."""
        assert isinstance(self._state, PolarState)
        return self._state

    def hold(self, state: PolarState) -> None:
        """Store the same estimate in other memory."""
        self._state = state

    def shares(self, num_rows: Tensor | float, loss_scale: Tensor | float) -> Shares | None:
        """Return the weights of a minibatch in a polar update; None if no row counts."""
        if not isinstance(num_rows, Tensor) and num_rows == 0.0:
            return None
        eta = eta_of(num_rows, self.num_samples_history, self.num_minibatches_history)
        of_rows = eta / num_rows / loss_scale**2
        return Shares(of_rows, 1.0 - eta if not isinstance(of_rows, Tensor) else 1.0 - torch.as_tensor(eta, dtype=torch.float64))

    def count_call(self) -> None:
        """Count a call, which decides when the next update is due."""
        if self._commit != self.queue.num_commits:
            self._commit, self._calls_since = self.queue.num_commits, 0
        self._calls_since += not self.frozen
        self.num_calls += not self.frozen

    def observe(self, X_ND: Tensor, *, num_rows: Tensor | float | None = None, loss_scale: Tensor | float = 1.0) -> None:
        """Update the estimate as `precondition` would, without output; free if no update is due."""
        if self._state is not None and not self.updates_now():
            self.count_call()
            return
        rows_ND = X_ND if type(X_ND) is Tensor and X_ND.dtype in tensors.FULL else self._rows(X_ND)
        call = self.begin(rows_ND, num_rows=num_rows, loss_scale=loss_scale, corrects=False)
        if call is not None:
            self.finish(call)

    def withdraw(self) -> None:
        """Undo the calls since the last step, of discarded gradients; updates remain."""
        if self._calls_since and self._commit == self.queue.num_commits:
            self.queue.drop(self)
            self.num_calls -= self._calls_since
            self._calls_since = 0

    def problem(self, J_RD: Tensor, moments: ops.Moments) -> ops.UpdateProblem:
        """Return the update of the current estimate by a minibatch; the queue calls it."""
        assert isinstance(self._state, ops.FisherState)
        eta = ops.forgetting_rate(moments.num_rows, self.num_samples_history, self.num_minibatches_history)
        state, dim, smoothing = self._state, J_RD.shape[1], self.smoothing
        if smoothing.is_relative:
            state, smoothing = ops.with_relative_start(state, moments, dim, smoothing)
            if 0.0 < moments.sum_sq < _SMALL_SUM_SQ:
                moments = ops.wide_moments(J_RD, moments)
        return ops.UpdateProblem(state, moments, dim, eta, smoothing)

    def updated(self, problem: ops.UpdateProblem, state: ops.FisherState) -> None:
        """Replace the estimate by the result of an update; the queue calls it."""
        self._state = state
        is_flat = self.smoothing.is_relative and state.d_R[0] <= ops.SMALLEST_EIGENVALUE and problem.moments.sum_sq > 0.0
        # Once for all estimates of an optimizer.
        if is_flat and not self.queue.has_warned:
            self.queue.has_warned = True
            warnings.warn(f"the rows given to {self.name} are below 1e-10: its Fisher estimate is flat and does not change them; "
                          f"multiply the loss by a constant and divide lr by it.", stacklevel=2)

    def set_alpha(self, alpha: float) -> None:
        """Change the smoothing; W = E^(1/2) R follows, because E depends on alpha."""
        self.queue.wait(self)
        old, self.smoothing = self.smoothing, self.smoothing._replace(alpha=alpha)
        if isinstance(self._state, PolarState):
            # The next call makes it polar again.
            self._state = kaldi(self._state, old)
        if self._state is not None:
            self._state = ops.resmoothed(self._state, old, self.smoothing)

    def gram(self) -> Tensor:
        """Return W W^T (R x R) of the current estimate."""
        return self._of_state().gram_RR

    @property
    def may_expect_scale(self) -> bool:
        """Whether `scale_of` may replace the gamma of rows that do not update the estimate."""
        return self.update == "auto" and self.on_nonfinite == "skip" and isinstance(self._state, ops.FisherState)

    @property
    def shape(self) -> tuple[int, int]:
        """Rank, and dimension of the rows, of the present estimate."""
        assert self._state is not None
        rank, dim = self._state.left_RD.shape
        return rank, dim

    def _of_state(self) -> Derived:
        assert isinstance(self._state, ops.FisherState)
        if self._derived is None or self._derived.state is not self._state:
            self._derived = Derived(self._state, self.smoothing)
        return self._derived

    def freeze(self, frozen: bool = True) -> None:
        """Stop or resume updates of the estimate and the count of calls."""
        self.frozen = frozen

    def reset(self) -> None:
        """Discard the estimate and the count of calls; the next rows initialize it again."""
        self.queue.drop(self)
        self._state = None
        self.num_calls = self._calls_since = 0

    def state_dict(self) -> dict[str, Any]:
        """Return Kaldi's form: "W" (R x D), "d" (R), "rho"; "t", calls, alone at first."""
        state = self.state
        if state is None:
            return {"t": self.num_calls}
        return {"W": state.W_RD.clone(), "d": torch.from_numpy(state.d_R.copy()),
                "rho": torch.tensor(state.rho, dtype=torch.float64), "t": self.num_calls}

    def training_state(self) -> dict[str, Any]:
        """Return the estimate in its own form: `state_dict`, or "R", "V", "M", "rho" and "t"."""
        self.queue.wait(self)
        if not isinstance(self._state, PolarState):
            return self.state_dict()
        R_RD, V_RD, M_RR, rho = (value.clone() for value in self._state)
        return {"R": R_RD, "V": V_RD, "M": M_RR, "rho": rho, "t": self.num_calls}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Continue bitwise from `training_state` of an equal estimate."""
        if "R" not in state:
            self.load_state_dict(state)
            return
        self.queue.drop(self)
        self._state = PolarState(*(state[key].clone() for key in ("R", "V", "M", "rho")))
        self.num_calls, self._calls_since = state["t"], 0

    def empty_state(self, like: Tensor) -> dict[str, Any]:
        """Return `state_dict` with zeros in the final shapes; needs `dim`."""
        assert self.dim is not None
        rank = min(self.rank, self.dim - 1)
        W_RD = torch.zeros(rank, self.dim, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        return {"W": W_RD, "d": torch.zeros(rank, dtype=torch.float64), "rho": torch.zeros((), dtype=torch.float64), "t": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; the estimate then counts as initialized, also at t = 0.

        The estimate has the rank of the state.

        Raises:
            OptimizerStateError: the state is of another method or dimension, or damaged.
        """
        found, num_calls = checked_state(state, self.name, self.dim)
        self.queue.wait(self)
        self._state, self.num_calls = found, num_calls

    def updates_now(self, num_calls_ahead: int = 0) -> bool:
        """Return whether this call, or one some calls ahead, updates the estimate."""
        if self.frozen:
            return False
        first = _NNET3_FIRST_UPDATES if self.schedule == "nnet3" else _NNET2_FIRST_UPDATES
        past_first = self.num_calls + num_calls_ahead - (first - 1)
        return past_first <= 0 or past_first % self.update_period == 0

    def next_updates(self) -> tuple[bool, ...] | None:
        """Return which calls of the next step update; None if one waits for an update in it."""
        updates = tuple(self.updates_now(ahead) for ahead in range(self._calls_since))
        return None if any(updates[:-1]) else updates

    def _may_use(self, X_ND: Tensor, one_N: Tensor | None, dim: int) -> bool:
        """Return whether the first rows are finite and wide enough; sync only if needed."""
        if self.on_nonfinite == "skip" and dim == 1:
            return False
        sum_sq = fisher_projection.sum_of_squares(X_ND, one_N)
        if self.on_nonfinite == "raise":
            self._raise_unless_finite(sum_sq, X_ND, dim)
        return dim > 1 and math.isfinite(float(sum_sq))

    def _raise_unless_finite(self, sum_sq: Tensor | float, X_ND: Tensor, dim: int) -> None:
        if not math.isfinite(float(sum_sq)):
            raise DivergenceError(f"the rows given to {self.name} ({len(X_ND)} x {dim}) are not finite, or too large to be "
                                  "squared; lower the learning rate, or skip such minibatches with on_nonfinite=\"skip\".")

    def _matched(self, X_ND: Tensor, dim: int) -> ops.FisherState | PolarState:
        """Return the estimate on the device of the rows; raise if the dimensions differ."""
        assert self._state is not None
        W_RD = self._state.left_RD
        if W_RD.shape[1] != dim:
            raise ArgumentError(f"the rows given to {self.name} have dimension {dim}, but its estimate is of rows of dimension "
                                f"{W_RD.shape[1]}; use an estimate for each kind of rows, or call reset().")
        if W_RD.dtype != X_ND.dtype or W_RD.device != X_ND.device:
            state = self.state
            assert state is not None
            self._state = state._replace(W_RD=state.W_RD.to(X_ND))
        is_wanted = self.update == "polar" or (self.update == "auto" and not X_ND.is_cpu)
        # The first nonzero rows may lower the initial value, which the host does.
        if is_wanted and isinstance(self._state, ops.FisherState) and not (
                self.smoothing.is_relative and ops.is_initial(self._state, self.smoothing)):
            self._state = polar(self._state, self.smoothing)
        return self._state

    def start(self, X_ND: Tensor, one_N: Tensor | None, num_rows: Tensor | float, loss_scale: Tensor | float,
              total: Callable[[Tensor], object] = lambda own: own) -> None:
        """Initialize as Kaldi does.

        Fixed values, then passes over the first minibatch, which updates again. `total` sums a
        tensor over ranks in place, each of which has some of the `num_rows` rows.
        """
        # Once in float64: otherwise directions at rounding level would depend on the machine.
        X64_ND, one64_N = X_ND.double(), None if one_N is None else one_N.double()
        dim = X_ND.shape[1] + (one_N is not None)
        rank = min(self.rank, dim - 1)
        sum_sq = torch.as_tensor(fisher_projection.sum_of_squares(X64_ND, one64_N), dtype=torch.float64, device=X_ND.device)
        total(sum_sq)
        self._state = ops.initial_state(dim, rank, self.smoothing, X64_ND)
        passes = UpdateQueue()
        for _ in range(3 if self.schedule == "nnet2" or float(num_rows) > rank else 1):
            H_NR = fisher_projection.coefficients(X64_ND, self._state.W_RD, one64_N)
            J_RD = ops.project_back(X64_ND, H_NR, one64_N)
            total(J_RD)
            KL_2RR = ops.moment_products(J_RD, H_NR)
            total(KL_2RR[1])
            passes.add(self, J_RD, KL_2RR, (sum_sq, num_rows, loss_scale))
