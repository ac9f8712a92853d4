"""Local SGD for custom training loops: ranks of torch.distributed that average parameters.

B is the model that ranks start a round from, W the model that is evaluated; see
`ngsgd.optim.outer`.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import json
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _abort_process_group, _get_default_store
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from ngsgd.arguments import checks_arguments, require_state
from ngsgd.cluster.exchange.process_group import nccl_options
from ngsgd.errors import ClusterError, ConfigError
from ngsgd.optim.outer_rules import Average, Bmuf, DiLoCo, OuterInfo, OuterRule

_RULES = {"average": Average, "bmuf": Bmuf, "diloco": DiLoCo}
# seconds between two heartbeats, and seconds without one after which a rank counts as dead
_BEAT_S, _SILENT_S = 0.5, 4.0
_POLL_S = 0.05
# number of parameters updated at a time: temporaries are reused and stay in the cache
_PART = 2**16
# number of rounds passed to rules whose momentum depends on the length of the run
_LONG_RUN = 1_000_000_000


class LocalSGD:
    """Average the parameters of all ranks every `sync_every` optimizer steps.

    Between two averages every rank trains alone. Ranks are weighted by the number of samples that
    they trained on. Running means and variances of batch norms are pooled over the ranks. Integer
    buffers, such as counters, are not exchanged.

    If a rank dies, the samples of its round are lost: the other ranks form a new group and
    continue. This requires a live process of the rendezvous store (rank 0, or the agent of
    torchrun). With NCCL, which has run with one rank only, a dead rank is detected after
    `timeout_s`, and `init_process_group` must not get a `device_id`. A rank that starts later loads
    `state_dict()` of a rank. All ranks then form a new process group, as after an elastic restart
    of torchrun.

    Args:
        model: the module that the optimizer trains. Its parameters are set to those of the lowest
            rank.
        optimizer: any optimizer of the model.
        sync_every: optimizer steps between two averages, at least 1.
        outer: "average", "bmuf", "diloco", or a rule of `ngsgd.optim.outer` without `center`,
            such as DiLoCo(lr=0.5). Default: "bmuf".
        process_group: ranks that train together; None for all ranks.
        reset_optimizer: start each round with a new optimizer state (momentum, Fisher estimates),
            as `ngsgd train` does. Default: False.
        timeout_s: maximum time that a rank waits for the others at an average, in seconds. Default:
            60.

    Raises:
        ConfigError: torch.distributed is not initialized, or an argument is wrong.

    Example:
        One process; with `torchrun`, `dist.init_process_group()` connects several.

        >>> import torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        >>> local = LocalSGD(model, optimizer, sync_every=2, outer="diloco")
        >>> for x in torch.ones(4, 8, 3):
        ...     optimizer.zero_grad()
        ...     model(x).square().mean().backward()
        ...     optimizer.step()
        ...     is_averaged = local.step(num_samples=len(x))
        >>> is_averaged, local.num_rounds
        (True, 2)
        >>> local.finish()
        >>> dist.destroy_process_group()
    """

    @checks_arguments()
    def __init__(self, model: nn.Module, optimizer: Optimizer, *, sync_every: int, outer: str | OuterRule = "bmuf",
                 process_group: dist.ProcessGroup | None = None, reset_optimizer: bool = False, timeout_s: float = 60.0) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("LocalSGD needs torch.distributed; call "
                              "torch.distributed.init_process_group first.")
        if sync_every < 1:
            raise ConfigError(f"sync_every is {sync_every}; set it to at least 1.")
        if isinstance(outer, type) or (outer not in _RULES if isinstance(outer, str) else not hasattr(outer, "coefficients")):
            raise ConfigError(f"outer is {outer!r}; choose {', '.join(_RULES)}, or pass a rule of "
                              "ngsgd.optim.outer, such as DiLoCo(lr=0.5).")
        if not isinstance(outer, str) and hasattr(outer, "center"):
            raise ConfigError(f"{type(outer).__name__} needs the parameters of every rank, but "
                              f"ranks exchange only their mean; choose {', '.join(_RULES)}, or a "
                              "rule of ngsgd.optim.outer without `center`.")
        _require_own_optimizer(model, optimizer)
        self.model, self.optimizer, self.sync_every = model, optimizer, sync_every
        self.rule = _RULES[outer]() if isinstance(outer, str) else outer
        self._initial_state = copy.deepcopy(optimizer.state_dict()) if reset_optimizer else None
        self._timeout_s = timeout_s
        self._ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._backend = dist.get_backend(process_group)
        # a separate group, which can be left when a rank dies
        self._group = self._new_group()
        self._num_regroups, self._is_new = 0, False
        self.num_steps = 0
        self.num_rounds = 0
        self._num_samples = 0
        self._numbers: dict[str, float] = {}
        self._closed = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="ngsgd-local-sgd", daemon=True)
        self._heart.start()
        # Python ends a thread inside torch's C++ code by std::terminate, which aborts the process
        atexit.register(_stop, self._heart, self._closed)
        tensors = [*self._parameters(), *self._statistics()]
        self._size = sum(p.numel() for p in self._parameters())
        # sums over all ranks: samples times parameters and statistics, then samples
        self._sums = torch.empty(1 + sum(tensor.numel() for tensor in tensors), device=tensors[0].device)
        self._fill(1)
        _wait(dist.broadcast(self._sums, self._ranks[0], self._group, async_op=True))
        # B; often identical to W
        self._start = self._sums[:self._size].clone()
        self._arrays = {"model": self._start, **{name: torch.full_like(self._start, value)
                                                 for name, value in self.rule.buffers.items()}}
        self._load()

    @property
    def num_ranks(self) -> int:
        """Number of live ranks."""
        return len(self._ranks)

    @property
    def gain(self) -> float:
        """Total step of the model on a constant mean delta.

        The learning rate of a rank may be num_ranks / gain times as high.
        """
        return self.rule.gain(self.num_ranks, _LONG_RUN)

    def step(self, num_samples: int = 1) -> bool:
        """Count an optimizer step, and average if `sync_every` steps were counted.

        Args:
            num_samples: samples of the step on this rank, the weight of the rank in the average.
                Default: 1.

        Returns:
            Whether parameters were averaged after the step.

        Raises:
            ClusterError: no other rank answers, or too few do.
        """
        self.num_steps += 1
        self._num_samples += num_samples
        if self.num_steps % self.sync_every:
            return False
        self.sync()
        return True

    @torch.no_grad()
    def sync(self) -> None:
        """Average now, and take the outer step.

        Raises:
            ClusterError: no other rank answers, or too few do.
        """
        if self._reduce():
            weight = float(self._sums[-1])
            if not weight:
                return
            info = OuterInfo(self.num_rounds, _LONG_RUN, self.num_ranks, 0.0)
            now = self.rule.coefficients(info, self._numbers)
            self._step(now, weight)
            self._numbers = now
            self.num_rounds += 1
            self._load()
        self._num_samples = 0
        if self._initial_state is not None:
            self.optimizer.load_state_dict(copy.deepcopy(self._initial_state))

    def finish(self) -> None:
        """End training: average the steps since the last average.

        Afterwards the module holds the model to evaluate and save (W).
        """
        self.sync()
        with contextlib.suppress(RuntimeError):
            # a process that ends closes connections that the average of other ranks may still need
            _wait(dist.barrier(self._group, async_op=True))
        _stop(self._heart, self._closed)
        _read(self._arrays["model"], self._parameters())

    def state_dict(self) -> dict[str, Any]:
        """State of the last average; with model and optimizer states, training resumes bitwise."""
        return {"arrays": {name: tensor.clone() for name, tensor in self._arrays.items()}, "start": self._start.clone(),
                "numbers": dict(self._numbers), "num_steps": self.num_steps, "num_rounds": self.num_rounds,
                "num_samples": self._num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a rank.

        Args:
            state: a result of `state_dict`.

        Raises:
            ConfigError: the state belongs to another rule or another model.
        """
        require_state(state, ("arrays", "start", "numbers", "num_steps", "num_rounds", "num_samples"), "LocalSGD", ConfigError)
        shapes = {name: tuple(tensor.shape) for name, tensor in state["arrays"].items()}
        wanted = {name: tuple(tensor.shape) for name, tensor in self._arrays.items()}
        if shapes != wanted:
            raise ConfigError(f"the state holds {shapes}, but this rule and model need {wanted}; "
                              "load the state with the rule and the model that saved it.")
        self._arrays = {name: tensor.to(self._start, copy=True) for name, tensor in state["arrays"].items()}
        self._start = state["start"].to(self._start, copy=True)
        if torch.equal(self._start, self._arrays["model"]):
            self._start = self._arrays["model"]
        self._numbers = dict(state["numbers"])
        self.num_steps, self.num_rounds = state["num_steps"], state["num_rounds"]
        self._num_samples = state["num_samples"]

    # Vectors --------------------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _statistics(self) -> list[Tensor]:
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point()]

    def _fill(self, num_samples: int) -> None:
        """Write samples times parameters and buffers.

        Second moments replace variances, because their means can be pooled.
        """
        tensors = [*self._parameters(), *self._statistics()]
        with torch.no_grad(), self._second_moments():
            for tensor, values in zip(tensors, self._sums[:-1].split([one.numel() for one in tensors]), strict=True):
                # while they are in the cache of the processor
                values.view_as(tensor).copy_(tensor).mul_(num_samples)
            self._sums[-1] = num_samples

    def _step(self, now: dict[str, float], weight: float) -> None:
        """Take the outer step in parts that stay in the cache, and overwrite the sums by B."""
        self._sums[self._size:-1].div_(weight)
        model, start = self._arrays["model"], self._start
        # the arithmetic of the rules also works with tensors
        rule: Any = self.rule
        for first in range(0, self._size, _PART):
            part = slice(first, min(first + _PART, self._size))
            mean, arrays = self._sums[part].div_(weight), {name: array[part] for name, array in self._arrays.items()}
            updated = rule.update(arrays, arrays["model"] if start is model else start[part], mean, now)
            broadcast = rule.broadcast(updated, now)
            if broadcast is updated["model"]:
                self._start = model
            else:
                self._start = torch.empty_like(model) if self._start is model else self._start
                self._start[part] = broadcast
            self._sums[part] = broadcast
            for name, array in arrays.items():
                array.copy_(updated[name])

    def _load(self) -> None:
        """Load parameters and statistics from the layout of `_fill`."""
        _read(self._sums[:-1], [*self._parameters(), *self._statistics()])
        for norm in self._batch_norms():
            norm.running_var.sub_(norm.running_mean.square()).clamp_(min=0.0)  # type: ignore[union-attr]

    @contextlib.contextmanager
    def _second_moments(self) -> Iterator[None]:
        kept = [(norm, norm.running_var.clone()) for norm in self._batch_norms()]  # type: ignore[union-attr]
        with torch.no_grad():
            for norm, _ in kept:
                norm.running_var.add_(norm.running_mean.square())  # type: ignore[union-attr]
            yield
            for norm, variance in kept:
                norm.running_var.copy_(variance)  # type: ignore[union-attr]

    def _batch_norms(self) -> list[_BatchNorm]:
        return [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.running_var is not None]

    # Ranks ----------------------------------------------------------------------------------------

    def _reduce(self) -> bool:
        """Sum over the live ranks; return False if the other ranks have done so already."""
        while True:
            try:
                if self._is_new and self._caught_up():
                    return False
                self._fill(self._num_samples)
                _wait(dist.all_reduce(self._sums, group=self._group, async_op=True))
                return True
            except (RuntimeError, dist.DistBackendError) as error:
                self._regroup(error)

    def _new_group(self, *, use_local_synchronization: bool = False) -> dist.ProcessGroup:
        """Create a group of the live ranks that this class can leave."""
        with nccl_options(self._timeout_s) if self._backend == "nccl" else contextlib.nullcontext() as options:
            group: dist.ProcessGroup = dist.new_group(self._ranks, timedelta(seconds=self._timeout_s), self._backend, options,
                                                      use_local_synchronization=use_local_synchronization)
        return group

    def _regroup(self, error: Exception) -> None:
        """Form a group of the ranks that announce themselves in the store."""
        with contextlib.suppress(Exception):
            # the destructor of NCCL waits for operations that never complete
            (_abort_process_group if self._backend == "nccl" else dist.destroy_process_group)(self._group)
        # the connections close when nothing refers to the group, so neighbors detect it immediately
        traceback.clear_frames(error.__traceback__)
        del self._group
        self._num_regroups += 1
        rank, prefix = dist.get_rank(), f"ngsgd/local_sgd/{self._num_regroups}"
        try:
            store = _get_default_store()
            store.set(f"{prefix}/{rank}", "1")
            present = self._announced(store, prefix)
            # the first rank to decide decides for all
            members: list[int] = json.loads(store.compare_set(f"{prefix}/members", "", json.dumps(present)))
        except (RuntimeError, ValueError) as lost:
            raise ClusterError("the process of the rendezvous store ended "
                               f"({str(lost).splitlines()[0]}), so the live ranks cannot find each "
                               "other; restart from the last state_dict().") from error
        if rank not in members:
            raise ClusterError(f"rank {rank} answered too late and was excluded; restart it from "
                               "the state_dict() of another rank.")
        self._ranks = members
        self._group = self._new_group(use_local_synchronization=True)
        self._is_new = True

    def _caught_up(self) -> bool:
        """Send the state of the last average to ranks that missed it.

        Returns:
            True on these ranks, whose samples the average already contains.
        """
        own = torch.tensor([self.num_rounds], device=self._sums.device)
        gathered = [torch.empty_like(own) for _ in self._ranks]
        _wait(dist.all_gather(gathered, own, group=self._group, async_op=True))
        rounds = [int(one) for one in gathered]
        newest = max(rounds)
        is_behind = self.num_rounds < newest
        if min(rounds) < newest:
            source, start = self._ranks[rounds.index(newest)], self._start.clone()
            for tensor in (*self._arrays.values(), start):
                _wait(dist.broadcast(tensor, source, group=self._group, async_op=True))
            store, key = _get_default_store(), f"ngsgd/local_sgd/{self._num_regroups}/numbers"
            if dist.get_rank() == source:
                store.set(key, json.dumps(self._numbers))
            if is_behind:
                self.num_rounds, self._numbers, self._start = newest, json.loads(store.get(key)), start
                _read(start, self._parameters())
        self._is_new = False
        return is_behind

    def _announced(self, store: Any, prefix: str) -> list[int]:
        """Return the announced ranks, after waiting for live ranks that are still in their
        round.
        """
        deadline = time.monotonic() + self._timeout_s
        beats = {one: (b"", time.monotonic()) for one in self._ranks}
        while True:
            now = time.monotonic()
            present = [one for one in self._ranks if store.check([f"{prefix}/{one}"])]
            for one in self._ranks:
                beat = store.get(_alive(one)) if store.check([_alive(one)]) else b""
                if beat != beats[one][0]:
                    beats[one] = (beat, now)
            awaited = [one for one in self._ranks if one not in present and now - beats[one][1] < _SILENT_S]
            if not awaited or now > deadline:
                return present
            time.sleep(_POLL_S)

    def _beat(self) -> None:
        """Publish heartbeats in a thread."""
        count, rank = 0, dist.get_rank()
        with contextlib.suppress(Exception):
            # a separate connection, because another thread may block on the first one
            store = _get_default_store()
            store = store.clone() if hasattr(store, "clone") else store
            while not self._closed.wait(_BEAT_S):
                count += 1
                store.set(_alive(rank), str(count))


@torch.no_grad()
def _read(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy consecutive values of a vector to tensors."""
    for tensor, values in zip(tensors, vector.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view_as(tensor))


def _require_own_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ConfigError if the optimizer trains no parameter of the model."""
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise ConfigError(f"the {type(optimizer).__name__} has no parameter of the model, so LocalSGD would "
                          "average a model that nobody trains; create the optimizer from the same "
                          "model, after the last change of its layers.")


def _wait(work: dist.Work | None) -> None:
    """Wait for a collective.

    Without `async_op` torch would only queue a collective of NCCL, and a dead rank would never be
    detected.
    """
    if work is not None:
        work.wait()


def _stop(heart: threading.Thread, closed: threading.Event) -> None:
    """End the thread of the heartbeats."""
    closed.set()
    heart.join(_SILENT_S)


def _alive(rank: int) -> str:
    return f"ngsgd/local_sgd/alive/{rank}"
