"""Products of vectors with Jacobians of the network output at the outputs of layers.

Letters: V vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge


def vector_products(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor,
                    at_once: int) -> list[Tensor | None]:
    """Return V x shape at each edge, None if the output does not depend on it.

    The graph is kept.

    `at_once` vectors are batched, which reduces the overhead of small minibatches; without batching
    support in torch they run one by one.
    """
    if at_once > 1 and len(vectors_V) > 1:
        try:
            blocks = [_batched(output, edges, block) for block in vectors_V.split(at_once)]
        except RuntimeError:
            # A custom function without a rule; other errors occur again below.
            pass
        else:
            if len(blocks) == 1:
                return blocks[0]
            return [torch.cat(es) if (es := _taken(blocks, number)) else None for number in range(len(edges))]
    return _one_by_one(output, edges, vectors_V)


def _batched(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor) -> list[Tensor | None]:
    is_reached: list[bool] = []

    def products(vector: Tensor) -> list[Tensor]:
        found: Any = torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True)
        is_reached[:] = [e_M is not None for e_M in found]
        return [e_M for e_M in found if e_M is not None]

    # grad(.., is_grads_batched=True) supports fewer operations, and runs the vectors of a
    # convolution one by one.
    found = iter(torch.func.vmap(products)(vectors_V))
    return [next(found) if is_there else None for is_there in is_reached]


def _one_by_one(output: Tensor | GradientEdge, edges: Sequence[GradientEdge], vectors_V: Tensor) -> list[Tensor | None]:
    found: list[list[Any]] = [list(torch.autograd.grad(output, edges, vector, retain_graph=True, allow_unused=True))
                              for vector in vectors_V]
    return [_stacked(_taken(found, number)) for number in range(len(edges))]


def _stacked(es: list[Tensor]) -> Tensor | None:
    if not es:
        return None
    return es[0][None] if len(es) == 1 else torch.stack(es)


def _taken(found: list[list[Any]], number: int) -> list[Tensor]:
    """Return the results of all blocks at one edge and free them in `found`.

    Empty without dependence.
    """
    es = [block[number] for block in found]
    for block in found:
        block[number] = None
    return [] if es[0] is None else es


def pushing(u: Tensor, pulled: Sequence[Tensor | None]) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return v -> J v from J^T u by parameter: J^T u is linear in u, and its gradient with respect
    to u, times v, is J v.
    """
    def push(v: Sequence[Tensor]) -> Tensor:
        along = [(J_u, each) for J_u, each in zip(pulled, v, strict=True) if J_u is not None and J_u.requires_grad]
        if not along:
            return torch.zeros_like(u)
        (pushed,) = torch.autograd.grad([J_u for J_u, _ in along], [u], [each for _, each in along], retain_graph=True,
                                        allow_unused=True)
        return torch.zeros_like(u) if pushed is None else pushed.detach()

    return push
