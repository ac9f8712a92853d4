"""NG-SGD: SGD on gradients that online Fisher estimates precondition layer by layer."""

from __future__ import annotations

import contextlib
import logging
import math
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.arguments import checks_arguments
from ngsgd.errors import ArgumentError, ConfigError, OptimizerStateError
from ngsgd.ops.max_change import row_product_factor
from ngsgd.optim import replicas
from ngsgd.optim.layers import (
    FisherSettings,
    LayerContext,
    LayerPreconditioner,
    attach,
    detach_all,
    natural_class,
    weight_of,
)
from ngsgd.optim.layers.attention import NaturalGradientMultiheadAttention
from ngsgd.optim.layers.base import NaturalGradientLayer
from ngsgd.optim.layers.batched import BatchedPass
from ngsgd.optim.layers.common import mean_over_ranks
from ngsgd.optim.layers.fast_linear import FastLinear
from ngsgd.optim.loss_rows import LossRows
from ngsgd.optim.sgd import OF_LAYERS, SGD, StepRecord, _ParameterSlot, _StepInputs, name_of, require_non_negative
from ngsgd.preconditioners.online import OnlineNaturalGradient

_log = logging.getLogger(__name__)
_SETTINGS = tuple(field.name for field in fields(FisherSettings))
_STATE = "natural_gradient"
_MANY_FALLBACKS = 0.3  # fraction of all parameters
_DEFAULT_LR = 0.024


class NGSGD(SGD):
    """Natural-gradient SGD with clipped update norms, as in Kaldi's nnet3.

    Update-norm clipping is on by default: `max_change` for each layer and `max_param_change` for
    the model. `lr` is per sample. With `loss_reduction="mean"`, gradients are multiplied by the
    number of samples, so one rate serves summed and mean losses. `NGSGD(model)` expects a mean loss
    and uses a rate that suits many models. After `backward`, `p.grad` holds the preconditioned
    gradient. Gradient clipping and accumulation therefore act on preconditioned gradients.

    Preconditioned layers, by exact class:

    - nn.Linear: input rows with an appended 1 for the bias, and output-derivative rows.
    - The projections of nn.MultiheadAttention and the Conv1D of Hugging Face: as nn.Linear.
    - nn.Conv1d with one group: as nn.Linear on spliced frames (TDNN).
    - nn.Conv2d, nn.Conv3d and grouped convolutions: rows of the gradient, then of its transpose.
    - LayerNorm, RMSNorm, GroupNorm and BatchNorm: per-frame rows of scale and offset.

    `preconditioned` lists them. `fallback` trains all other parameters, such as Embedding, LSTM,
    and weights tied between layers of different kinds. `fallbacks` lists those, and a log line
    reports them.

    Every backward pass that adds to the gradients of a layer is one minibatch to its estimates. A
    module that is used twice therefore counts twice, and accumulated gradients are sums of
    preconditioned gradients. `torch.autograd.grad` and `torch.func` return plain gradients and do
    not update the estimates. Passes whose gradients are cleared without a step do not count.

    `detach` restores the plain layers, as does garbage collection of the optimizer; copies and
    pickles of the model are plain. A second NGSGD on a layer takes it over, and the first one
    raises ConfigError at its next step.

    Source: Povey, Zhang and Khudanpur, arXiv 1410.7455.

    Args:
        model: the module to train. Layer classes are replaced in place; `detach` restores them.
        lr: learning rate per sample; default 0.024 with a mean loss.
        loss_reduction: "sum" or "mean" over the samples of the minibatch; "sum" if only `lr` is
            given. The number of samples is `num_samples` of `step`. Without it, NGSGD counts the
            rows of the targets of the losses since the last step: positions where the loss has
            positions, ignored ones too. A backward pass of an unknown loss needs num_samples.
        fallback: "adamw" or "sgd" for parameters without natural gradient. Default: AdamW, with a
            warning if they are more than 30 % of all.
        adamw_lr_factor: learning rate of AdamW relative to `lr`.
        rank_in, rank_out: ranks of the Fisher estimates, at most (dim + 1) / 2.
        update_period: minibatches between updates of the Fisher estimates, after the first 11.
        num_samples_history: time constant of the Fisher estimates in rows; older rows have weight
            1/e.
        alpha: smoothing of the Fisher estimates towards the identity.
        momentum, max_change, max_param_change, weight_decay, on_nonfinite: see `SGD`.
        layer_options: as for `SGD`, and also rank_in, rank_out, update_period, num_samples_history
            and alpha; rule is "natural", "sgd" or "adamw".
        max_change_per_sample: limit of the paper (C.3; nnet2) on the sum of row-norm products of a
            layer, per row of the minibatch; 0 = none. Kaldi's scripts use 0.075.
        schedule: "nnet3", or "nnet2" for the update schedule of the paper.
        ignore_zero_rows: exclude rows with zero derivative, such as padding and masked frames, from
            the estimates.
        grad_scaler: the torch.amp.GradScaler in use, so that the estimates do not mix its loss
            scales.
        cosine_period: steps between measurements of the cosine of preconditioned and plain weight
            gradient, for Linear and TDNN layers; 0 = never. Each one costs a plain weight gradient
            (`ngsgd.optim.inspection`).

    Raises:
        ConfigError: parameters are sharded or uninitialized, or a layer does not support an option.
        ArgumentError: an argument has another type than its annotation, or a number is out of
            range; a choice or a name in `layer_options` is unknown; or no parameter requires a
            gradient. It is a ConfigError, a ValueError and a TypeError.

    Example:
        >>> import torch, ngsgd
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> optimizer = ngsgd.NGSGD(model, lr=1e-3)
        >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
        >>> optimizer.zero_grad()
        >>> torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
        >>> optimizer.step()
    """

    _rules: tuple[str, ...] = ("natural", "sgd", "adamw")

    @checks_arguments(OF_LAYERS)
    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
        *,
        loss_reduction: str | None = None,
        momentum: float = 0.0,
        max_change: float = 0.75,
        max_param_change: float = 2.0,
        rank_in: int = 20,
        rank_out: int = 80,
        update_period: int = 4,
        num_samples_history: float = 2000.0,
        alpha: float = 4.0,
        weight_decay: float = 0.0,
        layer_options: Mapping[str, Mapping[str, Any]] | None = None,
        fallback: str | None = None,
        adamw_lr_factor: float = 0.125,
        max_change_per_sample: float = 0.0,
        schedule: str = "nnet3",
        ignore_zero_rows: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        cosine_period: int = 0,
        on_nonfinite: str = "skip",
    ) -> None:
        if fallback not in (None, "adamw", "sgd"):
            raise ArgumentError(f"Invalid fallback: {fallback!r}; choose adamw or sgd.")
        if loss_reduction not in (None, "sum", "mean"):
            raise ArgumentError(f'Invalid loss_reduction: {loss_reduction!r}; choose "mean" for a mean over the minibatch '
                             '(the default of torch\'s losses), or "sum" for reduction="sum"')
        self.fallback = fallback or "adamw"
        self.loss_reduction = loss_reduction or ("mean" if lr is None else "sum")
        self._settings = {"rank_in": rank_in, "rank_out": rank_out, "update_period": update_period,
                          "num_samples_history": num_samples_history, "alpha": alpha, "schedule": schedule}
        require_non_negative(max_change_per_sample=max_change_per_sample, cosine_period=cosine_period)
        super().__init__(model, _DEFAULT_LR if lr is None else lr, momentum=momentum, max_change=max_change,
                         max_param_change=max_param_change, weight_decay=weight_decay, layer_options=layer_options,
                         on_nonfinite=on_nonfinite, fast_gemm=False, adamw_lr_factor=adamw_lr_factor)
        self.max_change_per_sample = max_change_per_sample
        self._context = LayerContext(ignore_zero_rows=ignore_zero_rows,
                                     sums_row_products=max_change_per_sample > 0.0,
                                     on_nonfinite=on_nonfinite, grad_scaler=grad_scaler,
                                     asks_reduction=lr is not None and loss_reduction is None)
        self._context.batch = BatchedPass(self._context)
        self._loss_rows = LossRows(self._context) if self.loss_reduction == "mean" else None
        self.cosine_period = cosine_period
        self._layers: dict[str, nn.Module] = {}
        self._preconditioners: dict[str, LayerPreconditioner] = {}
        self._detach = weakref.finalize(self, detach_all, self._layers, self._context)
        self._detach.atexit = False
        self._attach(model)
        asked = {
            id(p)
            for group in self.param_groups
            if group["rule"] != "natural"
            for p in group["params"]
        }
        self.fallbacks = self._set_fallback_rule()
        self._prepare_state()
        if self.fallbacks:
            rule = {"adamw": "AdamW", "sgd": "plain SGD"}[self.fallback]
            _log.info("%s, without natural gradient, for: %s", rule, ", ".join(self.fallbacks))
            sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
            share = sum(
                sizes[name] for name in self.fallbacks if id(model.get_parameter(name)) not in asked
            ) / sum(sizes.values())
            if share > _MANY_FALLBACKS and fallback != "adamw":
                self._warn_once(
                    "fallbacks",
                    f"{share:.0%} of the parameters take {rule} steps, without natural gradient; "
                    'optimizer.fallbacks lists them, and fallback="adamw" confirms that this is intended.',
                )

    def _init_groups(self, model: nn.Module, defaults: dict[str, Any],
                     layer_options: Mapping[str, Mapping[str, Any]] | None) -> None:
        super()._init_groups(model, {**defaults, **self._settings}, layer_options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters as `SGD` does; layers are preconditioned from their next forward pass on.
        """
        super().add_param_group(param_group)
        if "_detach" in self.__dict__:
            self._attach(self._model)
            self.fallbacks = self._set_fallback_rule()
            self._prepare_state()

    def _watch_parameters(self) -> None:
        """Count backward passes that reach a parameter of this optimizer."""
        if self._loss_rows is not None:
            self._loss_rows.parameters = {id(p): p for group in self.param_groups for p in group["params"]}
            # AdamW steps do not depend on the number of samples.
            self._loss_rows.scaled = {id(p): p for group in self.param_groups if group["rule"] != "adamw" for p in group["params"]}

    def _num_samples(self, given: float | None) -> float:
        """Return the number of samples of a mean loss; under DDP its mean over the ranks.

        Raises:
            ConfigError: it was not given and is not known, on this or on another rank.
        """
        assert self._loss_rows is not None
        number, failure = float(given or 1), None
        if not given and any(p.grad is not None for p in self._loss_rows.scaled.values()):
            try:
                number = float(self._loss_rows.number())
            except ConfigError as error:
                number, failure = math.nan, error
        if self._context.ddp is None and not self._context.num_passes:
            # No layer with natural gradient has noted it.
            self._context.ddp = replicas.module_around(self._loss_rows.scaled)
        if self._context.ddp is not None:
            (number,) = mean_over_ranks(self._context, torch.tensor([number], dtype=torch.float64)).tolist()
        if failure is not None:
            raise failure
        if math.isnan(number):
            raise ConfigError("another rank cannot find the number of samples of its mean loss; give "
                              "optimizer.step(num_samples=...) on all ranks.")
        return number

    def _attach(self, model: nn.Module) -> None:
        settings = {group["name"]: FisherSettings(**{key: group[key] for key in _SETTINGS}) for group in self.param_groups}
        owners = {id(p): group["name"] for group in self.param_groups for p in group["params"]}
        mixed = _weights_of_mixed_kinds(model)
        others = {group["name"] for group in self.param_groups if group["rule"] != "natural"}
        # Torch does not call these submodules of its attention layers.
        uncalled = {
            id(layer.out_proj)
            for layer in model.modules()
            if isinstance(layer, nn.MultiheadAttention)
        }
        for name, layer in model.named_modules():
            key = name or name_of(model)
            weight = id(weight_of(layer))
            if (
                weight in owners
                and weight not in mixed
                and key not in self._layers
                and id(layer) not in uncalled
            ):
                # A weight that several layers share is in the group of the first of them.
                group = owners[weight] if _layer_of(owners[weight]) == key or key not in settings else key
                if group in others:
                    continue
                preconditioner = attach(layer, settings[group], self._context)
                if preconditioner is not None:
                    self._layers[key], self._preconditioners[key] = layer, preconditioner
                    for side, estimate in preconditioner.sides.items():
                        estimate.name = f"{key}.{side}"
            # modules() yields a module before its submodules.
            if isinstance(layer, NaturalGradientMultiheadAttention):
                uncalled.discard(id(layer.out_proj))

    @property
    def preconditioned(self) -> list[str]:
        """Names of the layers that take natural-gradient steps."""
        return list(self._layers)

    def preconditioners(self) -> Iterator[tuple[str, OnlineNaturalGradient]]:
        """Yield (name, estimate) of every Fisher estimate.

        Names of a Linear are "<layer>.input" and "<layer>.output".
        """
        for layer, preconditioner in self._preconditioners.items():
            for side, estimate in preconditioner.sides.items():
                yield f"{layer}.{side}", estimate

    def layer_preconditioners(self) -> dict[str, LayerPreconditioner]:
        """Return the preconditioner of every layer in `preconditioned`, by name."""
        return dict(self._preconditioners)

    def freeze(self, frozen: bool = True) -> None:
        """Stop or resume updates of the Fisher estimates; backstitch freezes them in its first
        step.
        """
        for _, preconditioner in self.preconditioners():
            preconditioner.freeze(frozen)

    def reset_estimates(self) -> None:
        """Reset all Fisher estimates; they start with the next minibatch.

        Use it after parameter averaging or a change of the task. Velocities and AdamW moments
        remain.
        """
        for _, estimate in self.preconditioners():
            estimate.reset()

    def detach(self) -> None:
        """Restore the plain layers of the model; `step` then raises ConfigError."""
        self._detach()
        self._context.retired = self._context.retired or "detach() restored the plain layers of the model"
        self._layers.clear()
        self._preconditioners.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Flag that an enabled torch.amp.GradScaler reads in its `step`."""
        if self._context.grad_scaler is None:
            self._warn_once("grad_scaler", "this NGSGD was created without the GradScaler in use, "
                                           "and its estimates mix loss scales; give NGSGD(..., "
                                           "grad_scaler=scaler).")
        return False

    @torch.no_grad()
    def _apply(self, scale: float, num_samples: float | None) -> None:
        if self._context.retired:
            raise ConfigError(f"this NGSGD cannot step any more: {self._context.retired}; use one "
                              "optimizer for a model.")
        if self._loss_rows is not None:
            self._gradient_scale = num_samples = self._num_samples(num_samples)
        elif self._context.looks_like_mean is not None and bool(self._context.looks_like_mean):
            self._warn_once("mean loss", "the loss seems to be a mean over "
                                         f"{self._context.num_mean_rows} samples, but lr applies "
                                         "to a summed loss; give loss_reduction=\"mean\" if lr is "
                                         "per sample, \"sum\" if this is intended.")
        self._context.looks_like_mean = None
        super()._apply(scale, num_samples)
        if not self._context.num_passes and any(weight.grad is not None for _, weight,
                                                _ in self._estimates()):
            self._warn_once("plain gradients", "no backward pass has added to the gradients of its "
                                               "layers since the last step, so they are plain or "
                                               "already used; call loss.backward() "
                                               "(torch.autograd.grad returns plain gradients).")
        self._context.num_passes, self._context.last_weight = 0, None
        if self._loss_rows is not None:
            self._loss_rows.clear()
        self._context.num_steps += 1
        # Queued updates must use the settings under which they were recorded.
        self._context.queue.flush()
        self._follow_groups()
        self._measure_cosines_in_turn()

    def _next_step_key(self) -> Hashable | None:
        common, context = super()._next_step_key(), self._context
        looks_at_first = context.asks_reduction or context.looks_like_mean is not None
        if common is None or context.measures_cosine or looks_at_first or context.grad_scaler is not None:
            return None
        self._follow_groups()
        # A graph reads the factors, and does not wait for updates.
        context.queue.wait()
        states = [(estimate.next_updates(), estimate.state) for _, estimate in self.preconditioners()]
        if any(updates is None or state is None for updates, state in states):
            return None
        return common, tuple((updates, state.W_RD.data_ptr()) for updates, state in states if state is not None)

    @contextlib.contextmanager
    def _recording(self) -> Iterator[StepRecord]:
        before = [(estimate, estimate.num_calls) for _, estimate in self.preconditioners()]
        with self._context.queue.held() as updates:
            record = StepRecord([], updates)
            yield record
        for estimate, num_calls in before:
            record.calls.extend([estimate] * (estimate.num_calls - num_calls))

    def _count_replay(self, record: StepRecord) -> None:
        super()._count_replay(record)
        for estimate in record.calls:
            estimate.count_call()
        self._context.num_steps += 1
        self._measure_cosines_in_turn()

    def _send_updates(self, record: StepRecord) -> None:
        self._context.queue.put(record.updates)
        self._context.queue.flush()

    def _measure_cosines_in_turn(self) -> None:
        self._context.measures_cosine = self.cosine_period > 0 and self._step_count % self.cosine_period == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, and the sums for max_change_per_sample."""
        super().zero_grad(set_to_none)
        if self._loss_rows is not None:
            self._loss_rows.clear()
        self._follow_groups()
        for preconditioner in self._preconditioners.values():
            preconditioner.pop_row_products()

    def _own_factors(self, moving: _StepInputs) -> Tensor | None:
        """Return the factor of limit C.3 for each component; 1 without a limit."""
        if not self.max_change_per_sample:
            return None
        p = moving.params[0][0]
        one = torch.ones((), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
        factors_C = torch.stack([self._row_product_factor(self.param_groups[index], one) for index in moving.indices])
        return mean_over_ranks(self._context, factors_C)

    def _row_product_factor(self, group: dict[str, Any], one: Tensor) -> Tensor:
        preconditioner = self._preconditioners.get(_layer_of(group["name"]))
        products, num_rows = (None,
                              0.0) if preconditioner is None else preconditioner.pop_row_products()
        if products is None:
            return one
        return row_product_factor(products.to(one), num_rows, group["lr"] * group["lr_factor"] * self._gradient_scale,
                                  self.max_change_per_sample)

    def _follow_groups(self) -> None:
        """Apply settings changed in `param_groups` from the next `zero_grad` or `step` on, except
        ranks.
        """
        for group in self.param_groups:
            preconditioner = self._preconditioners.get(_layer_of(group["name"]))
            if preconditioner is not None:
                preconditioner.sync_hyperparameters(group["alpha"], group["update_period"],
                                                    group["num_samples_history"])

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state plus "natural_gradient": the Fisher estimates in their dtype.

        `state` of each weight has the same tensors as "natural_gradient/<estimate>/W", because
        torch.distributed.checkpoint saves nothing else. There an estimate without data consists of
        zeros.
        """
        state = super().state_dict()
        state[_STATE] = {name: estimate.state_dict() for name, estimate in self.preconditioners()}
        indices = {id(p): index for group, packed in zip(self.param_groups, state["param_groups"], strict=True)
                   for p, index in zip(group["params"], packed["params"], strict=True)}
        for name, weight, estimate in self._estimates():
            own = {**estimate.empty_state(weight), **state[_STATE][name]}
            state["state"][indices[id(weight)]] |= {f"{_path(name)}/{key}": torch.as_tensor(value) for key, value in own.items()}
        return state

    def _prepare_state(self) -> None:
        super()._prepare_state()
        # No layer is attached yet.
        if "_detach" not in self.__dict__:
            return
        self._watch_parameters()
        for name, weight, _ in self._estimates():
            self.state[weight].update({f"{_path(name)}/{key}": None for key in ("W", "d", "rho", "t")})

    def _find_parameters(self, changed: str = "") -> list[_ParameterSlot]:
        places = super()._find_parameters(changed)
        # The constructor calls this before the layers exist.
        for name, layer in self.__dict__.get("_layers", {}).items():
            if weight_of(layer) is not self._preconditioners[name].weight:
                raise ConfigError(
                    f"the weight of {name} is no longer its parameter, as after a parametrization "
                    "or pruning; create the optimizer after that."
                )
        return places

    def _estimates(self) -> Iterator[tuple[str, Tensor, OnlineNaturalGradient]]:
        """Yield (name, weight of the layer, estimate)."""
        for layer, preconditioner in self._preconditioners.items():
            assert preconditioner.weight is not None
            for side, estimate in preconditioner.sides.items():
                yield f"{layer}.{side}", preconditioner.weight, estimate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training bitwise identically from a saved state.

        Raises:
            OptimizerStateError: the state belongs to other layers.
        """
        saved = self._state_by_parameter(state_dict)
        fisher = state_dict.get(_STATE) or _unpacked(values for _, values in saved)
        mine = dict(self.preconditioners())
        if fisher.keys() != mine.keys():
            raise OptimizerStateError("the state belongs to other layers or has no Fisher "
                                      "estimates; load the state of an NGSGD on the same model "
                                      "(not in both: "
                                      f"{', '.join(sorted(fisher.keys() ^ mine.keys()))}).")
        values_of = {id(p): values for p, values in saved}
        for name, weight, estimate in self._estimates():
            # An estimate without data has its shape among the values of the weight only.
            W_RD = fisher[name].get("W", values_of.get(id(weight), {}).get(f"{_path(name)}/W"))
            if W_RD is not None and estimate.dim not in (None, W_RD.shape[1]):
                raise OptimizerStateError(f"the state of {name} has rows of dimension {W_RD.shape[1]}, "
                                          f"this model {estimate.dim}; load it with the same model.")
        super().load_state_dict(state_dict)
        self._follow_groups()
        for name, estimate in mine.items():
            estimate.load_state_dict(fisher[name])

    def training_state(self) -> dict[str, Any]:
        """Return the state that steps change, with the Fisher estimates; see `SGD`."""
        cosines = {name: layer.cosine for name, layer in self._preconditioners.items()}
        return {**super().training_state(), "cosines": cosines,
                _STATE: {name: estimate.state_dict() for name, estimate in self.preconditioners()}}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `training_state` of an equal optimizer; tensors are not copied."""
        super().load_training_state(state)
        for name, estimate in self.preconditioners():
            estimate.load_state_dict(state[_STATE][name])
        for name, layer in self._preconditioners.items():
            layer.cosine = state["cosines"][name]
        self._context.num_steps = state["num_steps"]
        self._measure_cosines_in_turn()

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("an NGSGD cannot be copied or pickled, because it is attached to the "
                          "layers of its model; create a new one on a copy of the model and load "
                          "the state_dict() of this one.")

    def _set_fallback_rule(self) -> list[str]:
        """Set the rule of layers without natural gradient; return the names of their parameters."""
        covered = {id(p) for layer in self._layers.values() for p in layer.parameters(recurse=False)}
        for group in self.param_groups:
            if group["rule"] == "natural" and not any(id(p) in covered for p in group["params"]):
                group["rule"] = self.fallback
        return [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in covered]


def _layer_of(group: str) -> str:
    """Return the layer whose parameters are in a param group, from the name of the group."""
    return group.partition("#")[0]


def _path(name: str) -> str:
    """Return the key of an estimate in `state`.

    It has no dot, because torch.distributed.checkpoint would read a dot as nesting.
    """
    return f"{_STATE}.{name}".replace(".", "/")


def _unpacked(states: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return Fisher estimates by name, from `state` of all parameters."""
    fisher: dict[str, dict[str, Any]] = {}
    for values in states:
        for key, value in values.items():
            if key.startswith(f"{_STATE}/") and value is not None:
                _, *path, part = key.split("/")
                fisher.setdefault(".".join(path), {})[part] = value
    # rho is positive in every estimate that has processed data.
    return {name: state if state.get("rho", 0.0) > 0.0 else {"t": state["t"]} for name, state in fisher.items()}


def _weights_of_mixed_kinds(model: nn.Module) -> set[int]:
    """Return ids of parameters that also belong to a layer with a plain gradient.

    Their scales would differ.
    """
    return {
        id(p)
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if not (
            isinstance(module, (NaturalGradientLayer, FastLinear)) or natural_class(type(module))
        )
    }
