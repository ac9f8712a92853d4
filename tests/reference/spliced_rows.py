"""The natural gradient of convolutions, slowly: rows by explicit loops in float64, and
preconditioners that stand alone.

Letters: B sequences, T output frames, C channels in, O out, K taps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ngsgd import OnlineNaturalGradient


def index_at(t: int, num_frames: int, padding_mode: str) -> int | None:
    """The input frame at position t, which may be outside of the frames; None: a zero."""
    if 0 <= t < num_frames:
        return t
    if padding_mode == "reflect":
        return -t if t < 0 else 2 * (num_frames - 1) - t
    if padding_mode == "circular":
        return t % num_frames
    assert padding_mode == "zeros"
    return None


def spliced_rows(x: Tensor, num_frames_out: int, *, taps: int, stride: int, left_padding: int, dilation: int,
                 padding_mode: str) -> Tensor:
    """(B T) x (C K): what the kernel sees at each output frame, channel by channel."""
    rows = []
    for sequence in x.double():
        for t in range(num_frames_out):
            row = []
            for channel in sequence:
                for k in range(taps):
                    at = index_at(t * stride + k * dilation - left_padding, len(channel), padding_mode)
                    row.append(0.0 if at is None else float(channel[at]))
            rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def derivative_rows(dY: Tensor) -> Tensor:
    """(B T) x O."""
    return torch.tensor([[float(channel[t]) for channel in sequence] for sequence in dY.double() for t in range(dY.shape[2])],
                        dtype=torch.float64)


class FilterReference:
    """Other convolutions: rows of P = [dW | db], then rows of the transposed output."""

    def __init__(self, num_columns: int, num_filters: int, *, has_bias: bool) -> None:
        self.has_bias = has_bias
        self.filters, self.columns = (OnlineNaturalGradient(min(80, (dim + 1) // 2), update_period=4, num_minibatches_history=4)
                                      for dim in (num_columns + has_bias, num_filters))

    def gradient(self, dW: Tensor, db: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(weight, bias) gradients from the plain ones."""
        P = dW.double().reshape(len(dW), -1)
        if db is not None:
            P = torch.cat([P, db.double()[:, None]], dim=1)
        Phat, filter_scale = self.filters.precondition(P)
        Phat_T, column_scale = self.columns.precondition(Phat.T)
        P = filter_scale * column_scale * Phat_T.T
        return (P[:, :-1].reshape(dW.shape), P[:, -1]) if db is not None else (P.reshape(dW.shape), None)
