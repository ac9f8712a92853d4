"""NG-SGD: SGD on gradients that online Fisher estimates precondition layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.arguments import checks_arguments
from ngsgd.errors import ArgumentError, ConfigError, OptimizerStateError
from ngsgd.optim.fisher.online import OnlineNaturalGradient
from ngsgd.optim.groups import OF_LAYERS, require_non_negative, saved_by_parameter
from ngsgd.optim.layers import LayerContext, LayerPreconditioner
from ngsgd.optim.layers.batched import BatchedPass
from ngsgd.optim.layers.common import Ranks
from ngsgd.optim.natural_gradient import STATE, NaturalGradient, path_of
from ngsgd.optim.optimizer import Optimizer
from ngsgd.optim.sgd import Sgd

_DEFAULT_LR = 0.024


class NGSGD(Optimizer):
    """Natural-gradient SGD with clipped update norms, as in Kaldi's nnet3.

    Update-norm clipping is on by default: `max_change` for each layer and `max_param_change` for
    the model. `lr` is per sample. With `loss_reduction="mean"`, gradients are multiplied by the
    number of samples, so one rate serves summed and mean losses. `NGSGD(model)` expects a mean loss
    and uses a rate that suits many models. After `backward`, `p.grad` holds the preconditioned
    gradient. Gradient clipping and accumulation therefore act on preconditioned gradients. Under
    DistributedDataParallel, `step` preconditions the plain mean over ranks instead.

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
        update: update of the Fisher estimates. "exact" is Kaldi's, with eigenvalues from the host.
            "polar" uses matrix products alone, so that a device does not wait for the host
            (`ngsgd.ops.polar_update`). "auto" is polar on devices and exact on a CPU. There it
            takes gamma (38) of minibatches with many more rows than columns from the estimate,
            unless they update it (docs/derivation.md).
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

    rule: NaturalGradient

    @checks_arguments(OF_LAYERS)
    def __init__(self, model: nn.Module, lr: float | None = None, *, loss_reduction: str | None = None,
                 momentum: float = 0.0, max_change: float = 0.75, max_param_change: float = 2.0, rank_in: int = 20,
                 rank_out: int = 80, update_period: int = 4, num_samples_history: float = 2000.0, alpha: float = 4.0,
                 weight_decay: float = 0.0, layer_options: Mapping[str, Mapping[str, Any]] | None = None,
                 fallback: str | None = None, adamw_lr_factor: float = 0.125, max_change_per_sample: float = 0.0,
                 schedule: str = "nnet3", update: str = "auto", ignore_zero_rows: bool = False,
                 grad_scaler: torch.amp.GradScaler | None = None, cosine_period: int = 0,
                 on_nonfinite: str = "skip") -> None:
        if fallback not in (None, "adamw", "sgd"):
            raise ArgumentError(f"Invalid fallback: {fallback!r}; choose adamw or sgd.")
        if loss_reduction not in (None, "sum", "mean"):
            raise ArgumentError(f'Invalid loss_reduction: {loss_reduction!r}; choose "mean" for a mean over the minibatch '
                             '(the default of torch\'s losses), or "sum" for reduction="sum"')
        is_mean = (loss_reduction or ("mean" if lr is None else "sum")) == "mean"
        require_non_negative(max_change_per_sample=max_change_per_sample, cosine_period=cosine_period)
        context = LayerContext(ignore_zero_rows=ignore_zero_rows, sums_row_products=max_change_per_sample > 0.0,
                               on_nonfinite=on_nonfinite, grad_scaler=grad_scaler,
                               asks_reduction=lr is not None and loss_reduction is None)
        context.batch = BatchedPass(context)
        rule = NaturalGradient(
            Sgd(), context, {}, fallback=fallback, is_mean=is_mean, max_change_per_sample=max_change_per_sample,
            cosine_period=cosine_period,
            settings={"rank_in": rank_in, "rank_out": rank_out, "update_period": update_period,
                      "num_samples_history": num_samples_history, "alpha": alpha, "schedule": schedule,
                      "update": update})
        super().__init__(model, rule, {"lr": _DEFAULT_LR if lr is None else lr, "momentum": momentum, "max_change": max_change,
                                       "weight_decay": weight_decay, "adamw_lr_factor": adamw_lr_factor},
                         layer_options=layer_options, max_param_change=max_param_change, on_nonfinite=on_nonfinite)

    @property
    def loss_reduction(self) -> str:
        """Reduction of the loss over the samples of a minibatch: "sum" or "mean"."""
        return "sum" if self.rule.loss_rows is None else "mean"

    @property
    def fallback(self) -> str:
        """Rule of the layers without natural gradient: "adamw" or "sgd"."""
        return self.rule.fallback

    @property
    def fallbacks(self) -> list[str]:
        """Names of the parameters without natural gradient."""
        return list(self.rule.fallbacks)

    @property
    def preconditioned(self) -> list[str]:
        """Names of the layers that take natural-gradient steps."""
        return list(self.rule.layers)

    def preconditioners(self) -> Iterator[tuple[str, OnlineNaturalGradient]]:
        """Yield (name, estimate): "<layer>.input" and "<layer>.output" of a Linear, for example."""
        for name, _, estimate in self.rule.estimates():
            yield name, estimate

    def layer_preconditioners(self) -> dict[str, LayerPreconditioner]:
        """Return the preconditioner of every layer in `preconditioned`, by name."""
        return dict(self.rule.preconditioners)

    def freeze(self, frozen: bool = True) -> None:
        """Stop or resume updates of the Fisher estimates, as for the first step of backstitch."""
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
        assert self.rule.detach is not None
        self.rule.detach()
        self.rule.context.retired = self.rule.context.retired or "detach() restored the plain layers of the model"
        self.rule.layers.clear()
        self.rule.preconditioners.clear()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Flag that an enabled torch.amp.GradScaler reads in its `step`."""
        if self.rule.context.grad_scaler is None:
            self.warn_once("grad_scaler", "this NGSGD was created without the GradScaler in use, "
                                           "and its estimates mix loss scales; give NGSGD(..., "
                                           "grad_scaler=scaler).")
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as torch does, and the sums for max_change_per_sample."""
        super().zero_grad(set_to_none)
        self.rule.clear(self.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state plus "natural_gradient": the Fisher estimates in their dtype.

        `state` of each weight has the same tensors as "natural_gradient/<estimate>/W", because
        torch.distributed.checkpoint saves nothing else. There an estimate without data consists of
        zeros.
        """
        state = super().state_dict()
        state[STATE] = {name: estimate.state_dict() for name, estimate in self.preconditioners()}
        indices = {id(p): index for group, packed in zip(self.param_groups, state["param_groups"], strict=True)
                   for p, index in zip(group["params"], packed["params"], strict=True)}
        for name, weight, estimate in self.rule.estimates():
            own = {**estimate.empty_state(weight), **state[STATE][name]}
            state["state"][indices[id(weight)]] |= {f"{path_of(name)}/{key}": torch.as_tensor(value) for key, value in own.items()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue training bitwise identically from a saved state.

        Raises:
            OptimizerStateError: the state belongs to other layers.
        """
        saved = saved_by_parameter(self.param_groups, state_dict, type(self).__name__)
        fisher = state_dict.get(STATE) or _unpacked(values for _, values in saved)
        mine = dict(self.preconditioners())
        if fisher.keys() != mine.keys():
            raise OptimizerStateError("the state belongs to other layers or has no Fisher estimates; load the state of an "
                                      "NGSGD on the same model (not in both: "
                                      f"{', '.join(sorted(fisher.keys() ^ mine.keys()))}).")
        values_of = {id(p): values for p, values in saved}
        for name, weight, estimate in self.rule.estimates():
            # An estimate without data has its shape among the values of the weight only.
            W_RD = fisher[name].get("W", values_of.get(id(weight), {}).get(f"{path_of(name)}/W"))
            if W_RD is not None and estimate.dim not in (None, W_RD.shape[1]):
                raise OptimizerStateError(f"the state of {name} has rows of dimension {W_RD.shape[1]}, "
                                          f"this model {estimate.dim}; load it with the same model.")
        super().load_state_dict(state_dict)
        self.rule.prepare_state(self.state)
        self.rule.follow_groups(self.param_groups)
        for name, estimate in mine.items():
            estimate.load_state_dict(fisher[name])

    def share_rows(self, sum_in_place: Callable[[Tensor], object], device: torch.device, num_ranks: int) -> None:
        """Take the steps of one process with the rows of all ranks, for a loop that sums gradients.

        Under DistributedDataParallel this happens by itself. Every rank calls `backward`, sums all
        gradients, and calls `step`, which sums moments of the rows.

        Args:
            sum_in_place: sums a tensor on `device` over the ranks, in place.
            device: that of the sums.
            num_ranks: number of ranks.
        """
        self.rule.context.given_ranks = Ranks(sum_in_place, device, num_ranks, averages=False)

    def training_state(self) -> dict[str, Any]:
        """Return the state that steps change, with the Fisher estimates; see `SGD`."""
        cosines = {name: layer.cosine for name, layer in self.rule.preconditioners.items()}
        return {**super().training_state(), "cosines": cosines,
                STATE: {name: estimate.training_state() for name, estimate in self.preconditioners()}}

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue from `training_state` of an equal optimizer; tensors are not copied."""
        super().load_training_state(state)
        for name, estimate in self.preconditioners():
            estimate.load_training_state(state[STATE][name])
        for name, layer in self.rule.preconditioners.items():
            layer.cosine = state["cosines"][name]
        self.rule.context.num_steps = state["num_steps"]
        self.rule.measure_cosines_in_turn(self.step_count)

    def __getstate__(self) -> dict[str, Any]:
        raise ConfigError("an NGSGD cannot be copied or pickled, because it is attached to the "
                          "layers of its model; create a new one on a copy of the model and load "
                          "the state_dict() of this one.")


def _unpacked(states: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return Fisher estimates by name, from `state` of all parameters."""
    fisher: dict[str, dict[str, Any]] = {}
    for values in states:
        for key, value in values.items():
            if key.startswith(f"{STATE}/") and value is not None:
                _, *path, part = key.split("/")
                fisher.setdefault(".".join(path), {})[part] = value
    # rho is positive in every estimate that has processed data.
    return {name: state if state.get("rho", 0.0) > 0.0 else {"t": state["t"]} for name, state in fisher.items()}
