"""Layer-wise training: all parts exist from the start, and a stage selects the active ones.

Layers are added one after another (C.7 of arXiv 1410.7455), and an output layer is split into
sub-classes (C.5). Parameter vectors therefore have one size. The stage is a function of the outer
iteration, and is never stored, averaged or sent. The iterations are those of Kaldi's
nnet2/train_pnorm_fast.sh.
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

from ngsgd.config import ModelConfig, ScheduleConfig
from ngsgd.errors import ConfigError
from ngsgd.models.layers import Layer, initialize
from ngsgd.models.subclasses import split_rows
from ngsgd.models.tdnn import TimeDelayNetwork


@dataclass(frozen=True)
class Stage:
    """Active part of a model."""

    # hidden layers, from the input on
    num_layers: int
    # whether the output layer has sub-classes
    is_split: bool = False


@dataclass(frozen=True)
class Stages:
    """Stage of every outer iteration."""

    num_layers: int = 1
    # outer iterations between two additions; 0: all layers from the start
    add_layers_period: int = 0
    # first outer iteration with sub-classes
    first_split: int | None = None
    # rules of A6 for early outer iterations
    halves_early: bool = False

    @classmethod
    def of(cls, model: ModelConfig, schedule: ScheduleConfig, num_outer_iters: int) -> Stages:
        """Create the stages of a run.

        Raises ConfigError for a run that ends before the model is complete.
        """
        finish = model.num_layers * model.add_layers_period
        last_addition = 1 + (model.num_layers - 2) * model.add_layers_period if model.num_layers > 1 else 0
        if model.add_layers_period and last_addition >= num_outer_iters:
            raise ConfigError(f"model.add_layers_period is {model.add_layers_period}, which adds the last of "
                              f"{model.num_layers} layers after {last_addition} outer iterations, but the run has "
                              f"{num_outer_iters}; lower it or egs.samples_per_iter, or raise schedule.num_epochs.")
        first_split = (num_outer_iters + finish) // 2 + 1 if model.num_subclasses else None
        if first_split is not None and first_split >= num_outer_iters:
            raise ConfigError(f"model.num_subclasses is {model.num_subclasses}, but the run has {num_outer_iters} outer iterations "
                              f"and would split its output layer after {first_split}; lower egs.samples_per_iter or "
                              "model.add_layers_period, or raise schedule.num_epochs.")
        return cls(model.num_layers, model.add_layers_period, first_split, schedule.early_rules == "kaldi")

    def at(self, outer_iter: int) -> Stage:
        """Return the stage of an outer iteration; before the first it is that of the first."""
        num_layers = self.num_layers
        # The second layer is added in outer iteration 1, as in Kaldi.
        if self.add_layers_period:
            num_layers = min(num_layers, 2 + (outer_iter - 1) // self.add_layers_period if outer_iter > 0 else 1)
        return Stage(num_layers, self.first_split is not None and outer_iter >= self.first_split)

    def is_early(self, outer_iter: int) -> bool:
        """Return whether to keep the best job alone: averaging harms rapidly changing models."""
        return self.halves_early and (outer_iter == 0 or self.at(outer_iter).num_layers > self.at(outer_iter - 1).num_layers)


# Standard deviation of the output layer after an insertion before it, over sqrt(inputs); Kaldi's
# nnet-insert.
_REMADE_STDDEV = 0.1

Make = Callable[[Layer], nn.Module]


@dataclass(frozen=True)
class Split:
    """An output layer with sub-classes.

    Its modules, and the number of sub-classes of each class.
    """

    modules: Layer
    targets: tuple[int, ...]
    # of each class, after the layer; empty: none
    scales: tuple[float, ...] = ()


class StagedModel(nn.Module):
    """All modules of the final model by name; `at` returns the network of a stage.

    Before the split the output layer is "output", after it "subclass_output"; the other one is
    inactive.
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
        # They share the modules, so they are not part of the state dict.
        self._networks: dict[Stage, nn.Module] = {}

    def at(self, stage: Stage) -> nn.Module:
        """Return the network of a stage; it shares the modules and their names."""
        if stage not in self._networks:
            hidden = [name for layer in self._hidden[:stage.num_layers] for name in layer]
            names = [*self._front, *hidden, *(self._split if stage.is_split else self._output)]
            self._networks[stage] = self._make(OrderedDict((name, self.get_submodule(name))
                                                           for name in names))
        return self._networks[stage]

    def forward(self, x_NI: Tensor) -> Tensor:
        """Return the logits of the current stage."""
        y: Tensor = self.at(self.stage)(x_NI)
        return y

    @torch.no_grad()
    def remade(self, state: Mapping[str, Tensor], before: Stage, after: Stage,
               seed: int) -> dict[str, Tensor]:
        """Return the changed entries of a state at the transition between two stages.

        New layers are initialized. The output layer after them gets random values of standard
        deviation 0.1/sqrt(inputs) (C.7). Rows of the output layer are split into those of the
        sub-classes (C.5). All random numbers depend on `seed` and the stages. `state` is not
        modified.
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
    """Return the network of a stage; a model without stages is returned unchanged."""
    return model.at(stage) if isinstance(model, StagedModel) else model


def set_stage(model: nn.Module, stage: Stage) -> None:
    """Select the network that `forward` uses."""
    if isinstance(model, StagedModel):
        model.stage = stage


def utterance_logits(model: nn.Module, x_TI: Tensor) -> Tensor:
    """Return T x P for the spliced frames of one utterance, in order and without gaps.

    A TDNN computes each of its frames once.
    """
    network = network_at(model, model.stage) if isinstance(model, StagedModel) else model
    logits: Tensor = network.utterance(x_TI) if isinstance(network, TimeDelayNetwork) else network(x_TI)
    return logits
