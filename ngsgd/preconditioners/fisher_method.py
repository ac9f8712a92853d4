"""Base of the methods that need the rows of a minibatch: Fisher and Gauss-Newton matrices."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ngsgd.errors import ConfigError, warn
from ngsgd.preconditioners.base import Preconditioner
from ngsgd.preconditioners.estimates import is_finite
from ngsgd.preconditioners.fisher_recorder import FISHERS, FisherRecorder, FisherSample, Rows
from ngsgd.preconditioners.states import Layout, State

# Fraction of parameters with plain gradient that triggers a warning.
_MUCH = 0.3


class FisherMethod(Preconditioner):
    """Methods whose `measure` gets the `Rows` of an affine layer.

    Parameters outside affine layers have the diagonal of their Fisher matrix, "squares", as
    statistics and inverse.

    Args:
        fisher: "empirical" (default), "mc" (Monte Carlo samples of the targets) or "exact"
            (Gauss-Newton).
        num_draws: Monte Carlo samples per row with "mc". Default 1.
    """

    fisher: str = "empirical"
    num_draws: int = 1

    def problems(self) -> list[str]:
        found = [*super().problems(), *self.choice("fisher", *FISHERS), *self.at_least("num_draws", 1)]
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
                raise ConfigError(f"{type(self).__name__} has not processed a minibatch; run "
                                  "its forward and backward pass inside `with "
                                  "preconditioner.watch():`.")
            return False
        if recorder is not None:
            recorder.forget()
        seen = {*sample.rows, *sample.squares}
        self.update_curvature(replace(sample, is_last=True))
        if self.last["curvature"] is None and seen:
            self._warn_of_plain(grads, {*seen, *(self.blocks.bias_of.get(name) for name in seen)})
        return True

    def _warn_of_plain(self, grads: Mapping[str, Tensor], covered: Collection[str | None]) -> None:
        """Warn after the first update if much of the model keeps its plain gradient without being
        skipped.
        """
        sizes = {name: p.numel() for name, p in self.parameters.items() if p.requires_grad and name not in self.skipped}
        plain = [name for name in grads if name not in covered]
        share = sum(sizes.get(name, 0) for name in plain) / max(sum(sizes.values()), 1)
        if share > _MUCH:
            names = ", ".join([*plain[:5], "..."] if len(plain) > 5 else plain)
            warn(f"{type(self).__name__} does not precondition {100.0 * share:.0f} % of "
                 "the parameters, because the minibatch had no curvature for them: "
                 f"{names}; add their layers to skip= if this is intended.")

    def update_curvature(self, seen: FisherSample) -> None:
        """Update with the rows of a minibatch."""
        for name in seen.squares:
            # A separate block also in an affine layer, such as a weight tied to an embedding.
            self.blocks.bias_of.pop(name, None)
        measured: dict[str, State] = {name: {"squares": value} for name, value in seen.squares.items()}
        if self.replicas.comm is None:
            for name, rows in seen.layers():
                self.blocks.bias_of[name] = rows.bias
                self.update_statistics(name, rows)
        else:
            own: dict[str, State] = {}
            for name, rows in seen.rows.items():
                self.blocks.bias_of[name] = rows.bias
                own[name] = self.measure(name, rows)
            measured = self.replicas.comm.mean(own | measured, float(seen.num_rows))
        for name, new in measured.items():
            self.average_in(name, new)

    def update_statistics(self, name: str, rows: Rows) -> None:
        """Update with the rows of one layer."""
        new = self.measure(name, rows)
        if not self.is_passed_on(name):
            self.average_in(name, new)
        elif is_finite(new):
            self.pass_on(name, new)
        else:
            self.note_skipped()

    def is_passed_on(self, name: str) -> bool:
        """Return whether the statistics of a layer are unused after the inversion, and need not be
        kept.
        """
        return self.traits.passes_on and self.option(name, "ema_decay") == 0.0 and self.averaging != "average" \
            and self.is_due("inverse")

    def pass_on(self, name: str, new: State) -> None:
        """Invert statistics, in their memory if the method supports it."""
        # Its memory is reused.
        self.inverses.pop(name, None)
        self.statistics.forget(name)
        self.overwrites = True
        try:
            self.inverses[name] = self.inverted(name, new)
        finally:
            self.overwrites = False

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
