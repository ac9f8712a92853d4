"""A model that grows while it is trained: every part is there from the start, and a stage says
which are in use.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.models.dnn import Layer, initialize
from ngsgd.models.growth_stages import Stage
from ngsgd.models.subclasses import split_rows
from ngsgd.models.tdnn import TimeDelayNetwork

# of the output layer after a layer was put before it, over sqrt(inputs); Kaldi's nnet-insert
_REMADE_STDDEV = 0.1

Make = Callable[[Layer], nn.Module]


@dataclass(frozen=True)
class Split:
    """An output layer with sub-classes: its modules, and how many of them each class has."""

    modules: Layer
    targets: tuple[int, ...]
    # of each class, that follow the layer; none if empty
    scales: tuple[float, ...] = ()


class StagedModel(nn.Module):
    """The modules of a whole model by their names; `at` is the network that a stage makes of them.

    Before the split the output layer is "output", after it "subclass_output"; the other one then
    idles.
    """

    def __init__(self, front: Layer, layers: Sequence[Layer], output: Layer, split: Split | None,
                 make: Make) -> None:
        super().__init__()
        self._front, self._output = list(front), list(output)
        self._hidden = [list(layer) for layer in layers]
        self._split = list(split.modules) if split else []
        self.targets, self._scales = (split.targets, split.scales) if split else ((), ())
        self._make = make
        for part in (front, *layers, output, *([split.modules] if split else [])):
            for name, module in part.items():
                self.add_module(name, module)
        self.stage = Stage(len(layers), split is not None)
        # of the same modules, so they need no place in the state dict
        self._networks: dict[Stage, nn.Module] = {}

    def at(self, stage: Stage) -> nn.Module:
        """The network of a stage; its modules are this model's own, under their own names."""
        if stage not in self._networks:
            hidden = [name for layer in self._hidden[:stage.num_layers] for name in layer]
            names = [*self._front, *hidden, *(self._split if stage.is_split else self._output)]
            self._networks[stage] = self._make(OrderedDict((name, self.get_submodule(name))
                                                           for name in names))
        return self._networks[stage]

    def forward(self, x_NI: Tensor) -> Tensor:
        y: Tensor = self.at(self.stage)(x_NI)
        return y

    @torch.no_grad()
    def remade(self, state: Mapping[str, Tensor], before: Stage, after: Stage,
               seed: int) -> dict[str, Tensor]:
        """The entries that change when a model with this state passes from one stage to another;
        `state` is not modified.

        New layers get their start, and the output layer behind them random values of standard
        deviation 0.1/sqrt(inputs) (C.7); the rows of the output layer become those of its
        sub-classes (C.5).  `seed` and the stages decide every draw.
        """
        entropy = np.random.SeedSequence([seed, after.num_layers, after.is_split])
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        made: dict[str, Tensor] = {}
        for name in (name for layer in self._hidden[before.num_layers:after.num_layers]
                     for name in layer):
            module = copy.deepcopy(self.get_submodule(name)).cpu()
            initialize([module], generator)
            for one in module.modules():
                if isinstance(one, nn.modules.batchnorm._BatchNorm):
                    one.reset_running_stats()
            made |= {f"{name}.{key}": value for key, value in module.state_dict().items()
                     if value.is_floating_point()}
        if after.num_layers > before.num_layers:
            weight_PH = state["output.weight"]
            stddev = _REMADE_STDDEV / math.sqrt(weight_PH.shape[1])
            for key in ("output.weight", "output.bias"):
                made[key] = torch.empty_like(state[key]).normal_(0.0, stddev, generator=generator)
        if after.is_split and not before.is_split:
            now = {**state, **made}
            made["subclass_output.weight"], made["subclass_output.bias"] = split_rows(
                now["output.weight"], now["output.bias"], self.targets, generator,
                scales=self._scales)
        return made


def network_at(model: nn.Module, stage: Stage) -> nn.Module:
    """The network of a stage; a model without stages is one itself."""
    return model.at(stage) if isinstance(model, StagedModel) else model


def set_stage(model: nn.Module, stage: Stage) -> None:
    """Which network the model itself is from now on."""
    if isinstance(model, StagedModel):
        model.stage = stage


def utterance_logits(model: nn.Module, x_TI: Tensor) -> Tensor:
    """T x P for the spliced frames of one utterance, in order and without gaps; a TDNN computes
    each of its frames once.
    """
    network = network_at(model, model.stage) if isinstance(model, StagedModel) else model
    logits: Tensor = network.utterance(x_TI) if isinstance(network, TimeDelayNetwork) else network(x_TI)
    return logits
