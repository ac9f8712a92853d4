"""Traits of the preconditioners: data that the methods, the configuration and the tests share.

The configuration cannot read the classes, because that would import torch for `--help`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class Axes(NamedTuple):
    """Choices that make a method; `ngsgd.preconditioners.Method` combines others."""

    # "fisher": the option fisher of the method decides
    curvature: str = ""
    representation: str = ""
    granularity: str = ""
    solver: str = ""


@dataclass(frozen=True)
class Traits:
    """Properties of a method that decide where it can be used and how it is run."""

    axes: Axes = Axes()  # noqa: RUF009
    # Type of Fisher matrix of the rows that it needs: "any", only "empirical", or "" for none.
    fisher: str = ""
    one_minibatch: bool = False  # Has no moving average.
    every_step: bool = False  # Needs every minibatch, so its intervals are 1.
    has_mean: bool = True  # The mean of the statistics of several workers is meaningful.
    # The length of a step does not depend on that of the gradient, so grafting has no purpose.
    fixed_length: bool = False
    joins_bias: bool = True  # Weight and bias of an affine layer form one block.
    # Statistics have a mean over ranks, and layers can be inverted separately.
    splits_work: bool = False
    # Ranks that average their gradients agree without another exchange.
    agrees_over_ranks: bool = False
    # Curvature updates do not need the gradient itself, which can stay factored.
    measures_rows_only: bool = False
    applies_first: bool = False  # The direction uses the curvature of earlier steps.
    converts: bool = True  # Estimates of one dtype are also right in another one.


_FISHER = Traits(fisher="any")
_ROWS = replace(_FISHER, splits_work=True)
_LAST_ROWS = replace(_FISHER, one_minibatch=True, has_mean=False, measures_rows_only=True)
_TENSORS = Traits(Axes("root_moment", "dimensions", "layer", "eigen"), joins_bias=False, splits_work=True, agrees_over_ranks=True)
_TORCH = Traits(Axes("root_moment", "element", "element", "division"), every_step=True, fixed_length=True, joins_bias=False,
                agrees_over_ranks=True)
_MOMENTS = Traits(has_mean=False, agrees_over_ranks=True)

# By the value of `optimizer=`, in the order of all tables.
TRAITS: Mapping[str, Traits] = {
    "kfac": replace(_ROWS, axes=Axes("fisher", "kronecker", "layer", "cholesky"), measures_rows_only=True),
    "skfac": replace(_LAST_ROWS, axes=Axes("fisher", "kronecker", "layer", "smw")),
    "ekfac": replace(_FISHER, axes=Axes("fisher", "kronecker", "layer", "eigen"), measures_rows_only=True),
    "diagonal": replace(_ROWS, axes=Axes("fisher", "element", "element", "division")),
    "unit": replace(_ROWS, axes=Axes("fisher", "dense", "unit", "cholesky")),
    "layer": replace(_ROWS, axes=Axes("fisher", "dense", "layer", "cholesky")),
    "full": replace(_FISHER, axes=Axes("fisher", "dense", "full", "cholesky")),
    "seng": replace(_LAST_ROWS, axes=Axes("fisher", "gram", "layer", "smw")),
    "smw": replace(_LAST_ROWS, axes=Axes("fisher", "gram", "full", "smw")),
    "shampoo": _TENSORS,
    "soap": replace(_TENSORS, fixed_length=True, applies_first=True, converts=False),
    "psgd": Traits(Axes("absolute", "kronecker", "layer", "triangular")),
    "kbfgs": Traits(Axes("bfgs", "kronecker", "layer", "bfgs"), fisher="empirical", measures_rows_only=True),
    "hessian_free": Traits(Axes("exact", "free", "full", "cg"), every_step=True, joins_bias=False),
    "ksd": Traits(Axes("exact", "free", "full", "krylov"), every_step=True, joins_bias=False),
    "lissa": Traits(Axes("hessian", "free", "full", "neumann"), every_step=True, joins_bias=False, one_minibatch=True),
    "lbfgs": replace(_MOMENTS, axes=Axes("bfgs", "gram", "full", "bfgs"), joins_bias=False, one_minibatch=True),
    "neumann": replace(_MOMENTS, axes=Axes("hessian", "free", "full", "neumann"), every_step=True, joins_bias=False),
    "kfra": Traits(Axes("exact", "kronecker", "layer", "cholesky"), fisher="averages"),
    "fang": replace(_ROWS, axes=Axes("fisher", "sparse", "layer", "cholesky")),
    "tnt": replace(_ROWS, axes=Axes("fisher", "dimensions", "layer", "cholesky"), measures_rows_only=True),
    "mfac": replace(_MOMENTS, axes=Axes("moment", "gram", "full", "smw")),
    "ggt": replace(_MOMENTS, axes=Axes("root_moment", "gram", "full", "eigen")),
    "tonga": replace(_MOMENTS, axes=Axes("moment", "low_rank", "layer", "smw")),
    "tonga_unit": replace(_MOMENTS, axes=Axes("moment", "low_rank", "unit", "smw")),
    "sfn": Traits(Axes("absolute", "dense", "layer", "eigen")),
    "esgd": Traits(Axes("absolute", "element", "element", "division"), joins_bias=False),
    "adahessian": Traits(Axes("hessian", "element", "element", "division"), joins_bias=False),
    "simple": Traits(Axes("empirical", "kronecker", "layer", "smw"), fisher="empirical", one_minibatch=True, every_step=True,
                     has_mean=False),
    "adam": _TORCH,
    "adamw": _TORCH,
    "muon": replace(_TORCH, axes=Axes("root_moment", "dimensions", "layer", "newton_schulz")),
}


def kinds_with(**traits: object) -> tuple[str, ...]:
    """Return the methods with these traits, such as `kinds_with(has_mean=False)`."""
    return tuple(kind for kind, one in TRAITS.items() if all(getattr(one, key) == value for key, value in traits.items()))
