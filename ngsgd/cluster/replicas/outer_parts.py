"""Outer state of LocalSGD: flat vectors of the trained parameters, one for each dtype of sums."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ngsgd.arguments import checked
from ngsgd.cluster.replicas.exchanged_tensors import Exchanged, first_difference, values_of, write
from ngsgd.errors import ConfigError

# number of parameters updated at a time: temporaries are reused and stay in the cache
_CHUNK = 2**16


class Part:
    """The parameters whose sums have one dtype, and the outer state: B, W, buffers of the rule."""

    def __init__(self, tensors: list[Exchanged], buffers: Mapping[str, float]) -> None:
        self.tensors, self.sizes = tensors, [one.size for one in tensors]
        # sums over all ranks of samples times parameters
        self.sums = torch.empty(sum(self.sizes), dtype=tensors[0].precision, device=tensors[0].tensor.device)
        # B; often identical to W
        self.start = torch.cat([values_of(one.tensor, one.precision) for one in tensors])
        self.arrays = {"model": self.start, **{name: torch.full_like(self.start, value) for name, value in buffers.items()}}
        self.unfrozen: list[slice] = []  # elements that were not trained at the last average
        self.layout = layout_of(tensors)  # a tensor can change its shape, dtype and device later

    @property
    def dtype(self) -> str:
        return str(self.sums.dtype).removeprefix("torch.")

    def slices(self) -> dict[int, slice]:
        """Return the place of each parameter by id()."""
        found, first = {}, 0
        for one, size in zip(self.tensors, self.sizes, strict=True):
            found[id(one.tensor)] = slice(first, first + size)
            first += size
        return found

    def set_start(self, start: Tensor) -> None:
        """Set B, which shares the memory of W if they are equal."""
        self.start = self.arrays["model"] if torch.equal(start, self.arrays["model"]) else start

    def load(self, vector: Tensor) -> None:
        """Set the parameters to a vector."""
        for one, values in zip(self.tensors, vector.split(self.sizes), strict=True):
            write(one.tensor, values)

    def take_over(self, old: Mapping[int, tuple[Part, slice, torch.Size]]) -> None:
        """Copy the state of parameters that were trained at the last average."""
        start = self.start.clone()
        for one, (key, place) in zip(self.tensors, self.slices().items(), strict=True):
            if key not in old:
                self.unfrozen.append(place)
                continue
            before, source, shape = old[key]
            if shape != one.tensor.shape:
                raise ConfigError(f"the parameter {one.name} had the shape {list(shape)} at the last average, and has "
                                  f"{list(one.tensor.shape)} now; create the optimizer and LocalSGD again after the change.")
            start[place] = before.start[source]
            for name, array in self.arrays.items():
                array[place] = before.arrays[name][source]
        self.set_start(start)

    def step(self, rule: Any, now: Mapping[str, float], weight: float) -> None:
        """Take the outer step in chunks that stay in the cache."""
        for place in self.unfrozen:
            # the first average of a layer is its mean: the rule has no B to compare it with
            self.start[place] = self.arrays["model"][place] = self.sums[place] / weight
        self.unfrozen = []
        model, start, size = self.arrays["model"], self.start, len(self.sums)
        for first in range(0, size, _CHUNK):
            chunk = slice(first, min(first + _CHUNK, size))
            mean, arrays = self.sums[chunk].div_(weight), {name: array[chunk] for name, array in self.arrays.items()}
            updated = rule.update(arrays, arrays["model"] if start is model else start[chunk], mean, now)
            broadcast = rule.broadcast(updated, now)
            if broadcast is updated["model"]:
                self.start = model
            else:
                self.start = torch.empty_like(model) if self.start is model else self.start
                self.start[chunk] = broadcast
            for name, array in arrays.items():
                array.copy_(updated[name])


def layout_of(tensors: Sequence[Exchanged]) -> list[tuple[int, torch.Size, torch.dtype, torch.device]]:
    """Describe parameters; another description needs another part."""
    return [(id(one.tensor), one.tensor.shape, one.tensor.dtype, one.tensor.device) for one in tensors]


def parts_of(tensors: Sequence[Exchanged], buffers: Mapping[str, float], current: list[Part] | None) -> list[Part]:
    """Return the parts for the trained tensors of a plan, with the arrays of the rule.

    Parameters keep their state in the parts of the last average, `current`.

    Raises:
        ConfigError: a parameter has another shape than in its current part.
    """
    by_dtype: dict[torch.dtype, list[Exchanged]] = {}
    for one in tensors:
        if one.kind == "trained":
            by_dtype.setdefault(one.precision, []).append(one)
    if current is not None and list(map(layout_of, by_dtype.values())) == [part.layout for part in current]:
        return current
    old = {key: (part, place, shape) for part in current or ()
           for (key, place), (_, shape, *_) in zip(part.slices().items(), part.layout, strict=True)}
    parts = [Part(group, buffers) for group in by_dtype.values()]
    for part in parts if current is not None else ():
        part.take_over(old)
    return parts


def require_like(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise ConfigError if a state belongs to another rule or model than `own`."""
    hints = {"rule": str, "layout": list[str], "num_steps": int, "num_rounds": int, "num_samples": int,
             "numbers": Mapping[str, float]}
    checked({name: state[name] for name in hints}, hints, "the state of LocalSGD")
    if state["rule"] != own["rule"]:
        raise ConfigError(f"the state is of the outer rule {state['rule']}, but this LocalSGD has {own['rule']}; load the state "
                          "with the rule that saved it.")
    texts = {"the state": "\n".join(state["layout"]), "this model": "\n".join(own["layout"])}
    if difference := first_difference(texts):
        raise ConfigError(f"the state belongs to another model: {difference}. Load the state with the model that saved it, and "
                          "freeze the same layers before creating LocalSGD.")
    held, needed = _described(state), _described(own)
    if held != needed:
        raise ConfigError(f"the state holds {held}, but this rule and model need {needed}; "
                          "load the state with the rule and the model that saved it.")


def _described(state: Mapping[str, Any]) -> Any:
    """Return dtypes and shapes of the vectors of a state."""
    try:
        return {f"{name} ({dtype})": (tensor.dtype, list(tensor.shape)) for dtype, arrays in state["arrays"].items()
                for name, tensor in {**arrays, "start": state["start"][dtype]}.items()}
    except (AttributeError, KeyError, TypeError):
        return f"arrays of type {type(state['arrays']).__name__} without the vectors of each dtype"


class OptimizerReset:
    """The state that an optimizer has now, and its return to it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._initial = copy.deepcopy(optimizer.state_dict())
        indices = self._indices(self._initial)
        # by parameter, because indices change when groups are added
        self._values = [(p, self._initial["state"][indices[id(p)]]) for group in optimizer.param_groups for p in group["params"]
                        if indices[id(p)] in self._initial["state"]]

    def apply(self) -> None:
        """Restore the state (momentum, moments, Fisher estimates); groups and settings stay."""
        optimizer, now = self._optimizer, self._optimizer.state_dict()
        groups = [dict(group) for group in optimizer.param_groups]
        indices = self._indices(now)
        settings = {key: value for key, value in now.items() if key != "state" and hasattr(optimizer, key)}
        state = {indices[id(p)]: copy.deepcopy(values) for p, values in self._values if id(p) in indices}
        optimizer.load_state_dict({**copy.deepcopy(self._initial), **settings, "state": state})
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            # also objects that torch copies, such as a learning rate in a tensor
            group.update(before)

    def _indices(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Return the index of each parameter in a state, by id()."""
        return {id(p): index for group, packed in zip(self._optimizer.param_groups, state["param_groups"], strict=True)
                for p, index in zip(group["params"], packed["params"], strict=True)}


def clear_not_finite(optimizer: Optimizer) -> None:
    """Set tensors of the state of an optimizer that are not finite to 0."""
    for values in optimizer.state.values():
        for value in values.values():
            if isinstance(value, Tensor) and not bool(value.isfinite().all()):
                value.zero_()
