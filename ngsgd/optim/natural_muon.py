"""Orthogonalized momentum of natural gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.arguments import checks_arguments
from ngsgd.errors import ConfigError
from ngsgd.ops.orthonormal import orthogonalized
from ngsgd.ops.tensors import HALF
from ngsgd.optim import adamw, updates
from ngsgd.optim.groups import OF_LAYERS, name_of, require_non_negative
from ngsgd.optim.layers import LayerContext, LayerPreconditioner
from ngsgd.optim.layers.batched import BatchedPass
from ngsgd.optim.layers.kronecker import preconditioned
from ngsgd.optim.natural_gradient import NaturalGradient, layer_of
from ngsgd.optim.ngsgd import NGSGD
from ngsgd.optim.optimizer import Optimizer
from ngsgd.optim.rule import Factors, Group, Minibatch, Rule, Step, Stepped

# Steps then have the root mean square of AdamW steps (Moonshot's Muon).
_RMS = 0.2
_LIMITS = ("max_change", "orthonormal_constraint")


class OrthogonalMomentum(Rule):
    """Steps of fixed length along the orthogonalized momentum of matrices; AdamW for all others."""

    names = ("adamw",)

    def __init__(self, num_iterations: int, context: LayerContext, preconditioners: Mapping[str, LayerPreconditioner]) -> None:
        self.num_iterations, self._context, self._preconditioners = num_iterations, context, preconditioners

    def step(self, optimizer: Stepped, minibatch: Minibatch, factors: Factors | None = None) -> Step | None:
        if minibatch.scale != 1.0:
            raise ConfigError("NaturalMuon does not support backstitch, because its steps have a "
                              "fixed length; use NGSGD.")
        matrices = [(index, group, p, updates.laid_out_gradient(p)) for index, group in enumerate(optimizer.param_groups)
                    if group["rule"] == "natural" for p in group["params"] if p.grad is not None and _is_matrix(p)]
        if not matrices:
            return None
        norms = torch._foreach_norm([gradient for *_, gradient in matrices])
        is_finite = torch.stack([norm.isfinite() for norm in norms]).all()
        if minibatch.others_finite is not None:
            is_finite = is_finite & minibatch.others_finite.to(is_finite.device)
        steps = [(group, p, self.direction(group, p, gradient, optimizer.state[p]).view_as(p))
                 for _, group, p, gradient in matrices]
        proposed = {}
        for group, p, direction in steps:
            lr, decay = group["lr"] * group["lr_factor"], group["weight_decay"]
            # Round a new value in float32 once, and check it: half precision, and a huge rate.
            if p.dtype in HALF or lr * decay > adamw.MAX_DECAY or lr > adamw.MAX_LR:
                proposed[p] = (p.to(direction.dtype) * (1.0 - float(lr) * float(decay)) - float(lr) * direction).to(p.dtype)
        if proposed:
            is_finite = is_finite & updates.all_finite(list(proposed.values())).to(is_finite.device)
        is_skipped = ~is_finite
        for group, p, direction in steps:
            lr = group["lr"] * group["lr_factor"]
            if proposed and p in proposed:
                updates.replace(p, proposed[p], is_skipped)
            else:
                # A skipped minibatch must not decay the weights.
                p.mul_(1.0 - lr * group["weight_decay"] * is_finite)
                p.sub_(direction.masked_fill_(is_skipped, 0.0), alpha=lr)
            optimizer.state[p]["velocity"].masked_fill_(is_skipped, 0.0)
        optimizer.count(is_skipped, [])
        return Step(list(dict.fromkeys(index for index, *_ in matrices)), is_skipped.to(torch.float32))

    def direction(self, group: Group, p: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """Return the direction, O x I, that a step with learning rate 1 subtracts."""
        velocity = updates.accumulator(state, "velocity", p).mul_(group["momentum"]).add_(gradient)
        u_OI = torch.add(gradient, velocity, alpha=group["momentum"]).flatten(1)
        layer = self._preconditioners.get(layer_of(group))
        if layer is not None and layer.weight is p:
            u_OI = preconditioned(u_OI, layer.sides["output"], layer.sides["input"])
        num_outputs, num_inputs = u_OI.shape
        return orthogonalized(u_OI, self.num_iterations).mul_(_RMS * math.sqrt(max(num_outputs, num_inputs)))

    def attach(self, optimizer: Stepped) -> None:
        modules = dict(optimizer.model.named_modules())
        for group in optimizer.param_groups:
            module = modules.get("" if group["name"] == name_of(optimizer.model) else layer_of(group))
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or all(p.ndim <= 1 for p in group["params"]):
                group["rule"] = "adamw" if group["rule"] == "natural" else group["rule"]

    def adamw_groups(self, groups: Sequence[Group]) -> list[Group]:
        matrices = [{**group, "params": [p for p in group["params"] if _is_matrix(p)]} for group in super().adamw_groups(groups)]
        # Biases and scales do not decay.
        vectors = [{**group, "params": [p for p in group["params"] if not _is_matrix(p)], "weight_decay": 0.0}
                   for group in groups]
        return [*matrices, *vectors]

    def has_velocity(self, group: Group, p: Tensor) -> bool:
        return group["rule"] != "adamw" and _is_matrix(p)


class NaturalMuon(NGSGD):
    """Muon with Fisher estimates between its momentum and its orthogonalization.

    For the weight of each nn.Linear and TDNN layer (nn.Conv1d with one group):

        m <- momentum m + G;   u = G + momentum m
        u <- (1 - Wo^T Wo) u (1 - Wi^T Wi)
        W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(O, I)) orthogonalized(u)

    Wo and Wi are the Fisher estimates of output derivatives and inputs after this minibatch.
    Weights of other convolutions take the same steps without estimates. All other parameters
    (biases, embeddings, normalization layers) are trained by AdamW. `p.grad` holds the plain
    gradient.

    Steps do not depend on the scale of the loss, so one `lr` serves summed and mean losses. It has
    the magnitude of an AdamW learning rate. Use warm-up and learning-rate decay.

    On small character transformers it is better than Muon, NGSGD and AdamW after equal numbers of
    steps. On speech frames NGSGD reaches the same loss in a third of the time
    (`docs/natural-gradient.md`).

    Source: Jordan et al. 2024 (Muon); arXiv 1410.7455 (Fisher estimates).

    Args:
        model: the module to train. Layer classes are replaced in place; `detach` restores them.
        lr: learning rate of the matrices; 0.004 to 0.032 were best in three tasks.
        momentum: momentum of the gradients, as in torch.optim.Muon with nesterov.
        weight_decay: decoupled weight decay, as in torch.optim.AdamW.
        alpha, rank_in, rank_out, update_period, num_samples_history: see `NGSGD`.
        ns_steps: Newton-Schulz iterations of the orthogonalization.
        adamw_lr_factor: learning rate of AdamW relative to `lr`.
        layer_options: as for `NGSGD`, without max_change and orthonormal_constraint; rule is
            "natural" or "adamw".
        grad_scaler, on_nonfinite: see `NGSGD`.

    Raises:
        ConfigError: layer_options set a limit that fixed-length steps do not support.

    Example:
        >>> import torch, ngsgd
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> optimizer = ngsgd.NaturalMuon(model, lr=0.004)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> optimizer.zero_grad()
        >>> torch.nn.functional.cross_entropy(model(x), y).backward()
        >>> optimizer.step()
    """

    @checks_arguments(OF_LAYERS)
    def __init__(self, model: nn.Module, lr: float = 0.016, *, momentum: float = 0.8, weight_decay: float = 0.01,
                 alpha: float = 1.0, rank_in: int = 20, rank_out: int = 80, update_period: int = 4,
                 num_samples_history: float = 2000.0, ns_steps: int = 5, adamw_lr_factor: float = 1.0,
                 layer_options: Mapping[str, Mapping[str, Any]] | None = None, grad_scaler: torch.amp.GradScaler | None = None,
                 on_nonfinite: str = "skip") -> None:
        require_non_negative(ns_steps=ns_steps)
        if limited := [name for name, own in (layer_options or {}).items() if set(own) & set(_LIMITS)]:
            raise ConfigError(f"layer_options of {', '.join(limited)} set an update-norm limit, "
                              "which NaturalMuon does not support; its steps have a fixed length. "
                              "Set lr_factor instead.")
        context = LayerContext(observes=True, on_nonfinite=on_nonfinite, grad_scaler=grad_scaler)
        context.batch = BatchedPass(context)
        preconditioners: dict[str, LayerPreconditioner] = {}
        rule = NaturalGradient(
            OrthogonalMomentum(ns_steps, context, preconditioners), context, preconditioners, fallback="adamw", is_mean=False,
            settings={"rank_in": rank_in, "rank_out": rank_out, "update_period": update_period,
                      "num_samples_history": num_samples_history, "alpha": alpha, "schedule": "nnet3",
                      "update": "auto"})
        # Its layers, state and estimates are those of NGSGD, whose constructor makes another rule.
        Optimizer.__init__(self, model, rule, {"lr": lr, "momentum": momentum, "max_change": 0.0, "weight_decay": weight_decay,
                                               "adamw_lr_factor": adamw_lr_factor},
                           layer_options=layer_options, max_param_change=0.0, on_nonfinite=on_nonfinite)


def _is_matrix(p: Tensor) -> bool:
    """Return whether steps of a parameter are orthogonalized; AdamW trains all others."""
    return p.ndim > 1 and p.numel() > 0 and not p.is_complex()
