"""AdamW for single layers of a model whose other layers are trained by `SGD` or `NGSGD`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngsgd.ops.tensors import HALF
from ngsgd.optim import updates
from ngsgd.optim.updates import accumulator_dtype, laid_out_gradient

# Keys in `state` of a parameter. torch.optim.AdamW names the last one "step", a key that `SGD` uses
# itself.
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = (*MOMENTS, "num_adamw_steps")
# Defaults of torch, for a param group without these keys.
BETAS, EPS = (0.9, 0.999), 1e-8
# Weights grow without bound above the first product, and may overflow in one step above the second.
MAX_DECAY, MAX_LR = 2.0, 1e28


class Proposal(NamedTuple):
    """New values of parameters that might not be finite; nothing has changed yet."""

    params: list[Tensor]
    # new values in at least float32, and new moments
    values: list[Tensor]
    moments: list[list[Tensor]]


def prepare_state(p: Tensor, state: dict[str, Any]) -> None:
    """Create zero moments for a parameter that has none; follow its dtype and device."""
    average, square, number = state.get("exp_avg"), state.get("exp_avg_sq"), state.get("num_adamw_steps")
    # The most frequent case.
    if (average is not None and square is not None and number is not None and average.dtype == square.dtype == p.dtype
            and average.device == square.device == number.device == p.device and p.dtype not in HALF):
        return
    for key in MOMENTS:
        updates.accumulator(state, key, p)
    if number is None:
        state["num_adamw_steps"] = torch.zeros((), dtype=torch.float32, device=p.device)
    elif number.device != p.device:
        state["num_adamw_steps"] = number.to(p.device)


def propose(groups: Sequence[Mapping[str, Any]],
            state: Mapping[Tensor, dict[str, Any]]) -> tuple[list[Proposal | None], Tensor | None]:
    """Return proposals for the groups, and whether gradients and proposals are finite, or None.

    A proposal is None except with half precision or a huge rate: other steps are at most
    lr / sqrt(1 - beta2) long, and keep parameters finite.
    """
    found: list[Proposal | None] = []
    for group in groups:
        lr = _lr(group)
        is_huge = lr * group["weight_decay"] > MAX_DECAY or lr > MAX_LR
        if not is_huge and {p.dtype for p in group["params"]}.isdisjoint(HALF):
            found.append(None)
            continue
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            prepare_state(p, state[p])
        values = [p.detach().to(accumulator_dtype(p), copy=True) for p in params]
        moments = [[state[p][key].clone() for p in params] for key in MOMENTS]
        number = [state[p]["num_adamw_steps"] + 1 for p in params]
        _kernel(group, values, [laid_out_gradient(p).to(accumulator_dtype(p)) for p in params], moments, number)
        found.append(Proposal(params, values, moments))
    is_finite = updates.gradients_are_finite([p for group in groups for p in group["params"]])
    rounded = [value.to(p.dtype) for one in found if one is not None for p, value in zip(one.params, one.values, strict=True)]
    if rounded and is_finite is not None:
        is_finite = is_finite & updates.all_finite(rounded).to(is_finite.device)
    return found, is_finite


def step(groups: Iterable[Mapping[str, Any]], proposed: Iterable[Proposal | None], state: Mapping[Tensor, dict[str, Any]],
         is_skipped: Tensor) -> None:
    """Take a torch.optim.AdamW step for each group, except where `is_skipped`; no host sync."""
    # Groups with the same settings take one step, because on a GPU each operation is a launch.
    together: dict[Hashable, tuple[Mapping[str, Any], Proposal | None, list[Tensor]]] = {}
    for number, (group, proposal) in enumerate(zip(groups, proposed, strict=True)):
        params = [p for p in group["params"] if p.grad is not None]
        kinds = {(p.dtype, p.device) for p in params}
        settings = (_lr(group), group["weight_decay"], group.get("betas", BETAS), group.get("eps", EPS))
        key = (*settings, *kinds) if proposal is None and len(kinds) == 1 else number
        together.setdefault(key, (group, proposal, []))[2].extend(params)
    for group, proposal, params in together.values():
        if not params:
            continue
        for p in params:
            prepare_state(p, state[p])
        found_inf = is_skipped.to(params[0].device, torch.float32)
        num_steps = [state[p]["num_adamw_steps"] for p in params]
        torch._foreach_add_(num_steps, 1)
        moments = [[state[p][key] for p in params] for key in MOMENTS]
        if proposal is None:
            _kernel(group, params, [laid_out_gradient(p) for p in params], moments, num_steps, found_inf)
        else:
            new_values = [*proposal.values, *proposal.moments[0], *proposal.moments[1]]
            for old, new in zip([*params, *moments[0], *moments[1]], new_values, strict=True):
                updates.replace(old, new, is_skipped)
        torch._foreach_sub_(num_steps, [found_inf] * len(num_steps))
        # Fused kernels do not increment the version; autograd would not detect stale tensors.
        torch.autograd.graph.increment_version(params)


def _lr(group: Mapping[str, Any]) -> float:
    return float(group["lr"] * group["lr_factor"] * group["adamw_lr_factor"])


def _kernel(group: Mapping[str, Any], values: list[Tensor], gradients: list[Tensor], moments: list[list[Tensor]],
            num_steps: list[Tensor], found_inf: Tensor | None = None) -> None:
    beta1, beta2 = group.get("betas", BETAS)
    averages, squares = moments
    if not {value.dtype for value in values}.isdisjoint(updates.COMPLEX):
        values, gradients, averages, squares = ([updates.as_real(one) for one in tensors]
                                                for tensors in (values, gradients, *moments))
    torch._fused_adamw_(values, gradients, averages, squares, [], num_steps, amsgrad=False, lr=_lr(group), beta1=beta1,
                        beta2=beta2, weight_decay=group["weight_decay"], eps=group.get("eps", EPS), maximize=False,
                        grad_scale=None, found_inf=found_inf)
