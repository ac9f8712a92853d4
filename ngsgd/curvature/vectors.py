"""Products of vectors with the Jacobian of a network's output at the outputs of its layers, along the autograd graph.

Letters: V vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def vector_products(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor) -> list[Tensor | None]:
    """V x shape at each edge, None where the output does not depend on it; the graph is kept.

    All vectors at once, which spares small minibatches most of the time; one by one where torch cannot batch an operation on
    the way.
    """
    if len(vectors_V) > 1:
        try:
            return _batched(output, edges, vectors_V)
        except RuntimeError:   # a custom function without a rule for batches; an error of another kind comes again below
            pass
    return _one_by_one(output, edges, vectors_V)


def _batched(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor) -> list[Tensor | None]:
    is_reached: list[bool] = []

    def products(vector: Tensor) -> list[Tensor]:
        found: Any = torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True)
        is_reached[:] = [e_M is not None for e_M in found]
        return [e_M for e_M in found if e_M is not None]

    # not grad(.., is_grads_batched=True): that knows fewer operations, and takes a convolution's vectors one by one
    found = iter(torch.func.vmap(products)(vectors_V))
    return [next(found) if is_there else None for is_there in is_reached]


def _one_by_one(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor) -> list[Tensor | None]:
    found: list[list[Any]] = [list(torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True))
                              for vector in vectors_V]
    return [_stacked(found, number) for number in range(len(edges))]


def _stacked(found: list[list[Any]], number: int) -> Tensor | None:
    """The derivatives at one edge, let go in `found`."""
    es = [of_vector[number] for of_vector in found]
    for of_vector in found:
        of_vector[number] = None
    if es[0] is None:
        return None
    return es[0][None] if len(es) == 1 else torch.stack(es)
