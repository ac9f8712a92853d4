"""Arguments of the methods, and the schedule of curvature updates and inverses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

from torch import nn

from ngsgd.arguments import checked, hints_of
from ngsgd.config.traits import TRAITS, Traits
from ngsgd.errors import ArgumentError, ConfigError

# Steps between updates: a number, ((from step, number), ..) or a function of the step.
Interval = int | tuple[tuple[int, int], ...] | Callable[[int], int]


# Limits of options, which mean the same in all methods that have them: a test, and its words.
_LIMITS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("damping", "alpha", "cg_tolerance", "scale"), (lambda value: value > 0.0, "it must be above 0")),
    **dict.fromkeys(("ema_decay", "momentum"), (lambda value: 0.0 <= value < 1.0, "it must be at least 0 and below 1")),
    **dict.fromkeys(("min_curvature", "factor_lr"), (lambda value: 0.0 < value < 1.0, "it must be above 0 and below 1")),
    **dict.fromkeys(("num_draws", "max_cg_steps", "dimension", "num_terms", "block_size", "orthogonal_steps", "first_reset"),
                    (lambda value: value >= 1, "it must be at least 1")),
    **dict.fromkeys(("rank", "weight_decay", "attraction", "repulsion"), (lambda value: value >= 0, "it must be at least 0")),
    "kl_clip": (lambda value: value >= 0, "it must be at least 0, where 0 is no limit"),
    "sketch": (lambda value: value >= 0, "it must be at least 0, where 0 is all")}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "graft": ("none", "gradient"), "averaging": ("reset", "keep", "average"), "sharing": ("expand", "reduce"),
    "products": ("ggn", "hessian"), "history": ("average", "sum"), "form": ("kronecker", "full")}


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False, kw_only=True)
class MethodArguments:
    """Arguments of all methods, which `Preconditioner` explains; methods add annotated attributes.

    Raises ArgumentError for an unknown argument or type; ConfigError lists those out of range.
    """

    model: nn.Module = field(kw_only=False)
    damping: float = 1e-2
    curvature_interval: Interval = 1
    inverse_interval: Interval = 1
    ema_decay: float = 0.95
    kl_clip: float = 0.0
    graft: str = "none"
    skip: tuple[str, ...] = ()
    layer_options: Mapping[str, Mapping[str, float]] | None = None
    averaging: str = "reset"
    seed: int = 0

    traits: ClassVar[Traits] = Traits()
    # classes by the value of `optimizer=`
    kinds: ClassVar[dict[str, type[Any]]] = {}
    # options without effect, with the reason
    unused: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __init_subclass__(cls, kind: str = "") -> None:
        super().__init_subclass__()
        if kind:
            cls.traits, cls.kinds[kind] = TRAITS[kind], cls
        dataclass(eq=False, repr=False, kw_only=True)(cls)
        known, init = [one.name for one in fields(cls)], cls.__init__

        @functools.wraps(init)
        def checked_init(self: MethodArguments, *args: Any, **given: Any) -> None:
            if unknown := [name for name in given if name not in known]:
                raise ArgumentError([f"{type(self).__name__} has no option {name}; there are {', '.join(known[1:])}."
                                     for name in unknown])
            init(self, *args, **given)
        cls.__init__ = checked_init  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"{name} takes the module, not {type(self.model).__name__}: it needs the layers of the parameters")
        vars(self).update(checked(self.arguments(), hints_of(type(self)), name))
        if problems := [f"{name}: {problem}" for problem in self.problems()]:
            raise ConfigError(problems)

    @property
    def is_joint(self) -> bool:
        """Whether the estimates of all layers belong together."""
        return self.traits.axes.granularity == "full"

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by name, without the model."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "model"}

    def choice(self, name: str, *known: str) -> list[str]:
        """Return a message if an argument is none of these words."""
        value = getattr(self, name)
        return [] if value in known else [f"{name} is {value!r}; choose {', '.join(known)}."]

    def problems(self) -> list[str]:
        """Return one message for each argument that is out of range."""
        given, by_layer = self.arguments(), {key for own in (self.layer_options or {}).values() for key in own}
        found = [f"{name} is {value}; {_LIMITS[name][1]}." for name, value in given.items()
                 if name in _LIMITS and not _LIMITS[name][0](value)]
        found += [problem for name in given if name in _CHOICES for problem in self.choice(name, *_CHOICES[name])]
        if self.traits.one_minibatch and (self.ema_decay or "ema_decay" in by_layer):
            found.append("ema_decay must be 0, because rows of different minibatches have no average.")
        found += [f"{name} has no effect here: {reason}; remove it." for name, reason in self.unused if given[name]]
        axes = self.traits.axes
        needs = axes.representation == "low_rank" or (axes.representation == "gram" and not self.traits.fisher)
        if "rank" in given and needs != bool(given["rank"]):
            found.append(f"rank is {given['rank']}; {'give the number of vectors' if needs else 'remove it, it has no effect'}.")
        if self.is_joint and "damping" in by_layer:
            found.append("layer_options has damping; all layers are one block, so set damping.")
        for name in ("curvature_interval", "inverse_interval"):
            every = getattr(self, name)
            if self.traits.every_step and every != 1:
                found.append(f"{name} is {every}; it must be 1, because this method needs every minibatch.")
            elif isinstance(every, int) and every < 1:
                found.append(f"{name} is {every}; give at least 1 step.")
        return [*found, *(f"layer_options has {key}; only damping and ema_decay can differ between layers."
                          for key in by_layer if key not in ("damping", "ema_decay"))]


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
