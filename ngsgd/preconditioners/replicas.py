"""Replicas of a model on ranks that average statistics, and compute each inverse once, in order."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from ngsgd.config.traits import Traits
from ngsgd.errors import ConfigError, warn
from ngsgd.preconditioners.states import State

# Its type stubs lack the functions used here.
_c10d: Any = torch.distributed.distributed_c10d
_SPLITTING = "KFAC, TNT, FANG, DiagonalNG, UnitWiseNG, LayerWiseNG, Shampoo and SOAP"


class Replicas:
    """Replicas of the model of a method, which must stay equal."""

    def __init__(self, model: nn.Module, method: str, traits: Traits) -> None:
        self._model, self._method, self._traits = model, method, traits
        # of `split`: exchanges statistics and inverses
        self.comm: ProcessGroupComm | None = None
        # Set if DistributedDataParallel averages the gradients.
        self._has_ddp = False
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                self._add_ddp(module.process_group)

    @property
    def average_gradients(self) -> bool:
        """Return whether the ranks average gradients, which then cannot stay factored."""
        return self.comm is not None or self._has_ddp

    def split(self, group: Any) -> None:
        """Split the work over the ranks of a process group; ConfigError if the method cannot."""
        if not self._traits.splits_work:
            raise ConfigError(f"{self._method} cannot split its work over ranks; {_SPLITTING} can.")
        self.comm = ProcessGroupComm(group, next(self._model.parameters()).device)

    def noticed(self) -> contextlib.AbstractContextManager[Any]:
        """Detect in forward passes inside whether DistributedDataParallel runs the model."""
        def notice(*_: Any) -> None:
            around = nn.parallel.DistributedDataParallel._get_active_ddp_module()
            if around is not None and not self._has_ddp:
                self._add_ddp(around.process_group)
        if self._has_ddp:
            return contextlib.nullcontext()
        return self._model.register_forward_pre_hook(notice)

    def _add_ddp(self, group: Any) -> None:
        """Split the work over the ranks of a data-parallel loop; else replicas would diverge."""
        if self._traits.splits_work and self.comm is None:
            self.split(group)
        elif not self._traits.splits_work and not self._traits.agrees_over_ranks:
            raise ConfigError(f"{self._method} does not support DistributedDataParallel: each rank would use the curvature of "
                              f"its own rows, and the replicas would diverge. Choose one of {_SPLITTING}: they average it.")
        self._has_ddp = True

    def warn_of_ranks(self) -> None:
        """Warn at the first step, because averaging of gradients in the loop cannot be detected."""
        distributed = torch.distributed
        if self._traits.agrees_over_ranks or self.comm is not None \
                or not (distributed.is_available() and distributed.is_initialized()):
            return
        if (size := distributed.get_world_size()) > 1:
            remedy = "call split_work(group)" if self._traits.splits_work else "choose a method that splits its work, such as KFAC"
            warn(f"{self._method} uses the curvature of the rows of this process only, and torch.distributed has {size} "
                 f"processes; if the loop averages gradients over them, {remedy}, or the copies of the model diverge.")


class ProcessGroupComm:
    """A process group; `device` is the device of the exchanged tensors."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.rank, self.size = int(group.rank()), int(group.size())

    def __deepcopy__(self, _: Any) -> ProcessGroupComm:
        # A copy belongs to the same processes.
        return self

    def __reduce__(self) -> Any:
        raise ConfigError("a preconditioner that splits its work over processes cannot be pickled; save its state_dict().")

    def mean(self, states: Mapping[str, State], weight: float) -> dict[str, State]:
        """Return the mean of the states of all ranks, weighted by rows, in one exchange."""
        names = [(name, key) for name in sorted(states) for key in sorted(states[name])]
        parts = [states[name][key] for name, key in names]
        self._require_equal({(name, key): part.shape for (name, key), part in zip(names, parts, strict=True)})
        dtype = parts[0].dtype if parts else torch.float32
        total = torch.cat([*(part.flatten().to(dtype) * weight for part in parts),
                           torch.tensor([weight], dtype=dtype, device=self._device)])
        self._group.allreduce([total], _c10d.AllreduceOptions()).wait()
        of_all = total[:-1] / total[-1].clamp(min=torch.finfo(dtype).tiny)
        found: dict[str, State] = {name: {} for name in states}
        for (name, key), part, like in zip(names, of_all.split([part.numel() for part in parts]), parts, strict=True):
            found[name][key] = part.view_as(like).to(like.dtype)
        return found

    def inverted(self, statistics: Mapping[str, State], invert: Callable[[str], State]) -> dict[str, State]:
        """Return the inverses of all layers, each of which is computed by one rank."""
        # Inverting or decomposing a matrix takes D^3 operations.
        owners = self.owners({name: sum(float(value.numel()) * value.shape[-1] for value in known.values() if value.ndim > 1)
                              for name, known in statistics.items()})
        return self.exchanged({name: invert(name) for name, owner in owners.items() if owner == self.rank},
                              {(name, key): value.shape for name, known in statistics.items() for key, value in known.items()})

    def owners(self, costs: Mapping[str, float]) -> dict[str, int]:
        """Assign layers to ranks, the most expensive first, each to that with the least work."""
        load, found = [0.0] * self.size, {}
        for name in sorted(costs, key=lambda name: (-costs[name], name)):
            found[name] = min(range(self.size), key=lambda rank: (load[rank], rank))
            load[found[name]] += costs[name]
        return found

    def exchanged(self, mine: Mapping[str, State], layers: Mapping[tuple[str, str], torch.Size]) -> dict[str, State]:
        """Return the states of all ranks by layer; shapes of statistics must be equal on them."""
        # the library itself needs no safetensors
        from safetensors.torch import load, save
        self._require_equal(layers)
        found: dict[str, State] = {}
        for root in range(self.size):
            own = b"" if root != self.rank else save(
                {json.dumps([name, key]): value.contiguous() for name, state in mine.items() for key, value in state.items()})
            size = torch.tensor([len(own)], device=self._device)
            self._send(size, root)
            packed = torch.frombuffer(bytearray(own), dtype=torch.uint8) if own else torch.empty(int(size), dtype=torch.uint8)
            packed = packed.to(self._device)
            self._send(packed, root)
            for both, value in {} if root == self.rank else load(packed.cpu().numpy().tobytes()).items():
                name, key = json.loads(both)
                found.setdefault(name, {})[key] = value.to(self._device)
        return {**found, **mine}

    def _require_equal(self, shapes: Mapping[tuple[str, str], torch.Size]) -> None:
        """Raise ConfigError on all ranks if the layers of two ranks differ."""
        # Otherwise a collective operation would hang, or average the curvature of different layers
        # of one size, such as experts that only some ranks used.
        text = repr(sorted((str(name), tuple(shape)) for name, shape in shapes.items())).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
        bounds = torch.tensor([digest, -digest, len(shapes), -len(shapes)], device=self._device)
        options = _c10d.AllreduceOptions()
        options.reduceOp = _c10d.ReduceOp.MAX
        self._group.allreduce([bounds], options).wait()
        most, least, largest, smallest = bounds.tolist()
        if most != -least:
            names = ", ".join(sorted({name for name, _ in shapes})) or "none"
            raise ConfigError(f"the ranks have the curvature of different layers ({-smallest} to {largest} tensors; rank "
                              f"{self.rank}: {names}). Give every rank the same model, and a minibatch that uses all layers "
                              "with at least one row of nonzero weight; skip layers that only some ranks use, such as "
                              "experts.")

    def _send(self, value: Tensor, root: int) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([value], options).wait()
