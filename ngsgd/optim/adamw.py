"""AdamW for single layers of a model whose other layers are trained by `SGD` or `NGSGD`.

Typical layers are embeddings, recurrent layers, and scale and offset parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# Keys in `state` of a parameter. torch.optim.AdamW names the last one "step", a key that `SGD` uses
# itself.
STATE = ("exp_avg", "exp_avg_sq", "num_adamw_steps")
# Defaults of torch, for a param group without these keys.
BETAS, EPS = (0.9, 0.999), 1e-8


def prepare_state(p: Tensor, state: dict[str, Any]) -> None:
    """Create zero moments for a parameter that has none."""
    if state.get("exp_avg") is None:
        state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p),
                     num_adamw_steps=torch.zeros((), dtype=torch.float32, device=p.device))


def gradients_are_finite(groups: Iterable[Mapping[str, Any]]) -> Tensor | None:
    """Return a 0-d bool; None if no parameter of the groups has a gradient."""
    finite = [p.grad.isfinite().all() for group in groups for p in group["params"] if p.grad is not None]
    return torch.stack([one.to(finite[0].device) for one in finite]).all() if finite else None


def step(groups: Iterable[Mapping[str, Any]], state: Mapping[Tensor, dict[str, Any]], is_skipped: Tensor) -> None:
    """Take a torch.optim.AdamW step for each group, except where `is_skipped`; no host sync."""
    for group in groups:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            continue
        for p in params:
            prepare_state(p, state[p])
        found_inf = is_skipped.to(params[0].device, torch.float32)
        num_steps = [state[p]["num_adamw_steps"] for p in params]
        torch._foreach_add_(num_steps, 1)
        beta1, beta2 = group.get("betas", BETAS)
        torch._fused_adamw_(params, [_laid_out(p) for p in params], [state[p]["exp_avg"] for p in params],
                            [state[p]["exp_avg_sq"] for p in params], [], num_steps, amsgrad=False,
                            lr=group["lr"] * group["lr_factor"] * group["adamw_lr_factor"], beta1=beta1, beta2=beta2,
                            weight_decay=group["weight_decay"], eps=group.get("eps", EPS), maximize=False, grad_scale=None,
                            found_inf=found_inf)
        torch._foreach_sub_(num_steps, [found_inf] * len(num_steps))
        # Fused kernels do not increment the version; autograd would not detect stale tensors.
        torch.autograd.graph.increment_version(params)


def _laid_out(p: Tensor) -> Tensor:
    """Return the gradient with the strides of the parameter; without a copy if they are equal."""
    assert p.grad is not None
    return torch.empty_like(p).copy_(p.grad.to_dense()) if p.grad.is_sparse or p.grad.stride() != p.stride() else p.grad
