"""Options of all preconditioners, and the schedule of curvature updates and inverses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ngsgd.arguments import checked, hints_of
from ngsgd.errors import ConfigError

# Steps between updates: a number, ((from step, number), ..) or a function of the step.
Interval = int | tuple[tuple[int, int], ...] | Callable[[int], int]
POLICIES = ("reset", "keep", "average")
GRAFTS = ("none", "gradient")


@dataclass(frozen=True)
class Options:
    """Options of every method."""

    # Added to the curvature of the mean loss per row; above 0, typically 1e-4 to 1.
    damping: float = 1e-2
    # steps between curvature updates
    curvature_interval: Interval = 1
    # Steps between inverses (roots, bases), which are computed at curvature updates.
    inverse_interval: Interval = 1
    # Decay of the moving average of the curvature, in [0, 1); 0: the last minibatch only.
    ema_decay: float = 0.95
    # limit on lr^2 <P g, g> (kfac-pytorch: 1e-3), for which step() needs lr; 0 = none
    kl_clip: float = 0.0
    # limit on the L2 norm of the preconditioned gradient; 0 = none
    max_grad_norm: float = 0.0
    # "gradient": the direction of each layer gets the norm of its plain gradient.
    graft: str = "none"
    # Excluded modules by name, pattern or class such as "Conv1d"; parameters by name or pattern.
    skip: tuple[str, ...] = ()
    # damping and ema_decay of layers by name or pattern, such as {"output*": {"damping": 0.1}};
    # later entries win.
    layer_options: Mapping[str, Mapping[str, float]] | None = None
    # curvature after parameter averaging: reset, keep or average
    averaging: str = "reset"
    seed: int = 0                        # seed of random samples

    def problems(self) -> list[str]:
        """Return one message for each invalid setting."""
        found = []
        if not self.damping > 0.0:
            found.append(f"damping is {self.damping}; it must be above 0.")
        if not 0.0 <= self.ema_decay < 1.0:
            found.append(f"ema_decay is {self.ema_decay}; it must be at least 0 and below 1.")
        found += [f"{name} is {value}; it must be at least 0, where 0 is no limit." for name, value
                  in (("kl_clip", self.kl_clip), ("max_grad_norm", self.max_grad_norm)) if value < 0.0]
        found += [f"{name} is {value!r}; choose {', '.join(known)}." for name, value, known
                  in (("graft", self.graft, GRAFTS), ("averaging", self.averaging, POLICIES)) if value not in known]
        found += [f"{name} is {value}; give at least 1 step." for name, value
                  in (("curvature_interval", self.curvature_interval), ("inverse_interval", self.inverse_interval))
                  if isinstance(value, int) and value < 1]
        for layer, own in (self.layer_options or {}).items():
            found += [f"layer_options[{layer}] has {key}; only damping and ema_decay can differ "
                      "between layers." for key in own
                      if key not in ("damping", "ema_decay")]
        return found


@dataclass(frozen=True)
class FisherOptions(Options):
    """Options of methods that need the rows of layers."""

    # derivatives: "empirical", "mc" (Monte Carlo samples) or "exact" (Gauss-Newton)
    fisher: str = "empirical"
    # mc: Monte Carlo samples per row
    num_draws: int = 1

    def problems(self) -> list[str]:
        found = super().problems()
        if self.fisher not in ("empirical", "mc", "exact"):
            found.append(f"fisher is {self.fisher!r}; choose empirical, mc, exact.")
        if self.num_draws < 1:
            found.append(f"num_draws is {self.num_draws}; it must be at least 1.")
        return found


@dataclass(frozen=True)
class EveryStepOptions(Options):
    """Options of methods that update the curvature with every minibatch."""

    def problems(self) -> list[str]:
        found = super().problems()
        found += [f"{name} is {getattr(self, name)}; it must be 1, because this method needs every "
                  "minibatch."
                  for name in ("curvature_interval", "inverse_interval") if getattr(self, name) != 1]
        return found


def momentum_problems(momentum: float) -> list[str]:
    """Return a message if a decay of the gradient average is out of range."""
    return [] if 0.0 <= momentum < 1.0 else [f"momentum is {momentum}; it must be at least 0 and below 1."]


AnyOptions = TypeVar("AnyOptions", bound=Options)


def make_options(kind: type[AnyOptions], method: str, given: Mapping[str, Any]) -> AnyOptions:
    """Create the options of a method; ConfigError lists all problems."""
    known = [field.name for field in fields(kind)]
    problems = [f"{method} has no option {name}; there are {', '.join(known)}." for name in given if name not in known]
    if problems:
        raise ConfigError(problems)
    options = kind(**checked(given, hints_of(kind), method))
    if problems := [f"{method}: {problem}" for problem in options.problems()]:
        raise ConfigError(problems)
    return options


def signature_of(kind: type[Options]) -> inspect.Signature:
    """Return the signature of a method: the model, then its options as keyword-only arguments."""
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="nn.Module")
    return inspect.Signature([model, *(
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(kind))])


def is_due(interval: Interval, step: int, last: int | None) -> bool:
    """Return whether `interval` steps have passed at `step` since `last`; True if that is None."""
    if last is None:
        return True
    if callable(interval):
        every = interval(step)
    elif isinstance(interval, int):
        every = interval
    else:
        every = next((number for first, number in reversed(interval) if step >= first), 1)
    return step - last >= every
