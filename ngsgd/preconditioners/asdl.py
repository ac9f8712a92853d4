"""ASDL's names, for scripts written for it.

    from ngsgd.preconditioners import asdl          # instead of `import asdl`

    config = asdl.PreconditioningConfig(damping=1e-3, ema_decay=0.1, curvature_upd_interval=10)
    maker = asdl.KfacGradientMaker(model, config, fisher_type=asdl.FISHER_EMP)

The scale and the kind of the loss are measured, so `data_size` and `loss_type` decide nothing.
Weight and bias of a layer form one block. Source: asdl 0.1a5 and arXiv 2305.04684.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from torch import nn

from ngsgd.errors import ConfigError
from ngsgd.preconditioners.gradient_maker import GradientMaker
from ngsgd.preconditioners.methods.kbfgs import KBFGS
from ngsgd.preconditioners.methods.kfac import EKFAC, KFAC, SKFAC
from ngsgd.preconditioners.methods.named import DiagonalNG, FullNG, LayerWiseNG, UnitWiseNG
from ngsgd.preconditioners.methods.psgd import PSGD
from ngsgd.preconditioners.methods.seng_smw import SENG, SMWNG
from ngsgd.preconditioners.methods.shampoo import Shampoo
from ngsgd.preconditioners.options import Interval

FISHER_EXACT, FISHER_MC, FISHER_EMP = "fisher_exact", "fisher_mc", "fisher_emp"
LOSS_CROSS_ENTROPY, LOSS_MSE = "cross_entropy", "mse"
_FISHER = {FISHER_EXACT: "exact", FISHER_MC: "mc", FISHER_EMP: "empirical"}
_LOCAL = -1  # ema_decay without a moving average


@dataclass(kw_only=True)
class PreconditioningConfig:
    """Arguments of all methods; intervals and warm-up are in steps, ratios of num_total_steps.

    Args:
        num_total_steps: steps of the training; with it the ratios count, not the intervals.
        preconditioner_*: when inverses are computed; by default in every step.
        curvature_*: when the curvature is measured; by default as inverses are computed.
        data_size: accepted for ASDL's scripts; the scale of the loss is measured.
        damping: added to the curvature. Default 1e-7.
        ema_decay: weight of the newest minibatch in the average, in (0, 1]: `1 - ema_decay` of
            other methods here. Default -1: the last minibatch alone; for Shampoo the sum of all.
        ignore_modules: modules, their classes or parts of their names. Default None.

    Raises:
        ConfigError: intervals and num_total_steps, ratios without it, or outside [0, 1].
    """

    num_total_steps: int | None = None
    preconditioner_upd_interval: int = 1
    preconditioner_warmup_steps: int = 0
    preconditioner_upd_ratio: float = 1.0
    preconditioner_warmup_ratio: float = 0.0
    curvature_upd_interval: int | None = None
    curvature_warmup_steps: int = 0
    curvature_upd_ratio: float | None = None
    curvature_warmup_ratio: float = 0.0
    data_size: int = -1
    damping: float = 1e-7
    ema_decay: float = _LOCAL
    ignore_modules: Sequence[Any] | None = None

    def interval(self, kind: str) -> Interval:
        """Return the steps between updates of "curvature" or of the "preconditioner"."""
        every, first, ratio, first_ratio = (getattr(self, f"{kind}_{key}") for key in (
            "upd_interval", "warmup_steps", "upd_ratio", "warmup_ratio"))
        total = self.num_total_steps
        if (first_ratio or ratio not in (None, 1.0)) if total is None else (first or every not in (None, 1)):
            raise ConfigError(f"{kind}: give the interval and warm-up steps, or num_total_steps and ratios.")
        if (every if total is None else ratio) is None:
            return self.interval("preconditioner")
        if total is None:
            return ((0, 1), (first + 1, every)) if first else every
        first, number = int(total * first_ratio), int(total * ratio)
        if not 0 <= first < number <= total:
            raise ConfigError(f"{kind}_upd_ratio {ratio} and {kind}_warmup_ratio {first_ratio} of {total} steps are {number} "
                              f"updates, {first} of them at the start; the ratios must be in [0, 1], the first one larger.")
        every = (total - first) // (number - first)
        return (0, 1), (first + 1, every), (first + (number - first - 1) * every + 1, total)

    def ignored(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of the modules without submodules that `ignore_modules` excludes."""
        def matches(one: Any, name: str, module: nn.Module) -> bool:
            return one in name if isinstance(one, str) else isinstance(module, one) if isinstance(one, type) else one is module
        return tuple(name for name, module in model.named_modules() if not list(module.children())
                     and any(matches(one, name, module) for one in self.ignore_modules or ()))


class PreconditionedGradientMaker(GradientMaker):
    """Base of the makers."""

    method: type[Any]
    options: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, name: str, method: type[Any], **options: Any) -> type[Self]:
        """Return the maker of a method."""
        return type(name, (cls,), {"__module__": __name__, "__doc__": f"`{method.__name__}`.", "method": method,
                                   "options": options})

    def __init__(self, model: nn.Module, config: PreconditioningConfig | None = None) -> None:
        self.config = config = config or PreconditioningConfig()
        average = {"ema_decay": 0.0 if config.ema_decay == _LOCAL else 1.0 - config.ema_decay}
        if self.method is Shampoo and config.ema_decay == _LOCAL:
            average = {"history": "sum"}  # type: ignore[dict-item]
        super().__init__(model, self.method(model, **{
            "damping": config.damping, "curvature_interval": config.interval("curvature"), **average, **self.options,
            "inverse_interval": config.interval("preconditioner"), "skip": config.ignored(model)}))


class NaturalGradientMaker(PreconditionedGradientMaker):
    """Base of the makers that have a Fisher matrix."""

    def __init__(self, model: nn.Module, config: PreconditioningConfig | None = None, fisher_type: str = FISHER_MC,
                 loss_type: str = LOSS_CROSS_ENTROPY) -> None:
        if fisher_type not in _FISHER or loss_type not in (LOSS_CROSS_ENTROPY, LOSS_MSE):
            raise ConfigError(f"fisher_type is {fisher_type!r} and loss_type {loss_type!r}; choose {', '.join(_FISHER)}, and "
                              f"{LOSS_CROSS_ENTROPY} or {LOSS_MSE}.")
        self.options = {**self.options, "fisher": _FISHER[fisher_type]}
        super().__init__(model, config)


class KfacGradientMaker(NaturalGradientMaker):
    """`KFAC`, or `SKFAC` with swift=True."""

    def __init__(self, model: nn.Module, config: PreconditioningConfig | None = None, fisher_type: str = FISHER_MC,
                 loss_type: str = LOSS_CROSS_ENTROPY, *, swift: bool = False) -> None:
        self.method = SKFAC if swift else KFAC
        super().__init__(model, config, fisher_type, loss_type)


FullNaturalGradientMaker = NaturalGradientMaker.of("FullNaturalGradientMaker", FullNG)
LayerWiseNaturalGradientMaker = NaturalGradientMaker.of("LayerWiseNaturalGradientMaker", LayerWiseNG)
UnitWiseNaturalGradientMaker = NaturalGradientMaker.of("UnitWiseNaturalGradientMaker", UnitWiseNG)
DiagNaturalGradientMaker = NaturalGradientMaker.of("DiagNaturalGradientMaker", DiagonalNG)
EkfacGradientMaker = NaturalGradientMaker.of("EkfacGradientMaker", EKFAC)
ShampooGradientMaker = PreconditionedGradientMaker.of("ShampooGradientMaker", Shampoo)
SengGradientMaker = PreconditionedGradientMaker.of("SengGradientMaker", SENG)
SmwEmpNaturalGradientMaker = PreconditionedGradientMaker.of("SmwEmpNaturalGradientMaker", SMWNG)
KronBfgsGradientMaker = PreconditionedGradientMaker.of("KronBfgsGradientMaker", KBFGS)
KronPsgdGradientMaker = PreconditionedGradientMaker.of("KronPsgdGradientMaker", PSGD)
PsgdGradientMaker = PreconditionedGradientMaker.of("PsgdGradientMaker", PSGD, form="full")
