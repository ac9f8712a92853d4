"""Base of the methods that need the rows of a minibatch, and Kaldi's simple method.

Letters: N samples, X rows (samples, positions), O outputs, I inputs (with the 1 of the bias).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ngsgd.curvature.fisher_rows import FISHERS, FisherRecorder, FisherSample, Rows
from ngsgd.errors import ConfigError, warn
from ngsgd.ops.simple_natural_gradient import precondition_simple
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.states import Layout, State

# Fraction of parameters with plain gradient that triggers a warning.
_MUCH = 0.3


class FisherMethod(Preconditioner):
    """Methods that measure `Rows` of affine layers; others have the diagonal of F, "squares".

    Args:
        fisher: "empirical" (default), "mc" (Monte Carlo samples of the targets) or "exact"
            (Gauss-Newton).
        num_draws: Monte Carlo samples per row with "mc". Default 1.
        options: see `Preconditioner`.
    """

    fisher: str = "empirical"
    num_draws: int = 1

    def problems(self) -> list[str]:
        known = ("averages",) if self.traits.fisher == "averages" else FISHERS
        found = [*super().problems(), *self.choice("fisher", *known)]
        if self.num_draws > 1 and self.fisher != "mc":
            found.append(f"num_draws has no effect with fisher={self.fisher!r}; remove it.")
        if self.traits.fisher == "empirical" and self.fisher in ("mc", "exact"):
            found.append(f"fisher is {self.fisher!r}; it must be \"empirical\", because this method needs "
                         "derivatives of the loss itself.")
        return found

    def __post_init__(self) -> None:
        super().__post_init__()
        # of the passes of this step
        self._recorder: FisherRecorder | None = None
        self.sample: FisherSample | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_recorder": None, "sample": None}

    def _step(self, lr: float | None) -> None:
        super()._step(lr)
        self._recorder = self.sample = None

    @contextlib.contextmanager
    def watching(self, num_rows: int | None) -> Iterator[None]:
        if not self.is_due("curvature"):
            yield
            return
        self._recorder = self._recorder or FisherRecorder(
            self.model, fisher=self.fisher, num_draws=self.num_draws, generator=self.generator, skipped=self.skipped)
        # Several passes before a step belong to one minibatch.
        self._recorder.give_rows(num_rows)
        with self._recorder:
            yield
        self.sample = self._recorder.signal()

    def observe(self, grads: Mapping[str, Tensor]) -> bool:
        sample, self.sample = self.sample, None
        recorder, self._recorder = self._recorder, None
        if sample is None:
            if self.last["curvature"] is None:
                raise ConfigError(f"{type(self).__name__} has not processed a minibatch; run its forward and "
                                  "backward pass inside `with preconditioner.watch():`.")
            return False
        if recorder is not None:
            recorder.forget()
        seen = {*sample.rows, *sample.squares}
        self.update_curvature(sample)
        if self.last["curvature"] is None and seen:
            covered = {*seen, *(self.blocks.bias_of.get(name) for name in seen)}
            sizes = {name: p.numel() for name, p in self.parameters.items() if p.requires_grad and name not in self.skipped}
            plain = [name for name in grads if name not in covered]
            share = sum(sizes.get(name, 0) for name in plain) / max(sum(sizes.values()), 1)
            if share > _MUCH:
                names = ", ".join([*plain[:5], "..."] if len(plain) > 5 else plain)
                warn(f"{type(self).__name__} does not precondition {100.0 * share:.0f} % of the parameters, because "
                     f"the minibatch had no curvature for them: {names}; add their layers to skip= if this is intended.")
        return True

    def update_curvature(self, seen: FisherSample) -> None:
        """Update with the rows of a minibatch."""
        for name in seen.squares:
            # A separate block also in an affine layer, such as a weight tied to an embedding.
            self.blocks.bias_of.pop(name, None)
        measured: dict[str, State] = {name: {"squares": value} for name, value in seen.squares.items()}
        for name, rows in seen.rows.items():
            self.blocks.bias_of[name] = rows.bias
            if self.replicas.comm is None:
                self.update_statistics(name, rows)
            else:
                measured[name] = self.measure(name, rows)
        if self.replicas.comm is not None:
            measured = self.replicas.comm.mean(measured, float(seen.num_rows))
        for name, new in measured.items():
            self.average_in(name, new)

    def update_statistics(self, name: str, rows: Rows) -> None:
        """Update with the rows of one layer."""
        self.average_in(name, self.measure(name, rows))

    def refresh(self) -> None:
        super().refresh()
        if self.traits.splits_work and self.replicas.comm is None and self.averaging != "average":
            # Statistics without a history are not used again.
            for name in [name for name, known in self.statistics.items()
                         if "squares" not in known and not self.option(name, "ema_decay")]:
                self.statistics.forget(name)

    def inverted(self, name: str, known: State) -> State:
        return known if "squares" in known else super().inverted(name, known)

    def block_direction(self, name: str, inverse: State, grads: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if "squares" not in inverse:
            return super().block_direction(name, inverse, grads)
        return {name: grads[name] / (inverse["squares"].view_as(grads[name]) + self.option(name, "damping"))}

    def layout_of(self, name: str, entry: Mapping[str, Tensor]) -> Layout | None:
        if any(key.endswith(".squares") for key in entry):
            return dict.fromkeys(("statistics.squares?", "inverse.squares?"), (self.blocks.shape(name).numel(),))
        return super().layout_of(name, entry)


class SimpleNG(FisherMethod, kind="simple"):
    """Simple natural gradient of Kaldi; stateless.

    Affine layers use alpha instead of damping. Other layers use the diagonal of one minibatch.

    Args:
        alpha: smoothing towards the identity, in units of the mean eigenvalue. Default 4, as in
            Kaldi.
        options: see `Preconditioner`.

    Source: arXiv 1410.7455, Appendix A.
    """

    ema_decay: float = 0.0
    alpha: float = 4.0
    unused = (("layer_options", "alpha is that of all layers"),)

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout:
        return dict.fromkeys(("statistics.direction", "inverse.direction"), self.blocks.sides(name)[:2])

    def measure(self, name: str, rows: Rows) -> State:
        """Return the direction, for a gradient of norm 1; it is valid for this minibatch only."""
        a_XI, e_XO = rows.a_NTI.flatten(0, 1), rows.e_VNTO.flatten(0, 2)
        plain = (e_XO.T @ a_XI).norm()
        made = self._preconditioned(e_XO).T @ self._preconditioned(a_XI)
        return {"direction": made / plain.clamp(min=torch.finfo(plain.dtype).tiny)}

    def _preconditioned(self, rows_XD: Tensor) -> Tensor:
        """Precondition the rows of one side of a layer and restore their norm."""
        if not bool(rows_XD.isfinite().all()):
            # The statistics are then not finite, and the update is counted as skipped.
            return rows_XD
        return precondition_simple(rows_XD, self.alpha)

    def invert(self, name: str, known: State) -> State:
        return known

    def direction(self, name: str, inverse: State, g_OI: Tensor) -> Tensor:
        direction_OI: Tensor = inverse["direction"] * g_OI.norm()
        return direction_OI
