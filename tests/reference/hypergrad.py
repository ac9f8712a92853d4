"""Training with averaging, written out in float64 and differentiated as one graph: what
`ngsgd.hypergrad` must agree with.

One step of a layer: v = m v - (1 - m) (g + l2 w); change d = lr v, shortened to the layer's limit
and then, together with the others, to the model's; w += d. Every job starts from the mean with v =
0.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ngsgd.hypergrad import HyperparameterPlan, MinibatchIndex, TrainingTask

Layers = dict[str, list[Tensor]]


def unrolled(task: TrainingTask, plan: HyperparameterPlan) -> tuple[Tensor, dict[str, Tensor]]:
    """(validation loss, its gradient w.r.t. plan and start), by autograd through every step."""
    leaves = {name: value.clone().requires_grad_() for name, value in plan.tensors().items()}
    start = {name: p.double().clone().requires_grad_() for name, p in task.start.items()}
    value = task.validation(train(task, leaves, start, plan.num_jobs))
    names, inputs = [*leaves, *start], [*leaves.values(), *start.values()]
    found = torch.autograd.grad(value, inputs, allow_unused=True)
    return value.detach(), {name: torch.zeros_like(leaf) if grad is None else grad
                            for name, leaf, grad in zip(names, inputs, found, strict=True)}


def train(task: TrainingTask, hyper: Mapping[str, Tensor], start: Mapping[str, Tensor],
          num_jobs: int) -> dict[str, Tensor]:
    """The final parameters, as a function of the hyperparameters."""
    layer_of = {name: index for index, names in enumerate(task.layers.values()) for name in names}
    w = {name: hyper["init_scale_G"][layer_of[name]] * p for name, p in start.items()}
    num_iters = len(hyper["averaging_ON"])
    steps = len(hyper["lr_TG"]) // num_iters
    for outer_iter in range(num_iters):
        ends = [_job(task, hyper, w, layer_of, MinibatchIndex(outer_iter, job, 0),
                     steps) for job in range(num_jobs)]
        shares = hyper["averaging_ON"][outer_iter] / hyper["averaging_ON"][outer_iter].sum()
        w = {name: sum((share * end[name] for share, end in zip(shares, ends, strict=True)), torch.zeros(())) for name in w}
    return w


def _job(task: TrainingTask, hyper: Mapping[str, Tensor], w: dict[str, Tensor],
         layer_of: Mapping[str, int], place: MinibatchIndex,
         steps: int) -> dict[str, Tensor]:
    v = {name: torch.zeros_like(p) for name, p in w.items()}
    for step in range(steps):
        t = place.outer_iter * steps + step
        torch.manual_seed(place._replace(step=step).seed(task.seed))
        loss = task.loss(w, place._replace(step=step), hyper.get("data_weights"))
        grads = torch.autograd.grad(loss, list(w.values()), create_graph=True)
        change = {}
        for (name, p), grad in zip(w.items(), grads, strict=True):
            layer = layer_of[name]
            gamma, l2, lr = hyper["momentum_TG"][t, layer], hyper["l2_G"][layer], hyper["lr_TG"][t, layer]
            v[name] = gamma * v[name] - (1.0 - gamma) * (grad + l2 * p)
            change[name] = lr * v[name]
        change = _limited(change, layer_of, hyper["max_change_G"], hyper["max_param_change"])
        w = {name: p + change[name] for name, p in w.items()}
    return w


def _limited(change: dict[str, Tensor], layer_of: Mapping[str, int], limit_G: Tensor, limit: Tensor) -> dict[str, Tensor]:
    for layer in range(len(limit_G)):
        names = [name for name in change if layer_of[name] == layer]
        norm = _norm([change[name] for name in names])
        if 0.0 < float(limit_G[layer].detach()) < float(norm.detach()):
            change |= {name: change[name] * (limit_G[layer] / norm) for name in names}
    norm = _norm(list(change.values()))
    holds = 0.0 < float(limit.detach()) < float(norm.detach())
    return {name: d * (limit / norm) for name, d in change.items()} if holds else change


def _norm(parts: list[Tensor]) -> Tensor:
    norm: Tensor = torch.cat([part.reshape(-1) for part in parts]).norm()
    return norm
