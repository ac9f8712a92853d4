"""The natural gradient of layers, and the Fisher estimates that it needs."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError
from ngsgd.ops.max_change import row_product_factor
from ngsgd.optim import layers
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.groups import name_of
from ngsgd.optim.layers.attention import NaturalGradientMultiheadAttention
from ngsgd.optim.layers.base import NaturalGradientLayer
from ngsgd.optim.layers.common import mean_over_ranks
from ngsgd.optim.layers.shared import SharedPass
from ngsgd.optim.mean_loss.loss_rows import LossRows, module_around
from ngsgd.optim.rule import Group, Minibatch, Rule, Step, Stepped, StepRecord

_log = logging.getLogger("ngsgd.optim.ngsgd")
_SETTINGS = tuple(field.name for field in fields(layers.FisherSettings))
# key of the estimates in a state_dict
STATE = "natural_gradient"
_MANY_FALLBACKS = 0.3  # fraction of all parameters


class NaturalGradient(Rule):
    """Layers whose backward pass updates Fisher estimates, and preconditions gradients with them.

    Args:
        update: the rule that applies the gradients.
        context: state that all layers share.
        preconditioners: filled with those of the layers, by name.
        settings: defaults of `FisherSettings` in the groups.
        fallback: rule of layers without natural gradient; None: AdamW, with a warning if these are
            most parameters.
        is_mean: whether losses are means, whose numbers of samples are counted.
        max_change_per_sample, cosine_period: see `NGSGD`.
    """

    def __init__(self, update: Rule, context: layers.LayerContext, preconditioners: dict[str, layers.LayerPreconditioner], *,
                 settings: Mapping[str, Any], fallback: str | None, is_mean: bool, max_change_per_sample: float = 0.0,
                 cosine_period: int = 0) -> None:
        self.update, self.context, self.preconditioners, self.settings = update, context, preconditioners, settings
        self.names = ("natural", *update.names)
        self.fallback, self._is_confirmed = fallback or "adamw", fallback == "adamw"
        self.loss_rows = LossRows(context) if is_mean else None
        self.max_change_per_sample, self.cosine_period = max_change_per_sample, cosine_period
        self.layers: dict[str, nn.Module] = {}
        # names of parameters without natural gradient
        self.fallbacks: list[str] = []
        # restores the plain layers
        self.detach: weakref.finalize[Any, Any] | None = None
        self._gradient_scale = 1.0
        context.shared, context.is_sum = SharedPass(), not is_mean and not context.observes

    def begin(self, optimizer: Stepped, minibatch: Minibatch) -> None:
        context = self.context
        if context.retired:
            raise ConfigError(f"this NGSGD cannot step any more: {context.retired}; use one "
                              "optimizer for a model.")
        if self.loss_rows is not None:
            minibatch.num_samples = minibatch.gradient_scale = self._gradient_scale = self._num_samples(minibatch.num_samples)
        elif context.looks_like_mean is not None and bool(context.looks_like_mean):
            optimizer.warn_once("mean loss", f"the loss seems to be a mean over {context.num_mean_rows} samples, but lr applies "
                                             "to a summed loss; give loss_reduction=\"mean\" if lr is per sample, \"sum\" if "
                                             "this is intended.")
        context.looks_like_mean = None
        if context.ranks is not None:
            context.shared.exchange([own for own in self.preconditioners.values() if own.is_shared], context)

    def step(self, optimizer: Stepped, minibatch: Minibatch, factors: Any = None) -> Step | None:
        return self.update.step(optimizer, minibatch, self._row_product_factors if self.max_change_per_sample else None)

    def end(self, optimizer: Stepped) -> None:
        context = self.context
        if not context.num_passes and any(weight.grad is not None for _, weight, _ in self.estimates()):
            optimizer.warn_once("plain gradients", "no backward pass has added to the gradients of its layers since the last "
                                                   "step, so they are plain or already used; call loss.backward() "
                                                   "(torch.autograd.grad returns plain gradients).")
        context.num_passes, context.last_weight = 0, None
        if self.loss_rows is not None:
            self.loss_rows.clear()
        context.num_steps += 1
        # Queued updates must use the settings under which they were recorded.
        context.queue.flush()
        self.follow_groups(optimizer.param_groups)
        self.measure_cosines_in_turn(optimizer.step_count)

    def adamw_groups(self, groups: Sequence[Group]) -> list[Group]:
        return self.update.adamw_groups(groups)

    def has_velocity(self, group: Group, p: Tensor) -> bool:
        return self.update.has_velocity(group, p)

    def check(self, model: nn.Module) -> None:
        for name, layer in self.layers.items():
            if layers.weight_of(layer) is not self.preconditioners[name].weight:
                raise ConfigError(f"the weight of {name} is no longer its parameter, as after a parametrization "
                                  "or pruning; create the optimizer after that.")

    def estimates(self) -> Iterator[tuple[str, Tensor, OnlineNaturalGradient]]:
        """Yield (name, weight of the layer, estimate)."""
        for layer, preconditioner in self.preconditioners.items():
            assert preconditioner.weight is not None
            for side, estimate in preconditioner.sides.items():
                yield f"{layer}.{side}", preconditioner.weight, estimate

    def attach(self, optimizer: Stepped) -> None:
        is_new = self.detach is None
        if self.detach is None:
            self.detach = weakref.finalize(optimizer, layers.detach_all, self.layers, self.context)
            self.detach.atexit = False
        model, groups = optimizer.model, optimizer.param_groups
        self._attach_layers(model, groups)
        asked = {id(p) for group in groups if group["rule"] != "natural" for p in group["params"]}
        self.update.attach(optimizer)
        if self.context.observes:
            covered = {id(preconditioner.weight) for preconditioner in self.preconditioners.values()}
        else:
            covered = {id(p) for layer in self.layers.values() for p in layer.parameters(recurse=False)}
            for group in groups:
                if group["rule"] == "natural" and not any(id(p) in covered for p in group["params"]):
                    group["rule"] = self.fallback
        self.fallbacks = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in covered]
        if self.loss_rows is not None:
            # AdamW steps do not depend on the number of samples.
            self.loss_rows.parameters = {id(p): p for group in groups for p in group["params"]}
            self.loss_rows.scaled = {id(p): p for group in groups if group["rule"] != "adamw" for p in group["params"]}
        self.prepare_state(optimizer.state)
        if is_new and self.fallbacks:
            rule = {"adamw": "AdamW", "sgd": "plain SGD"}[self.fallback]
            _log.info("%s, without natural gradient, for: %s", rule, ", ".join(self.fallbacks))
            sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
            share = sum(sizes[name] for name in self.fallbacks if id(model.get_parameter(name)) not in asked) / sum(sizes.values())
            if share > _MANY_FALLBACKS and not self._is_confirmed:
                optimizer.warn_once("fallbacks", f"{share:.0%} of the parameters take {rule} steps, without natural gradient; "
                                                 "optimizer.fallbacks lists them, and fallback=\"adamw\" confirms that this is "
                                                 "intended.")

    def _attach_layers(self, model: nn.Module, groups: Sequence[Group]) -> None:
        settings = {group["name"]: layers.FisherSettings(**{key: group[key] for key in _SETTINGS}) for group in groups}
        owners = {id(p): group["name"] for group in groups for p in group["params"]}
        # The scale of a parameter that also belongs to a layer with a plain gradient would differ.
        plain = [module for module in model.modules() if not (
            isinstance(module, NaturalGradientLayer) or layers.natural_class(type(module)))]
        mixed = {id(p) for module in plain for p in module.parameters(recurse=False)}
        others = {group["name"] for group in groups if group["rule"] != "natural"}
        # Torch does not call these submodules of its attention layers.
        uncalled = {id(layer.out_proj) for layer in model.modules() if isinstance(layer, nn.MultiheadAttention)}
        for name, layer in model.named_modules():
            key = name or name_of(model)
            weight = id(layers.weight_of(layer))
            if weight in owners and weight not in mixed and key not in self.layers and id(layer) not in uncalled:
                # A weight that several layers share is in the group of the first of them.
                group = owners[weight] if owners[weight].partition("#")[0] == key or key not in settings else key
                if group in others:
                    continue
                preconditioner = layers.attach(layer, settings[group], self.context)
                if preconditioner is not None:
                    self.layers[key], self.preconditioners[key] = layer, preconditioner
                    for side, estimate in preconditioner.sides.items():
                        estimate.name = f"{key}.{side}"
            # modules() yields a module before its submodules.
            if isinstance(layer, NaturalGradientMultiheadAttention):
                uncalled.discard(id(layer.out_proj))
        weights = [id(own.weight) for own in self.preconditioners.values()]
        for own in self.preconditioners.values():
            own.is_tied = weights.count(id(own.weight)) > 1

    def _num_samples(self, given: float | None) -> float:
        """Return the number of samples of a mean loss; under DDP its mean over the ranks.

        Raises:
            ConfigError: it was not given and is not known, on this or on another rank.
        """
        assert self.loss_rows is not None
        number, failure = float(given or 1), None
        if not given and any(p.grad is not None for p in self.loss_rows.scaled.values()):
            try:
                number = float(self.loss_rows.number())
            except ConfigError as error:
                number, failure = math.nan, error
        if self.context.ranks is None and not self.context.num_passes:
            # No layer with natural gradient has noted it.
            around = module_around(self.loss_rows.scaled)
            self.context.module = None if around is None else weakref.ref(around)
        if self.context.ranks is not None:
            (number,) = mean_over_ranks(self.context, torch.tensor([number], dtype=torch.float64)).tolist()
        if failure is not None:
            raise failure
        if math.isnan(number):
            raise ConfigError("another rank cannot find the number of samples of its mean loss; give "
                              "optimizer.step(num_samples=...) on all ranks.")
        return number

    def _row_product_factors(self, groups: Sequence[Group], like: Tensor) -> Tensor:
        """Return the factor of limit C.3 for each group; 1 without a limit."""
        one = torch.ones((), dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
        factors = []
        for group in groups:
            preconditioner = self.preconditioners.get(layer_of(group))
            products, num_rows = (None, 0.0) if preconditioner is None else preconditioner.pop_row_products()
            factors.append(one if products is None else row_product_factor(
                products.to(one), num_rows, group["lr"] * group["lr_factor"] * self._gradient_scale, self.max_change_per_sample))
        return mean_over_ranks(self.context, torch.stack(factors))

    def clear(self, groups: Sequence[Group]) -> None:
        """Forget the backward passes since the last step, as `zero_grad` does."""
        if self.loss_rows is not None:
            self.loss_rows.clear()
        self.follow_groups(groups)
        for preconditioner in self.preconditioners.values():
            preconditioner.pop_row_products()
            self.context.shared.drop(preconditioner)

    def follow_groups(self, groups: Sequence[Group]) -> None:
        """Apply settings changed in groups, except ranks."""
        for group in groups:
            preconditioner = self.preconditioners.get(layer_of(group))
            if preconditioner is not None:
                preconditioner.sync_hyperparameters(group["alpha"], group["update_period"], group["num_samples_history"])

    def measure_cosines_in_turn(self, step_count: int) -> None:
        """Decide whether the next backward pass measures cosines."""
        self.context.measures_cosine = self.cosine_period > 0 and step_count % self.cosine_period == 0

    def prepare_state(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Create the keys that `packed` fills; torch.distributed.checkpoint loads no others."""
        for name, weight, _ in self.estimates():
            state[weight].update({f"{path_of(name)}/{key}": None for key in ("W", "d", "rho", "t")})

    def graph_key(self, optimizer: Stepped) -> Hashable | None:
        context = self.context
        looks_at_first = context.asks_reduction or context.looks_like_mean is not None
        if context.measures_cosine or looks_at_first or context.grad_scaler is not None or context.ranks is not None:
            return None
        self.follow_groups(optimizer.param_groups)
        idle = {id(own.sides.get("offset")) for own in self.preconditioners.values()
                if own.bias is not None and not own.bias.requires_grad}
        of_queue = context.queue.graph_key()
        estimates = [estimate for _, _, estimate in self.estimates() if estimate.dim != 1 and id(estimate) not in idle]
        updates = [estimate.next_updates() for estimate in estimates]
        stack = context.queue.stack
        if of_queue is None or None in updates or (estimates and (stack is None or not stack.holds(estimates))):
            return None
        return of_queue, tuple(updates)

    @contextlib.contextmanager
    def recording(self) -> Iterator[StepRecord]:
        before = [(estimate, estimate.num_calls) for _, _, estimate in self.estimates()]
        with self.context.queue.held() as updates:
            record = StepRecord([], updates)
            yield record
        for estimate, num_calls in before:
            record.calls.extend([estimate] * (estimate.num_calls - num_calls))

    def replayed(self, optimizer: Stepped, record: StepRecord) -> None:
        for estimate in record.calls:
            estimate.count_call()
        self.context.num_steps += 1
        self.measure_cosines_in_turn(optimizer.step_count)

    def send_updates(self, record: StepRecord) -> None:
        self.context.queue.put(record.updates)
        self.context.queue.flush()


def layer_of(group: Mapping[str, Any]) -> str:
    """Return the layer whose parameters are in a group."""
    return str(group["name"]).partition("#")[0]


def path_of(name: str) -> str:
    """Return the key of an estimate in the state of its weight; a dot would mean nesting."""
    return f"{STATE}.{name}".replace(".", "/")
