"""Traits of the preconditioners: data that the methods, the configuration and the tests share.

The configuration cannot read the classes, because that would import torch for `--help`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Traits:
    """Properties of a method that decide where it can be used and how it is run."""

    # Type of Fisher matrix of the rows that it needs: "any", only "empirical", or "" for none.
    fisher: str = ""
    # Needs every minibatch, so its intervals are 1.
    every_step: bool = False
    # The mean of the statistics of several workers is meaningful.
    has_mean: bool = True
    # The length of a step does not depend on that of the gradient, so grafting has no purpose.
    fixed_length: bool = False
    # Weight and bias of an affine layer form one block.
    joins_bias: bool = True
    # Statistics have a mean over ranks, and layers can be inverted separately.
    splits_work: bool = False
    # Ranks that average their gradients agree without another exchange.
    agrees_over_ranks: bool = False
    # Inverts layers one by one, from the statistics only, which need not be kept.
    passes_on: bool = False
    # Curvature updates do not need the gradient itself, which can stay factored.
    measures_rows_only: bool = False
    # The direction uses the curvature of earlier steps.
    applies_first: bool = False
    # Estimates of one dtype are also right in another one.
    converts: bool = True


_ROWS = Traits(fisher="any", splits_work=True, passes_on=True)
_LAST_ROWS = Traits(fisher="any", has_mean=False, measures_rows_only=True)
_TENSORS = Traits(joins_bias=False, splits_work=True, agrees_over_ranks=True)
_TORCH = Traits(every_step=True, fixed_length=True, joins_bias=False, agrees_over_ranks=True)

# By the value of `optimizer=`.
TRAITS: Mapping[str, Traits] = {
    "kfac": replace(_ROWS, measures_rows_only=True),
    "skfac": _LAST_ROWS,
    "ekfac": Traits(fisher="any", measures_rows_only=True),
    "diagonal": _ROWS,
    "unit": _ROWS,
    "layer": _ROWS,
    "full": Traits(fisher="any"),
    "seng": _LAST_ROWS,
    "smw": _LAST_ROWS,
    "shampoo": _TENSORS,
    "soap": replace(_TENSORS, fixed_length=True, applies_first=True, converts=False),
    "psgd": Traits(),
    "kbfgs": Traits(fisher="empirical", measures_rows_only=True),
    "hessian_free": Traits(every_step=True, joins_bias=False),
    "simple": Traits(fisher="empirical", every_step=True, has_mean=False),
    "adam": _TORCH,
    "adamw": _TORCH,
    "muon": _TORCH,
}


def kinds_with(**traits: object) -> tuple[str, ...]:
    """Return the methods with these traits, such as `kinds_with(has_mean=False)`."""
    return tuple(kind for kind, one in TRAITS.items() if all(getattr(one, key) == value for key, value in traits.items()))
