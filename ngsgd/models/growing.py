"""Layer-wise training: all parts exist from the start, and a stage selects the active ones.

Layers are added (C.7 of arXiv 1410.7455), and the output layer is split into sub-classes (C.5), at
the iterations of Kaldi's nnet2/train_pnorm_fast.sh. The stage is a function of the outer iteration.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ngsgd.config import ModelConfig
from ngsgd.errors import ConfigError
from ngsgd.models.layers import Layer, initialize
from ngsgd.models.tdnn import TimeDelayNetwork

_MIN_POSTERIOR = 1e-20  # Kaldi's floor of the argument of the logarithm.
# Standard deviation of the perturbation that separates two halves of a row.
_PERTURBATION = 0.01


def split_targets(counts: Sequence[float], num_subclasses: int, power: float = 0.25, min_count: float = 10.0) -> list[int]:
    """Distribute at most `num_subclasses` sub-classes over classes with these numbers of frames.

    The class with the largest count^power / sub-classes gets one more, unless the new number times
    `min_count` would reach its count. Source: GetSplitTargets of Kaldi's gmm/model-common.cc.

    >>> split_targets([100.0, 10000.0], 6, power=0.5)
    [1, 5]
    """
    targets = [1] * len(counts)
    # Ties are resolved in class order.
    queue = [(-(count ** power), pdf) for pdf, count in enumerate(counts)]
    heapq.heapify(queue)
    num_left = num_subclasses - len(counts)
    while num_left > 0 and queue:
        _, pdf = heapq.heappop(queue)
        if (targets[pdf] + 1) * min_count < counts[pdf]:
            targets[pdf] += 1
            num_left -= 1
            heapq.heappush(queue, (-(counts[pdf] ** power) / targets[pdf], pdf))
    return targets


def classes_of_subclasses(targets: Sequence[int]) -> list[int]:
    """Return the class of each sub-class; those of one class are adjacent."""
    return [pdf for pdf, number in enumerate(targets) for _ in range(number)]


def split_rows(weight_PH: Tensor, bias_P: Tensor, targets: Sequence[int], generator: torch.Generator, *,
               scales: Sequence[float] = (), perturbation: float = _PERTURBATION) -> tuple[Tensor, Tensor]:
    """Split the row of every class into its number of sub-classes (weight S x H, bias S).

    A split halves the probability of the row with the fewest splits and moves its two copies apart
    by +- `perturbation` * randn; without it the posteriors do not change, even with fixed `scales`.
    """
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for row_H, bias, number, scale in zip(weight_PH, bias_P, targets, scales or [1.0] * len(targets), strict=True):
        rows, offsets = [row_H], [0.0]
        while len(rows) < number:
            chosen = offsets.index(max(offsets))
            noise_H = perturbation * torch.randn(row_H.shape, generator=generator, dtype=row_H.dtype)
            rows.append(rows[chosen] - noise_H)
            rows[chosen] = rows[chosen] + noise_H
            offsets[chosen] += math.log(0.5) / scale
            offsets.append(offsets[chosen])
        weights += rows
        biases += [bias + offset for offset in offsets]
    return torch.stack(weights), torch.stack(biases)


def prior_scale(counts: Sequence[float], power: float, smoothing: float = 0.01) -> Tensor:
    """Return (count + smoothing * mean count)^power of mean 1, as Kaldi's FixedScale (-0.25)."""
    counts_P = torch.tensor(counts, dtype=torch.float64)
    scale_P = (counts_P + smoothing * counts_P.mean()) ** power
    return scale_P / scale_P.mean()


class SumSubclasses(nn.Module):
    """Log of the sum over the sub-classes of each class of their softmax, N x S to N x P, floored
    at log 1e-20. As in Kaldi, the derivative ignores the floor.
    """

    class_S: Tensor

    def __init__(self, targets: Sequence[int]) -> None:
        super().__init__()
        self.num_classes = len(targets)
        self.register_buffer("class_S", torch.tensor(classes_of_subclasses(targets)), persistent=False)

    def forward(self, z_NS: Tensor) -> Tensor:
        """Return log probabilities of the classes."""
        index_NS = self.class_S.expand_as(z_NS)
        nothing_NP = z_NS.new_zeros(z_NS.shape[0], self.num_classes)
        # Each class relative to its largest value; relative to that of the row, unlikely classes
        # would underflow.
        top_NP = nothing_NP.scatter_reduce(1, index_NS, z_NS.detach(), "amax", include_self=False)
        sum_NP = nothing_NP.index_add(1, self.class_S, (z_NS - top_NP.gather(1, index_NS)).exp())
        log_y_NP = sum_NP.log() + top_NP - z_NS.logsumexp(dim=1, keepdim=True)
        return log_y_NP + (log_y_NP.clamp(min=math.log(_MIN_POSTERIOR)) - log_y_NP).detach()

    def extra_repr(self) -> str:
        return f"num_subclasses={len(self.class_S)}, num_classes={self.num_classes}"


@dataclass(frozen=True)
class Stage:
    """Active part of a model."""

    num_layers: int  # hidden layers, from the input on
    is_split: bool = False  # whether the output layer has sub-classes


@dataclass(frozen=True)
class Stages:
    """Stage of every outer iteration."""

    num_layers: int = 1
    add_layers_period: int = 0  # outer iterations between two additions; 0: all from the start
    first_split: int | None = None  # first outer iteration with sub-classes

    @classmethod
    def of(cls, model: ModelConfig, num_outer_iters: int) -> Stages:
        """Create the stages; ConfigError for a run that ends before the model is complete."""
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
        return cls(model.num_layers, model.add_layers_period, first_split)

    def at(self, outer_iter: int) -> Stage:
        """Return the stage of an outer iteration; before the first it is that of the first."""
        num_layers = self.num_layers
        # The second layer is added in outer iteration 1, as in Kaldi.
        if self.add_layers_period:
            num_layers = min(num_layers, 2 + (outer_iter - 1) // self.add_layers_period if outer_iter > 0 else 1)
        return Stage(num_layers, self.first_split is not None and outer_iter >= self.first_split)


# Standard deviation of the output layer after an insertion before it, over sqrt(inputs); Kaldi's
# nnet-insert.
_REMADE_STDDEV = 0.1

Make = Callable[[Layer], nn.Module]


@dataclass(frozen=True)
class Split:
    """An output layer with sub-classes."""

    modules: Layer
    targets: tuple[int, ...]  # sub-classes of each class
    scales: tuple[float, ...] = ()  # of each class, after the layer; empty: none


class StagedModel(nn.Module):
    """All modules of the final model by name; `at` returns the network of a stage. The output layer
    is "output" before the split, and "subclass_output" after it.
    """

    def __init__(self, front: Layer, layers: Sequence[Layer], output: Layer, split: Split | None, make: Make) -> None:
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
            self._networks[stage] = self._make(OrderedDict((name, self.get_submodule(name)) for name in names))
        return self._networks[stage]

    def forward(self, x_NI: Tensor) -> Tensor:
        """Return the logits of the current stage."""
        y: Tensor = self.at(self.stage)(x_NI)
        return y

    @torch.no_grad()
    def remade(self, state: Mapping[str, Tensor], before: Stage, after: Stage, seed: int) -> dict[str, Tensor]:
        """Return the changed entries of a state at the transition between two stages.

        New layers are initialized, the output layer after them gets random values of deviation
        0.1/sqrt(inputs) (C.7), its rows are split (C.5), by `seed` and the stages.
        """
        entropy = np.random.SeedSequence([seed, after.num_layers, after.is_split])
        generator = torch.Generator().manual_seed(int(entropy.generate_state(1)[0]))
        made: dict[str, Tensor] = {}
        for name in (name for layer in self._hidden[before.num_layers:after.num_layers] for name in layer):
            module = copy.deepcopy(self.get_submodule(name)).cpu()
            initialize([module], generator)
            for one in module.modules():
                if isinstance(one, nn.modules.batchnorm._BatchNorm):
                    one.reset_running_stats()
            made |= {f"{name}.{key}": value for key, value in module.state_dict().items() if value.is_floating_point()}
        if after.num_layers > before.num_layers:
            stddev = _REMADE_STDDEV / math.sqrt(state["output.weight"].shape[1])
            for key in ("output.weight", "output.bias"):
                made[key] = torch.empty_like(state[key]).normal_(0.0, stddev, generator=generator)
        if after.is_split and not before.is_split:
            now = {**state, **made}
            made["subclass_output.weight"], made["subclass_output.bias"] = split_rows(
                now["output.weight"], now["output.bias"], self.targets, generator, scales=self._scales)
        return made


def network_at(model: nn.Module, stage: Stage) -> nn.Module:
    """Return the network of a stage; a model without stages is returned unchanged."""
    return model.at(stage) if isinstance(model, StagedModel) else model


def set_stage(model: nn.Module, stage: Stage) -> None:
    """Select the network that `forward` uses."""
    if isinstance(model, StagedModel):
        model.stage = stage


def utterance_logits(model: nn.Module, x_TI: Tensor) -> Tensor:
    """Return T x P for consecutive spliced frames of one utterance, by a TDNN each once."""
    network = network_at(model, model.stage) if isinstance(model, StagedModel) else model
    logits: Tensor = network.utterance(x_TI) if isinstance(network, TimeDelayNetwork) else network(x_TI)
    return logits
