"""NG-SGD: SGD on gradients that an online Fisher estimate has preconditioned, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import nn

from ngsgd.optim.natural_gradient_linear import LayerPreconditioner, NaturalGradientLinear
from ngsgd.optim.sgd import SGD
from ngsgd.preconditioners.online import OnlineNaturalGradient

_log = logging.getLogger(__name__)


class NGSGD(SGD):
    """Natural-gradient SGD of Povey, Zhang and Khudanpur (arXiv 1410.7455), as Kaldi's nnet3 runs it.

    `lr` is per sample, on a loss *summed* over the minibatch (`reduction="sum"`); with a mean-reduced loss multiply it
    by the minibatch size.  After `backward`, `p.grad` holds the preconditioned gradient, so anything that acts on
    gradients (clipping, accumulation) acts on that.

    Every `nn.Linear` is preconditioned on its input rows (with the 1 of the bias appended) and on its
    output-derivative rows; `preconditioned` names them.  All other parameters take plain SGD steps; `fallbacks` names
    them, and a log line says so.

    Args:
        model: the module to train.  Its nn.Linear layers change class in place; `detach` undoes it.
        rank_in, rank_out: Fisher ranks; lowered to (dim + 1) / 2.
        update_period: minibatches between updates of the Fisher estimates, after the first 11.
        num_samples_history: rows after which the past counts 1/e.
        alpha: smoothing of the Fisher estimates towards the identity.
        momentum, max_change, max_param_change, weight_decay: see `SGD`.

    >>> import torch, ngsgd
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> optimizer = ngsgd.NGSGD(model, lr=1e-3)
    >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
    >>> optimizer.zero_grad()
    >>> torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    >>> optimizer.step()
    """

    def __init__(self, model: nn.Module, lr: float, *, momentum: float = 0.0, max_change: float = 0.75,
                 max_param_change: float = 2.0, rank_in: int = 20, rank_out: int = 80, update_period: int = 4,
                 num_samples_history: float = 2000.0, alpha: float = 4.0, weight_decay: float = 0.0) -> None:
        super().__init__(model, lr, momentum=momentum, max_change=max_change, max_param_change=max_param_change,
                         weight_decay=weight_decay)
        if rank_in < 1 or rank_out < 1:
            raise ValueError(f"Invalid rank_in, rank_out: {rank_in}, {rank_out}; both must be at least 1")

        def side(rank: int, dim: int) -> OnlineNaturalGradient:
            return OnlineNaturalGradient(min(rank, (dim + 1) // 2), update_period, num_samples_history, alpha=alpha)

        self._layers: dict[str, NaturalGradientLinear] = {}
        for name, layer in model.named_modules():
            if type(layer) in (nn.Linear, NaturalGradientLinear) and layer.weight.requires_grad:
                num_inputs = layer.in_features + (layer.bias is not None)
                NaturalGradientLinear.attach(layer, LayerPreconditioner(side(rank_in, num_inputs),
                                                                        side(rank_out, layer.out_features)))
                self._layers[name] = layer
        self.fallbacks = self._names_of_plain_parameters(model)
        if self.fallbacks:
            _log.info("plain SGD, without natural gradient, for: %s", ", ".join(self.fallbacks))

    @property
    def preconditioned(self) -> list[str]:
        """Names of the layers that take natural-gradient steps."""
        return list(self._layers)

    def preconditioners(self) -> Iterator[tuple[str, OnlineNaturalGradient]]:
        """(name, object) of every Fisher estimate: "<layer>.input" and "<layer>.output"."""
        for name, layer in self._layers.items():
            yield f"{name}.input", layer.preconditioner.input_side
            yield f"{name}.output", layer.preconditioner.output_side

    def freeze(self, frozen: bool = True) -> None:
        """Stops the Fisher estimates from moving, or lets them go on; backstitch freezes them in its first step."""
        for _, preconditioner in self.preconditioners():
            preconditioner.freeze(frozen)

    def detach(self) -> None:
        """Gives the model its plain layers back; the optimiser is of no use afterwards."""
        for layer in self._layers.values():
            layer.detach()
        self._layers.clear()

    def state_dict(self) -> dict[str, Any]:
        """torch's state plus "natural_gradient": the Fisher estimates, in their own dtype whatever the parameters'."""
        state = super().state_dict()
        state["natural_gradient"] = {name: p.state_dict() for name, p in self.preconditioners()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues bit for bit where the state was taken, on a model of the same layers."""
        fisher = state_dict["natural_gradient"]
        mine = dict(self.preconditioners())
        if fisher.keys() != mine.keys():
            raise ValueError(f"the state is of other layers: {sorted(fisher.keys() ^ mine.keys())}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "natural_gradient"})
        for name, preconditioner in mine.items():
            preconditioner.load_state_dict(fisher[name])

    def _names_of_plain_parameters(self, model: nn.Module) -> list[str]:
        covered = {id(p) for layer in self._layers.values() for p in layer.parameters(recurse=False)}
        return [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
