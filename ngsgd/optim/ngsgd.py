"""NG-SGD: SGD on gradients that an online Fisher estimate has preconditioned, layer by layer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.errors import ConfigError, OptimizerStateError
from ngsgd.ops.max_change import row_product_factor
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
from ngsgd.optim.layers.fast_linear import FastLinear
from ngsgd.optim.sgd import SGD, _ParameterSlot, _StepInputs, name_of, require_non_negative
from ngsgd.preconditioners.online import OnlineNaturalGradient

_log = logging.getLogger(__name__)
_SETTINGS = tuple(field.name for field in fields(FisherSettings))
_STATE = "natural_gradient"
_MANY_FALLBACKS = 0.3  # of the parameters
_DEFAULT_LR = 0.024


class NGSGD(SGD):
    """Natural-gradient SGD of Povey, Zhang and Khudanpur (arXiv 1410.7455), as Kaldi's nnet3 runs it.

    `lr` is per sample.  With `loss_reduction="mean"`, gradients are multiplied by the number of samples, so that the same rate
    serves losses that are summed and losses that are averaged over the minibatch.  `NGSGD(model)` takes torch's losses as they
    are by default: a mean, and a rate that suits many models.  After `backward`, `p.grad` holds the preconditioned gradient,
    so anything that acts on gradients (clipping, accumulation) acts on that.

    Preconditioned are, by exact class: nn.Linear (input rows with the 1 of the bias appended,
    output-derivative rows); the projections of nn.MultiheadAttention and the Conv1D of Hugging Face, as Linear;
    nn.Conv1d with one group likewise, on spliced frames (TDNN); nn.Conv2d, nn.Conv3d and grouped convolutions (rows of the
    gradient, then of its transpose); LayerNorm, RMSNorm, GroupNorm and BatchNorm (per-frame rows of scale and offset).
    `preconditioned` names them.  All other parameters (Embedding, LSTM, tied weights of layers of
    different kinds) are trained as `fallback` says: `fallbacks` names them, and a log line says so.

    Every backward pass that adds to the gradients of a layer is one minibatch to its estimates: a module used twice counts twice,
    and gradients that are accumulated over several passes are sums of preconditioned gradients.  `torch.autograd.grad` and
    `torch.func` return plain gradients and leave the estimates alone.  Passes whose gradients are cleared without a step do not
    count.

    The model is plain again after `detach` and once the optimizer is garbage collected; its copies and pickles are plain.  A second
    NGSGD on a layer takes it over, and the first one raises ConfigError at its next step.

    Args:
        model: the module to train.  Its layers change class in place; `detach` undoes it.
        lr: learning rate per sample; 0.024 with a loss that is a mean if not given.
        loss_reduction: "sum" or "mean" over the samples of the minibatch; "sum" if only `lr` is given.  The number of samples
            is `num_samples` of `step`, or the number of rows (positions of sequences included) of the layer next to the loss,
            since the last step.
        fallback: "adamw" or "sgd" for parameters without natural gradient; AdamW if not given, with a
            warning where they are more than 30 % of all.
        adamw_lr_factor: learning rate of AdamW relative to `lr`.
        rank_in, rank_out: Fisher ranks; lowered to (dim + 1) / 2.
        update_period: minibatches between updates of the Fisher estimates, after the first 11.
        num_samples_history: rows after which the past counts 1/e.
        alpha: smoothing of the Fisher estimates towards the identity.
        momentum, max_change, max_param_change, weight_decay, on_nonfinite: see `SGD`.
        layer_options: as for `SGD`, with rank_in, rank_out, update_period, num_samples_history and alpha besides; rule is
            "natural", "sgd" or "adamw".
        max_change_per_sample: the paper's limit (C.3; nnet2), on a layer's sum of row-norm products; 0 = none, Kaldi's scripts
            use 0.075.  A layer's limit is this times the rows of the minibatch.
        schedule: "nnet3", or "nnet2" for the paper's update schedule.
        ignore_zero_rows: rows whose derivative is zero, as those of padding and masked frames, do not enter the estimates.
        grad_scaler: the torch.amp.GradScaler in use, so that the estimates do not mix its loss scales.
        cosine_period: steps between two measurements of the cosine of each Linear's and TDNN's weight gradient to the plain one,
            which cost a plain weight gradient (`ngsgd.optim.inspection`); 0 = never.

    >>> import torch, ngsgd
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    >>> optimizer = ngsgd.NGSGD(model, lr=1e-3)
    >>> x, y = torch.randn(16, 4), torch.randint(3, (16,))
    >>> optimizer.zero_grad()
    >>> torch.nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
    >>> optimizer.step()
    """

    _rules: tuple[str, ...] = ("natural", "sgd", "adamw")

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
        grad_scaler: Any = None,
        cosine_period: int = 0,
        on_nonfinite: str = "skip",
    ) -> None:
        if fallback not in (None, "adamw", "sgd") or loss_reduction not in (None, "sum", "mean"):
            raise ValueError(f"Invalid fallback or loss_reduction: {fallback!r} (adamw or sgd), {loss_reduction!r} (sum or mean)")
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
                    'optimizer.fallbacks names them, and fallback="adamw" says that this is intended.',
                )

    def _init_groups(self, model: nn.Module, defaults: dict[str, Any],
                     layer_options: Mapping[str, Mapping[str, Any]] | None) -> None:
        super()._init_groups(model, {**defaults, **self._settings}, layer_options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of `SGD`; layers whose weights are added take natural-gradient steps from the next forward pass on."""
        super().add_param_group(param_group)
        if "_detach" in self.__dict__:
            self._attach(self._model)
            self.fallbacks = self._set_fallback_rule()
            self._prepare_state()

    def _attach(self, model: nn.Module) -> None:
        settings = {group["name"]: FisherSettings(**{key: group[key] for key in _SETTINGS}) for group in self.param_groups}
        owners = {id(p): group["name"] for group in self.param_groups for p in group["params"]}
        mixed = _weights_of_mixed_kinds(model)
        others = {group["name"] for group in self.param_groups if group["rule"] != "natural"}
        # of attention layers; torch's own do not call theirs
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
                # a weight that several layers share is in the group of the first of them
                group = owners[weight] if _layer_of(owners[weight]) == key or key not in settings else key
                if group in others:
                    continue
                preconditioner = attach(layer, settings[group], self._context)
                if preconditioner is not None:
                    self._layers[key], self._preconditioners[key] = layer, preconditioner
                    for side, estimate in preconditioner.sides.items():
                        estimate.name = f"{key}.{side}"
            # modules come before their parts
            if isinstance(layer, NaturalGradientMultiheadAttention):
                uncalled.discard(id(layer.out_proj))

    @property
    def preconditioned(self) -> list[str]:
        """Names of the layers that take natural-gradient steps."""
        return list(self._layers)

    def preconditioners(self) -> Iterator[tuple[str, OnlineNaturalGradient]]:
        """(name, object) of every Fisher estimate, as "<layer>.input" and "<layer>.output" of a Linear."""
        for layer, preconditioner in self._preconditioners.items():
            for side, estimate in preconditioner.sides.items():
                yield f"{layer}.{side}", estimate

    def layer_preconditioners(self) -> dict[str, LayerPreconditioner]:
        """The preconditioner of every layer in `preconditioned`, by name."""
        return dict(self._preconditioners)

    def freeze(self, frozen: bool = True) -> None:
        """Stops the Fisher estimates from moving, or lets them go on; backstitch freezes them in its first step."""
        for _, preconditioner in self.preconditioners():
            preconditioner.freeze(frozen)

    def reset_estimates(self) -> None:
        """Starts all Fisher estimates again from the next minibatch.

        For a model that is replaced by an average, or gets a new task.  Velocities and moments of AdamW
        stay.
        """
        for _, estimate in self.preconditioners():
            estimate.reset()

    def detach(self) -> None:
        """Gives the model its plain layers back; `step` then raises ConfigError."""
        self._detach()
        self._context.retired = self._context.retired or "detach() gave the model its plain layers back"
        self._layers.clear()
        self._preconditioners.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by an enabled torch.amp.GradScaler in its `step`, and by nobody else."""
        if self._context.grad_scaler is None:
            self._warn_once("grad_scaler", "a GradScaler is in use that it was not made with, and the estimates mix its loss "
                                           "scales; give NGSGD(..., grad_scaler=scaler).")
        return False

    @torch.no_grad()
    def _apply(self, scale: float, num_samples: int | None) -> None:
        if self._context.retired:
            raise ConfigError(f"this NGSGD cannot step any more: {self._context.retired}; use one optimizer for a model.")
        if self.loss_reduction == "mean":
            num_samples = num_samples or max(1, self._context.num_loss_rows)
            self._gradient_scale = float(num_samples)
        elif self._context.looks_like_mean is not None and bool(self._context.looks_like_mean):
            self._warn_once("mean loss", f"the loss looks like a mean over {self._context.num_loss_rows} samples, and lr is taken "
                            "for that of a sum; give loss_reduction=\"mean\" if lr is per sample, \"sum\" if this is intended.")
        self._context.looks_like_mean = None
        super()._apply(scale, num_samples)
        if not self._context.num_passes and any(weight.grad is not None for _, weight,
                                                _ in self._estimates()):
            self._warn_once("plain gradients", "no backward pass has added to the gradients of its layers since the last step, "
                                               "so they are plain or were used before; call loss.backward() (torch.autograd.grad "
                                               "returns plain gradients).")
        self._context.num_passes = self._context.num_loss_rows = 0
        self._context.loss_layer = self._context.loss_task = None
        self._context.num_steps += 1
        # first: these updates belong to the settings so far
        self._context.queue.flush()
        self._follow_groups()
        self._context.measures_cosine = self.cosine_period > 0 and self._step_count % self.cosine_period == 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; the sums for max_change_per_sample start again too."""
        super().zero_grad(set_to_none)
        self._follow_groups()
        for preconditioner in self._preconditioners.values():
            preconditioner.pop_row_products()

    def _own_factors(self, moving: _StepInputs) -> Tensor | None:
        """The limit of C.3 on each component; 1 where there is none."""
        if not self.max_change_per_sample:
            return None
        p = moving.params[0][0]
        one = torch.ones((), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
        return torch.stack([self._row_product_factor(self.param_groups[index], one) for index in moving.indices])

    def _row_product_factor(self, group: dict[str, Any], one: Tensor) -> Tensor:
        preconditioner = self._preconditioners.get(_layer_of(group["name"]))
        products, num_rows = (None,
                              0.0) if preconditioner is None else preconditioner.pop_row_products()
        if products is None:
            return one
        return row_product_factor(products.to(one), num_rows, group["lr"] * group["lr_factor"] * self._gradient_scale,
                                  self.max_change_per_sample)

    def _follow_groups(self) -> None:
        """Settings changed in `param_groups` hold from the next `zero_grad` or `step` on; the ranks stay."""
        for group in self.param_groups:
            preconditioner = self._preconditioners.get(_layer_of(group["name"]))
            if preconditioner is not None:
                preconditioner.sync_hyperparameters(group["alpha"], group["update_period"],
                                                    group["num_samples_history"])

    def state_dict(self) -> dict[str, Any]:
        """torch's state plus "natural_gradient": the Fisher estimates, in their own dtype whatever the parameters'.

        The same tensors are in `state` of each weight, as "natural_gradient/<estimate>/W", since torch.distributed.checkpoint keeps
        nothing else.  There an estimate that has not begun is of zeros.
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
        # no layer is attached yet
        if "_detach" not in self.__dict__:
            return
        for name, weight, _ in self._estimates():
            self.state[weight].update({f"{_path(name)}/{key}": None for key in ("W", "d", "rho", "t")})

    def _find_parameters(self, changed: str = "") -> list[_ParameterSlot]:
        places = super()._find_parameters(changed)
        # none while the optimizer is made
        for name, layer in self.__dict__.get("_layers", {}).items():
            if weight_of(layer) is not self._preconditioners[name].weight:
                raise ConfigError(
                    f"the weight of {name} is no longer its parameter, as after a parametrization or pruning; make "
                    "the optimizer after that."
                )
        return places

    def _estimates(self) -> Iterator[tuple[str, Tensor, OnlineNaturalGradient]]:
        """(name, weight of the layer, estimate)."""
        for layer, preconditioner in self._preconditioners.items():
            assert preconditioner.weight is not None
            for side, estimate in preconditioner.sides.items():
                yield f"{layer}.{side}", preconditioner.weight, estimate

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues bit for bit where the state was taken; raises OptimizerStateError for that of other layers."""
        saved = self._state_by_parameter(state_dict)
        fisher = state_dict.get(_STATE) or _unpacked(values for _, values in saved)
        mine = dict(self.preconditioners())
        if fisher.keys() != mine.keys():
            raise OptimizerStateError("the state is of other layers or has no Fisher estimates; load that of an NGSGD on the "
                                      f"same model (not in both: {', '.join(sorted(fisher.keys() ^ mine.keys()))}).")
        for name, estimate in mine.items():
            if "W" in fisher[name] and estimate.dim not in (None, fisher[name]["W"].shape[1]):
                raise OptimizerStateError(f"the state of {name} is for rows of dimension {fisher[name]['W'].shape[1]}, this "
                                          f"model has {estimate.dim}; load it with the same model.")
        super().load_state_dict(state_dict)
        self._follow_groups()
        for name, estimate in mine.items():
            estimate.load_state_dict(fisher[name])

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("an NGSGD cannot be copied or pickled, as it belongs to the layers of its model; make a new one on a "
                          "copy of the model, and give it the state_dict() of this one.")

    def _set_fallback_rule(self) -> list[str]:
        """Give the layers that have no natural gradient their rule; returns the names of their parameters."""
        covered = {id(p) for layer in self._layers.values() for p in layer.parameters(recurse=False)}
        for group in self.param_groups:
            if group["rule"] == "natural" and not any(id(p) in covered for p in group["params"]):
                group["rule"] = self.fallback
        return [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) not in covered]


def _layer_of(group: str) -> str:
    """The layer whose parameters are in a param group, from the group's name."""
    return group.partition("#")[0]


def _path(name: str) -> str:
    """The key of an estimate in `state`; a dot would nest, where torch.distributed.checkpoint flattens the state."""
    return f"{_STATE}.{name}".replace(".", "/")


def _unpacked(states: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fisher estimates by name, from `state` of all parameters."""
    fisher: dict[str, dict[str, Any]] = {}
    for values in states:
        for key, value in values.items():
            if key.startswith(f"{_STATE}/") and value is not None:
                _, *path, part = key.split("/")
                fisher.setdefault(".".join(path), {})[part] = value
    # rho is above 0 in every estimate that has begun
    return {name: state if state.get("rho", 0.0) > 0.0 else {"t": state["t"]} for name, state in fisher.items()}


def _weights_of_mixed_kinds(model: nn.Module) -> set[int]:
    """Ids of parameters that also belong to a layer that gets its plain gradient: the two would not fit in size."""
    return {
        id(p)
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if not (
            isinstance(module, (NaturalGradientLayer, FastLinear)) or natural_class(type(module))
        )
    }
