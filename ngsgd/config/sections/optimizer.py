"""Options of the optimizer of a worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ngsgd.config.option import Section, option
from ngsgd.config.traits import TRAITS, kinds_with

Kind = Literal[
    "ngsgd", "sgd", "kfac", "skfac", "ekfac", "diagonal", "unit", "layer", "full", "seng", "smw",
    "shampoo", "soap", "psgd", "kbfgs", "hessian_free", "ksd", "lissa", "lbfgs", "neumann", "kfra",
    "fang", "tnt", "mfac", "ggt", "tonga", "tonga_unit", "sfn", "esgd", "adahessian",
    "simple", "adam", "adamw", "muon"]
# Kinds that `ngsgd.preconditioners` implements: SGD on a preconditioned gradient
METHODS = tuple(TRAITS)
# Rows of different jobs have no mean, and no moving average
WITHOUT_MEAN = kinds_with(has_mean=False)
# What ranks of a group compute alike, because it depends on the sum of their gradients alone
OF_SUMMED_GRADIENTS = ("ngsgd", "sgd", *kinds_with(agrees_over_ranks=True, splits_work=False))
EVERY_MINIBATCH = kinds_with(every_step=True)
# Options whose default in a run differs from that of the library's classes, which apply the plain
# method at every step. In a run, steps of the other methods have the norm of the gradient, so that
# learning rates keep their meaning, the curvature is updated every 10 minibatches, and jobs hand
# it on.
OF_A_RUN = ("graft", "curvature_interval", "inverse_interval", "curvature_state")

_ONE_MINIBATCH = kinds_with(one_minibatch=True)
# damping is eps, and ema_decay beta 2
_ADAM = kinds_with(every_step=True, fixed_length=True)


def _kinds(kinds: Iterable[str]) -> str:
    return f"!_target_ & kind={'|'.join(kinds)}"


_NGSGD = _kinds(("ngsgd",))


def _all_but(*kinds: str) -> str:
    return _kinds(kind for kind in METHODS if kind not in kinds)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """The optimizer of a worker: from the gradient of a minibatch to the step of the model."""

    kind: Kind = option(  # noqa: RUF009
        "ngsgd", "optimizer; ngsgd: online natural gradient; sgd: plain gradient; others: SGD on a preconditioned gradient",
        used="!_target_",
        choices={"adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW", "soap": "Adam in the eigenbasis of Shampoo",
                 "muon": "torch.optim.Muon; AdamW for vectors"})
    momentum: float = option(0.0, "momentum; the step is also multiplied by 1 - momentum", low=0.0, high=0.999)
    max_change: float = option(0.75, "maximum L2 norm of one layer's update per minibatch; 0: no limit (C.3)", low=0.0)
    max_param_change: float = option(2.0, "maximum L2 norm of the complete model's update per "
                                     "minibatch; 0: no limit (C.3)", low=0.0)
    weight_decay: float = option(0.0, "L2 regularization (Kaldi's l2-regularize): -weight_decay "
                                 "|W|^2 is added to the objective of each frame; 0: none", low=0.0)
    backstitch_scale: float = option(
        0.0, "backstitch: a step of -scale, followed by a step of 1 + scale (Kaldi: 0.3 to 1); 0: "
        "off", low=0.0, used=_kinds(("ngsgd", "sgd")))
    layer_options: Mapping[str, Any] | None = option(
        None, "lr_factor, max_change and weight_decay of layers by name or pattern, such as "
        "{affine1: {lr_factor: 1.3}}; null: none")
    curvature_state: Literal["reset", "keep", "average"] = option(
        "reset", "curvature at the start of a job; reset: none; keep: that of the previous job of "
        "its slot; average: mean over all jobs", used=f"kind={'|'.join(('ngsgd', *METHODS))}",
        default_of_kind={"diagonal": "average", "adam": "average", "adamw": "average", "soap": "keep"})
    alpha: float = option(4.0, "smoothing of the Fisher matrix toward the identity (eq. 19)",
                          low=0.0, used=_kinds(("ngsgd", "simple")))
    rank_in: int = option(20, "rank of the Fisher factor of a layer's inputs; at most (dim + 1) / 2", low=1, used=_NGSGD)
    rank_out: int = option(80, "rank of the Fisher factor of the gradients of a layer's outputs; "
                           "at most (dim + 1) / 2", low=1, used=_NGSGD)
    update_period: int = option(4, "interval between two updates of the Fisher factors", unit="minibatches", low=1, used=_NGSGD)
    num_samples_history: float = option(
        2000.0, "time constant of the moving average of the Fisher factors (eq. 78)",
        unit="frames", above=0.0, high=1e6, used=_NGSGD)
    update: Literal["auto", "exact", "polar"] = option(
        "auto", "update of the Fisher factors; exact: Kaldi's, with eigenvalues; polar: matrix products "
        "alone, without a wait of a GPU; auto: exact on a CPU, polar on a GPU", used=_NGSGD)
    damping: float = option(
        1e-2, "damping of the curvature of the mean loss; shampoo: relative to the largest "
        "eigenvalue; soap, adam, adamw, muon: eps", above=0.0, used=_all_but(),
        default_of_kind={"shampoo": 1e-6, "adahessian": 1e-4, **dict.fromkeys(("soap", *_ADAM), 1e-8)})
    curvature_interval: int = option(
        10, "interval between two curvature updates", unit="minibatches", low=1,
        used=_all_but(*EVERY_MINIBATCH), default_of_kind=dict.fromkeys(EVERY_MINIBATCH, 1))
    inverse_interval: int = option(
        10, "interval between two inversions of the curvature", unit="minibatches", low=1,
        used=_all_but(*EVERY_MINIBATCH), default_of_kind=dict.fromkeys(EVERY_MINIBATCH, 1))
    ema_decay: float = option(
        0.95, "decay of the moving average of the curvature; soap, adam, adamw, muon: beta2",
        low=0.0, high=0.9999, used=_all_but("psgd", *_ONE_MINIBATCH), default_of_kind={
            **dict.fromkeys((*_ONE_MINIBATCH, "mfac", "ggt"), 0.0), "tonga": 0.995, "tonga_unit": 0.995,
            "neumann": 0.99, **dict.fromkeys(("adahessian", *_ADAM), 0.999)})
    fisher: Literal["empirical", "mc", "exact"] = option(
        "empirical", "type of Fisher matrix; empirical: gradients of the targets; mc: gradients of "
        "sampled targets; exact: Gauss-Newton matrix", used=_kinds(kinds_with(fisher="any")))
    graft: Literal["none", "gradient"] = option(
        "gradient", "grafting; gradient: each layer's step has the norm of its gradient",
        used=_all_but(), default_of_kind=dict.fromkeys(kinds_with(fixed_length=True), "none"))
    kl_clip: float = option(0.0, "maximum of lr^2 <P g, g> per minibatch (KL clipping); 0: no limit", low=0.0, used=_all_but())
    skip: str = option("", "layers and parameters without preconditioning: names, patterns or "
                       "classes, separated by commas; empty: none", used=_all_but())
    beta1: float = option(
        0.9, "decay of the first moment", low=0.0, high=0.9999, used=_kinds(("soap", *_ADAM)),
        default_of_kind={"soap": 0.95, "muon": 0.95})
    decoupled_weight_decay: float = option(
        0.0, "decoupled weight decay (AdamW): fraction of the parameters subtracted by a step with "
        "learning rate 1", low=0.0, used=_kinds(_ADAM), default_of_kind={"adamw": 0.01})

    _target_: str = option("", "package.module:Name or package.module.Name of a torch.optim.Optimizer; empty: kind")
    args: Mapping[str, Any] | None = option(None, "keyword arguments of the optimizer in _target_ besides lr, such as "
                                            "{eps: 1e-6}; null: none", used="_target_")
    search_path: str = option("", "folder to import the optimizer in _target_ from; empty: current folder", used="_target_")

    @property
    def label(self) -> str:
        """The name of the optimizer in run names and reports."""
        return self._target_.replace(":", ".").rpartition(".")[2] or self.kind

    @property
    def preconditions(self) -> bool:
        """Whether a method of `ngsgd.preconditioners`, or a custom one, makes the steps."""
        return bool(self._target_) or self.kind in METHODS

    @property
    def keeps_curvature(self) -> bool:
        """Whether a job continues from the curvature that a previous job left."""
        return (self.preconditions or self.kind == "ngsgd") and self.curvature_state != "reset"
