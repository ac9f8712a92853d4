"""Estimates of the layers of a model: they follow its parameters, and are saved and loaded."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ngsgd.curvature.layers import upcast
from ngsgd.errors import ConfigError, OptimizerStateError, has_grown, warn
from ngsgd.ops.tensors import refuse_sharded
from ngsgd.preconditioners import states
from ngsgd.preconditioners.blocks import Blocks, require_parameters, require_supported, skipped_parameters
from ngsgd.preconditioners.options import MethodArguments, is_due
from ngsgd.preconditioners.states import OWN, Layout, State, kept, own

# Attributes of a parameter that estimates depend on.
_DECISIVE = operator.attrgetter("shape", "dtype", "device", "requires_grad")


class CurvatureAverage(dict[str, State]):
    """Sums of moving averages by weight; `weights` are their total weights, for bias correction."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, float] = {}

    def put(self, name: str, state: State, weight: float = 1.0) -> None:
        """Replace the statistics of a weight."""
        self[name], self.weights[name] = state, weight

    def add(self, name: str, new: State, decay: float) -> bool:
        """Add the statistics of a minibatch; False, without effect, if they are not finite."""
        if not is_finite(new):
            return False
        if name not in self or decay == 0.0:
            self.put(name, {key: kept(value) for key, value in new.items()})
            # The first minibatch gets the same weight as any other.
            if decay:
                self.weights[name] = 1.0 - decay
                torch._foreach_mul_(list(self[name].values()), 1.0 - decay)
            return True
        for key, value in new.items():
            self[name][key].mul_(decay).add_(value, alpha=1.0 - decay)
        self.decayed(name, decay)
        return True

    def decayed(self, name: str, decay: float) -> None:
        """Update the weight of a sum to which a minibatch was added."""
        self.weights[name] = decay * self.weights[name] + 1.0 - decay

    def mean(self, name: str) -> State:
        """Return the averaged statistics of a weight."""
        weight = self.weights[name]
        return {key: value if weight == 1.0 else value / weight for key, value in self[name].items()}

    def forget(self, name: str) -> None:
        """Discard the statistics of a weight."""
        self.pop(name, None)
        self.weights.pop(name, None)


def is_finite(state: State) -> bool:
    """Return whether statistics are finite, in one pass; elementwise isfinite() takes four."""
    return all(bool(value.sum().isfinite()) for value in state.values())


class Estimates(MethodArguments):
    """Statistics and inverses by weight, with the counters of their updates."""

    # name of the method in states; empty: that of the class
    title = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.averaging == "average":
            self._require_mean()
        self.num_steps = 0
        # minibatches with non-finite values, which were excluded from the curvature
        self.num_skipped = 0
        # step of the last of them, and their number in the last warning
        self._skipped_at, self._num_reported = -1, 0
        # step of the last curvature update and inversion
        self.last: dict[str, int | None] = {"curvature": None, "inverse": None}
        self.statistics = CurvatureAverage()
        # inverses to apply, by weight
        self.inverses: dict[str, State] = {}
        # names of the layers of a matrix for several layers
        self._covered: tuple[str, ...] = ()
        self.generator = torch.Generator(require_parameters(self.model, type(self).__name__).device).manual_seed(self.seed)
        # What estimates depend on, of each parameter; `follow` notices a change.
        self.parameters: dict[str, nn.Parameter] = {}
        self.seen_parameters: list[tuple[Any, ...]] = []
        self.follow(dict(self.model.named_parameters()))

    def value_of(self, name: str) -> Tensor:
        """Return a parameter as gradients are: outputs first, in at least float32."""
        return self.blocks.oriented(name, upcast(self.parameters[name].detach()))

    def settle(self) -> None:
        """Bring the statistics up to date, of methods that keep them elsewhere."""

    def layout(self, name: str, entry: Mapping[str, Tensor]) -> Layout | None:
        """Return the shapes of `entry`, the tensors of a parameter; None: they are not checked."""
        return None

    def layout_of(self, name: str, entry: Mapping[str, Tensor]) -> Layout | None:
        """Return `layout`, or that of an entry that methods share."""
        return self.layout(name, entry)

    def follow(self, parameters: dict[str, nn.Parameter]) -> bool:
        """Adapt the estimates if parameters were replaced, converted, moved, frozen or unfrozen.

        Estimates of another shape start again. Returns whether parameters have none now, and need a
        curvature update.
        """
        seen = list(map(_DECISIVE, parameters.values()))
        if seen == self.seen_parameters and parameters.keys() == self.parameters.keys():
            # Others of the same shapes, perhaps.
            self.parameters = parameters
            return False
        refuse_sharded(self.model, type(self).__name__)
        self.skipped = skipped_parameters(self.model, self.skip)
        require_supported(self.model, self.skipped, type(self).__name__)
        before = [(name, *one) for name, one in zip(self.parameters, self.seen_parameters, strict=True)]
        self.parameters, self.seen_parameters = parameters, seen
        self.blocks = Blocks(self.model, self.skipped, self.traits.joins_bias)
        if not before:
            return False
        if (device := next(iter(parameters.values())).device) != self.generator.device:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        self.settle()
        now = [(name, *one) for name, one in zip(parameters, seen, strict=True)]
        layers_differ = [(name, shape, is_trained) for name, shape, *_, is_trained in before] \
            != [(name, shape, is_trained) for name, shape, *_, is_trained in now]
        dropped = [name for name in {*self.statistics, *self.inverses, *self.statistics.weights}
                   if (self.is_joint and layers_differ) or not self._adapted(name, parameters.get(name))]
        for name in dropped:
            self.forget(name)
        trained = {name for name, *_, is_trained in before if is_trained}
        return bool(dropped) or any(name not in trained for name, *_, is_trained in now if is_trained)

    def follow_known(self) -> None:
        """Run `follow` if a known parameter has changed; a search for new ones takes too long."""
        if list(map(_DECISIVE, self.parameters.values())) != self.seen_parameters \
                and self.follow(dict(self.model.named_parameters())):
            self.renew()

    def _adapted(self, name: str, p: nn.Parameter | None) -> bool:
        """Convert the estimates of a parameter, and return whether they fit it."""
        entry = self._entry(name)
        if p is None or ((layout := self.layout_of(name, entry)) is not None and self._misfit(entry, layout, p)):
            return False
        self._put(name, states.converted(entry, layout, p))
        return True

    def _put(self, name: str, entry: Mapping[str, Tensor]) -> None:
        """Store the tensors of a parameter, named as in `state_dict`."""
        for key, value in entry.items():
            group, _, short = key.partition(".")
            (self.statistics if group == "statistics" else self.inverses).setdefault(name, {})[short] = value

    def forget(self, name: str) -> None:
        """Discard the estimates of a parameter."""
        self.statistics.forget(name)
        self.inverses.pop(name, None)
        self._covered = ()

    def cover(self, names: Sequence[str]) -> None:
        """Start a matrix for several layers again if its layers have changed."""
        if self._covered != tuple(names):
            for name in self._covered:
                self.forget(name)
            self._covered = tuple(names)

    def require_covered(self, names: Collection[str]) -> None:
        """Raise ConfigError if gradients are not those of the layers of the matrix."""
        if {*names} != {*self._covered}:
            differing = ", ".join(sorted({*names} ^ {*self._covered}))
            raise ConfigError(f"{type(self).__name__} has one matrix for all layers, and the gradients of this step are of "
                              f"other layers ({differing} only in one of them); use curvature_interval=1, or skip the layers "
                              "that some minibatches do not use.")

    def is_due(self, what: str) -> bool:
        """Return whether this step updates the "curvature" or the "inverse"."""
        return is_due(getattr(self, f"{what}_interval"), self.num_steps, self.last[what])

    def renew(self) -> None:
        """Make the current or next step update curvature and inverse, whatever the intervals."""
        self.last = dict.fromkeys(self.last)

    def note_skipped(self) -> None:
        """Count this minibatch, once, as excluded from the curvature, and warn of it."""
        if self._skipped_at == self.num_steps:
            return
        self._skipped_at = self.num_steps
        self.num_skipped += 1
        # Warn again when the number has grown tenfold.
        if has_grown(self.num_skipped, self._num_reported):
            self._num_reported = self.num_skipped
            warn(f"{type(self).__name__}: {self.num_skipped} of {self.num_steps + 1} minibatches were excluded "
                 "from the curvature, since a value was not finite; num_skipped counts them. "
                 "The optimizer still gets their gradient: call its step() only if the loss is finite.")

    def _misfit(self, entry: Mapping[str, Tensor], layout: Layout, p: Tensor) -> str:
        """Return why the tensors of a parameter cannot be used; "" if they can."""
        if problem := states.misfit(entry, layout):
            return problem
        other = {value.dtype for value in entry.values()} - {states.working_dtype(p)}
        return f"is {', '.join(map(str, other))}, and the model {p.dtype}" if other and not self.traits.converts else ""

    def _entry(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a parameter as in `state_dict`; they are not copied."""
        return {f"{group}.{key}": value for group, known in zip(states.GROUPS, (self.statistics, self.inverses), strict=True)
                for key, value in known.get(name, {}).items()}

    def _counters(self) -> dict[str, Any]:
        """Return the part of the state that belongs to no layer."""
        last = {f"last_{key}": -1 if value is None else value for key, value in self.last.items()}
        covered = {"covered": states.packed_text("\n".join(self._covered))} if self.is_joint else {}
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped, **last, "generator": self.generator.get_state(),
                "method": states.packed_text(self.title or type(self).__name__),
                "parameters": states.packed_text(states.shapes_text(self.model.named_parameters())), **covered}

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return statistics, weight, inverses by parameter; "": counters, method, shapes."""
        self.settle()
        state: dict[str, dict[str, Any]] = {}
        for name in sorted({*self.statistics, *self.inverses}):
            state[name] = {key: value.clone() for key, value in self._entry(name).items()}
            if name in self.statistics.weights:
                state[name]["weight"] = self.statistics.weights[name]
        state[OWN] = {**self._counters(), "entries": states.packed_text(states.entries_text(state))}
        return state

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a state; training continues bitwise identically.

        A state of another dtype is converted. Nothing is changed if the state does not fit.

        Raises:
            OptimizerStateError: the state is of another method or model, or incomplete.
        """
        self.follow(dict(self.model.named_parameters()))
        layers, weights = self._checked(state)
        self.statistics, self.inverses = CurvatureAverage(), {}
        self.statistics.weights = weights
        self.blocks = Blocks(self.model, self.skipped, self.traits.joins_bias)
        for name, entry in layers.items():
            if "statistics.squares" in entry:
                self.blocks.bias_of.pop(name, None)
            self._put(name, {key: own(value) for key, value in entry.items()})
        counters, self._skipped_at = state[OWN], -1
        self.num_steps, self.num_skipped = int(counters["num_steps"]), int(counters["num_skipped"])
        self.last = {key: None if int(counters[f"last_{key}"]) < 0 else int(counters[f"last_{key}"]) for key in self.last}
        self._covered = states.covered_of(counters) if self.is_joint else ()
        self.generator.set_state(torch.as_tensor(counters["generator"]).to(torch.uint8).clone())

    def _checked(self, state: Mapping[str, Mapping[str, Any]]) -> tuple[dict[str, dict[str, Tensor]], dict[str, float]]:
        """Return (tensors by parameter, weights) of a state; raise OptimizerStateError."""
        method, parameters = (self.title or type(self).__name__), dict(self.model.named_parameters())
        states.require_counters(state, self._counters(), method, parameters)
        layers, weights = {}, {}
        # Size of the matrix of several layers.
        total = sum(parameters[name].numel() for name in states.covered_of(state[OWN])) if self.is_joint else 0
        for name, entry in state.items():
            if name == OWN:
                continue
            tensors, weight = states.checked_entry(name, entry, method)
            layout = self.layout_of(name, tensors)
            if layout is not None and total:
                layout = {key: [total if size == "d" else size for size in shape] for key, shape in layout.items()}
            if layout is not None and (problem := self._misfit(tensors, layout, parameters[name])):
                raise OptimizerStateError(f"the state of {name} {problem}; load the state of {method} with the same options "
                                          "and model.")
            layers[name] = states.converted(tensors, layout, parameters[name])
            if weight is not None:
                weights[name] = weight
        return layers, weights

    def average(self, each: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """Load the mean of the curvature of several workers; the next step updates the inverses."""
        self._require_mean()
        if not each:
            raise ConfigError("average() was given no state; give the state_dict() of each worker.")
        for state in each:
            self._checked(state)
        self.load_state_dict(states.mean_state(each))

    def _require_mean(self) -> None:
        if not self.traits.has_mean:
            raise ConfigError(f"{type(self).__name__}: rows or gradients of different workers have "
                              "no mean; choose averaging=\"reset\" or \"keep\".")
